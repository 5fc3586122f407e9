# SPDX-License-Identifier: Apache-2.0
"""The scales of LoRA products: alpha / rank.

A module's tensor `alpha` takes precedence over PEFT's config, and PEFT's config takes precedence over trainers'
metadata. PEFT's config is an entry of the file's metadata, or a JSON file in the same folder. This config has an alpha
and a rank for all modules, and patterns with values for some modules. A pattern is a regular expression for the end of
a module's name (`get_pattern_key` in peft/utils/other.py). Patterns come from untrusted files, so patterns that could
take exponential time are rejected.
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
from wanjax.checkpoints.lora_keys import PEFT_PREFIX, SUPPORTED_KINDS
from wanjax.checkpoints.lora_source import PEFT_CONFIG, PEFT_FILE
from wanjax.errors import WanjaxError, repr_short

PEFT_METADATA = "lora_adapter_metadata"  # diffusers' metadata entry with PEFT's config
CONFIG_ENTRIES = (PEFT_METADATA, "lora_config")  # entries with PEFT's config; finetrainers writes the second
ALPHA_ENTRIES = ("network_alpha", "ss_network_alpha")  # entries with alpha; kohya writes the second
PEFT_ENTRIES = ("lora_alpha", "r", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern")
DEFAULT_ALPHA = 8  # PEFT's default
PEFT_TYPES = ("LORA", "LOHA", "LOKR", "ADALORA")
ADAPTIVE_RANK, ADAPTIVE_EPSILON = 12, 1e-5  # PEFT's default initial rank of AdaLoRA, and the epsilon added to it
UNSUPPORTED_OPTIONS = (  # entries of PEFT's config that change the formula
    *("use_bdlora", "kasa_config", "monteclora_config", "arrow_config", "alora_invocation_tokens"),
)
BASE_CHANGING_INITS = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # initialisations that also change the base weights
MAX_CONFIG_BYTES = 2**24
MAX_PATTERN_LENGTH = 500  # in characters
PATTERN_SECONDS = 10.0  # the time limit for all patterns of a file; a thousand patterns and modules take less than 1 s
QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")


class LoraScales:
    """The scales of a file's products.

    Raises WanjaxError if the config or metadata with the scales is unreadable or of an unsupported kind.
    """

    def __init__(self, reader: MappedFile):
        self._reader = reader
        self._config_name, self._config = _read_scale_config(reader)
        kind = self._config.get("peft_type") or "LORA"
        if str(kind).upper() not in PEFT_TYPES:
            raise WanjaxError(
                f"{self._config_name} has the unsupported peft_type {repr_short(kind)}: {SUPPORTED_KINDS}"
            )
        if entry := next(filter(self._config.get, UNSUPPORTED_OPTIONS), None):
            raise WanjaxError(f"{self._config_name} has the unsupported option {entry}: {SUPPORTED_KINDS}")
        self._is_adalora = str(kind).upper() == "ADALORA"
        if str(start := self._config.get("init_lora_weights")).lower().startswith(BASE_CHANGING_INITS):
            problem = f"{self._config_name} has init_lora_weights {start!r}, which also changes the base weights"
            raise WanjaxError(f"{problem}: convert it to a plain LoRA with PEFT")
        tables = ("alpha_pattern", "rank_pattern")  # AdaLoRA's patterns only describe pruned ranks
        self._patterns = {name: {} if self._is_adalora else self._compile_table(name) for name in tables}
        self._matched_patterns: set[tuple[str, str]] = set()
        self._seconds_left = PATTERN_SECONDS

    @property
    def unused_patterns(self) -> list[str]:
        """The patterns that matched no module, each with the name of its table."""
        patterns = ((table, text) for table, patterns in self._patterns.items() for text in patterns)
        return [f"the {table} {text!r}" for table, text in patterns if (table, text) not in self._matched_patterns]

    @property
    def has_replacements(self) -> bool:
        """Whether the file may have tensors that replace the network's tensors, as PEFT's files may."""
        trained = self._config.get("modules_to_save") or self._config.get("bias", "none") != "none"
        return bool(trained) or any(key.startswith(PEFT_PREFIX) for key in self._reader.specs)

    def check_no_dora(self, key: str) -> None:
        """Raise WanjaxError if the config enables DoRA. `key` names a factor of a product that has no magnitude."""
        if self._config.get("use_dora"):
            raise WanjaxError(f"{self._config_name} has use_dora, but {key} has no magnitude: give a complete file")

    def scale(self, module: str, rank: int | None, alpha: str | None) -> float:
        """Return the scale of a product. The scale is 1 if no alpha is stored.

        Args:
            module: The module's name for patterns.
            rank: The rank of the product. None means matrices without factors; PEFT's config then has the rank.
            alpha: The key of the module's tensor `alpha`, or None.
        """
        if rank == 0:  # the product is zero
            return 1.0
        if alpha is not None:
            number = self._read_number(alpha)
            return 1.0 if rank is None else number / rank
        if not self._config:
            return 1.0
        default = self._config.get("lora_alpha", self._config.get("alpha", DEFAULT_ALPHA))
        number = self._lookup("alpha_pattern", module, default)
        configured_rank = self._lookup("rank_pattern", module, self._config.get("r"))
        if rank is None and (configured_rank is None or configured_rank <= 0):
            return 1.0
        if rank is not None and configured_rank is not None and configured_rank != rank:
            raise WanjaxError(
                f"{self._config_name} gives {module} the rank {configured_rank}, but its factors have {rank}: "
                "get both files again"
            )
        divisor = float(configured_rank or 0) if rank is None else rank
        return number / (math.sqrt(divisor) if self._config.get("use_rslora") else divisor)

    def adaptive_scale(self, key: str) -> float:
        """Return the scale of AdaLoRA's products, which depends on the initial rank.

        `key` names a tensor in messages.
        """
        if not self._is_adalora:
            problem = f"{self._reader.path} contains {key}, a part of AdaLoRA"
            raise WanjaxError(f"{problem}, whose scale is in PEFT's {PEFT_CONFIG}: put {PEFT_CONFIG} beside the file")
        rank = self._number(self._config.get("init_r", ADAPTIVE_RANK), "init_r")
        alpha = self._number(self._config.get("lora_alpha", DEFAULT_ALPHA), "lora_alpha")
        if rank < 1:
            raise WanjaxError(f"{self._config_name} has init_r {rank:g}: give a rank of 1 or more")
        return (alpha if alpha > 0 else rank) / (rank + ADAPTIVE_EPSILON)

    def _read_number(self, key: str) -> float:
        """Read a tensor that contains one number."""
        shape, dtype = self._reader.specs[key]
        if math.prod(shape) != 1 or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            raise WanjaxError(
                f"{self._reader.path} contains {key} as {dtype} {list(shape)}, expected one number: get the file again"
            )
        number = float(self._reader.read(key).astype(np.float32).item())
        if not math.isfinite(number):
            raise WanjaxError(f"{self._reader.path} contains {key} = {number}, which is not finite: get the file again")
        return number

    def _lookup(self, table: str, module: str, default: Any) -> Any:
        """Return the number of the first pattern that matches the module. Without a match, return `default`, which may
        be None."""
        pattern = next(
            (text for text, compiled in self._patterns[table].items() if self._matches(compiled, text, module)), None
        )
        if pattern is not None:
            self._matched_patterns.add((table, pattern))
        value = default if pattern is None else self._config[table][pattern]
        if value is None and table == "alpha_pattern":
            raise WanjaxError(f"{self._config_name} has no lora_alpha for {module}: add it, as a number")
        return None if value is None else self._number(value, module)

    def _number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise WanjaxError(
                f"{self._config_name} has {repr_short(value)} for {name}, not a finite number: give a number"
            )
        return value

    def _compile_table(self, table: str) -> dict[str, Any]:
        """Compile the patterns of a table, in its order."""
        patterns = self._config.get(table) or {}
        if not isinstance(patterns, dict):
            raise WanjaxError(f"{self._config_name} has the {table} {repr_short(patterns)}: write a JSON object")
        return {text: self._compile_pattern(table, text) for text in patterns}

    def _compile_pattern(self, table: str, text: str) -> Any:
        problem = f"{self._config_name} has the {table} {repr_short(text)}"
        if len(text) > MAX_PATTERN_LENGTH:
            raise WanjaxError(f"{problem} of {len(text):,} characters: the limit is {MAX_PATTERN_LENGTH}")
        if _has_nested_quantifier(text):
            raise WanjaxError(f"{problem}, whose nested quantifiers could take exponential time: give a simpler one")
        try:
            return regex.compile(rf"(.*\.)?({text})$")
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise WanjaxError(f"{problem}, which is not a regular expression: {error}; give a valid one") from error

    def _matches(self, pattern: Any, text: str, module: str) -> bool:
        start = monotonic()
        try:
            return pattern.match(module, timeout=max(self._seconds_left, 1e-3)) is not None
        except TimeoutError:
            problem = f"{self._config_name} has the pattern {repr_short(text)}, which takes too long"
            raise WanjaxError(f"{problem}: give a simpler one") from None
        finally:
            self._seconds_left -= monotonic() - start


def _read_scale_config(reader: MappedFile) -> tuple[str, dict[str, Any]]:
    """Find the config or metadata with the scales; return its name for messages, and its entries, if any."""
    path, metadata = reader.path, reader.metadata
    for entry in CONFIG_ENTRIES:
        if text := metadata.get(entry):
            config_name = f"PEFT's config in the {entry} of {path}"
            config = _transformer_entries(_parse_config(text, config_name))
            if entry == PEFT_METADATA or "lora_alpha" in config:
                return config_name, config
    config_file = path.with_name(PEFT_CONFIG)
    is_peft = path.stem == PEFT_FILE or any(key.startswith(PEFT_PREFIX) for key in reader.specs)
    if is_peft and config_file.is_file():
        if config_file.stat().st_size > MAX_CONFIG_BYTES:
            raise WanjaxError(f"{config_file} has more than {MAX_CONFIG_BYTES:,} bytes: it is not a PEFT config")
        config_name = f"PEFT's config {config_file}"
        return config_name, _transformer_entries(
            _parse_config(config_file.read_text(encoding="utf-8", errors="replace"), config_name)
        )
    entries = _transformer_entries(metadata)
    if "lora_alpha" in entries:
        return f"the metadata of {path}", {
            name: _parse_value(entries[name]) for name in PEFT_ENTRIES if name in entries
        }
    for entry in ALPHA_ENTRIES:
        if (value := _parse_value(entries.get(entry, "None"))) is not None:
            return f"the metadata of {path}", {"lora_alpha": value}
    return str(path), {}


def _parse_config(text: str, config_name: str) -> dict[str, Any]:
    config = _parse_value(text)
    if not isinstance(config, dict):
        raise WanjaxError(f"{config_name} is not a JSON object: get it again")
    return config


def _transformer_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the transformer without their prefix; leave out the entries of text encoders."""
    unprefixed = {name: value for name, value in entries.items() if "." not in name}
    prefixed = {name.removeprefix("transformer."): x for name, x in entries.items() if name.startswith("transformer.")}
    return unprefixed | prefixed


def _parse_value(text: str) -> Any:
    """Parse a string of a file's metadata: JSON, or Python's None, True or False."""
    python_constants = {"None": None, "True": True, "False": False}
    try:
        return python_constants[text] if text in python_constants else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _has_nested_quantifier(pattern: str) -> bool:
    """Return whether a repeated group contains a quantifier, as in `(a+)+`."""
    # Replace escapes and character classes by a letter.
    simplified = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "c", re.sub(r"\\.", "c", pattern))
    while group := re.search(r"\((?:\?[:=!]|\?<[=!]|\?P<\w*>)?([^()]*)\)", simplified):
        repeated = QUANTIFIER.match(simplified, group.end())
        if repeated and repeated[0] != "?" and QUANTIFIER.search(group[1]):
            return True
        replacement = "c*" if QUANTIFIER.search(group[1]) else "c"
        simplified = simplified[: group.start()] + replacement + simplified[group.end() :]
    return False
