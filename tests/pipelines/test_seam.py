# SPDX-License-Identifier: Apache-2.0
"""A family of models has to define only a few members, and its data contains no functions."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import get_origin, get_type_hints

import pytest

from tests.support import toy, toy_sound
from tests.support.toy import TOY
from tests.support.toy_sound import TOY_SOUND
from wanjax import registry
from wanjax.pipelines.denoiser import Denoiser
from wanjax.pipelines.model import ModelSpec, VideoModel

MAX_MEMBERS = {"Wan": 14, "CogVideoX": 10, "HunyuanVideo": 12, "Toy": 9, "Toy with sound": 12}
PACKAGES = {name: f"wanjax.pipelines.{name.lower()}." for name in MAX_MEMBERS} | {
    "Toy": f"{toy.__name__}.",
    "Toy with sound": f"{toy_sound.__name__}.",
}


def members(kind: type) -> set[str]:
    """Return the public members that a base class of families offers to subclasses, without its data."""
    data = {"conditioning_type", "vae", "scheduler", "tables"}
    return {name for name in [*vars(kind), *get_type_hints(kind)] if not name.startswith("_")} - data


SEAM = members(VideoModel) | members(Denoiser)


def subclasses(kind: type) -> list[type]:
    return [kind, *(subclass for child in kind.__subclasses__() for subclass in subclasses(child))]


def test_the_base_classes_have_few_members():
    assert len(SEAM) <= 18


@pytest.mark.parametrize("family", [*registry.FAMILIES, TOY, TOY_SOUND], ids=lambda family: family.name)
def test_a_family_defines_few_members(family):
    package = PACKAGES[family.name]
    classes = [
        subclass
        for base in (VideoModel, Denoiser)
        for subclass in subclasses(base)
        if f"{subclass.__module__}.".startswith(package)
    ]
    defined = {name for subclass in classes for name in vars(subclass)} & SEAM
    assert len(defined) <= MAX_MEMBERS[family.name], sorted(defined)


def test_the_data_of_a_family_contains_no_function():
    hints = get_type_hints(ModelSpec)
    for field in fields(ModelSpec):
        kind = hints[field.name]
        assert get_origin(kind) is not Callable
        assert not inspect.isfunction(kind)
