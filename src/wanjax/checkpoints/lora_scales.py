# SPDX-License-Identifier: Apache-2.0
"""Scales of changes: alpha / rank, from wherever alpha is stored.

A tensor `alpha` of the module comes first, then PEFT's config, then the metadata of trainers. PEFT's config is an entry
of the file's metadata, or a JSON file beside it. It has an alpha and a rank for all modules, and patterns for some.
PEFT takes a pattern for a regular expression of the end of a module's name (`get_pattern_key` in peft/utils/other.py).
Patterns come from strangers: those that would take for ever are refused.
"""

import json
import math
import re
from collections.abc import Mapping
from time import monotonic
from typing import Any

import jax.numpy as jnp
import numpy as np
import regex

from wanjax.checkpoints.files import MappedFile
from wanjax.checkpoints.lora_keys import KINDS, PEFT_PREFIX
from wanjax.checkpoints.lora_source import PEFT_CONFIG, PEFT_FILE
from wanjax.errors import WanjaxError, repr_short

PEFT_METADATA = "lora_adapter_metadata"  # the entry of a file's metadata in which diffusers stores PEFT's config
CONFIGS = (PEFT_METADATA, "lora_config")  # the latter is finetrainers'
ALPHAS = ("network_alpha", "ss_network_alpha")  # entries of trainers' metadata; the latter is kohya's
ENTRIES = ("lora_alpha", "r", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
DEFAULT_ALPHA = 8  # PEFT's, for a config without one
PEFT_TYPES = ("LORA", "LOHA", "LOKR", "ADALORA")
ADAPTIVE_RANK, ADAPTIVE_EPSILON = 12, 1e-5  # AdaLoRA's initial rank in PEFT by default, and what PEFT adds to it
OTHER_FORMULAS = (  # entries of PEFT's config, which make another change of the same factors
    *("use_bdlora", "kasa_config", "monteclora_config", "arrow_config", "alora_invocation_tokens"),
)
MOVED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # beginnings of factors that change the base weights too
CONFIG_BYTES = 2**24
PATTERN_LENGTH = 500  # letters
PATTERN_SECONDS = 10.0  # for all of a file's: a thousand for a thousand modules take less than one
QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")


class Scales:
    """The scales of a file's products. Raises WanjaxError where their source is unreadable or of another kind."""

    def __init__(self, reader: MappedFile):
        self._reader = reader
        self._where, self._config = _config(reader)
        kind = self._config.get("peft_type") or "LORA"
        if str(kind).upper() not in PEFT_TYPES:
            raise WanjaxError(f"{self._where} says peft_type {repr_short(kind)}, a change of another kind: {KINDS}")
        if entry := next(filter(self._config.get, OTHER_FORMULAS), None):
            raise WanjaxError(f"{self._where} says {entry}, by which the factors make another change: {KINDS}")
        self._adaptive = str(kind).upper() == "ADALORA"
        if str(start := self._config.get("init_lora_weights")).lower().startswith(MOVED_BASES):
            how = "whose factors change the weights that they begin with"
            raise WanjaxError(f"{self._where} says init_lora_weights {start!r}, {how}: PEFT can save it as plain LoRA")
        tables = ("alpha_pattern", "rank_pattern")  # AdaLoRA's tell what was pruned, which the file is without
        self._patterns = {name: {} if self._adaptive else self._compiled(name) for name in tables}
        self._used: set[tuple[str, str]] = set()
        self._left = PATTERN_SECONDS

    @property
    def idle(self) -> list[str]:
        """The patterns that decided nothing so far, each with the name of its table."""
        each = ((table, text) for table, patterns in self._patterns.items() for text in patterns)
        return [f"the {table} {text!r}" for table, text in each if (table, text) not in self._used]

    @property
    def of_values(self) -> bool:
        """Whether the file may have tensors by their own names, which are in place of the network's, as PEFT's may."""
        trained = self._config.get("modules_to_save") or self._config.get("bias", "none") != "none"
        return bool(trained) or any(key.startswith(PEFT_PREFIX) for key in self._reader.specs)

    def check_plain(self, key: str) -> None:
        """Raise WanjaxError if the config says DoRA, but the product of the factor `key` has no magnitude."""
        if self._config.get("use_dora"):
            raise WanjaxError(f"{self._where} says use_dora, and {key} has no magnitude: give a complete file")

    def scale(self, module: str, rank: int | None, alpha: str | None) -> float:
        """Return the scale of a product of this rank; 1 without an alpha.

        module: the name by which patterns know it; alpha: the key of its tensor, if there is one. A product of whole
        matrices has no rank: alpha counts by PEFT's config alone, which tells the rank.
        """
        if rank == 0:  # such a product is nothing
            return 1.0
        if alpha is not None:
            number = self._stored(alpha)
            return 1.0 if rank is None else number / rank
        if not self._config:
            return 1.0
        usual = self._config.get("lora_alpha", self._config.get("alpha", DEFAULT_ALPHA))
        number = self._entry("alpha_pattern", module, usual)
        configured = self._entry("rank_pattern", module, self._config.get("r"))
        if rank is None and (configured is None or configured <= 0):
            return 1.0
        if rank is not None and configured is not None and configured != rank:
            raise WanjaxError(f"{self._where} gives {module} the rank {configured} where its factors have {rank}")
        divisor = float(configured or 0) if rank is None else rank
        return number / (math.sqrt(divisor) if self._config.get("use_rslora") else divisor)

    def adaptive_scale(self, key: str) -> float:
        """Return the scale of AdaLoRA's products, which is that of the rank at the beginning; `key` is a tensor's."""
        if not self._adaptive:
            problem = f"{self._reader.path} holds {key}, a part of AdaLoRA"
            raise WanjaxError(f"{problem}, whose scale stands in PEFT's {PEFT_CONFIG}: put it beside the file")
        rank = self._number(self._config.get("init_r", ADAPTIVE_RANK), "init_r")
        alpha = self._number(self._config.get("lora_alpha", DEFAULT_ALPHA), "lora_alpha")
        if rank < 1:
            raise WanjaxError(f"{self._where} has init_r {rank:g}, and a rank is 1 or more: give its number")
        return (alpha if alpha > 0 else rank) / (rank + ADAPTIVE_EPSILON)

    def _stored(self, key: str) -> float:
        """Return the number that a tensor holds."""
        shape, dtype = self._reader.specs[key]
        if math.prod(shape) != 1 or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            raise WanjaxError(f"{self._reader.path} holds {key} as {dtype} {list(shape)} where it should be one number")
        number = float(self._reader.read(key).astype(np.float32).item())
        if not math.isfinite(number):
            raise WanjaxError(f"{self._reader.path} holds {key} with {number}, which is not finite: get the file again")
        return number

    def _entry(self, table: str, module: str, otherwise: Any) -> Any:
        """Return the number of the first pattern that fits the module, or `otherwise`, which may be None."""
        pattern = next((text for text, fits in self._patterns[table].items() if self._fits(fits, text, module)), None)
        if pattern is not None:
            self._used.add((table, pattern))
        value = otherwise if pattern is None else self._config[table][pattern]
        if value is None and table == "alpha_pattern":
            raise WanjaxError(f"{self._where} has no number lora_alpha for {module}")
        return None if value is None else self._number(value, module)

    def _number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise WanjaxError(f"{self._where} has {repr_short(value)} for {name}, not a finite number: give a number")
        return value

    def _compiled(self, table: str) -> dict[str, Any]:
        """Return the compiled patterns of a table, in its order."""
        patterns = self._config.get(table) or {}
        if not isinstance(patterns, dict):
            raise WanjaxError(f"{self._where} has the {table} {repr_short(patterns)}: write a JSON object")
        return {text: self._expression(table, text) for text in patterns}

    def _expression(self, table: str, text: str) -> Any:
        named = f"{self._where} has the {table} {repr_short(text)}"
        if len(text) > PATTERN_LENGTH:
            raise WanjaxError(f"{named} of {len(text):,} letters: at most {PATTERN_LENGTH} are read")
        if _repeats_repeats(text):
            raise WanjaxError(f"{named}, which repeats what repeats and could take for ever: give a plainer one")
        try:
            return regex.compile(rf"(.*\.)?({text})$")
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise WanjaxError(f"{named}, which is no regular expression ({error})") from error

    def _fits(self, pattern: Any, text: str, module: str) -> bool:
        start = monotonic()
        try:
            return pattern.match(module, timeout=max(self._left, 1e-3)) is not None
        except TimeoutError:
            problem = f"{self._where} has the pattern {repr_short(text)}, which takes for ever"
            raise WanjaxError(f"{problem}: give a plainer one") from None
        finally:
            self._left -= monotonic() - start


def _config(reader: MappedFile) -> tuple[str, dict[str, Any]]:
    """Return the name of the config or metadata with scales, and its entries; empty if there is none."""
    path, metadata = reader.path, reader.metadata
    for entry in CONFIGS:
        if text := metadata.get(entry):
            where = f"PEFT's config in the {entry} of {path}"
            config = _own(_parsed(text, where))
            if entry == PEFT_METADATA or "lora_alpha" in config:
                return where, config
    beside = path.with_name(PEFT_CONFIG)
    peft = path.stem == PEFT_FILE or any(key.startswith(PEFT_PREFIX) for key in reader.specs)
    if peft and beside.is_file():
        if beside.stat().st_size > CONFIG_BYTES:
            raise WanjaxError(f"{beside} has more than {CONFIG_BYTES:,} bytes: it is no config of PEFT")
        where = f"PEFT's config {beside}"
        return where, _own(_parsed(beside.read_text(encoding="utf-8", errors="replace"), where))
    entries = _own(metadata)
    if "lora_alpha" in entries:
        return f"the metadata of {path}", {name: _value(entries[name]) for name in ENTRIES if name in entries}
    for entry in ALPHAS:
        if (value := _value(entries.get(entry, "None"))) is not None:
            return f"the metadata of {path}", {"lora_alpha": value}
    return str(path), {}


def _parsed(text: str, where: str) -> dict[str, Any]:
    config = _value(text)
    if not isinstance(config, dict):
        raise WanjaxError(f"{where} is no JSON object, which it has to be")
    return config


def _own(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transformer's entries by their bare names, without those of text encoders."""
    bare = {name: value for name, value in entries.items() if "." not in name}
    prefixed = {name.removeprefix("transformer."): x for name, x in entries.items() if name.startswith("transformer.")}
    return bare | prefixed


def _value(text: str) -> Any:
    """Parse an entry of a file's metadata, which is text: JSON, or None, True or False of Python."""
    spelled = {"None": None, "True": True, "False": False}
    try:
        return spelled[text] if text in spelled else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _repeats_repeats(pattern: str) -> bool:
    """Return whether a group that is repeated holds something that is repeated, as in `(a+)+`."""
    plain = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "c", re.sub(r"\\.", "c", pattern))  # without escapes and classes
    while inner := re.search(r"\((?:\?[:=!]|\?<[=!]|\?P<\w*>)?([^()]*)\)", plain):
        repeated = QUANTIFIER.match(plain, inner.end())
        if repeated and repeated[0] != "?" and QUANTIFIER.search(inner[1]):
            return True
        inside = "c*" if QUANTIFIER.search(inner[1]) else "c"
        plain = plain[: inner.start()] + inside + plain[inner.end() :]
    return False
