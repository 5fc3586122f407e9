# SPDX-License-Identifier: Apache-2.0
"""Tables that step caches need of a checkpoint: published ones, and those that `wanjax calibrate` measured."""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.files import content_digest
from wanjax.checkpoints.sources import Source
from wanjax.errors import WanjaxError, reason
from wanjax.figures import quantity
from wanjax.stores.user_folders import home, user_cache

FILE = "caches.json"  # the published tables of a family
KINDS = {
    "magnitudes": "magcache",
    "changes": "teacache",
    "pictured": "magcache_pictured",
    "plain": "teacache_plain",
}
"""The entries of a file, by the fields of `Tables`."""


class Magnitudes(NamedTuple):
    """MagCache's table: how much larger the blocks' residual is in each step than in the step before it.

    `prompt` and `negative` have an entry for each step; the first is 1. `delta`, `most` and `whole` are the settings
    in use where none are given. `turns` tells of each network, in their order, whether its steps may reuse at all.
    """

    prompt: tuple[float, ...]
    negative: tuple[float, ...]
    delta: float
    most: int
    whole: float
    turns: tuple[bool, ...] = (True, True)


class Changes(NamedTuple):
    """TeaCache's polynomial, the highest degree first, from the change of the timestep's embedding to the output's.

    The first `first` and the last `last` steps are whole. `threshold` is in use where none is given.
    """

    polynomial: tuple[float, ...]
    threshold: float
    first: int = 1
    last: int = 0


@dataclass(frozen=True)
class Tables:
    """The tables of a checkpoint; None for those that it lacks.

    `pictured` takes the place of `magnitudes` where a model that needs no picture is given one. `plain` is for the
    timestep's embedding before it is projected for the blocks, `changes` for what the blocks are given.
    """

    magnitudes: Magnitudes | None = None
    changes: Changes | None = None
    pictured: Magnitudes | None = None
    plain: Changes | None = None

    @property
    def of_pictured(self) -> "Tables":
        """The tables for a video that begins with a given picture."""
        return replace(self, magnitudes=self.pictured) if self.pictured else self


NO_TABLES = Tables()


def read_tables(file: Path, name: str | None = None) -> Tables:
    """Read the tables of a file, in which `name` selects a checkpoint's; a file that does not exist has none.

    Raises WanjaxError where the file is damaged or a table has a wrong length.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        kinds = [content.get(kind, {}) for kind in KINDS.values()]
        magcache, teacache, pictured, plain = kinds if name is None else [kind.get(name) for kind in kinds]
        return Tables(_magnitudes(magcache), _changes(teacache), _magnitudes(pictured), _changes(plain))
    except WanjaxError as error:
        raise WanjaxError(f"{file}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WanjaxError(
            f"{file} holds no tables of step caches ({reason(error)}): `wanjax calibrate` writes one"
        ) from error


def tables_of(places: Sequence[tuple[Path | None, str | None]]) -> Tables:
    """Return each table from the first of the places that has it: files, and names in them as for `read_tables`."""
    tables = [read_tables(file, name) for file, name in places if file is not None]
    first: dict[str, Any] = {kind: next(filter(None, (getattr(x, kind) for x in tables)), None) for kind in KINDS}
    first["pictured"] = next((x.pictured for x in tables if x.magnitudes), None)  # of one place with `magnitudes`
    return Tables(**first)


def measured_file(key: str) -> Path:
    """Return the file in which the tables measured of a checkpoint are kept, in the user's folder for data.

    For a user without a home folder it is a temporary one.
    """
    usual = (home() or user_cache()) / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")
    return Path(os.environ.get("XDG_DATA_HOME") or usual) / "wanjax" / "caches" / f"{key}.json"


def key_of(source: Source) -> str:
    """Return a name for the tables of a checkpoint that is not a published one.

    It is another one when the files of the transformer change.
    """
    if source.revision is not None:
        identity = [source.origin, source.revision]
    else:
        identity = [str(Path(source.name).expanduser().absolute())]
        with suppress(WanjaxError, OSError):
            for path in source["transformer"].weights().paths:
                identity += [path.name, content_digest(path)]
    name = re.sub(r"[^\w.-]+", "-", Path(source.origin).name)
    return f"{name}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]}"


def table_digest(tables: Tables, kind: str) -> str:
    """Return a digest of the table of a kind, a field of `Tables`."""
    return hashlib.sha256(repr(getattr(tables, kind)).encode()).hexdigest()


def to_json(tables: Tables) -> dict[str, Any]:
    """Return tables as `read_tables` reads them."""
    tables_by_kind = {kind: getattr(tables, field) for field, kind in KINDS.items()}
    return {kind: table._asdict() for kind, table in tables_by_kind.items() if table}


def _magnitudes(json: Any) -> Magnitudes | None:
    if not json:
        return None
    prompt, negative = (_numbers(json[name]) for name in ("prompt", "negative"))
    if len(prompt) != len(negative) or len(prompt) < 2:
        raise WanjaxError(
            f"the table has {quantity(len(prompt), 'ratio')} for the prompt and {len(negative)} for the negative one: "
            "give one for each step"
        )
    if min(*prompt, *negative) <= 0:
        raise WanjaxError(f"the table has the ratio {min(*prompt, *negative)}: ratios are above 0")
    settings = float(json["delta"]), int(json["most"]), float(json["whole"])
    return Magnitudes(prompt, negative, *settings, tuple(map(bool, json.get("turns", (True, True)))))


def _changes(json: Any) -> Changes | None:
    if not json:
        return None
    polynomial = _numbers(json["polynomial"])
    return Changes(polynomial, float(json["threshold"]), int(json.get("first", 1)), int(json.get("last", 0)))


def _numbers(json: Any) -> tuple[float, ...]:
    if not all(not isinstance(x, bool) and isinstance(x, Real) and math.isfinite(float(x)) for x in json):
        raise WanjaxError("the table holds what is not a number: write finite numbers")
    return tuple(map(float, json))
