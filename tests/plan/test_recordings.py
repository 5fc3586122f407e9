# SPDX-License-Identifier: Apache-2.0
"""Program traces of every published model, for devices that need not be present."""

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
ALL_PRESETS = [name for name, preset in presets().items() if preset.model]
QUICK_PRESETS = ["wan2.1-t2v-1.3b", "cogvideox-2b"]


def trace_video(description, mesh=MESH, **options):
    """Return the programs of a video of a described model, by stage."""
    pipe = abstract_pipeline(description, Partitioner(mesh, SHARDING_RULES["fsdp"]), **options)
    settings = pipe.settings()
    programs = programs_of(trace_programs(pipe, settings, needed_pictures(pipe, settings)))
    return {stage: [x for x in programs if x.stage == stage] for stage in ("encode", "denoise", "decode")}


def trace_preset(name, **changes):
    description = model_description(name)
    return trace_video(replace(description, settings=description.settings.updated(changes)))


def digest(program):
    """Return the digest of a program as the compiler's process receives it."""
    return export(program.abstract_call, SLICES["v6e-8"]).key["program"]


def step_of(stages):
    return next(program for program in stages["denoise"] if program.name == "step")


@pytest.mark.parametrize("name", quick(QUICK_PRESETS, ALL_PRESETS))
def test_every_preset_is_traced_at_its_default_settings(name):
    video, model = presets()[name].defaults, presets()[name].model
    spec = model.spec
    stages = trace_preset(name)
    counts = {program.name: program.times for program in stages["denoise"]}
    _, _, frames, *latent_size = spec.noise_shape(video)
    chunk_frames = spec.chunk_frames or frames
    assert counts["step"] == frames // chunk_frames * video.steps
    assert counts["context"] == len(spec.denoisers)
    assert counts["begin"] == counts["finish"] == frames // chunk_frames
    step = step_of(stages)
    state, *_ = step.abstract_call.arguments
    assert state.x.shape[:4] == (1, chunk_frames, *latent_size)
    length = spec.latent_shape(video)[2]
    first, rest = spec.decode_lengths(chunk_frames if spec.is_chunked else length)
    decode_counts = {program.name: program.times for program in stages["decode"]}
    assert first + rest * decode_counts.get("decode_next", 0) >= length
    assert stages["encode"]
    for programs in stages.values():
        shardings = [x.sharding for p in programs for x in jax.tree.leaves(p.abstract_call.arguments)]
        assert all(sharding is None or sharding.mesh == MESH for sharding in shardings)


@pytest.mark.parametrize("compiler", OPTION_SETS)
@pytest.mark.parametrize("chip", ["v5e-8", "v5p-8", "v6e-8"])
def test_programs_have_the_options_of_the_chip_and_of_the_set(chip, compiler):
    mesh = abstract_mesh(SLICES[chip], {"dp": 2, "sp": 1, "tp": SLICES[chip].devices // 2})
    stages = trace_video(
        replace(model_description("nano"), model=small_model(4), settings=VIDEO), mesh, compiler=compiler
    )
    step = step_of(stages)
    assert "xla_enable_async_all_gather" in step.abstract_call.compiler_options
    has_sparse_cores = any("sparse_core" in name for name in step.abstract_call.compiler_options)
    assert has_sparse_cores is (compiler == "fast" and not chip.startswith("v5e"))


def digests_of_chunks(stages) -> set[str]:
    """Return the digests of the programs that decode the chunks of a video."""
    return {digest(run) for run in stages["decode"] if run.name.startswith("decode_")}


@pytest.mark.slow
def test_equal_programs_have_equal_bytes():
    """Programs of equal bytes are priced once."""
    text, image, small = (trace_preset(name) for name in ("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-t2v-1.3b"))
    decoding, step = digests_of_chunks(text), digest(step_of(text))
    assert decoding == digests_of_chunks(image)
    assert not decoding & digests_of_chunks(small)
    assert digest(text["encode"][0]) == digest(image["encode"][0]) == digest(small["encode"][0])
    assert step != digest(step_of(image))
    shorter = trace_preset("wan2.1-t2v-14b", frames=49, steps=30)
    assert digests_of_chunks(shorter) == decoding  # videos of any length share these programs
    assert digest(step_of(shorter)) != step
    assert digest(step_of(trace_preset("wan2.1-t2v-14b", steps=30))) == step


def test_the_bundled_model_is_traced_for_a_slice():
    stages = trace_video(model_description("nano"), abstract_mesh(SLICES["v6e-8"], {"dp": 1, "sp": 1, "tp": 8}))
    assert [run.name for run in stages["encode"]] == ["encode_prompts"]
    assert [run.name for run in stages["denoise"]] == ["begin", "context", "step", "finish"]
    assert [run.name for run in stages["decode"]] == ["cut", "decode_first", "decode_next"]
