# SPDX-License-Identifier: Apache-2.0
"""Read the tables that step caches need for a checkpoint. Tables are published, or `wanjax calibrate` has measured
them."""

import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wanjax.checkpoints.files import content_digest
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError, reason
from wanjax.figures import pluralize
from wanjax.schedulers.base import TRAIN_STEPS
from wanjax.stores.user_folders import home, user_cache, xdg_folder

TABLES_FILE = "caches.json"  # the published tables of a family
NAMES_IN_FILE = {
    "magnitudes": "magcache",
    "changes": "teacache",
    "image_magnitudes": "magcache_pictured",
    "plain": "teacache_plain",
}
"""The names of the tables in a file, by the fields of `CacheTables`."""


class MagCacheTable(NamedTuple):
    """MagCache's table. It has, for each step, the ratio of the blocks' residual to the residual of the previous step.

    `prompt` has the ratios of the forward pass for the prompt, and `negative` the ratios of the forward pass for the
    negative prompt. Both have one ratio per step, and the first ratio is 1. `delta`, `most` and `whole` are the default
    settings of `MagCache`. `turns` has a flag for each network, in order. The flag is True if steps of the network may
    reuse cached values.
    """

    prompt: tuple[float, ...]
    negative: tuple[float, ...]
    delta: float
    most: int
    whole: float
    turns: tuple[bool, ...] = (True, True)


class TeaCacheTable(NamedTuple):
    """TeaCache's polynomial, highest degree first. The polynomial maps the change of the timestep's embedding to the
    change of the output.

    The first `first` and the last `last` steps are computed in full. `threshold` is the default threshold. `gaps` are
    lengths of steps, for evenly spaced timesteps from 0 to 1000. A step that starts at such a timestep and is at least
    as long as its gap never reuses cached values with the default threshold. `gaps` is empty if no gaps were measured.
    """

    polynomial: tuple[float, ...]
    threshold: float
    first: int = 1
    last: int = 0
    gaps: tuple[float, ...] = ()

    def gap_at(self, timestep: float) -> float:
        """Interpolate the gaps at a timestep."""
        return float(np.interp(timestep, np.linspace(0, TRAIN_STEPS, len(self.gaps)), self.gaps))


@dataclass(frozen=True)
class CacheTables:
    """The tables of a checkpoint. A missing table is None.

    `image_magnitudes` replaces `magnitudes` if the user gives an optional input image. `changes` maps changes of the
    timestep's embedding after its projection for the blocks. `plain` maps changes of the embedding before this
    projection.
    """

    magnitudes: MagCacheTable | None = None
    changes: TeaCacheTable | None = None
    image_magnitudes: MagCacheTable | None = None
    plain: TeaCacheTable | None = None

    @property
    def for_image_input(self) -> "CacheTables":
        """The tables for a video that begins with an input image."""
        return replace(self, magnitudes=self.image_magnitudes) if self.image_magnitudes else self


NO_TABLES = CacheTables()


def read_tables(file: Path, name: str | None = None) -> CacheTables:
    """Read the tables in a file. Return no tables if the file is missing. `name` selects a checkpoint in a file of
    several.

    Raises WanjaxError if the file is damaged or a table has a wrong length.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        entries = [content.get(table_name, {}) for table_name in NAMES_IN_FILE.values()]
        magcache, teacache, magcache_pictured, plain = (
            entries if name is None else [table_name.get(name) for table_name in entries]
        )
        return CacheTables(
            _read_magcache_table(magcache),
            _read_teacache_table(teacache),
            _read_magcache_table(magcache_pictured),
            _read_teacache_table(plain),
        )
    except WanjaxError as error:
        raise WanjaxError(f"{file}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WanjaxError(
            f"{file} is not a table of step caches ({reason(error)}): write one with `wanjax calibrate`"
        ) from error


def merge_tables(locations: Sequence[tuple[Path | None, str | None]]) -> CacheTables:
    """Read each table from the first location that has the table. A location is a file and a name in the file, as in
    `read_tables`."""
    tables = [read_tables(file, name) for file, name in locations if file is not None]
    tables_by_field: dict[str, Any] = {
        field: next(filter(None, (getattr(x, field) for x in tables)), None) for field in NAMES_IN_FILE
    }
    tables_by_field["image_magnitudes"] = next(
        (x.image_magnitudes for x in tables if x.magnitudes), None
    )  # read from the same file as `magnitudes`
    return CacheTables(**tables_by_field)


def measured_file(key: str) -> Path:
    """Return the file of the tables measured for a checkpoint, in the user's data folder.

    If the user has no home folder, the file is in a temporary folder.
    """
    default = (home() or user_cache()) / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")
    return (xdg_folder("XDG_DATA_HOME") or default) / "wanjax" / "caches" / f"{key}.json"


def checkpoint_key(source: Source) -> str:
    """Return a file name for the tables of an unpublished checkpoint.

    The name changes when the files of the transformer change.
    """
    if source.revision is not None:
        identity = [source.published_name, source.revision]
    else:
        identity = [str(Path(source.name).expanduser().absolute())]
        with suppress(WanjaxError, OSError):
            for path in source["transformer"].weights().paths:
                identity += [path.name, content_digest(path)]
    name = re.sub(r"[^\w.-]+", "-", Path(source.published_name).name)
    return f"{name}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}"


def table_digest(tables: CacheTables, kind: str) -> str:
    """Return a digest of one table; `kind` is a field of `CacheTables`."""
    table = getattr(tables, kind)
    values = table and tuple(table)  # without the name of the class
    return hashlib.sha256(repr(values).encode()).hexdigest()


def to_json(tables: CacheTables) -> dict[str, Any]:
    """Return tables as JSON that `read_tables` reads."""
    tables_by_kind = {kind: getattr(tables, field) for field, kind in NAMES_IN_FILE.items()}
    return {kind: table._asdict() for kind, table in tables_by_kind.items() if table}


def _read_magcache_table(json: Any) -> MagCacheTable | None:
    if not json:
        return None
    prompt, negative = (_numbers(json[name]) for name in ("prompt", "negative"))
    if len(prompt) != len(negative) or len(prompt) < 2:
        raise WanjaxError(
            f"the table has {pluralize(len(prompt), 'ratio')} for the prompt and {len(negative)} for the negative "
            "prompt: give one for each step"
        )
    if min(*prompt, *negative) <= 0:
        raise WanjaxError(f"the table has the ratio {min(*prompt, *negative)}: ratios must be above 0")
    settings = float(json["delta"]), int(json["most"]), float(json["whole"])
    return MagCacheTable(prompt, negative, *settings, tuple(map(bool, json.get("turns", (True, True)))))


def _read_teacache_table(json: Any) -> TeaCacheTable | None:
    if not json:
        return None
    polynomial = _numbers(json["polynomial"])
    first, last, gaps = int(json.get("first", 1)), int(json.get("last", 0)), _numbers(json.get("gaps", ()))
    return TeaCacheTable(polynomial, float(json["threshold"]), first, last, gaps)


def _numbers(json: Any) -> tuple[float, ...]:
    if not all(not isinstance(x, bool) and isinstance(x, Real) and math.isfinite(float(x)) for x in json):
        raise WanjaxError("the table has an entry that is not a finite number: write finite numbers")
    return tuple(map(float, json))
