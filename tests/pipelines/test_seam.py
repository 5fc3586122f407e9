# SPDX-License-Identifier: Apache-2.0
"""What a family of models has to write: few members, none of them data that computes."""

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

MOST = {"Wan": 14, "CogVideoX": 10, "HunyuanVideo": 12, "Toy": 9, "Toy with sound": 12}
PACKAGES = {name: f"wanjax.pipelines.{name.lower()}." for name in MOST} | {
    "Toy": f"{toy.__name__}.",
    "Toy with sound": f"{toy_sound.__name__}.",
}


def members(kind: type) -> set[str]:
    """Return the public members that a class of the seam offers to its subclasses, but for its data."""
    data = {"conditioning_type", "vae", "scheduler", "tables"}
    return {name for name in [*vars(kind), *get_type_hints(kind)] if not name.startswith("_")} - data


SEAM = members(VideoModel) | members(Denoiser)


def subclasses(kind: type) -> list[type]:
    return [kind, *(subclass for each in kind.__subclasses__() for subclass in subclasses(each))]


def test_the_seam_is_small():
    assert len(SEAM) <= 18


@pytest.mark.parametrize("family", [*registry.FAMILIES, TOY, TOY_SOUND], ids=lambda family: family.name)
def test_a_family_writes_few_members(family):
    package = PACKAGES[family.name]
    classes = [
        subclass
        for base in (VideoModel, Denoiser)
        for subclass in subclasses(base)
        if f"{subclass.__module__}.".startswith(package)
    ]
    written = {name for each in classes for name in vars(each)} & SEAM
    assert len(written) <= MOST[family.name], sorted(written)


def test_data_holds_no_function():
    hints = get_type_hints(ModelSpec)
    for field in fields(ModelSpec):
        kind = hints[field.name]
        assert get_origin(kind) is not Callable
        assert not inspect.isfunction(kind)
