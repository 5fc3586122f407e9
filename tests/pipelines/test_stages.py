# SPDX-License-Identifier: Apache-2.0
"""The priced programs against those that the pipeline runs."""

from dataclasses import replace
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
from wanjax.plan.chips import SLICES, described
from wanjax.plan.exporting import export
from wanjax.plan.stages import stages
from wanjax.registry import outline, presets
from wanjax.schedulers import UniPC
from wanjax.sharding import make_mesh

MESH = described(SLICES["v6e-8"], {"dp": 2, "sp": 1, "tp": 4})


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


def digest(run):
    """Returns the digest of a program as the compiler's process is given it."""
    return export(run.lowering, SLICES["v6e-8"]).key["program"]


def check_priced(calls, runs, names):
    """Checks the priced programs of both stages against the last calls of the pipeline's, by their names."""
    for run, name in zip((*runs["denoise"], *runs["decode"]), names, strict=True):
        if name is None:  # the first chunk's call, which a later one replaced in `calls`
            continue
        static, given, donated, options = calls[name]
        program = run.lowering
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
    runs = stages(networks, VIDEO, make_mesh(*axes), rules=rules)
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
    runs = stages(shapes, video, make_mesh(*axes), rules=rules)
    assert [run.times for stage in runs.values() for run in stage] == [1, 1, 16, 3, 1, 3]
    check_priced(calls, runs, ("begin_past", "take_step", "renew", None, "decode_chunk"))


@pytest.mark.parametrize("compiler", SETS)
@pytest.mark.parametrize("kind", ["v5 lite", "v5", "v6 lite"])
def test_priced_options_are_those_of_the_pipeline(monkeypatch, kind, compiler):
    monkeypatch.setattr(compilation, "target_of", lambda device: Target("tpu", f"TPU {kind}"))
    pipe = WanPipeline(Components({}), architecture(4), VIDEO, partitioner((2, 2, 2)), compiler)
    runs = stages(architecture(4), VIDEO, make_mesh(2, 2, 2), compiler=compiler)
    programs = {"step": take_step, "decode_first": decode_chunk}
    lowerings = {run.name: run.lowering for stage in runs.values() for run in stage}
    options = {name: lowerings[name].compiler_options for name in programs}
    assert options == {name: pipe.compiled(program).options for name, program in programs.items()}
    has_sparse_cores = any("sparse_core" in name for name in options["step"])
    assert has_sparse_cores is (compiler == "fast" and kind != "v5 lite")


def test_equal_programs_are_the_same_bytes():
    """Equal programs are the same bytes, so that they are priced once."""

    def planned(name, **given):
        preset = presets()[name]
        return stages(preset.architecture, preset.defaults.updated(given), MESH)

    text, image, small = (planned(name) for name in ("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-t2v-1.3b"))
    decoding, step = ([digest(run) for run in text["decode"]], digest(text["denoise"][1]))
    assert decoding == [digest(run) for run in image["decode"]]
    assert not set(decoding) & {digest(run) for run in small["decode"]}
    assert digest(text["encode"][0]) == digest(image["encode"][0]) == digest(small["encode"][0])
    assert not {digest(run) for run in text["denoise"]} & {digest(run) for run in image["denoise"]}
    again = planned("wan2.1-t2v-14b", frames=49, steps=30)
    assert [digest(run) for run in again["decode"]] == decoding
    assert digest(again["denoise"][1]) != step
    assert digest(planned("wan2.1-t2v-14b", steps=30)["denoise"][1]) == step


# presets that differ from another in their weights, number of steps and guidance alone
FEW_STEPS = ("-4step", "-rcm-480p", "-rcm-720p", "-causvid", "-fastwan")
EVERY = [name for name, preset in presets().items() if preset.architecture and not name.endswith(FEW_STEPS)]


@pytest.mark.parametrize("name", quick([name for name in EVERY if "720p" not in name], EVERY))  # there is 480p of each
def test_every_program_of_every_preset_is_traced(name, traced):
    """Traces every program of a preset at its default size, from configs alone; those that presets share once."""
    video = presets()[name].defaults
    runs = stages(presets()[name].architecture, video, MESH)
    networks = presets()[name].architecture
    context, step, *_ = runs["denoise"]
    batch, channels, frames, *cells = networks.denoised_shape(video)
    block = networks.transformer.block_frames if networks.streams else frames
    assert (context.times, step.times) == (len(networks.denoisers), frames // block * video.steps)
    state, *_ = step.lowering.arguments
    assert state.x.shape == (batch, block, *cells, channels)
    for run in runs["encode"]:
        if (told := (run.name, str(run.lowering.arguments), str(run.lowering.function.args))) not in traced:
            with jax.sharding.use_abstract_mesh(MESH):
                jax.eval_shape(run.lowering.function, *run.lowering.arguments)
            traced.add(told)


@pytest.fixture(scope="module")
def traced() -> set[str]:
    """The programs that were traced, by name, arguments and what is static in them."""
    return set()


def test_an_architecture_is_read_from_a_checkpoint():
    _, read, video = outline("nano")
    assert read.task == FIRST_FRAME_TO_VIDEO
    assert read.transformer.text_width == read.text_encoder.width
    assert stages(read, video, make_mesh(tp=8)).keys() == {"encode", "denoise", "decode"}
