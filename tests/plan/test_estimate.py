# SPDX-License-Identifier: Apache-2.0
"""The estimate of a video on the stated CPU: what of its settings and keywords reaches the prices."""

from dataclasses import replace

import pytest

from tests.support.quick import quick
from tests.support.small_wan import TEXT, VIDEO, small_model
from tests.support.tabled import TABLES
from tests.support.words import has_line_with
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


def priced(shapes=SHAPES, *, cache: str = "none", **options) -> Estimate:
    video = VIDEO.updated({"steps": STEPS, "guidance_scale": 3.0, "cache": cache})
    return estimate_video(replace(MODEL, model=shapes, settings=video), "cpu", **options)


def rows(result: Estimate) -> dict[str, int]:
    return {row.name: row.times for row in result.programs}


def test_a_video_with_easycache_has_a_range_of_seconds():
    """Its steps decide on the device: at least the first and the last are whole, and any other may reuse."""
    result, uncached = priced(cache="easycache:0.1,2"), priced()
    assert result.reusing_steps == STEPS - 3
    assert result.total_seconds_least < result.total_seconds
    assert 0 <= result.reusing_step_seconds_least < result.reusing_step_seconds  # the model counts products alone
    saved = result.reusing_steps * (result.reusing_step_seconds - result.reusing_step_seconds_least)
    assert result.total_seconds - result.total_seconds_least == pytest.approx(saved)
    assert result.total_seconds >= uncached.total_seconds
    assert result.total_seconds_low == pytest.approx(result.total_seconds_least)  # estimates have no range
    assert result.total_seconds_high == pytest.approx(result.total_seconds)
    assert uncached.total_seconds_least is uncached.reusing_step_seconds_least is None
    assert uncached.reusing_steps == 0


@pytest.mark.parametrize("cache", quick(["deepcache:1,6,2"], ["magcache:.2,1,.1", "deepcache:1,6,2", "guidance:2"]))
def test_a_cache_with_fixed_steps_makes_a_video_faster(cache):
    result, uncached = priced(cache=cache), priced()
    assert result.cache == str(
        SHAPES.spec.cache_rule(VIDEO.updated({"steps": STEPS, "guidance_scale": 3.0, "cache": cache}))
    )
    assert 0 < result.reusing_steps < STEPS
    assert rows(result)["step"] + rows(result)["reusing_step"] == STEPS
    assert result.reusing_step_seconds < result.step_seconds
    assert result.total_seconds < uncached.total_seconds
    assert result.total_seconds_least is None


def test_teacache_counts_the_one_step_that_reuses_for_certain():
    """The weights decide which steps reuse, so that the seconds are those of the slowest video."""
    price = priced(cache="teacache:0.5")
    assert price.cache.startswith("teacache")
    assert price.reusing_steps == rows(price)["reusing_step"] == 1
    assert rows(price)["step"] == STEPS - 1
    assert rows(price)["time_changes"] == 1


def test_a_window_that_is_not_priced_is_reported():
    window = AttentionConfig.parse("auto:window=2")
    assert has_line_with("\n".join(priced(attention=window).doubts), "window 2 tokens")
    assert not has_line_with("\n".join(priced().doubts), "window")


def test_loaded_networks_are_counted_in_each_stage():
    freed, stays = (priced(offload=offload) for offload in map(Offload.of, ("stages", "none")))
    assert [stage.kept_bytes_per_chip for stage in freed.stages.values()] == [0, 0, 0]
    encode, denoise, decode = (stage.kept_bytes_per_chip for stage in stays.stages.values())
    assert encode == 0 < denoise < decode  # each stage leaves a network to the next
    for name, stage in stays.stages.items():
        more = stage.peak_bytes_per_chip - freed.stages[name].peak_bytes_per_chip
        assert more == stage.kept_bytes_per_chip
        assert (
            stage.spare_bytes_per_chip == stays.memory_per_chip - stage.peak_bytes_per_chip
        )  # by which it fits or not
    assert stays.peak_bytes_per_chip == max(stage.peak_bytes_per_chip for stage in stays.stages.values())


def test_tiles_reach_the_plan():
    uncached, tiled = priced(), priced(tiling=Tiling((8, 8), (4, 4)))
    assert not any("tile" in name for name in rows(uncached))
    assert rows(tiled)["decode_tile_first"] + rows(tiled).get("decode_tile_first_2", 0) > 1
    assert any(name.startswith("join_tiles") for name in rows(tiled))
    assert tiled.stages["denoise"].seconds == uncached.stages["denoise"].seconds


def test_the_scheduler_reaches_the_plan():
    """A solver of a higher order keeps more between two steps than Euler's, which keeps nothing."""
    euler, unipc = (priced(with_scheduler(SHAPES, solver)) for solver in (FlowEuler(), UniPC()))
    (least,), (more,) = ([r for r in x.programs if r.name == "step"] for x in (euler, unipc))
    assert least.arguments_bytes_per_chip < more.arguments_bytes_per_chip


def test_a_forward_with_both_prompts_counts_as_one_of_a_batch():
    apart, together = priced(), priced(batch_guidance=True)
    assert rows(apart) == rows(together)
    assert together.step_seconds == pytest.approx(apart.step_seconds, rel=0.5)
    assert TEXT.width == SHAPES.transformer.text_width
