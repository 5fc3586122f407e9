# SPDX-License-Identifier: Apache-2.0
"""The estimate of a video on the stated CPU follows its settings and keywords."""

from dataclasses import replace

import pytest

from tests.support.quick import quick
from tests.support.small_wan import TEXT, VIDEO, small_model
from tests.support.tabled import TABLES
from tests.support.words import has_line_with_words
from wanjax.kernels.attention import AttentionConfig
from wanjax.layers.offload import Offload
from wanjax.layers.tiling import Tiling
from wanjax.pipelines.model import with_scheduler
from wanjax.plan.estimate import Estimate, estimate_video
from wanjax.registry import model_description
from wanjax.schedulers import FlowEuler, UniPC

MODEL = model_description("nano")
SHAPES = replace(small_model(4), tables=TABLES)
STEPS = 7


def estimate(shapes=SHAPES, *, cache: str = "none", **options) -> Estimate:
    video = VIDEO.updated({"steps": STEPS, "guidance_scale": 3.0, "cache": cache})
    return estimate_video(replace(MODEL, model=shapes, settings=video), "cpu", **options)


def run_counts_by_program(video_estimate: Estimate) -> dict[str, int]:
    return {row.name: row.times for row in video_estimate.programs}


def test_a_video_with_easycache_has_a_range_of_seconds():
    """The device decides which steps reuse. The first steps and the last are always full."""
    cached, uncached = estimate(cache="easycache:0.1,2"), estimate()
    assert cached.reusing_steps == STEPS - 3
    assert cached.total_seconds_least < cached.total_seconds
    # the model of the device counts only products
    assert 0 <= cached.reusing_step_seconds_least < cached.reusing_step_seconds
    saved_seconds = cached.reusing_steps * (cached.reusing_step_seconds - cached.reusing_step_seconds_least)
    assert cached.total_seconds - cached.total_seconds_least == pytest.approx(saved_seconds)
    assert cached.total_seconds >= uncached.total_seconds
    assert cached.total_seconds_low == pytest.approx(cached.total_seconds_least)  # estimates have no range
    assert cached.total_seconds_high == pytest.approx(cached.total_seconds)
    assert uncached.total_seconds_least is uncached.reusing_step_seconds_least is None
    assert uncached.reusing_steps == 0


@pytest.mark.parametrize("cache", quick(["deepcache:1,6,2"], ["magcache:.2,1,.1", "deepcache:1,6,2", "guidance:2"]))
def test_a_cache_with_fixed_steps_makes_a_video_faster(cache):
    cached, uncached = estimate(cache=cache), estimate()
    assert cached.cache == str(
        SHAPES.spec.cache_rule(VIDEO.updated({"steps": STEPS, "guidance_scale": 3.0, "cache": cache}))
    )
    assert 0 < cached.reusing_steps < STEPS
    assert run_counts_by_program(cached)["step"] + run_counts_by_program(cached)["reusing_step"] == STEPS
    assert cached.reusing_step_seconds < cached.step_seconds
    assert cached.total_seconds < uncached.total_seconds
    assert cached.total_seconds_least is None


def test_a_plan_with_teacache_counts_one_reused_step():
    """The weights decide which steps reuse, so that the estimate is that of the slowest video."""
    price = estimate(cache="teacache:0.5")
    assert price.cache.startswith("teacache")
    assert price.reusing_steps == run_counts_by_program(price)["reusing_step"] == 1
    assert run_counts_by_program(price)["step"] == STEPS - 1
    assert run_counts_by_program(price)["time_changes"] == 1


def test_a_window_that_is_not_priced_is_reported():
    window = AttentionConfig.parse("auto:window=2")
    assert has_line_with_words("\n".join(estimate(attention=window).doubts), "window 2 tokens")
    assert not has_line_with_words("\n".join(estimate().doubts), "window")


def test_loaded_networks_are_counted_in_each_stage():
    freed, resident = (estimate(offload=offload) for offload in map(Offload.of, ("stages", "none")))
    assert [stage.kept_bytes_per_chip for stage in freed.stages.values()] == [0, 0, 0]
    encode, denoise, decode = (stage.kept_bytes_per_chip for stage in resident.stages.values())
    assert encode == 0 < denoise < decode  # each stage adds a network
    for name, stage in resident.stages.items():
        difference = stage.peak_bytes_per_chip - freed.stages[name].peak_bytes_per_chip
        assert difference == stage.kept_bytes_per_chip
        assert stage.spare_bytes_per_chip == resident.memory_per_chip - stage.peak_bytes_per_chip
    assert resident.peak_bytes_per_chip == max(stage.peak_bytes_per_chip for stage in resident.stages.values())


def test_a_plan_with_tiles_counts_their_programs():
    uncached, tiled = estimate(), estimate(tiling=Tiling((8, 8), (4, 4)))
    assert not any("tile" in name for name in run_counts_by_program(uncached))
    assert (
        run_counts_by_program(tiled)["decode_tile_first"] + run_counts_by_program(tiled).get("decode_tile_first_2", 0)
        > 1
    )
    assert any(name.startswith("join_tiles") for name in run_counts_by_program(tiled))
    assert tiled.stages["denoise"].seconds == uncached.stages["denoise"].seconds


def test_a_plan_counts_the_state_of_the_solver():
    """A solver of a higher order has a state between two steps; Euler's method has none."""
    euler, unipc = (estimate(with_scheduler(SHAPES, solver)) for solver in (FlowEuler(), UniPC()))
    (euler_step,), (unipc_step,) = (
        [program for program in x.programs if program.name == "step"] for x in (euler, unipc)
    )
    assert euler_step.arguments_bytes_per_chip < unipc_step.arguments_bytes_per_chip


def test_both_prompts_in_one_batch_take_one_step():
    separate, in_one_batch = estimate(), estimate(batch_guidance=True)
    assert run_counts_by_program(separate) == run_counts_by_program(in_one_batch)
    assert in_one_batch.step_seconds == pytest.approx(separate.step_seconds, rel=0.5)
    assert TEXT.width == SHAPES.transformer.text_width
