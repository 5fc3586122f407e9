# SPDX-License-Identifier: Apache-2.0
"""The attention of a model as a value, read once from the text of a command or of the library."""

import math
from dataclasses import dataclass

from wanjax.errors import WanjaxError
from wanjax.kernels.attention import chunked, cudnn, flash_tpu, reference, splash
from wanjax.kernels.attention.flash_tiles import Config, Tiles
from wanjax.kernels.attention.implementation import Implementation
from wanjax.kernels.attention.radial import DEFAULT_DECAY, MAX_DECAY, Radial
from wanjax.kernels.attention.sparse_linear import SparseLinear

IMPLEMENTATIONS = {
    "reference": Implementation(reference.attention, reference.unsupported, chunked.gradient),
    "chunked": Implementation(chunked.attention, chunked.unsupported, chunked.gradient),
    "cudnn": Implementation(cudnn.attention, cudnn.unsupported, chunked.gradient),
    "flash_tpu": Implementation(
        flash_tpu.attention,
        flash_tpu.unsupported,
        flash_tpu.gradient,
        takes_num_keys=True,
        supports_carry=flash_tpu.supports_carry,
        attention_with_carry=flash_tpu.attention_with_carry,
    ),
    "splash": Implementation(splash.attention, splash.unsupported, chunked.gradient, takes_num_keys=True),
}
_AUTO, _RADIAL, _SPARSE, _WINDOW = "auto", "radial", "sla", "window="


@dataclass(frozen=True)
class AttentionConfig:
    """The implementation of attention, and the mask of self-attention.

    Attributes:
        implementation: A name in `IMPLEMENTATIONS`; None chooses by platform and shape.
        tiles: Tiles of flash_tpu; None takes its defaults.
        window: The number of tokens before and after a token that it attends to; None: all.
        radial: Use the mask of radial attention, which has no tiles and no window.
        decay: The decay of the radial mask; None is the model's default.
        sparse: Options of sparse-linear attention, which has no tiles and no window; None: do not use it.
    """

    implementation: str | None = None
    tiles: Tiles | None = None
    window: int | None = None
    radial: bool = False
    decay: float | None = None
    sparse: SparseLinear | None = None

    @classmethod
    def of(cls, value: "str | AttentionConfig | None") -> "AttentionConfig":
        """Return a config, parsed if it is text; None chooses the implementation."""
        return value if isinstance(value, AttentionConfig) else cls.parse(value or _AUTO)

    @classmethod
    def parse(cls, text: str) -> "AttentionConfig":
        """Parse text such as `chunked`, `flash_tpu:block_q=1024`, `auto:window=4096`, `radial:0.2` or `sla:top=0.1`.

        Raises:
            WanjaxError: The implementation is unknown, it has no such tiles, or a decay or a share is out of range.
        """
        name, _, options = text.partition(":")
        if name == _RADIAL:
            return cls(radial=True, decay=_parse_decay(options) if options else None)
        if name == _SPARSE:
            return cls(sparse=SparseLinear.parse(options))
        if name not in (_AUTO, *IMPLEMENTATIONS):
            names = ", ".join((_AUTO, *IMPLEMENTATIONS, _RADIAL, _SPARSE))
            raise WanjaxError(f"no attention is named {name!r}: choose {names}")
        entries = options.split(",") if options else []
        windows = [entry.removeprefix(_WINDOW) for entry in entries if entry.startswith(_WINDOW)]
        if len(windows) > 1 or not all(window.isascii() and window.isdigit() for window in windows):
            raise WanjaxError(f"the window in {text!r} is not a number of tokens, such as window=4096")
        tiles = ",".join(entry for entry in entries if not entry.startswith(_WINDOW))
        if tiles and name != "flash_tpu":
            raise WanjaxError(f"{name} has no tiles to choose: those of flash_tpu can be chosen")
        implementation = None if name == _AUTO else name
        return cls(implementation, Tiles.parse(tiles) if tiles else None, int(windows[0]) if windows else None)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        name = _RADIAL if self.radial else _SPARSE if self.sparse else self.implementation or _AUTO
        options = [str(self.tiles)] if self.tiles else []
        options += [] if self.window is None else [f"{_WINDOW}{self.window}"]
        options += [] if self.decay is None else [str(self.decay).removesuffix(".0")]
        options += [str(self.sparse)] if self.sparse else []
        return ":".join([name, *filter(None, [",".join(options)])])

    @property
    def config(self) -> Config | None:
        """The tiles as a `flash_tpu.Config`; None leaves them to the implementation."""
        return None if self.tiles is None else self.tiles.config()

    @property
    def is_sparse(self) -> bool:
        """Whether self-attention visits only some blocks of keys."""
        return self.radial or self.sparse is not None

    @property
    def is_dense(self) -> bool:
        """Whether every token attends to all others: no window and no sparse mask."""
        return self.window is None and not self.is_sparse

    @property
    def supports_ring(self) -> bool:
        """Whether the kernel can add keys of other TPUs to its sums, as ring attention does."""
        implementation = IMPLEMENTATIONS[self.implementation or "flash_tpu"]
        return implementation.supports_carry(self.config) and self.is_dense

    def dense_only(self) -> "AttentionConfig":
        """Return a config without window or sparse mask, for attention other than self-attention."""
        return AttentionConfig(self.implementation)

    def mask(self, grid: tuple[int, int, int], *, decay: float = DEFAULT_DECAY, sink: bool = True) -> Radial | None:
        """Return the mask of self-attention over a grid of tokens, or None if it is not radial.

        `decay` is the model's default; for `sink` see `Radial`.
        """
        frames, height, width = grid
        return Radial(frames, height * width, self.decay or decay, sink) if self.radial else None


AUTO = AttentionConfig()


def _parse_decay(text: str) -> float:
    """Read the decay of radial attention; raise WanjaxError for another text, and for one that is out of range."""
    if "=" in text:
        raise WanjaxError(f"radial attention has no window and no tiles to choose, such as {text!r}: give radial:0.2")
    try:
        decay = float(text)
    except ValueError:
        decay = math.nan
    if not 0 < decay <= MAX_DECAY:
        raise WanjaxError(f"a decay of {text!r}: give a number above 0, at most {MAX_DECAY:g}, such as radial:0.2")
    return decay
