# SPDX-License-Identifier: Apache-2.0
"""The alphabet of shapes: the meaning of each letter in annotations, einsum strings and comments; and how `help` prints
annotations.

Inside the library arrays are channels-last: videos and latents are `[B T H W C]`, sequences `[B L E]`, operands of
attention `[B L N D]`. In files and for users latents are `[B, C, T, H, W]` as in the reference.
A letter with a leading underscore is a size that differs from the one that the letter stands for elsewhere.
"""

import re
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, formatannotation, get_annotations, isclass, isfunction, signature
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

ALPHABET = {
    "B": "batch",
    "T": "frames, of the video or of the latents",
    "H": "height, in pixels or latent cells",
    "W": "width, in pixels or latent cells",
    "C": "channels",
    "L": "tokens of the queries",
    "S": "tokens of the keys and values, or of the context",
    "N": "attention heads",
    "K": "heads of keys and values, if they are fewer than N",
    "D": "size of a head",
    "E": "width of the model",
    "F": "width inside the MLP",
    "P": "pairs of channels that rotary embeddings rotate, D / 2",
    "steps": "of a denoising schedule",
    "terms": "of a solver's expansion at one step",
}

DTYPE = "str | type[Any] | dtype | SupportsDType"  # as JAX writes its `DTypeLike`
Public = TypeVar("Public")


class Shown(NamedTuple):
    """An annotation that prints without the modules of its names, and with bars between the types of a union."""

    hint: Any

    def __repr__(self) -> str:
        if get_origin(self.hint) in (Union, UnionType):
            return " | ".join(repr(Shown(part)) for part in get_args(self.hint)).replace(DTYPE, "DTypeLike")
        text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", formatannotation(self.hint))
        if "Union[" in text and not isinstance((parts := get_args(self.hint))[0], list):  # as a callable's are
            return f"{text.partition('[')[0]}[{', '.join(repr(Shown(part)) for part in parts)}]"
        return text.replace("NoneType", "None").replace("'", '"')


def readable(public: Public) -> Public:
    """Decorate a function, or a class: `help` then prints its annotations readably, and those of its methods.

    What checks annotations finds the same ones. A dataclass is passed once it is defined, because in tests its checks
    are added after its decorators have run, and are read from its signature.
    """
    for hint in get_annotations(public).values():  # pyright: ignore[reportArgumentType]
        if getattr(hint, "__module__", None) == "jaxtyping":
            hint.__module__ = "builtins"  # as jaxtyping has it where documentation is made
    factories = {x.name: x.default_factory for x in fields(public)} if is_dataclass(public) else {}
    members = vars(public).values() if isinstance(public, type) else [public]
    for function in filter(isfunction, (getattr(member, "__func__", member) for member in members)):
        prototype = signature(function)
        parameters = [
            p.replace(annotation=_shown(p.annotation), default=_plain(p.default, factories.get(p.name, MISSING)))
            for p in prototype.parameters.values()
        ]
        prototype = prototype.replace(parameters=parameters, return_annotation=_shown(prototype.return_annotation))
        function.__signature__ = prototype  # pyright: ignore[reportFunctionMemberAccess]
    return public


def _shown(hint: Any) -> Any:
    return hint if hint is Parameter.empty else Shown(hint)


class Named(NamedTuple):
    """A default, a class or a function, that prints as its name."""

    default: Any

    def __repr__(self) -> str:
        return self.default.__name__


def _plain(default: Any, factory: Any) -> Any:
    """Return a default that prints readably; `factory` makes that of a dataclass's field, unless it is missing."""
    if default is not Parameter.empty and factory is not MISSING:
        return factory()
    return Named(default) if isfunction(default) or (isclass(default) and default is not Parameter.empty) else default
