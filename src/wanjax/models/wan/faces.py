# SPDX-License-Identifier: Apache-2.0
"""The layers of Wan Animate's transformer for faces.

The motion encoder encodes a picture of a face as a motion vector, as LIA does (Wang et al., Latent Image Animator,
2022, arXiv:2203.09043). A motion vector is a weighted sum of learned directions. The face encoder encodes the motion
vectors of a clip as a few face tokens for each latent frame. After some blocks, there is a face adapter: the tokens of
a latent frame attend to the face tokens of the same frame. The reference is diffusers'
models/transformers/transformer_wan_animate.py.
"""

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.kernels.attention import attention
from wanjax.kernels.target import operand_dtype
from wanjax.layers.conv import CONV_AXES, RepeatingConv
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import linear
from wanjax.layers.norms import layer_norm, rms_norm
from wanjax.layers.placement import param
from wanjax.layers.residual import NormedTokens, Residual, Tokens, project, project_heads
from wanjax.models.wan.config import PoseTransformerConfig
from wanjax.models.wan.transformer import Context, shard_kv
from wanjax.sharding import replicate

FACE_BATCH_SIZE = 8  # faces that are encoded together, as in the reference; more faces need more memory
NORM_EPS = 1e-6
LEAKY_RELU_SLOPE = 0.2  # the slope of the activation below zero
BLUR_KERNEL = (0.125, 0.375, 0.375, 0.125)
"""The weights of four neighbouring pixels in the low-pass filter before height and width are halved."""
OTHER_FRAME_BIAS = -1e30  # with this bias, keys of other frames have an attention weight of 0

Faces = Float[Array, "B H W C"]
FaceTokens = Float[Array, "B _T _S _E"]  # a few tokens for each latent frame


class ScaledConv(nnx.Module):
    """A convolution that divides its stored kernel by the square root of the fan-in (Karras et al., 2018).

    A layer with a bias also has an activation. The result is float32.
    """

    def __init__(self, channels_in: int, channels_out: int, size: int, *, bias: bool = True, **kw):
        shape, options = (size, size, channels_in, channels_out), {"dtype": kw["param_dtype"], "rngs": kw["rngs"]}
        zeros = nnx.initializers.zeros_init()
        self.kernel = param(nnx.initializers.normal(1.0), shape, (None, None, *CONV_AXES), **options)
        self.bias = nnx.data(param(zeros, (channels_out,), CONV_AXES[1:], **options) if bias else None)
        self.dtype = kw["dtype"]

    def __call__(self, x: Faces, stride: int = 1, padding: int = 0) -> Float32[Array, "B _H _W _C"]:
        kernel = self.kernel[...] / math.sqrt(math.prod(self.kernel.shape[:3]))
        dtype = operand_dtype(x, self.dtype)
        y = jax.lax.conv_general_dilated(
            x.astype(dtype),
            replicate(kernel.astype(dtype)),
            window_strides=(stride, stride),
            padding=[(padding, padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=jnp.float32,
        )
        return y if self.bias is None else activate(y + self.bias[...].astype(jnp.float32)[None, None, None])


class ScaledLinear(nnx.Module):
    """A dense layer that divides its stored kernel by the square root of the fan-in."""

    def __init__(self, features_in: int, features_out: int, **kw):
        shape, options = (features_in, features_out), {"dtype": kw["param_dtype"], "rngs": kw["rngs"]}
        self.kernel = param(nnx.initializers.normal(1.0), shape, (None, None), **options)
        self.bias = param(nnx.initializers.zeros_init(), (features_out,), (None,), **options)
        self.dtype = kw["dtype"]

    def __call__(self, x: Float[Array, "B _E"]) -> Float32[Array, "B E"]:
        kernel = (self.kernel[...] / math.sqrt(self.kernel.shape[0])).astype(self.dtype)
        y = jnp.matmul(x.astype(self.dtype), kernel, preferred_element_type=jnp.float32)
        return y + self.bias[...].astype(jnp.float32)[None]


class FaceBlock(nnx.Module):
    """Two convolutions and a shortcut that halve height and width. Blurring before the halving prevents aliasing."""

    def __init__(self, channels_in: int, channels_out: int, **kw):
        self.conv1 = ScaledConv(channels_in, channels_in, 3, **kw)
        self.conv2 = ScaledConv(channels_in, channels_out, 3, **kw)
        self.shortcut = ScaledConv(channels_in, channels_out, 1, bias=False, **kw)

    def __call__(self, x: Faces) -> Float32[Array, "B _H _W _C"]:
        y = self.conv2(blur(self.conv1(x, padding=1), padding=2), stride=2)
        return (y + self.shortcut(blur(x, padding=1), stride=2)) / math.sqrt(2)


class MotionEncoder(nnx.Module):
    """Encode pictures of faces [B H W 3] in [-1, 1] as motion vectors, which are sums of learned directions.

    The learned directions are orthonormalised before use.
    """

    def __init__(self, config: PoseTransformerConfig, **kw):
        first, *_, last = config.motion_channels
        width, layers = config.motion_width, 4
        self.conv_in = ScaledConv(3, first, 1, **kw)
        self.blocks = nnx.List([FaceBlock(a, b, **kw) for a, b in pairwise(config.motion_channels)])
        self.conv_out = ScaledConv(last, width, 4, bias=False, **kw)
        self.layers = nnx.List([ScaledLinear(width, width, **kw) for _ in range(layers)])
        self.factors = ScaledLinear(width, config.motions, **kw)
        shape = (config.motion_space, config.motions)
        self.directions = param(
            nnx.initializers.normal(1.0), shape, (None, None), dtype=jnp.float32, rngs=kw["rngs"]
        )  # float32, as in the reference

    def __call__(self, faces: Float[Array, "B H W 3"]) -> Float32[Array, "B _E"]:
        x = self.conv_in(faces)
        for block in self.blocks:
            x = block(x)
        x = self.conv_out(x)[:, 0, 0]
        for layer in self.layers:  # without activations between them, as in the reference
            x = layer(x)
        # the signs of the columns are those of Householder's method in LAPACK
        directions = jnp.linalg.qr(self.directions[...].astype(jnp.float32) + 1e-8)[0]
        return jnp.matmul(self.factors(x), directions.T, precision=jax.lax.Precision.HIGHEST)


class FaceEncoder(nnx.Module):
    """Encode the motion vectors of a clip's frames as the face tokens of its latent frames.

    A latent frame has one token for each head, and a learned token. There are three causal convolutions over time. Two
    of them halve the number of frames after the first frame.
    """

    def __init__(self, config: PoseTransformerConfig, **kw):
        width, heads = config.face_width, config.face_heads
        self.conv1 = RepeatingConv(config.motion_space, heads * width, (3, 1), **kw)
        self.conv2 = RepeatingConv(width, width, (3, 1), time_stride=2, **kw)
        self.conv3 = RepeatingConv(width, width, (3, 1), time_stride=2, **kw)
        self.norm = layer_norm(width, NORM_EPS, affine=False, **kw)
        self.out = linear(width, config.width, (None, None), **kw)
        zeros = nnx.initializers.zeros_init()
        self.padding = param(zeros, (config.width,), (None,), dtype=kw["param_dtype"], rngs=kw["rngs"])
        self.heads = heads
        self.dtype = kw["dtype"]

    def __call__(self, motions: Float[Array, "B T C"]) -> FaceTokens:
        batch = len(motions)
        x, _ = self.conv1(motions[:, :, None, None], None)  # [B T 1 1 C], with the heads in C
        x = jnp.moveaxis(split_heads(x[:, :, 0, 0], self.heads), 2, 1)  # [B N T C]
        x = self._activate(x.reshape(-1, x.shape[2], 1, 1, x.shape[3]))  # the heads are in the batch
        x = self._activate(self.conv2(x, None)[0])
        x = self._activate(self.conv3(x, None)[0])
        x = self.out(x)[:, :, 0, 0]  # [B·N T E]
        tokens = jnp.moveaxis(x.reshape(batch, self.heads, *x.shape[1:]), 1, 2)  # [B T N E]
        padding = jnp.broadcast_to(self.padding[...].astype(self.dtype), (*tokens.shape[:2], 1, tokens.shape[3]))
        return jnp.concatenate([tokens, padding], axis=2)

    def _activate(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H W C"]:
        return jax.nn.silu(self.norm(x)).astype(self.dtype)


class FaceAdapter(nnx.Module):
    """Attention of each token to the face tokens of its frame, with a norm over each head of q and k."""

    def __init__(self, config: PoseTransformerConfig, **kw):
        width = config.width
        self.norm = layer_norm(width, config.eps, affine=False, **kw)
        self.q = linear(width, width, ("embed", "heads"), **kw)
        self.k = linear(width, width, ("embed", "heads"), **kw)
        self.v = linear(width, width, ("embed", "heads"), **kw)
        self.out = linear(width, width, ("heads", "embed"), **kw)
        self.q_norm = rms_norm(config.head_dim, config.eps, **kw, axis="head_dim")
        self.k_norm = rms_norm(config.head_dim, config.eps, **kw, axis="head_dim")
        self.heads = config.heads
        self.dtype = kw["dtype"]

    def context(self, faces: Float[Array, "B S E"]) -> Context:
        """Compute keys and values of the face tokens of all latent frames, which are the same in every step."""
        faces = self.norm(faces).astype(self.dtype)
        k = shard_kv(project_heads(self.k, faces, self.k_norm).astype(self.dtype), self.heads)
        return Context(k, shard_kv(self.v(faces).astype(self.dtype), self.heads))

    @jax.named_scope("face_attention")
    def __call__(self, x: Tokens, context: Context, bias: Float32[Array, "1 1 L S"]) -> Tokens:
        """Return the sum of the tokens and their attention to the face tokens.

        Args:
            x: The tokens.
            context: The result of the method `context`.
            bias: The result of `same_frame_bias`.
        """
        q = split_heads(project_heads(self.q, NormedTokens(x, self.norm, self.dtype), self.q_norm), self.heads)
        k, v = (split_heads(x, self.heads) for x in context[:2])  # [B S N D]
        y = attention(q.astype(self.dtype), k, v, bias=bias)
        return project(self.out, join_heads(y), Residual(x))


def same_frame_bias(tokens: int, frame_tokens: int, keys: int, frame_keys: int) -> Float32[Array, "1 1 L S"]:
    """Return the bias that restricts the attention of tokens to the keys of their own frame.

    Args:
        tokens: The number of tokens, which may include padding at the end.
        frame_tokens: The number of tokens of a frame.
        keys: The number of keys.
        frame_keys: The number of keys of a frame.
    """
    # padding tokens count as tokens of the last frame
    frame = jnp.minimum(jnp.arange(tokens) // frame_tokens, keys // frame_keys - 1)
    is_same = frame[:, None] == (jnp.arange(keys) // frame_keys)[None]
    return jnp.where(is_same, 0.0, OTHER_FRAME_BIAS).astype(jnp.float32)[None, None]


def activate(x: Float32[Array, "B H W C"]) -> Float32[Array, "B H W C"]:
    """Apply leaky ReLU, scaled to preserve the variance."""
    return jax.nn.leaky_relu(x, LEAKY_RELU_SLOPE) * math.sqrt(2)


def blur(x: Faces, padding: int) -> Float32[Array, "B _H _W C"]:
    """Pad pictures with `padding` zeros on every side, then filter their rows and columns with `BLUR_KERNEL`."""
    x = jnp.pad(x.astype(jnp.float32), [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    for axis in (1, 2):
        length = x.shape[axis] - len(BLUR_KERNEL) + 1
        shifted = (jax.lax.slice_in_dim(x, start, start + length, axis=axis) for start in range(len(BLUR_KERNEL)))
        x = sum((w * part for w, part in zip(BLUR_KERNEL, shifted, strict=True)), start=jnp.zeros((), x.dtype))
    return x
