# SPDX-License-Identifier: Apache-2.0
"""The TPU compiler compiles several small programs at once. It needs libtpu (the extra `plan`), but no TPU."""

import json
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import jax.numpy as jnp
import psutil
import pytest

from tests.support.plan_programs import layers, on_shapes, product_kernel, replicated_product, target_of
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import attention
from wanjax.pricing import compile as compiling
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.compile import Compiled, compile_program, compile_programs
from wanjax.pricing.costs import price_compiled
from wanjax.pricing.exporting import CompilerError, export
from wanjax.pricing.pallas_kernels import KernelSeconds
from wanjax.pricing.pricer import Pricer


def mesh(chip, **axes):
    return abstract_mesh(find_slice(chip), axes or None)


KERNEL = on_shapes(product_kernel, (512, 256), (256, 128))
PROGRAMS = {
    "kernel": (KERNEL, "v6e-1"),
    "layers": (layers(mesh("v6e-8", dp=2, tp=4), count=6, tokens=4096, width=1024), "v6e-8"),
    "other chip": (KERNEL, "v5e-1"),
    "two cores": (replicated_product(mesh("v4-8")), "v4-8"),
    "two later cores": (replicated_product(mesh("v5p-8")), "v5p-8"),
    "refused": (on_shapes(lambda x: x.undefined, (8,)), "v6e-1"),
    "refused option": (
        on_shapes(
            jnp.exp,
            (8, 128),
            dtype="float32",
            compiler_options={"xla_no_such_option": "true", "xla_tpu_scoped_vmem_limit_kib": "much"},
        ),
        "v6e-1",
    ),
    "too large": (on_shapes(jnp.sin, (2**16, 2**16)), "v5e-1"),
    "target": (on_shapes(target_of, (8, 128)), "v6e-1"),
}

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the result of each program by name and, as `remaining_files`, the files in the compiler's folder."""
    folder = tmp_path_factory.mktemp("compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        results = dict(zip(PROGRAMS, compile_programs(list(PROGRAMS.values()), reads_schedules=True), strict=True))
    return results | {"remaining_files": list(folder.iterdir())}


@needs_libtpu
def test_the_compiler_removes_its_files(results):
    assert results["remaining_files"] == []


@needs_libtpu
@pytest.mark.parametrize("program", ["kernel", "other chip"])
def test_a_kernel_is_priced(results, program):
    compiled = results[program]
    (schedule,) = compiled.schedules.values()
    run = schedule.run()
    assert run.data_dependent_blocks == set()
    assert {1, 4, 8, 10} == set(run.run_counts.values())
    assert run.traffic_bytes == 128 * 128 * (8 * 2 + 8 * 2 + 4 * 4)
    priced = price_compiled(compiled)
    assert priced.unpriced_kernels == ()
    assert priced.total.mid >= schedule.cycles(run.run_counts) / compiled.slice.chip.clock


@needs_libtpu
def test_a_kernel_is_priced_on_chips_of_two_cores(results):
    """Two cores are one device and share the grid. The price comes from the schedule of the first core."""
    cycles = []
    for program in ("two cores", "two later cores"):
        assert results[program].slice.devices == 4
        (schedule,) = results[program].schedules.values()
        cycles.append(schedule.cycles(schedule.run().run_counts))
        assert price_compiled(results[program]).unpriced_kernels == ()
    assert cycles[0] == pytest.approx(cycles[1], rel=0.1)


@needs_libtpu
def test_a_sharded_program_is_priced(results):
    compiled = results["layers"]
    assert compiled.memory.arguments == 2048 * 1024 * 2 + 6 * 1024 * 256 * 2
    assert compiled.memory.peak >= compiled.memory.arguments
    priced = price_compiled(compiled)
    assert priced.unknown_loops == priced.unpriced_kernels == ()
    assert priced.flops == 6 * 2 * 2048 * 1024 * 256
    gathers = [item for item in priced.items if item.kind == "collectives"]
    assert sum(item.num_executions for item in gathers) == 6
    assert {item.group for item in gathers} == {4}


@needs_libtpu
def test_a_failed_program_names_its_cause_and_stops_no_other(results):
    assert isinstance(results["refused"], CompilerError)
    assert "has no attribute undefined" in str(results["refused"])
    assert isinstance(results["too large"], CompilerError)
    assert has_line_with_words(str(results["too large"]), "v5e-1 HBM")


@needs_libtpu
def test_rejected_options_are_dropped_and_reported(results):
    doubts = Pricer().divide(results["refused option"], {}).doubts
    assert sorted(doubt.partition(", which")[0] for doubt in doubts) == [
        "compiled without xla_no_such_option",
        "compiled without xla_tpu_scoped_vmem_limit_kib",
    ]
    assert not Pricer().divide(results["kernel"], {"product.1": KernelSeconds(1.0, 1.0)}).doubts


@needs_libtpu
def test_a_function_is_compiled_for_the_target_chip(results):
    """Attention chooses its implementation for the chip that the program is compiled for, not for the host's CPU."""
    assert "tpu_custom_call" in results["target"].module


@needs_libtpu
def test_the_compiler_ends_with_its_caller(tmp_path):
    """If a plan is killed, the compiler's process ends because its standard input is closed."""
    program, chip = PROGRAMS["layers"]
    job = export(program, find_slice(chip))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "program.bin").write_bytes(job.program)
    (tmp_path / "0" / "job.json").write_text(json.dumps(compiling._job_fields(job)))
    command = [sys.executable, "-m", "wanjax.pricing.compiler_process", str(tmp_path), "2", "0"]
    completed = subprocess.run(command, env=compiling._environment(tmp_path), stdin=subprocess.DEVNULL)
    assert completed.returncode == 1
    assert not (tmp_path / "0" / "result.json").exists()


def _kill_compilers() -> int:
    """End this process's compilers as a crash does, and return how many there were."""
    count = 0
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # the process may have just ended
            if "wanjax.pricing.compiler_process" in process.cmdline():
                process.send_signal(signal.SIGSEGV)
                count += 1
    return count


@needs_libtpu
def test_a_compiler_that_crashes_once_is_retried():
    """libtpu sometimes crashes in a program that compiles at the next attempt."""
    jobs = [export(PROGRAMS[name][0], find_slice(PROGRAMS[name][1])) for name in ("target", "kernel", "layers")]
    results = compiling.compile_jobs(jobs)
    first = next(results)
    assert _kill_compilers() == 1
    all_results = dict([first, *results])
    assert sorted(all_results) == [0, 1, 2]
    assert all(isinstance(result, Compiled) for result in all_results.values())


@needs_libtpu
def test_dumps_of_a_crashed_compiler_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    starts = []

    def crash_once(number):
        if not starts:
            [dump] = tmp_path.glob("*/schedules/dump")
            (dump / "1-fusion.7-01-final_bundles.txt").write_text("cut off")
            assert _kill_compilers() == 1
        starts.append(number)

    job = export(KERNEL, find_slice("v6e-1"))
    [(_, result)] = compiling.compile_jobs([job], schedules=[0], on_start=crash_once)
    assert starts == [0, 0]
    assert isinstance(result, Compiled)
    assert "fusion.7" not in result.schedules
    assert result.schedules


@needs_libtpu
def test_a_program_that_crashes_the_compiler_is_refused():
    """The error names the signal, and no program waits forever."""
    job = export(PROGRAMS["target"][0], find_slice("v6e-1"))
    is_done = threading.Event()

    def crash_repeatedly():
        while not is_done.wait(0.05):
            _kill_compilers()

    crashing = threading.Thread(target=crash_repeatedly)
    crashing.start()
    try:
        results = dict(compiling.compile_jobs([job, job]))
    finally:
        is_done.set()
        crashing.join()
    assert sorted(results) == [0, 1]
    assert all(
        isinstance(result, CompilerError) and has_line_with_words(str(result), "SIGSEGV v6e-1")
        for result in results.values()
    )


CUDNN = on_shapes(partial(attention, implementation="cudnn"), *[(1, 64, 2, 64)] * 3)
REFUSED = [  # a function that compiles, and words of the message
    (lambda: compile_program(CUDNN, "v6e-1"), "cudnn NVIDIA's TPU v6"),
    (lambda: mesh("v6e-8", dp=2, tp=2), "mesh dp=2 tp=2 4 devices v6e-8 8"),
    (lambda: compile_programs([(PROGRAMS["layers"][0], "v6e-4")]), "mesh dp=2 tp=4 8 devices v6e-4 4"),
    (lambda: compile_programs([(PROGRAMS["layers"][0], "v5e-8")]), "TPU v6 v5e-8 v5"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_programs_that_do_not_fit_the_chip_are_refused(call, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        call()


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chip", "words"), [("refused", "v6e-1", "AttributeError"), ("too large", "v5e-1", "RESOURCE_EXHAUSTED")]
)
def test_the_error_of_a_single_program_names_the_cause(name, chip, words):
    with pytest.raises(CompilerError, match=line_with_words(f"{chip} {words}")):
        compile_program(PROGRAMS[name][0], chip)


@pytest.mark.parametrize(
    ("name", "replacement", "words"),
    [
        ("find_spec", lambda name: None, "libtpu '.[plan]' h200"),
        pytest.param(
            *("version", {"libtpu": "0.0.7", "jax": "0.10.2"}.__getitem__),
            "libtpu 0.0.7 jax 0.10.2 'jax[tpu]==0.10.2'",
            marks=needs_libtpu,
        ),
    ],
    ids=["none", "another"],
)
def test_a_missing_or_wrong_compiler_is_reported(monkeypatch, name, replacement, words):
    monkeypatch.setattr(compiling, name, replacement)
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        compile_program(on_shapes(jnp.sin, (8,)), "v6e-1")
