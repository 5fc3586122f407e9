# SPDX-License-Identifier: Apache-2.0
"""The self-test: it is content with this machine, and sees what it is there to see."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from wanjax.bench.suite import Measurement
from wanjax.cli import main
from wanjax.compile_cache.executables import Executables
from wanjax.execution import Execute
from wanjax.layers import tiling
from wanjax.selftest import checks, small_models
from wanjax.selftest.checks import Check, load_golden
from wanjax.selftest.signatures import relative_error, signature
from wanjax.selftest.summary import summarize

SMALL = small_models.model_names()[0]


def faults(result):
    return [check.name for check in result if not check.passed]


@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.3])
def test_a_signature_measures_the_distance_of_an_array(share):
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(3, 50, 70)), random.normal(size=(3, 50, 70))
    far = relative_error(signature(x + share * noise), signature(x))
    assert 0.5 * share < far < 2 * share


def test_an_array_that_is_not_finite_is_infinitely_far():
    assert relative_error(signature([1.0, np.nan]), signature([1.0, 2.0])) == np.inf


def test_golden_values_cover_all_checks():
    assert set(load_golden()) == {"nano", "tiles", *small_models.model_names()}
    assert all(np.isfinite(x).all() and np.any(x) for each in load_golden().values() for x in each.values())


def test_the_bundled_model_passes():
    assert faults(checks.check_nano()) == []


def test_a_family_and_tiles_pass():
    assert faults([*checks.check_family(SMALL), *checks.check_tiles()]) == []


def test_messages_between_devices_pass():
    result = list(checks.check_messages())
    assert len(result) == 5
    assert faults(result) == []


def test_a_corrupted_message_is_detected(monkeypatch):
    monkeypatch.setattr(jax.lax, "all_gather", lambda x, axes, **_: jax.lax.psum(jnp.tile(x, (8, 1)), axes))
    assert faults(checks.check_messages()) == ["message all-gather"]


def test_a_checkpoint_is_read_as_written():
    result = list(checks.check_checkpoint())
    assert len(result) == 3
    assert faults(result) == []


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in small_models.model_names() if model != SMALL])
def test_each_family_passes(model):
    assert faults(checks.check_family(model)) == []


@pytest.mark.slow
def test_a_mesh_of_eight_devices_equals_one_device():
    assert checks.mesh_axes(8) == {"dp": 2, "sp": 2, "tp": 2}
    result = list(checks.check_mesh())
    assert len(result) == 9
    assert faults(result) == []


def test_a_swapped_weight_is_detected(monkeypatch):
    read = small_models.RandomWeights.read
    query, key = (f"blocks.0.attn1.to_{name}.weight" for name in "qk")
    swapped = {query: key, key: query}
    monkeypatch.setattr(small_models.RandomWeights, "read", lambda self, name: read(self, swapped.get(name, name)))
    assert faults(checks.check_family(SMALL)) == [f"{SMALL}, denoise", f"{SMALL}, decode"]


def test_bfloat16_in_place_of_float32_is_detected(monkeypatch):
    monkeypatch.setattr(
        checks, "small_pipeline", lambda model, mesh: small_models.small_pipeline(model, mesh, "bfloat16")
    )
    assert len(faults(checks.check_family(SMALL))) == 3


def run_by(strategy, monkeypatch):
    """Run small models by a strategy of their own, which has compiled nothing."""
    make = small_models.small_pipeline
    monkeypatch.setattr(checks, "small_pipeline", lambda model, mesh: make(model, mesh).with_strategy(strategy))


def test_a_wrong_tile_is_detected(monkeypatch):
    monkeypatch.setattr(tiling, "_cross_fade", lambda before, after, overlap, axis: after)
    run_by(Execute(), monkeypatch)
    assert faults(checks.check_tiles()) == ["tiles, frames"]


def test_a_stale_executable_is_detected(monkeypatch, tmp_path):
    executables = Executables(tmp_path / "executables")
    with monkeypatch.context() as older:  # code whose programs are kept as if they were today's
        silu = jax.nn.silu
        older.setattr(jax.nn, "silu", lambda x: 1.05 * silu(x))
        run_by(Execute(executables), older)
        assert faults(checks.check_family(SMALL))
    run_by(Execute(executables), monkeypatch)
    assert faults(checks.check_family(SMALL))


def test_a_check_that_raises_fails_and_the_others_run(monkeypatch):
    def broken():
        raise RuntimeError("INTERNAL: the device is lost\nmore")

    def fine():
        yield Check("fine", 1e-6, 1e-4)

    for name in ("kernels", "attentions", "nano", "tiles", "checkpoint", "messages", "mesh"):
        monkeypatch.setattr(checks, f"check_{name}", broken if name == "nano" else fine)
    monkeypatch.setattr(checks, "check_family", lambda model: fine())
    result = list(checks.checks(lambda sentence: None))
    assert [check.fault for check in result if not check.passed] == ["RuntimeError: INTERNAL: the device is lost"]
    assert len(result) == 7 + len(small_models.model_names())


@pytest.mark.parametrize("fault", ["", "it is 3e-2 away"])
def test_the_command_writes_what_an_issue_needs(fault, monkeypatch, tmp_path):
    from wanjax.cli import measuring

    actual = [
        Check("nano, frames", 1e-6, 1e-4, fault, seconds=1.0),
        Check("mesh", note="left out: there is one device"),
    ]
    row = Measurement("a step", "1 layer", "safe", seconds=2.0, modelled=1.0)
    monkeypatch.setattr(measuring, "checks", lambda tell: iter(actual))
    monkeypatch.setattr(measuring, "timings", lambda tell: iter([row]))
    result = CliRunner().invoke(main, ["selftest", "--out", str(tmp_path)])
    assert result.exit_code == bool(fault)
    data = json.loads((tmp_path / "selftest-cpu.json").read_text())
    assert data["passed"] is not bool(fault)
    assert data["timings"][0]["ratio"] == 2.0
    assert [check["outcome"] for check in data["checks"]] == ["wrong" if fault else "right", "left out"]
    text = (tmp_path / "selftest-cpu.md").read_text()
    assert "| nano, frames |" in text
    assert "| a step: 1 layer |" in text


def test_the_kind_of_a_chip_names_the_files():
    summary = replace(summarize([], []), devices="1 x NVIDIA H100 80GB HBM3")
    assert summary.slug == "nvidia-h100-80gb-hbm3"
