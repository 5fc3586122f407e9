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

from wanjax.layers.linear import default_kernel_init
from wanjax.layers.norms import along_last
from wanjax.sharding import constrain

CONV_AXES = ("conv_in", "conv_out")
VIDEO = ("batch", "frames", "height", "width", None)


def frame_conv(
    channels_in: int,
    channels_out: int,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: tuple[int, int] = (1, 1),
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """A 2-D convolution of each frame of `[B T H W C]`; `padding` is (before, after), the same for height and width."""
    return nnx.Conv(
        channels_in,
        channels_out,
        (kernel_size, kernel_size),
        strides=stride,
        padding=(padding, padding),
        kernel_init=nnx.with_partitioning(default_kernel_init, (None, None, *CONV_AXES)),
        bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), CONV_AXES[1:]),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


class CausalConv(nnx.Module):
    """A 3-D convolution that sees no later frame, run as one 2-D convolution for each of its taps in time.

    The sum of 2-D convolutions over frames folded into the batch is the same sum of products as the 3-D one, and two to
    six times as fast as it under XLA on the CPU (docs/performance.md).
    """

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
        """`kernel_size` is (time, height and width)."""
        taps, size = kernel_size
        kernel_init = nnx.with_partitioning(default_kernel_init, (None, None, None, *CONV_AXES))
        bias_init = nnx.with_partitioning(nnx.initializers.zeros_init(), CONV_AXES[1:])
        self.kernel = nnx.Param(kernel_init(rngs.params(), (taps, size, size, channels_in, channels_out), param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (channels_out,), param_dtype))
        self.time_stride = time_stride
        self.dtype = dtype

    def blank(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B 2 H W C"]:
        """The kept frames of a layer before which there is nothing: zeros, the causal padding."""
        batch, _, height, width, channels = x.shape
        return jnp.zeros((batch, self.kernel.shape[0] - 1, height, width, channels), self.dtype)

    def __call__(
        self, x: Float[Array, "B T H W C"], kept: Array | None
    ) -> tuple[Float[Array, "B _T H W _C"], Float[Array, "B _K H W C"]]:
        x = x.astype(self.dtype)
        x = constrain(jnp.concatenate([self.blank(x) if kept is None else kept, x], axis=1), VIDEO)
        taps, size = self.kernel.shape[:2]
        frames_out = (x.shape[1] - taps) // self.time_stride + 1
        y = jnp.zeros((), jnp.float32)
        for tap in range(taps):
            frames = x[:, tap : tap + (frames_out - 1) * self.time_stride + 1 : self.time_stride]
            y = y + _conv_frames(frames, self.kernel[tap].astype(self.dtype), padding=size // 2)
        y = y + along_last(self.bias[...].astype(jnp.float32), x.ndim)
        return constrain(y.astype(self.dtype), VIDEO), x[:, x.shape[1] - (taps - self.time_stride) :]


def _conv_frames(x: Float[Array, "B T H W C"], kernel: Float[Array, "_K _K C _C"], padding: int) -> Array:
    batch, frames, *image = x.shape
    y = jax.lax.conv_general_dilated(
        x.reshape(batch * frames, *image),
        kernel,
        window_strides=(1, 1),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(batch, frames, *y.shape[1:])
