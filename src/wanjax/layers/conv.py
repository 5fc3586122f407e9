# SPDX-License-Identifier: Apache-2.0
"""Convolutions of causal video autoencoders, which process a video chunk by chunk.

A causal layer takes a chunk of frames, and a cache with the last frames of the previous chunk. The layer returns its
output, and the cache for the next chunk. The cache is None before the first chunk.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.normed_silu import NUM_SUBLANES
from wanjax.kernels.target import operand_dtype, target
from wanjax.layers.linear import default_kernel_init
from wanjax.layers.norms import expand_to_rank
from wanjax.layers.placement import param
from wanjax.sharding import VIDEO_AXES, constrain, replicate

CONV_AXES = ("conv_in", "conv_out")
WHOLE_VIDEO_ADVICE = {
    "encode": "pipe.encode_video(frames) encodes a video, and encode_chunk a chunk of it",
    "decode": "pipe.decode(latents) decodes a video, and decode_chunk a chunk of it",
}
Chunk = Float[Array, "B _T _H _W _C"]  # an input or an output of a layer; their sizes may differ
Cache = Any  # a pytree of cached frames; None before the first chunk


class Autoencoder(nnx.Module):
    """A video autoencoder. Its methods encode or decode a chunk, and take and return a cache."""

    if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For `encode` and `decode`, the message names the methods to use instead."""
            if name in WHOLE_VIDEO_ADVICE:
                raise AttributeError(f"{type(self).__name__} has no {name}: {WHOLE_VIDEO_ADVICE[name]}")
            return object.__getattribute__(self, name)  # raises the usual AttributeError of Python


class FrameConv(nnx.Module):
    """A 3 × 3 convolution of each frame."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        stride: int = 1,
        padding: tuple[int, int] = (1, 1),
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """Create the layer. `padding` is (before, after), for both height and width."""
        self.kernel, self.bias = _weights((3, 3, channels_in, channels_out), param_dtype, rngs)
        self.stride = stride
        self.padding = padding
        self.dtype = dtype

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T _H _W _C"]:
        y = _convolve_frames(to_operand_dtype(x, self.dtype), self.kernel[...], self.stride, self.padding)
        return _add_bias(y, self.bias[...], self.dtype)


class CausalConv(nnx.Module):
    """A causal 3-D convolution. `kernel_size` is (frames, pixels). The kernel is square in height and width."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: tuple[int, int] = (3, 3),
        *,
        time_stride: int = 1,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kernel_frames, kernel_size_hw = kernel_size
        self.kernel, self.bias = _weights(
            (kernel_frames, kernel_size_hw, kernel_size_hw, channels_in, channels_out), param_dtype, rngs
        )
        self.time_stride = time_stride
        self.dtype = dtype

    def initial_frames(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B _T H W C"]:
        """Return the causal padding before the first chunk: zeros."""
        batch, _, height, width, channels = x.shape
        return to_operand_dtype(jnp.zeros((batch, self.kernel.shape[0] - 1, height, width, channels)), self.dtype)

    def __call__(
        self, x: Float[Array, "B T H W C"], previous_frames: Float[Array, "B _T H W C"] | None
    ) -> tuple[Float[Array, "B _T H W _C"], Float[Array, "B _T H W C"]]:
        """Convolve a chunk. Also return the frames to cache for the next chunk."""
        x = to_operand_dtype(x, self.dtype)
        x = constrain(
            jnp.concatenate([self.initial_frames(x) if previous_frames is None else previous_frames, x], axis=1),
            VIDEO_AXES,
        )
        y = _add_bias(self._conv_function(x)(x, self.kernel[...], self.time_stride), self.bias[...], self.dtype)
        return constrain(y, VIDEO_AXES), x[:, x.shape[1] - (self.kernel.shape[0] - self.time_stride) :]

    def _conv_function(self, x: Float[Array, "B T H W C"]) -> Callable[..., Float32[Array, "B _T H W _C"]]:
        """Choose the fastest of three equivalent functions. The choice depends on the platform, and on TPUs also on the
        number of output frames."""
        if target(x).platform != "tpu":
            return sum_of_taps
        frames = (x.shape[1] - self.kernel.shape[0]) // self.time_stride + 1
        return convolve_clip if frames % NUM_SUBLANES else stacked_taps


class RepeatingConv(CausalConv):
    """A causal 3-D convolution that pads the first chunk with copies of its first frame."""

    def initial_frames(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B _T H W C"]:
        """Return the causal padding before the first chunk: copies of its first frame."""
        return to_operand_dtype(x[:, :1], self.dtype).repeat(self.kernel.shape[0] - 1, axis=1)


def run_layers(layers: Sequence[Any], x: Chunk, cache: Cache, *arguments: Any) -> tuple[Chunk, Cache]:
    """Apply layers to a chunk one after another. Each layer has its own cache. All layers get the same `arguments`."""
    caches = list(cache or [None] * len(layers))
    for index, layer in enumerate(layers):
        x, caches[index] = layer(x, caches[index], *arguments)
    return x, tuple(caches)


def to_operand_dtype(x: Chunk, dtype: DTypeLike) -> Chunk:
    """Cast x to the dtype of a convolution's operands. Frames are cached, padded and sent in this dtype."""
    return x.astype(operand_dtype(x, dtype))


def convolve_clip(
    x: Float[Array, "B T H W C"], kernel: Float[Array, "_T _H _W C _C"], time_stride: int
) -> Float32[Array, "B _T H W _C"]:
    """Compute a 3-D convolution with sums in float32. Only height and width are padded."""
    padding = kernel.shape[1] // 2
    return jax.lax.conv_general_dilated(
        x,
        _operand(kernel, x),
        window_strides=(time_stride, 1, 1),
        padding=[(0, 0), (padding, padding), (padding, padding)],
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        preferred_element_type=jnp.float32,
    )


def sum_of_taps(
    x: Float[Array, "B T H W C"], kernel: Float[Array, "_T _H _W C _C"], time_stride: int
) -> Float32[Array, "B _T H W _C"]:
    """Compute `convolve_clip` as a sum of 2-D convolutions, one for each tap, with frames in the batch.

    A tap is one frame of the kernel. On CPUs, XLA runs this two to six times as fast as a 3-D convolution
    (docs/performance.md).
    """
    num_taps, kernel_size = kernel.shape[:2]
    y = jnp.zeros((), jnp.float32)
    for tap in range(num_taps):
        frames = x[:, tap : x.shape[1] - num_taps + tap + 1 : time_stride]
        y = y + _convolve_frames(frames, kernel[tap], 1, (kernel_size // 2, kernel_size // 2))
    return y


def stacked_taps(
    x: Float[Array, "B T H W C"], kernel: Float[Array, "_T _H _W C _C"], time_stride: int
) -> Float32[Array, "B _T H W _C"]:
    """Compute `convolve_clip` as one 2-D convolution of frames. The input frames of all taps are concatenated in the
    channels.

    This function is for TPUs, and for a multiple of eight frames, which fills a TPU's tiles. XLA then uses the same
    memory layout from layer to layer. For a 3-D convolution, XLA would move a part of the width into the batch, with
    copies before and after.
    """
    num_taps, kernel_size = kernel.shape[:2]
    end = x.shape[1] - num_taps + 1
    x = jnp.concatenate([x[:, tap : end + tap : time_stride] for tap in range(num_taps)], axis=-1)
    kernel = jnp.moveaxis(kernel, 0, 2).reshape(kernel_size, kernel_size, -1, kernel.shape[-1])
    return _convolve_frames(x, kernel, 1, (kernel_size // 2, kernel_size // 2))


def _convolve_frames(
    x: Float[Array, "B T H W C"], kernel: Float[Array, "_H _W C _C"], stride: int, padding: tuple[int, int]
) -> Float32[Array, "B T _H _W _C"]:
    """Compute a 2-D convolution of each frame."""
    batch, frames, *image = x.shape
    y = jax.lax.conv_general_dilated(
        x.reshape(batch * frames, *image),
        _operand(kernel, x),
        window_strides=(stride, stride),
        padding=[padding] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(batch, frames, *y.shape[1:])


def _operand(kernel: Float[Array, "... C _C"], x: Float[Array, "... C"]) -> Float[Array, "... C _C"]:
    """Cast the kernel to the dtype of x, and replicate it.

    Without the replication, XLA could shard the 3 rows (or columns) of the kernel over devices that share 2 rows (or
    columns) of pixels. XLA would then add the same products on several devices, and the result would be a multiple of
    the correct sum.
    """
    return replicate(kernel.astype(x.dtype))


def _add_bias(y: Float32[Array, "B T H W C"], bias: Float[Array, " C"], dtype: DTypeLike) -> Float[Array, "B T H W C"]:
    return (y + expand_to_rank(bias.astype(jnp.float32), y.ndim)).astype(dtype)


def _weights(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param]:
    """Initialize the kernel [... C _C] and the bias of a convolution."""
    kernel_axes = (*[None] * (len(shape) - 2), *CONV_AXES)
    kernel = param(default_kernel_init, shape, kernel_axes, dtype=dtype, rngs=rngs)
    return kernel, param(nnx.initializers.zeros_init(), shape[-1:], CONV_AXES[1:], dtype=dtype, rngs=rngs)
