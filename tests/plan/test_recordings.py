# SPDX-License-Identifier: Apache-2.0
"""Recordings of described models, for absent devices: every published model, and the programs that are compiled."""

from dataclasses import replace

import jax
import pytest

from tests.support.quick import quick
from tests.support.small_wan import VIDEO, small_model
from wanjax.kernels.compiler_options import OPTION_SETS
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.video_programs import programs_of
from wanjax.pricing.chips import SLICES, abstract_mesh
from wanjax.pricing.exporting import export
from wanjax.registry import model_description, presets
from wanjax.sharding import SHARDING_RULES, Partitioner

MESH = abstract_mesh(SLICES["v6e-8"], {"dp": 2, "sp": 1, "tp": 4})
EVERY = [name for name, preset in presets().items() if preset.model]
SOME = ["wan2.1-t2v-1.3b", "cogvideox-2b", "hunyuanvideo1.5-480p-t2v"]


def recorded(description, mesh=MESH, **how):
    """Return the programs of a video of an description, by stage."""
    pipe = abstract_pipeline(description, Partitioner(mesh, SHARDING_RULES["fsdp"]), **how)
    chosen = pipe.settings()
    result = programs_of(trace_programs(pipe, chosen, needed_pictures(pipe, chosen)))
    return {stage: [x for x in result if x.stage == stage] for stage in ("encode", "denoise", "decode")}


def published(name, **changed):
    description = model_description(name)
    return recorded(replace(description, settings=description.settings.updated(changed)))


def digest(program):
    """Return the digest of a program as the compiler's process receives it."""
    return export(program.abstract_call, SLICES["v6e-8"]).key["program"]


def step_of(stages):
    return next(program for program in stages["denoise"] if program.name == "step")


@pytest.mark.parametrize("name", quick(SOME, EVERY))
def test_a_video_of_every_preset_is_recorded_at_its_default_settings(name):
    video, shapes = presets()[name].defaults, presets()[name].model
    spec = shapes.spec
    stages = published(name)
    counts = {program.name: program.times for program in stages["denoise"]}
    _, _, frames, *latent_size = spec.noise_shape(video)
    block = spec.chunk_frames or frames
    assert counts["step"] == frames // block * video.steps
    assert counts["context"] == len(spec.denoisers)
    assert counts["begin"] == counts["finish"] == frames // block
    step = step_of(stages)
    state, *_ = step.abstract_call.arguments
    assert state.x.shape[:4] == (1, block, *latent_size)
    length = spec.latent_shape(video)[2]
    first, rest = spec.decode_lengths(block if spec.is_chunked else length)
    decoding = {program.name: program.times for program in stages["decode"]}
    assert first + rest * decoding.get("decode_next", 0) >= length
    assert stages["encode"]
    for programs in stages.values():
        shardings = [x.sharding for p in programs for x in jax.tree.leaves(p.abstract_call.arguments)]
        assert all(sharding is None or sharding.mesh == MESH for sharding in shardings)


@pytest.mark.parametrize("compiler", OPTION_SETS)
@pytest.mark.parametrize("chip", ["v5e-8", "v5p-8", "v6e-8"])
def test_programs_have_the_options_of_the_chip_and_of_the_set(chip, compiler):
    mesh = abstract_mesh(SLICES[chip], {"dp": 2, "sp": 1, "tp": SLICES[chip].devices // 2})
    stages = recorded(replace(model_description("nano"), model=small_model(4), settings=VIDEO), mesh, compiler=compiler)
    step = step_of(stages)
    assert "xla_enable_async_all_gather" in step.abstract_call.compiler_options
    has_sparse_cores = any("sparse_core" in name for name in step.abstract_call.compiler_options)
    assert has_sparse_cores is (compiler == "fast" and not chip.startswith("v5e"))


def chunks_of(stages) -> set[str]:
    """Return the digests of the programs that decode the chunks of a video."""
    return {digest(run) for run in stages["decode"] if run.name.startswith("decode_")}


@pytest.mark.slow
def test_equal_programs_are_the_same_bytes():
    """Equal programs are the same bytes, so that they are priced once."""
    text, image, small = (published(name) for name in ("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-t2v-1.3b"))
    decoding, step = chunks_of(text), digest(step_of(text))
    assert decoding == chunks_of(image)
    assert not decoding & chunks_of(small)
    assert digest(text["encode"][0]) == digest(image["encode"][0]) == digest(small["encode"][0])
    assert step != digest(step_of(image))
    again = published("wan2.1-t2v-14b", frames=49, steps=30)
    assert chunks_of(again) == decoding  # for videos of any length
    assert digest(step_of(again)) != step
    assert digest(step_of(published("wan2.1-t2v-14b", steps=30))) == step


def test_the_programs_of_a_model_of_this_package_are_recorded_for_a_slice():
    stages = recorded(model_description("nano"), abstract_mesh(SLICES["v6e-8"], {"dp": 1, "sp": 1, "tp": 8}))
    assert [run.name for run in stages["encode"]] == ["encode_prompts"]
    assert [run.name for run in stages["denoise"]] == ["begin", "context", "step", "finish"]
    assert [run.name for run in stages["decode"]] == ["cut", "decode_first", "decode_next"]
