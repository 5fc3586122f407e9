# SPDX-License-Identifier: Apache-2.0
"""Programs, executed and recorded. The errors about compiler options come from XLA."""

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.programs import num_compiled
from tests.support.words import line_with_words
from wanjax import execution
from wanjax.errors import WanjaxWarning
from wanjax.execution import CompileContext, Execute, Program, Trace, TracedProgram, program
from wanjax.kernels.admitted import set_rejected
from wanjax.kernels.target import Target
from wanjax.pipelines.denoiser import take_step
from wanjax.pricing.lowering import retry_without_rejected_options
from wanjax.sharding import one_device_partitioner

BOGUS = {"xla_no_such_option": "true"}
VALID = {"xla_cpu_enable_fast_math": False}
BREAKS_TOP_K = {"xla_disable_hlo_passes": "topk-decomposer"}  # XLA then cannot compile top_k, and names no option
TOO_MANY_NUMBERS = 2**50


def sums(_: None, x: jax.Array, total: jax.Array) -> jax.Array:
    return total + x


def largest(_: None, x: jax.Array) -> jax.Array:
    return jax.lax.top_k(x, 2)[0]


def doubled(_: None, x: jax.Array) -> jax.Array:
    return 2 * x


def tripled(_: None, x: jax.Array) -> jax.Array:
    return 3 * x


def impossible(_: None, x: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def huge(_: None, x: jax.Array) -> jax.Array:
    return jnp.zeros(TOO_MANY_NUMBERS) + x[0]


def program_of(function, options) -> Program:
    return program(lambda context: options)(function)


@pytest.fixture
def compile_context() -> CompileContext:
    return CompileContext(one_device_partitioner())


@pytest.fixture
def execute() -> Execute:
    return Execute()


def test_an_unknown_option_is_dropped_and_reported_once(execute, compile_context):
    sum_program = Program(sums, lambda context: {**BOGUS, **VALID}, donated=("total",))
    x, total = jnp.arange(3.0), jnp.ones(3)
    message = (
        r"^compiled without xla_no_such_option, which the compiler rejected: INVALID_ARGUMENT: No such compile option: "
    )
    with pytest.warns(WanjaxWarning, match=message) as warned:
        total = execute.call(sum_program, compile_context, None, x, total)
    assert len(warned) == 1
    total = execute.call(sum_program, compile_context, None, x, total)  # warnings are errors here
    np.testing.assert_array_equal(total, [1, 3, 5])
    assert execute.compiler_options(sum_program, compile_context) == VALID
    assert num_compiled(sum_program, execute) == 1


def test_an_option_with_a_rejected_value_is_dropped(execute, compile_context):
    x = jnp.ones(3)
    with pytest.warns(WanjaxWarning, match=line_with_words("xla_cpu_enable_fast_math")):
        execute.call(program_of(sums, {"xla_cpu_enable_fast_math": "perhaps"}), compile_context, None, x, x)


def test_each_rejected_option_is_reported(execute, compile_context):
    # one name is the beginning of another
    several = program_of(sums, {"xla_bogus": "1", **VALID, "xla_bogus_too": "1"})
    x = jnp.ones(3)
    with pytest.warns(WanjaxWarning) as warned:
        execute.call(several, compile_context, None, x, x)
    assert sorted(str(warning.message).partition(",")[0] for warning in warned) == [
        "compiled without xla_bogus",
        "compiled without xla_bogus_too",
    ]
    assert execute.compiler_options(several, compile_context) == VALID


def test_an_error_that_names_no_option_drops_all_options(execute, compile_context):
    top = program_of(largest, {**BREAKS_TOP_K, **VALID})
    with pytest.warns(
        WanjaxWarning, match="without xla_disable_hlo_passes and xla_cpu_enable_fast_math.*UNIMPLEMENTED"
    ):
        np.testing.assert_array_equal(execute.call(top, compile_context, None, jnp.arange(5.0)), [4, 3])
    assert execute.compiler_options(top, compile_context) == {}


def test_a_program_that_fails_without_options_too_says_why(execute, compile_context):
    calls = program_of(impossible, VALID)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_kernel"):
        execute.call(calls, compile_context, None, jnp.ones(3))
    assert execute.compiler_options(calls, compile_context) == VALID


def test_a_lack_of_memory_drops_no_option():
    attempts = []

    def attempt(options):
        attempts.append(options)
        return jax.jit(huge, static_argnums=0, compiler_options=options)(None, jnp.ones(1))

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        retry_without_rejected_options(dict(VALID), attempt, warnings.warn)
    assert len(attempts) == 1


def test_sets_with_equal_options_share_an_executable(execute, compile_context):
    """On a CPU the options of both compilers are equal, so that one compilation is enough."""
    equal, fast = Program(sums, lambda _: VALID, fast_options=lambda _: {}), compile_context._replace(compiler="fast")
    for context in (fast, compile_context):
        execute.call(equal, context, None, jnp.ones(3), jnp.ones(3))
    assert num_compiled(equal, execute) == 1
    different = Program(sums, lambda _: VALID, fast_options=lambda _: BOGUS)
    assert different.compiler_options(fast) == {**VALID, **BOGUS}
    assert different.compiler_options(compile_context) == VALID


@pytest.mark.parametrize(("compiler", "count"), [("safe", 0), ("fast", 2)])
def test_a_single_chip_gets_the_options_of_its_kind(monkeypatch, compile_context, compiler, count):
    monkeypatch.setattr(execution, "target_of", lambda device: Target("tpu", "TPU v6 lite"))
    options = take_step.compiler_options(compile_context._replace(compiler=compiler))
    assert options.keys() >= {"xla_tpu_scoped_vmem_limit_kib", "xla_enable_async_all_gather"}
    assert len([name for name in options if "sparse_core" in name]) == count


class Slow(Execute):
    """Compiles when `go` is set; `compiled` lists the names of the programs."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.compiled = Event(), []

    def _compile(self, traced_program: TracedProgram, cache: Any) -> Any:
        assert self.go.wait(60)
        self.compiled.append(traced_program.program.name)
        return super()._compile(traced_program, cache)


def test_threads_that_call_a_program_compile_it_once(compile_context):
    slow, x = Slow(), jnp.ones(3)
    sum_program = program_of(sums, {})
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(slow.call, sum_program, compile_context, None, x, x) for _ in range(4)]
        slow.go.set()
        assert [np.asarray(x.result()).tolist() for x in results] == 4 * [[2.0, 2.0, 2.0]]
    assert slow.compiled == ["sums"]


def test_a_program_that_failed_is_tried_again(compile_context):
    class Failing(Execute):
        fails = True

        def _compile(self, traced_program: TracedProgram, cache: Any) -> Any:
            if self.fails:
                raise RuntimeError("no compiler")
            return super()._compile(traced_program, cache)

    execute, sum_program, x = Failing(), program_of(sums, {}), jnp.ones(3)
    with pytest.raises(RuntimeError, match="no compiler"):
        execute.call(sum_program, compile_context, None, x, x)
    execute.fails = False
    np.testing.assert_array_equal(execute.call(sum_program, compile_context, None, x, x), [2, 2, 2])


def test_programs_of_a_run_are_compiled_in_parallel_once_one_is_missing(compile_context):
    execute, sum_program, largest_program = Execute(), program_of(sums, {}), program_of(largest, {})
    x, traces = jnp.ones(3), []

    def recorded() -> list[TracedProgram]:
        traces.append(1)
        return [
            TracedProgram(sum_program, compile_context, None, (x, x)),
            TracedProgram(largest_program, compile_context, None, (x,)),
        ]

    with execute.compile_ahead(recorded):
        execute.call(sum_program, compile_context, None, x, x)
        end = time.monotonic() + 60
        while not num_compiled(largest_program, execute) and time.monotonic() < end:
            time.sleep(0.01)
        execute.call(largest_program, compile_context, None, x)
    assert traces == [1]
    assert num_compiled(strategy=execute) == 2
    with execute.compile_ahead(recorded):
        execute.call(sum_program, compile_context, None, x, x)  # already compiled
    assert traces == [1]


def test_a_callback_before_each_compilation_can_stop_the_rest(compile_context):
    execute, x, starts = Execute(), jnp.ones(3), []

    def begin(number: int, total: int) -> None:
        starts.append((number, total))
        if number == 2:
            raise KeyboardInterrupt

    instances = [
        TracedProgram(program_of(function, {}), compile_context, None, (x,)) for function in (largest, doubled, tripled)
    ]
    with pytest.raises(KeyboardInterrupt):
        execute.compile(*instances, on_start=begin)
    assert starts == [(1, 3), (2, 3)]
    assert num_compiled(strategy=execute) == 1


def test_a_plan_and_the_run_trace_a_program_once(compile_context):
    traces, x = [], jnp.ones(3)

    def recorded(_: None, x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return x + 1

    counted = program_of(recorded, {})
    Trace().call(counted, compile_context, None, x)
    Trace().call(counted, compile_context, None, x)
    execution.EXECUTE.call(counted, compile_context, None, x)
    assert traces == [(3,)]
    execution.EXECUTE.call(counted, compile_context, None, jnp.ones(4))
    set_rejected({"flash": "it gave wrong values"})  # another kernel may be selected
    try:
        Trace().call(counted, compile_context, None, x)
    finally:
        set_rejected({})
    assert traces == [(3,), (4,), (3,)]
    Execute().call(counted, compile_context, None, x)  # a new strategy has traced nothing
    assert len(traces) == 4
