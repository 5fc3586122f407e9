# SPDX-License-Identifier: Apache-2.0
"""Convolutions of causal video autoencoders, streamed over time.

A causal layer takes a chunk of frames and the frames it kept from the chunk before, and returns its output and what to
keep for the next one. `None` in place of kept frames means that nothing came before.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention.target import Target, target
from wanjax.layers.linear import default_kernel_init
from wanjax.layers.norms import along_last
from wanjax.sharding import constrain

CONV_AXES = ("conv_in", "conv_out")
VIDEO = ("batch", "frames", "height", "width", None)
O1 = 19  # XLA's number for this level of its effort
Frames = Float[Array, "B _T _H _W _C"]  # what goes in and what comes out differ in size
Kernel = Float[Array, "*K C _C"]


class FrameConv(nnx.Module):
    """A 2-D convolution of each frame, 3 × 3."""

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
        """`padding` is (before, after), the same for height and width."""
        self.kernel, self.bias = _weights((3, 3, channels_in, channels_out), param_dtype, rngs)
        self.stride = stride
        self.padding = padding
        self.dtype = dtype

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T _H _W _C"]:
        y = _convolve_frames(as_operand(x, self.dtype), self.kernel[...], self.stride, self.padding)
        return _biased(y, self.bias[...], self.dtype)


class CausalConv(nnx.Module):
    """A 3-D convolution that sees no later frame; `kernel_size` is (time, height and width)."""

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
        taps, size = kernel_size
        self.kernel, self.bias = _weights((taps, size, size, channels_in, channels_out), param_dtype, rngs)
        self.time_stride = time_stride
        self.dtype = dtype

    def blank(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B 2 H W C"]:
        """The kept frames of a layer before which there is nothing: zeros, the causal padding."""
        batch, _, height, width, channels = x.shape
        return as_operand(jnp.zeros((batch, self.kernel.shape[0] - 1, height, width, channels)), self.dtype)

    def __call__(
        self, x: Float[Array, "B T H W C"], kept: Array | None
    ) -> tuple[Float[Array, "B _T H W _C"], Float[Array, "B _K H W C"]]:
        x = as_operand(x, self.dtype)
        x = constrain(jnp.concatenate([self.blank(x) if kept is None else kept, x], axis=1), VIDEO)
        convolve = convolve_clip if target(x).platform == "tpu" else sum_of_taps
        y = _biased(convolve(x, self.kernel[...], self.time_stride), self.bias[...], self.dtype)
        return constrain(y, VIDEO), x[:, x.shape[1] - (self.kernel.shape[0] - self.time_stride) :]


def as_operand(x: Array, dtype: DTypeLike) -> Array:
    """x as a convolution of this dtype takes it: on TPUs in bfloat16 unless JAX is asked for precise products.

    The matrix units round float32 to that in any case; here it is done before frames are kept, padded and exchanged.
    """
    rounded = target(x).platform == "tpu" and jax.default_matmul_precision.value is None
    return x.astype(jnp.bfloat16 if rounded else dtype)


def convolve_clip(x: Float[Array, "B T H W C"], kernel: Kernel, time_stride: int) -> Frames:
    """A 3-D convolution, padded in height and width alone."""
    around = kernel.shape[1] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        window_strides=(time_stride, 1, 1),
        padding=[(0, 0), (around, around), (around, around)],
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        preferred_element_type=jnp.float32,
    )


def sum_of_taps(x: Float[Array, "B T H W C"], kernel: Kernel, time_stride: int) -> Frames:
    """`convolve_clip` as a 2-D convolution for each tap in time, over frames that are folded into the batch.

    It is the same sum of products, and two to six times as fast under XLA on the CPU (docs/performance.md).
    """
    taps, size = kernel.shape[:2]
    y = jnp.zeros((), jnp.float32)
    for tap in range(taps):
        frames = x[:, tap : x.shape[1] - taps + tap + 1 : time_stride]
        y = y + _convolve_frames(frames, kernel[tap], 1, (size // 2, size // 2))
    return y


def _convolve_frames(x: Frames, kernel: Kernel, stride: int, padding: tuple[int, int]) -> Frames:
    batch, frames, *image = x.shape
    y = jax.lax.conv_general_dilated(
        x.reshape(batch * frames, *image),
        kernel.astype(x.dtype),
        window_strides=(stride, stride),
        padding=[padding] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(batch, frames, *y.shape[1:])


def convolution_compiler_options(on: Target | None = None) -> dict[str, int]:
    """What to give `jax.jit` as `compiler_options` where the program is convolutions; None: on the device of `target`.

    For TPUs the search for each convolution's best tiles, which the compiler's usual level has, takes four fifths of
    its time and gains a quarter of the program's (docs/performance.md).
    """
    return {"optimization_level": O1} if (on or target()).platform == "tpu" else {}


def _biased(y: Frames, bias: Float[Array, "C"], dtype: DTypeLike) -> Frames:
    return (y + along_last(bias.astype(jnp.float32), y.ndim)).astype(dtype)


def _weights(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param]:
    """The kernel [... C _C] and the bias of a convolution."""
    kernel_init = nnx.with_partitioning(default_kernel_init, (*[None] * (len(shape) - 2), *CONV_AXES))
    bias_init = nnx.with_partitioning(nnx.initializers.zeros_init(), CONV_AXES[1:])
    return nnx.Param(kernel_init(rngs.params(), shape, dtype)), nnx.Param(bias_init(rngs.params(), shape[-1:], dtype))
