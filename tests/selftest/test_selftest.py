# SPDX-License-Identifier: Apache-2.0
"""The self-test passes on this machine, and detects errors."""

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


def failed_checks(results):
    return [check.name for check in results if not check.passed]


@pytest.mark.parametrize("noise_level", [1e-5, 1e-3, 0.3])
def test_a_signature_measures_relative_errors(noise_level):
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(3, 50, 70)), random.normal(size=(3, 50, 70))
    relative = relative_error(signature(x + noise_level * noise), signature(x))
    assert 0.5 * noise_level < relative < 2 * noise_level


def test_an_array_that_is_not_finite_has_an_infinite_error():
    assert relative_error(signature([1.0, np.nan]), signature([1.0, 2.0])) == np.inf


def test_golden_values_cover_all_checks():
    assert set(load_golden()) == {"nano", "tiles", *small_models.model_names()}
    assert all(np.isfinite(x).all() and np.any(x) for arrays in load_golden().values() for x in arrays.values())


def test_the_bundled_model_passes():
    assert failed_checks(checks.check_nano()) == []


def test_a_family_and_tiles_pass():
    assert failed_checks([*checks.check_family(SMALL), *checks.check_tiles()]) == []


def test_collectives_pass():
    collective_checks = list(checks.check_collectives())
    assert len(collective_checks) == 5
    assert failed_checks(collective_checks) == []


def test_a_wrong_collective_is_detected(monkeypatch):
    monkeypatch.setattr(jax.lax, "all_gather", lambda x, axes, **_: jax.lax.psum(jnp.tile(x, (8, 1)), axes))
    assert failed_checks(checks.check_collectives()) == ["collective all-gather"]


def test_a_checkpoint_is_read_as_written():
    checkpoint_checks = list(checks.check_checkpoint())
    assert len(checkpoint_checks) == 3
    assert failed_checks(checkpoint_checks) == []


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in small_models.model_names() if model != SMALL])
def test_each_family_passes(model):
    assert failed_checks(checks.check_family(model)) == []


@pytest.mark.slow
def test_a_mesh_of_eight_devices_equals_one_device():
    assert checks.mesh_axes(8) == {"dp": 2, "sp": 2, "tp": 2}
    mesh_checks = list(checks.check_mesh())
    assert len(mesh_checks) == 9
    assert failed_checks(mesh_checks) == []


def test_a_swapped_weight_is_detected(monkeypatch):
    read = small_models.RandomWeights.read
    query, key = (f"blocks.0.attn1.to_{name}.weight" for name in "qk")
    swapped_names = {query: key, key: query}
    monkeypatch.setattr(
        small_models.RandomWeights, "read", lambda self, name: read(self, swapped_names.get(name, name))
    )
    assert failed_checks(checks.check_family(SMALL)) == [f"{SMALL}, denoise", f"{SMALL}, decode"]


@pytest.mark.slow  # the test before it is quick: a swapped weight
def test_bfloat16_in_place_of_float32_is_detected(monkeypatch):
    monkeypatch.setattr(
        checks, "small_pipeline", lambda model, mesh: small_models.small_pipeline(model, mesh, "bfloat16")
    )
    assert len(failed_checks(checks.check_family(SMALL))) == 3


def use_strategy(strategy, monkeypatch):
    """Run small models with a new strategy, which has no compiled programs."""
    make = small_models.small_pipeline
    monkeypatch.setattr(checks, "small_pipeline", lambda model, mesh: make(model, mesh).with_strategy(strategy))


def test_a_wrong_tile_is_detected(monkeypatch):
    monkeypatch.setattr(tiling, "_cross_fade", lambda before, after, overlap, axis: after)
    use_strategy(Execute(), monkeypatch)
    assert failed_checks(checks.check_tiles()) == ["tiles, frames"]


@pytest.mark.slow  # tests with a swapped weight and a wrong tile are quick
def test_a_stale_executable_is_detected(monkeypatch, tmp_path):
    executables = Executables(tmp_path / "executables")
    with monkeypatch.context() as older:  # older code, whose programs are cached under the same key
        silu = jax.nn.silu
        older.setattr(jax.nn, "silu", lambda x: 1.05 * silu(x))
        use_strategy(Execute(executables), older)
        assert failed_checks(checks.check_family(SMALL))
    use_strategy(Execute(executables), monkeypatch)
    assert failed_checks(checks.check_family(SMALL))


def test_a_check_that_raises_fails_and_the_others_run(monkeypatch):
    def failing_check():
        raise RuntimeError("INTERNAL: the device is lost\nmore")

    def passing_check():
        yield Check("fine", 1e-6, 1e-4)

    for name in ("kernels", "attentions", "nano", "tiles", "checkpoint", "collectives", "mesh"):
        monkeypatch.setattr(checks, f"check_{name}", failing_check if name == "nano" else passing_check)
    monkeypatch.setattr(checks, "check_family", lambda model: passing_check())
    all_checks = list(checks.checks(lambda sentence: None))
    assert [check.fault for check in all_checks if not check.passed] == ["RuntimeError: INTERNAL: the device is lost"]
    assert len(all_checks) == 7 + len(small_models.model_names())


@pytest.mark.parametrize("fault", ["", "it is 3e-2 away"])
def test_the_command_writes_the_files_for_an_issue(fault, monkeypatch, tmp_path):
    from wanjax.cli import measuring

    all_checks = [
        Check("nano, frames", 1e-6, 1e-4, fault, seconds=1.0),
        Check("mesh", note="left out: there is one device"),
    ]
    row = Measurement("a step", "1 layer", "safe", seconds=2.0, modelled=1.0)
    monkeypatch.setattr(measuring, "checks", lambda tell: iter(all_checks))
    monkeypatch.setattr(measuring, "timings", lambda tell: iter([row]))
    completed = CliRunner().invoke(main, ["selftest", "--out", str(tmp_path)])
    assert completed.exit_code == bool(fault)
    data = json.loads((tmp_path / "selftest-cpu.json").read_text())
    assert data["passed"] is not bool(fault)
    assert data["timings"][0]["ratio"] == 2.0
    assert [check["outcome"] for check in data["checks"]] == ["wrong" if fault else "right", "left out"]
    text = (tmp_path / "selftest-cpu.md").read_text()
    assert "| nano, frames |" in text
    assert "| a step: 1 layer |" in text


def test_the_files_are_named_after_the_device():
    summary = replace(summarize([], []), devices="1 x NVIDIA H100 80GB HBM3")
    assert summary.slug == "nvidia-h100-80gb-hbm3"
