# SPDX-License-Identifier: Apache-2.0
"""A scheduler is chosen by name or as a value, and replaces the model's scheduler."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support.small_wan import VIDEO, pipeline
from tests.support.toy.scheduler import Ancestral
from tests.support.types import unchecked
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.schedulers import (
    DDIM,
    DPM,
    RCM,
    SCHEDULERS,
    Consistency,
    FlowDPM,
    FlowEuler,
    RCMEuler,
    UniPC,
    name_of,
    parse,
    resolve,
)


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("unipc", UniPC()),
        ("unipc:order=1", UniPC(order=1)),
        ("euler", FlowEuler()),
        ("dpm++", FlowDPM()),
        ("dpm++:order=1", FlowDPM(order=1)),
        ("ddim", DDIM()),
        ("dpm", DPM()),
        ("consistency", Consistency()),
        ("consistency:timesteps=1000,757,522", Consistency(timesteps=(1000.0, 757.0, 522.0))),
        ("consistency:timesteps=985.5", Consistency(timesteps=(985.5,))),
        ("rcm", RCM()),
        ("rcm:sigma_max=200", RCM(sigma_max=200.0)),
        ("rcm:sigma_max=80.25", RCM(sigma_max=80.25)),
        ("rcm-ode", RCMEuler(sigma_max=200.0)),
        ("rcm-ode:sigma_max=80", RCMEuler(sigma_max=80.0)),
    ],
)
def test_every_scheduler_has_a_name(name, scheduler):
    assert parse(name) == scheduler
    assert name_of(scheduler) == name
    assert set(SCHEDULERS) == {"unipc", "euler", "dpm++", "ddim", "dpm", "consistency", "rcm", "rcm-ode"}


def test_a_scheduler_without_a_name_is_described():
    assert name_of(Ancestral()) == "Ancestral(prediction='v')"
    assert name_of(UniPC(prediction="v")) == "UniPC(prediction='v', order=2)"


UNKNOWN = [
    *("heun", "", "dpm:order=1", "unipc:", "unipc:order", "unipc:order=x", "unipc:steps=1", "euler:order=1", 3),
    *("consistency:", "consistency:timesteps=", "consistency:timesteps=a,b", "consistency:1000", "rcm:sigma_max="),
    *("rcm:prediction=v", "euler:="),
]
ALL_NAMES = "scheduler unipc euler ddim dpm consistency rcm"
REFUSED = [  # a function that chooses a scheduler, its arguments, and words of the message
    *((parse, (name,), ALL_NAMES) for name in UNKNOWN),
    *(
        (parse, (name,), words)
        for name, words in [
            ("unipc:order=3", "solver order 3"),
            ("consistency:timesteps=1000,1000", "timesteps (1000.0, 1000.0)"),
            ("consistency:timesteps=1000,0", "fall 1000 757 522"),
            ("consistency:timesteps=1001", "do not fall"),
            ("consistency:timesteps=nan", "do not fall"),
            ("rcm:sigma_max=14", "sigma_max rCM 14.0 15 80 200"),
            ("rcm:sigma_max=inf", "sigma_max rCM inf"),
            ("rcm:sigma_max=nan", "sigma_max rCM nan"),
        ]
    ),
    *((parse, (name,), f"'{name}' {suggestion}") for name, suggestion in (("lcm", "consistency"), ("uni_pc", "unipc"))),
    (parse, ("dpmpp_2m",), "'dpmpp_2m' dpm++"),
    (resolve, (Ancestral(), UniPC()), "v model velocity unipc"),
    (resolve, (Ancestral(prediction="velocity"), UniPC()), "shift sigmas unipc"),
    (lambda name: wanjax.load("nano", scheduler=name), ("heun",), "scheduler 'heun'"),
]


@pytest.mark.parametrize(("choose", "arguments", "words"), REFUSED)
def test_an_unknown_scheduler_is_refused(choose, arguments, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        choose(*arguments)


def test_only_schedulers_that_fit_the_model_are_suggested():
    mistakes: list[tuple[Any, Any]] = [
        (UniPC(), 5),
        (UniPC(), "dpm:x"),
        (DDIM(), 5),
        (DDIM(), "unipcc"),
        (DDIM(), "lcm"),
    ]
    for default, scheduler in mistakes:
        with pytest.raises(WanjaxError) as error, unchecked():
            resolve(scheduler, default)
        advice = re.split(r"did you mean |give |, or with options ", str(error.value).rstrip("?"))[1]
        names = advice.split(", ")
        assert names
        for name in names:
            resolve(name, default)


def test_a_pipeline_accepts_and_keeps_another_scheduler():
    pipe = pipeline(4, None)
    prompts = WanConditioning(*(jnp.full((1, 7, 8), value) for value in (1.0, 0.5)))
    expected = pipe.denoise(prompts, **VIDEO.to_json())
    assert pipe.scheduler == FlowEuler()
    pipe.scheduler = "unipc"
    assert pipe.scheduler == UniPC()
    euler = pipe.denoise(prompts, **VIDEO.to_json())
    assert np.abs(euler - expected).max() > 1e-3
    pipe.free()
    assert pipe.scheduler == UniPC()
    pipe.scheduler = FlowEuler()
    np.testing.assert_array_equal(pipe.denoise(prompts, **VIDEO.to_json()), expected)


@pytest.mark.parametrize("scheduler", ["dpm", "heun", Ancestral(), FlowEuler, None])
def test_a_pipeline_refuses_a_scheduler_that_does_not_fit(scheduler):
    pipe = pipeline(4, None)
    with unchecked(), pytest.raises(WanjaxError):
        pipe.scheduler = scheduler
    assert pipe.scheduler == FlowEuler()


def test_a_model_is_loaded_with_another_scheduler():
    assert wanjax.load("nano", scheduler="unipc:order=1").scheduler == UniPC(order=1)
