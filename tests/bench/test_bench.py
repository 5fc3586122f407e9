# SPDX-License-Identifier: Apache-2.0
"""The bench measures each program, compares it with its price, and reports wrong results."""

import io
import json
import re
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from tests.support.attention import SMALL_TILES
from tests.support.commands import succeeded, wanjax
from wanjax.bench import operations, suite
from wanjax.bench.measure import MeasuredProgram, measure, mesh_of_first_devices, relative_l2_error, synthetic_arrays
from wanjax.bench.operations import COLLECTIVES, attention_program, check_attention, collective_program
from wanjax.bench.suite import BENCH_SIZES, BenchSize, BenchSuite, find_local_hardware
from wanjax.bench.timing import Timing, time_program
from wanjax.cli import measuring
from wanjax.errors import WanjaxError
from wanjax.kernels import compiler_options
from wanjax.kernels.attention import AUTO
from wanjax.plan.hardware import mesh_on, price_on
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.registry import model_description, presets

TINY = BenchSize((32, 32), (32, 32), 5, 1, 0.0)


def ignore_note(sentence):
    assert sentence


@pytest.fixture
def small_suite():
    """Return a suite of `nano` on one device."""
    model, devices = model_description("nano"), jax.devices()[:1]
    settings = suite.bench_settings(model.settings, TINY, model.model)
    return BenchSuite(
        replace(model, settings=settings),
        TINY,
        devices,
        find_local_hardware(devices),
        {"dp": 1, "sp": 1, "tp": 1},
        ignore_note,
    )


def test_compiling_and_the_first_run_are_timed_separately():
    calls = []

    def run(x):
        calls.append(x)
        time.sleep(0.05 if len(calls) == 1 else 0.001)
        return x

    timing, result = time_program(run, lambda: (len(calls),), compilation=3.0, budget=0.0)
    assert (timing.compile_seconds, result, len(timing.run_seconds), calls) == (3.0, 0, 2, [0, 1, 2])
    assert timing.first_seconds > 0.05 > timing.median_seconds
    assert len(time_program(run, lambda: (1,), 0.0, budget=0.02)[0].run_seconds) > 2


def test_one_layer_keeps_all_other_sizes():
    for name in ("wan2.1-t2v-14b", "cogvideox1.5-5b", "hunyuanvideo1.5-720p-t2v"):
        model = presets()[name].model
        one_layer = suite.limit_layers(model, 1)
        assert one_layer.transformer == replace(model.transformer, layers=1)
        assert one_layer.vae == model.vae
        assert suite.limit_layers(model, None) is model


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_gives_the_right_result(kind):
    program = collective_program(
        mesh_of_first_devices({"tp": 8}, jax.devices()), kind=kind, tokens=20, width=12, dtype="float32"
    )
    measured = measure(program, 0.0)
    assert len(measured.timing.run_seconds) == 2
    [x] = (np.asarray(x) for x in synthetic_arrays(program.arguments))
    assert x.shape == (24, 16)
    summed = x.reshape(8, 3, 16).sum(0)
    expected = {"all_reduce": summed, "all_gather": x, "all_to_all": x}
    expected |= {"reduce_scatter": summed, "permute": np.roll(x, 3, axis=0)}
    expected = expected[kind]
    np.testing.assert_allclose(np.asarray(measured.result), expected, rtol=1e-6, atol=1e-8)


def test_collectives_are_measured_on_eight_devices(small_suite):
    small_suite.devices, small_suite.local_hardware = jax.devices(), find_local_hardware(jax.devices())
    assert [row.name for row in small_suite.measure_collectives()] == [kind.replace("_", "-") for kind in COLLECTIVES]
    assert all(row.note == "the model covers a single device" for row in small_suite.measure_collectives())


def test_attention_is_compared_with_the_reference(small_suite, monkeypatch):
    configs = {"flash_tpu": SMALL_TILES}  # run by Pallas' interpreter
    errors = check_attention(2, 64, "float32", tokens=150, configs=configs)
    print(errors)
    assert set(errors) == {"reference", "chunked", "flash_tpu"}
    assert max(errors.values()) < 1e-5
    assert check_attention(2, 16, "bfloat16", tokens=150)["chunked"] < 1e-2
    attention = operations.attention
    monkeypatch.setattr(
        operations,
        "attention",
        lambda *x, **options: attention(*x, **options) * (1 + 1e-3 * (options["implementation"] != "reference")),
    )
    small_suite.compare_attention()
    assert len(small_suite.faults) == 1
    assert "chunked has a relative error of 1.0e-03 against the reference" in small_suite.faults[0]


def test_relative_errors_handle_integers_and_nan():
    a = {"x": jnp.asarray([3.0, 4.0]), "n": jnp.arange(2)}
    assert relative_l2_error(a, a) == 0
    assert relative_l2_error({"x": jnp.asarray([3.0, 4.5]), "n": a["n"]}, a) == pytest.approx(0.1)
    nan = {"x": jnp.asarray([3.0, jnp.nan]), "n": a["n"]}
    assert relative_l2_error(nan, a) == relative_l2_error(a, nan) == float("inf")
    assert relative_l2_error(nan, nan) == 0


@pytest.mark.parametrize(
    ("seconds", "error", "expected_set", "num_faults"),
    [(0.8, 0.0, "fast", 0), (1.2, 0.0, "safe", 0), (0.8, 0.1, "safe", 1)],
)
def test_the_faster_option_set_is_chosen_if_results_agree(small_suite, seconds, error, expected_set, num_faults):
    x = jnp.ones(4)
    for name, step_seconds, result in (("safe", 1.0, x), ("fast", seconds, x * (1 + error))):
        small_suite._measured_steps[name] = MeasuredProgram(
            Timing(0.0, step_seconds, (step_seconds, step_seconds)), result, (), {}
        )
    difference, faster_set = small_suite.compare_options()
    assert (difference, faster_set) == (pytest.approx(error, abs=1e-6), expected_set)
    assert len(small_suite.faults) == num_faults


def test_a_program_that_fails_is_reported_as_a_row(small_suite):
    sizes = {"queries": 64, "keys": 64, "heads": 1, "head_dim": 16, "dtype": "float32"}

    def build(mesh, _):
        return attention_program(mesh, "flash_tpu", **sizes)

    row, result = small_suite._measure_and_price(
        "attention", "x", "safe", build, small_suite.local_hardware, small_suite.axes
    )
    assert result is None
    assert row.note.startswith("did not run: ")
    assert row.ratio is None


def test_commands_use_the_saved_option_set(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    requested = []

    def load(model, **options):
        requested.append(options["compiler"])
        raise WanjaxError("no further")

    monkeypatch.setattr("wanjax.cli.stages.load", load)
    commands = [("a circle",), ("warmup",), ("serve",), ("a circle", "--compiler", "safe")]
    for command in commands:
        assert wanjax(*command).exit_code == 2
    compiler_options.save_option_set("fast")
    for command in commands:
        assert wanjax(*command).exit_code == 2
    assert requested == ["safe"] * 4 + ["fast"] * 3 + ["safe"]
    compiler_options.save_option_set("unknown")
    assert compiler_options.saved_option_set() == "safe"
    compiler_options.save_option_set("fast")
    assert compiler_options.saved_option_set() == "fast"


@pytest.mark.parametrize("programs", [["step"], pytest.param(list(suite.PROGRAM_TITLES), marks=pytest.mark.slow)])
def test_programs_are_measured_and_compared_with_their_prices(programs, monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "PROGRAM_TITLES", {name: suite.PROGRAM_TITLES[name] for name in programs})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(BENCH_SIZES, ("cpu", True), TINY)
    monkeypatch.setattr(jax, "devices", lambda *_, devices=jax.devices: devices("cpu")[:1])
    results = []
    monkeypatch.setattr(measuring, "print_bench", lambda result, console: results.append(result))
    succeeded(wanjax("bench", "nano", "--quick"))
    result = json.loads(json.dumps(results[0].to_json()))
    assert (result["devices"], result["faster_option_set"], result["faults"]) == ("1 x cpu", None, [])
    assert [row["name"] for row in result["rows"]] == ["attention", *["a product"] * 3, *suite.PROGRAM_TITLES.values()]
    tokens, width, inside = map(int, re.findall(r"\[(\d+) (\d+)\] by \[\d+ (\d+)\]", result["rows"][1]["what"])[0])
    for row in result["rows"]:
        assert row["note"] == ""
        assert min(row["seconds"], row["first"]) > 0
        if "NumPy" not in row["what"]:
            assert min(row["modelled"], row["compiling"]) > 0
            assert row["ratio"] == row["seconds"] / row["modelled"]
        if row["name"] == "a product":
            assert row["rate"] == 2 * tokens * width * inside / row["seconds"]
    monkeypatch.undo()
    console = Console(width=200, record=True, file=io.StringIO())
    measuring.print_bench(results[0], console)
    assert re.search(r"a step: .* tokens, two prompts, 1 layer +\d.* \d+(\.\d+)? *\n", text := console.export_text())
    assert len(re.findall(r"a product, .*: [\d.]+ [MG]FLOP/s\n", text)) == 3
    assert "both sets of compiler options are the same on these devices" in text


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v6e-1", "v6e-8"])
def test_every_program_compiles_for_the_chip(slice_name, monkeypatch, tmp_path):
    """The TPU compiler compiles every program of a bench on v6e, and each program has a price."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = model_description("wan2.1-t2v-1.3b")
    settings = model.settings.updated({"height": 256, "width": 256, "frames": 17, "dtype": "bfloat16"})
    count = find_slice(slice_name).devices
    local_hardware = replace(find_local_hardware(jax.devices()[:1]), hardware=find_slice(slice_name))
    axes = suite.auto_mesh_axes(model, jax.devices()[:count])
    small_suite = BenchSuite(
        replace(model, settings=settings), TINY, jax.devices()[:count], local_hardware, axes, ignore_note
    )
    builds = [
        (partial(small_suite._program, name, set_), axes)
        for set_ in ("safe", "fast")
        for name in small_suite.build_programs(abstract_mesh(find_slice(slice_name), axes), set_)
    ]
    if count == 1:
        sizes = {"queries": 1280, "keys": 1280, "heads": 12, "head_dim": 128, "dtype": "bfloat16"}
        builds.append((partial(attention_program, **sizes), axes))
    else:
        sizes = {"tokens": 1280, "width": 1536, "dtype": "bfloat16"}
        builds += [
            (partial(collective_program, kind=kind, **sizes), {"dp": 1, "sp": 1, "tp": count}) for kind in COLLECTIVES
        ]
    programs = [(str(build), build(mesh_on(local_hardware.hardware, axes), AUTO)) for build, axes in builds]
    for (name, _), priced in zip(programs, price_on(local_hardware.hardware, programs), strict=True):
        assert priced.seconds is not None, name
        assert priced.seconds > 0, name
