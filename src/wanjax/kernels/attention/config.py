# SPDX-License-Identifier: Apache-2.0
"""The user's choice of attention for a model, parsed once from the text of a command or of a library call."""

import math
from dataclasses import dataclass

from wanjax.errors import WanjaxError, repr_short
from wanjax.kernels.attention import chunked, cudnn, flash_tpu, reference, splash
from wanjax.kernels.attention.flash_tiles import Config, Int8Config, Tiles
from wanjax.kernels.attention.implementation import Implementation
from wanjax.kernels.attention.radial import DEFAULT_DECAY, MAX_DECAY, Radial
from wanjax.kernels.attention.sparse_linear import SparseLinearAttentionConfig

IMPLEMENTATIONS = {
    "reference": Implementation(reference.attention, reference.unsupported, chunked.gradient),
    "chunked": Implementation(chunked.attention, chunked.unsupported, chunked.gradient),
    "cudnn": Implementation(cudnn.attention, cudnn.unsupported, chunked.gradient),
    "flash_tpu": Implementation(
        flash_tpu.attention,
        flash_tpu.unsupported,
        flash_tpu.gradient,
        takes_kv_length=True,
        supports_carry=flash_tpu.supports_carry,
        attention_with_carry=flash_tpu.attention_with_carry,
    ),
    "splash": Implementation(splash.attention, splash.unsupported, chunked.gradient, takes_kv_length=True),
}
_AUTO_NAME, _RADIAL_NAME, _SPARSE_NAME, _WINDOW_PREFIX = "auto", "radial", "sla", "window="


@dataclass(frozen=True)
class AttentionConfig:
    """The implementation of attention, and the mask of self-attention.

    Attributes:
        implementation: A name in `IMPLEMENTATIONS`; None chooses by platform and shape.
        tiles: Tiles of flash_tpu; None takes the defaults.
        window: A token attends to this number of tokens before and after it; None means all tokens.
        radial: Whether to use the mask of radial attention, which has no tiles and no window.
        decay: The decay of the radial mask; None is the model's default.
        sparse: Options of sparse-linear attention, which has no tiles and no window; None does not use it.
    """

    implementation: str | None = None
    tiles: Tiles | None = None
    window: int | None = None
    radial: bool = False
    decay: float | None = None
    sparse: SparseLinearAttentionConfig | None = None

    @classmethod
    def of(cls, value: "str | AttentionConfig | None") -> "AttentionConfig":
        """Return a config. Text is parsed. With None, `attention` chooses the implementation."""
        if not isinstance(value, AttentionConfig | str | None):
            names = ", ".join((_AUTO_NAME, *IMPLEMENTATIONS, _RADIAL_NAME, _SPARSE_NAME))
            raise WanjaxError(
                f"attention must be a name or an AttentionConfig, got {repr_short(value)}: choose {names}"
            )
        return value if isinstance(value, AttentionConfig) else cls.parse(value or _AUTO_NAME)

    @classmethod
    def parse(cls, text: str) -> "AttentionConfig":
        """Parse text such as `chunked`, `flash_tpu:block_q=1024`, `auto:window=4096`, `radial:0.2` or `sla:top=0.1`.

        Raises:
            WanjaxError: The implementation is unknown or does not have these tiles, or a number is out of range.
        """
        name, _, options = text.partition(":")
        if name == _RADIAL_NAME:
            return cls(radial=True, decay=_parse_decay(options) if options else None)
        if name == _SPARSE_NAME:
            return cls(sparse=SparseLinearAttentionConfig.parse(options))
        if name not in (_AUTO_NAME, *IMPLEMENTATIONS):
            names = ", ".join((_AUTO_NAME, *IMPLEMENTATIONS, _RADIAL_NAME, _SPARSE_NAME))
            raise WanjaxError(f"no attention is named {name!r}: choose {names}")
        entries = options.split(",") if options else []
        windows = [entry.removeprefix(_WINDOW_PREFIX) for entry in entries if entry.startswith(_WINDOW_PREFIX)]
        if len(windows) > 1 or not all(window.isascii() and window.isdigit() for window in windows):
            raise WanjaxError(f"the window in {text!r} is not a number of tokens, such as window=4096")
        tiles = ",".join(entry for entry in entries if not entry.startswith(_WINDOW_PREFIX))
        if tiles and name != "flash_tpu":
            raise WanjaxError(f"{name} has no option {tiles}: leave it out, or use flash_tpu on a TPU")
        implementation = None if name == _AUTO_NAME else name
        attn = cls(implementation, _parse_tiles(tiles) if tiles else None, int(windows[0]) if windows else None)
        if attn.qk and attn.window is not None:
            raise WanjaxError(f"qk={attn.qk} with window={attn.window}: give one of the two")
        return attn

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        name = _RADIAL_NAME if self.radial else _SPARSE_NAME if self.sparse else self.implementation or _AUTO_NAME
        options = [str(self.tiles)] if self.tiles else []
        options += [] if self.window is None else [f"{_WINDOW_PREFIX}{self.window}"]
        options += [] if self.decay is None else [str(self.decay).removesuffix(".0")]
        options += [str(self.sparse)] if self.sparse else []
        return ":".join([name, *filter(None, [",".join(options)])])

    @property
    def config(self) -> Config | Int8Config | None:
        """The tiles as a configuration of flash_tpu. None means that the implementation chooses."""
        return None if self.tiles is None else self.tiles.config()

    @property
    def qk(self) -> str | None:
        """The dtype of the product of queries and keys, if it is not that of the operands."""
        return None if self.tiles is None else self.tiles.qk

    @property
    def is_sparse(self) -> bool:
        """Whether self-attention visits only some blocks of keys."""
        return self.radial or self.sparse is not None

    @property
    def is_dense(self) -> bool:
        """Whether every token attends to all tokens, so that there is no window and no sparse mask."""
        return self.window is None and not self.is_sparse

    @property
    def supports_ring(self) -> bool:
        """Whether the kernel can continue from the running softmax sums of earlier keys, as ring attention needs."""
        implementation = IMPLEMENTATIONS[self.implementation or "flash_tpu"]
        return implementation.supports_carry(self.config) and self.is_dense

    def dense_only(self) -> "AttentionConfig":
        """Return the config without a window and a sparse mask, for attention other than the video's self-attention."""
        return AttentionConfig(self.implementation)

    def mask(self, grid: tuple[int, int, int], *, decay: float = DEFAULT_DECAY, has_sink: bool = True) -> Radial | None:
        """Return the mask of self-attention over a grid of tokens, or None if it is not radial.

        `decay` is the model's default decay. `Radial` explains `has_sink`.
        """
        frames, height, width = grid
        return Radial(frames, height * width, self.decay or decay, has_sink) if self.radial else None


AUTO = AttentionConfig()


def _parse_tiles(text: str) -> Tiles:
    """Parse the tiles of flash_tpu. The message of an error also says that they are useless without a TPU."""
    try:
        return Tiles.parse(text)
    except WanjaxError as error:
        raise WanjaxError(f"{error}, or leave it and flash_tpu out on a device that is not a TPU") from None


def _parse_decay(text: str) -> float:
    """Parse the decay of radial attention. Raises WanjaxError if the text is malformed or the number is out of
    range."""
    if "=" in text:
        raise WanjaxError(f"radial attention accepts neither a window nor tiles, got {text!r}: give radial:0.2")
    try:
        decay = float(text)
    except ValueError:
        decay = math.nan
    if not 0 < decay <= MAX_DECAY:
        raise WanjaxError(f"a decay of {text!r}: give a number above 0, at most {MAX_DECAY:g}, such as radial:0.2")
    return decay
