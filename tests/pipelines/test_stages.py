# SPDX-License-Identifier: Apache-2.0
"""The priced programs against those that the pipeline runs."""

import json
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests.support.quick import quick
from tests.support.small_wan import TEXT, VIDEO, architecture, causal_pipeline, partitioner, pipeline
from wanjax import compilation
from wanjax.kernels.compiler_options import SETS
from wanjax.kernels.target import Target
from wanjax.pipelines.components import Components
from wanjax.pipelines.frames import decode_chunk
from wanjax.pipelines.sampler import take_step
from wanjax.pipelines.wan.conditioning import FIRST_FRAME_TO_VIDEO, WanEncoded
from wanjax.pipelines.wan.pipeline import WanPipeline
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.plan.builders import find
from wanjax.plan.stages import stages
from wanjax.registry import outline, presets
from wanjax.schedulers import UniPC
from wanjax.sharding import MESH_AXES, make_mesh


class Given(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    committed: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)


def as_given(x):
    """Returns the shape of an argument, with its sharding unless it is an array of the host."""
    committed = isinstance(x, jax.Array) and x.committed
    return Given(x.shape, x.dtype, x.sharding if committed else None, committed)


def alike(given, planned):
    """Tells whether arguments match the plan. Arrays of the host have no sharding and match any."""
    return (
        given.shape == planned.shape
        and given.dtype == planned.dtype
        and (not given.committed or given.sharding.is_equivalent_to(planned.sharding, given.ndim))
    )


def leaves(given):
    return jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, Given))


@pytest.fixture
def calls(monkeypatch):
    """The arguments of the last call of each of the pipeline's programs, by name."""
    seen = {}

    def recorded(program, partitioner, options):
        def run(static, *arguments):
            seen[program.function.__name__] = static, jax.tree.map(as_given, arguments), program.donated, dict(options)
            return executable(program, partitioner, options)(static, *arguments)

        return run

    executable = compilation._executable
    monkeypatch.setattr(compilation, "_executable", recorded)
    return seen


def planned(job):
    """Builds a job's program as the compiling process does, for the devices of this process."""
    mesh = make_mesh(*job.mesh.values())
    return find(job.builder)(mesh, **json.loads(json.dumps(job.settings)))


def check_priced(calls, runs, names):
    """Checks the priced programs of both stages against the last calls of the pipeline's, by their names."""
    for run, name in zip((*runs["denoise"], *runs["decode"]), names, strict=True):
        if name is None:  # the first chunk's call, which a later one replaced in `calls`
            continue
        static, given, donated, options = calls[name]
        program = planned(run.job)
        assert len(program.donate) == len(donated)
        assert program.function.args[0] == static
        assert program.compiler_options == options
        pairs = zip(leaves(given), jax.tree.leaves(program.arguments), strict=True)
        assert all(alike(*pair) for pair in pairs)


@pytest.mark.parametrize(("axes", "rules"), quick([((1, 4, 2), "tp")], [((2, 2, 2), "fsdp"), ((1, 4, 2), "tp")]))
def test_priced_programs_are_those_of_the_pipeline(calls, axes, rules):
    networks = architecture(4, scheduler=UniPC())
    pipe = pipeline(4, partitioner(axes, rules))
    pipe.scheduler = UniPC()
    prompts = WanEncoded(*(jnp.zeros((1, TEXT_LENGTH, 8)) for _ in range(2)))
    pipe.decode(pipe.denoise(prompts, **VIDEO.to_json()))
    runs = stages(networks, VIDEO, "v6e-8", dict(zip(MESH_AXES, axes, strict=True)), rules=rules)
    assert [run.times for stage in runs.values() for run in stage] == [1, 1, 2, 1, 1]
    check_priced(calls, runs, ("make_context", "take_step", None, "decode_chunk"))


@pytest.mark.parametrize(("axes", "rules"), quick([((1, 2, 4), "fsdp")], [((1, 2, 4), "fsdp"), ((2, 2, 2), "tp")]))
def test_priced_programs_of_blocks_are_those_of_the_pipeline(calls, axes, rules):
    pipe = causal_pipeline(4, partitioner(axes, rules))
    video = pipe.defaults.updated({"height": 12, "width": 12, "frames": 15})
    prompts = WanEncoded(*(jnp.zeros((1, TEXT_LENGTH, 8)) for _ in range(2)))
    for _ in pipe.decode_blocks(pipe.blocks(prompts, **video.to_json())):
        pass
    shapes = replace(pipe.architecture, text_encoder=TEXT)
    runs = stages(shapes, video, "v6e-8", dict(zip(MESH_AXES, axes, strict=True)), rules=rules)
    assert [run.times for stage in runs.values() for run in stage] == [1, 1, 16, 3, 1, 3]
    check_priced(calls, runs, ("begin_past", "take_step", "renew", None, "decode_chunk"))


@pytest.mark.parametrize("compiler", SETS)
@pytest.mark.parametrize("kind", ["v5 lite", "v5", "v6 lite"])
def test_priced_options_are_those_of_the_pipeline(monkeypatch, kind, compiler):
    monkeypatch.setattr(compilation, "target_of", lambda device: Target("tpu", f"TPU {kind}"))
    pipe = WanPipeline(Components({}), architecture(4), VIDEO, partitioner((2, 2, 2)), compiler)
    mesh = {"dp": 2, "sp": 2, "tp": 2}
    runs = stages(architecture(4), VIDEO, "v6e-8", mesh, compiler=compiler)
    programs = {"step": take_step, "decode_first": decode_chunk}
    jobs = {run.name: run.job for stage in runs.values() for run in stage}
    options = {name: planned(jobs[name]).compiler_options for name in programs}
    assert options == {name: pipe.compiled(program).options for name, program in programs.items()}
    has_sparse_cores = any("sparse_core" in name for name in options["step"])
    assert has_sparse_cores is (compiler == "fast" and kind != "v5 lite")


def test_equal_programs_are_one_job():
    """Equal programs share one job, so that they are priced once."""
    mesh = {"dp": 2, "tp": 4}
    text, image, small = (
        stages(presets()[name].architecture, presets()[name].defaults, "v6e-8", mesh)
        for name in ("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-t2v-1.3b")
    )
    assert text["decode"] == image["decode"] != small["decode"]
    assert text["encode"][0] == image["encode"][0] == small["encode"][0]
    assert text["denoise"] != image["denoise"]
    shorter = presets()["wan2.1-t2v-14b"].defaults.updated({"frames": 49, "steps": 30})
    again = stages(presets()["wan2.1-t2v-14b"].architecture, shorter, "v6e-8", mesh)
    assert [run.job for run in again["decode"]] == [run.job for run in text["decode"]]
    assert again["denoise"][1].job != text["denoise"][1].job


# presets that differ from another in their weights, number of steps and guidance alone
FEW_STEPS = ("-4step", "-rcm-480p", "-rcm-720p", "-causvid", "-fastwan")
EVERY = [name for name, preset in presets().items() if preset.architecture and not name.endswith(FEW_STEPS)]


@pytest.mark.parametrize("name", quick([name for name in EVERY if "720p" not in name], EVERY))  # there is 480p of each
def test_every_program_of_every_preset_is_traced(name, traced):
    """Traces every program of a preset at its default size, from configs alone; those that presets share once."""
    video = presets()[name].defaults
    runs = stages(presets()[name].architecture, video, "v6e-8", {"dp": 2, "tp": 4})
    networks = presets()[name].architecture
    context, step, *_ = runs["denoise"]
    batch, channels, frames, *cells = networks.denoised_shape(video)
    block = networks.transformer.block_frames if networks.streams else frames
    assert (context.times, step.times) == (len(networks.denoisers), frames // block * video.steps)
    state, *_ = planned(step.job).arguments
    assert state.x.shape == (batch, block, *cells, channels)
    for run in runs["encode"]:
        if (told := json.dumps(asdict(run.job), sort_keys=True)) not in traced:
            program = planned(run.job)
            jax.eval_shape(program.function, *program.arguments)
            traced.add(told)


@pytest.fixture(scope="module")
def traced() -> set[str]:
    """The programs that were traced, as JSON."""
    return set()


def test_an_architecture_is_read_from_a_checkpoint():
    _, read, _ = outline("nano")
    assert read.task == FIRST_FRAME_TO_VIDEO
    assert read.transformer.text_width == read.text_encoder.width
    assert stages(read, VIDEO, "v6e-8", {"tp": 8}).keys() == {"encode", "denoise", "decode"}
