# SPDX-License-Identifier: Apache-2.0
"""Define the letters for sizes in shape annotations, einsum strings and comments. Also make annotations readable in
`help`.

Inside the library, arrays are channels-last: videos and latents are `[B T H W C]`, sequences `[B L E]`, and operands of
attention `[B L N D]`. In files and in the public API, latents are `[B, C, T, H, W]` as in the reference. A letter with
a leading underscore is a size of the same kind that may have a different value.
"""

import re
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, formatannotation, get_annotations, isclass, isfunction, signature
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

ALPHABET = {
    "B": "batch",
    "T": "frames, of the video or of the latents",
    "H": "height, in pixels or latent positions",
    "W": "width, in pixels or latent positions",
    "C": "channels",
    "L": "tokens of the queries",
    "S": "tokens of the keys and values, or of the context",
    "N": "attention heads",
    "K": "heads of keys and values, if there are fewer than N",
    "D": "size of a head",
    "E": "width of the model",
    "F": "width of the hidden layer of the MLP",
    "P": "pairs of channels that rotary embeddings rotate, D / 2",
    "steps": "steps of a denoising schedule",
    "terms": "of a solver's expansion at one step",
}

DTYPE_LIKE_TEXT = "str | type[Any] | dtype | SupportsDType"  # the text of `DTypeLike` in a signature
Decorated = TypeVar("Decorated")


class ReadableHint(NamedTuple):
    """An annotation whose `repr` has no module names, and `|` between the types of a union."""

    hint: Any

    def __repr__(self) -> str:
        if get_origin(self.hint) in (Union, UnionType):
            return " | ".join(repr(ReadableHint(part)) for part in get_args(self.hint)).replace(
                DTYPE_LIKE_TEXT, "DTypeLike"
            )
        text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", formatannotation(self.hint))
        if "Union[" in text and not isinstance((parts := get_args(self.hint))[0], list):  # a list if it is a Callable
            return f"{text.partition('[')[0]}[{', '.join(repr(ReadableHint(part)) for part in parts)}]"
        return text.replace("NoneType", "None").replace("'", '"')


def readable_signature(target: Decorated) -> Decorated:
    """Make `help` print the annotations of a function, or of a class and its methods, in a readable form.

    Type checkers still see the original annotations. Call this on a dataclass after it is defined, not as a decorator:
    in tests jaxtyping adds its checks after the decorators, and reads them from the signature.
    """
    for hint in get_annotations(target).values():  # pyright: ignore[reportArgumentType]
        if getattr(hint, "__module__", None) == "jaxtyping":
            hint.__module__ = "builtins"  # jaxtyping does the same when documentation is generated
    factories = {x.name: x.default_factory for x in fields(target)} if is_dataclass(target) else {}
    members = vars(target).values() if isinstance(target, type) else [target]
    for function in filter(isfunction, (getattr(member, "__func__", member) for member in members)):
        prototype = signature(function)
        parameters = [
            p.replace(
                annotation=_format(p.annotation), default=_readable_default(p.default, factories.get(p.name, MISSING))
            )
            for p in prototype.parameters.values()
        ]
        prototype = prototype.replace(parameters=parameters, return_annotation=_format(prototype.return_annotation))
        function.__signature__ = prototype  # pyright: ignore[reportFunctionMemberAccess]
    return target


def _format(hint: Any) -> Any:
    return hint if hint is Parameter.empty else ReadableHint(hint)


class NamedDefault(NamedTuple):
    """A default value that is a class or a function. Its `repr` is the name of the class or function."""

    default: Any

    def __repr__(self) -> str:
        return self.default.__name__


def _readable_default(default: Any, factory: Any) -> Any:
    """Return a default value with a readable `repr`. If a dataclass field has a `factory`, call it for the value."""
    if default is not Parameter.empty and factory is not MISSING:
        return factory()
    return (
        NamedDefault(default)
        if isfunction(default) or (isclass(default) and default is not Parameter.empty)
        else default
    )
