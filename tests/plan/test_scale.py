# SPDX-License-Identifier: Apache-2.0
"""A plan of many videos gives the number of slices, the cheapest slices, and those that are not priced."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.commands import refused, succeeded, wanjax
from tests.support.small_wan import VIDEO, small_model
from tests.support.words import has_line_with_words
from wanjax.plan import scale
from wanjax.plan.estimate import estimate_video
from wanjax.plan.scale import Option, Rejected, ScaleEstimate, Workload, chip_seconds, estimate_at_scale
from wanjax.pricing.chips import Slice
from wanjax.registry import model_description

MODEL = replace(model_description("nano"), model=small_model(4), settings=VIDEO)
GB = 10**9
SECONDS = {"v6e-1": (90.0, 100.0, 120.0), "v6e-4": (28.0, 30.0, 33.0), "v6e-8": (17.0, 20.0, 24.0)}
"""Seconds of a video on each slice (low, mid, high). In chip-seconds, the mid values are 100, 120 and 160."""
HOUR = 3600.0


@pytest.fixture(scope="module")
def estimate_of_plan():
    """Return the plan of a small video; other plans replace its seconds."""
    return estimate_video(MODEL, "cpu")


class PricedSlices(list[str]):
    """The names of the priced slices. `changes` replaces fields of each plan; `chip_seconds` estimates a slice."""

    changes: Mapping[str, Any] = {}

    def chip_seconds(self, tpu_slice: Slice, *_: Any) -> float:
        return tpu_slice.devices * SECONDS[tpu_slice.name][1]


@pytest.fixture
def priced_slices(estimate_of_plan, monkeypatch):
    """Price each slice with the seconds above, and return the list of priced slices."""
    recorder = PricedSlices()

    def price(description, name, mesh, **arguments):
        recorder.append(name)
        low, mid, high = SECONDS[name]
        totals = {"total_seconds": mid, "total_seconds_low": low, "total_seconds_high": high}
        sizes = {"disk_bytes": 20 * GB, "download_bytes_at_most": 20 * GB, "compile_seconds": 0.0}
        return replace(estimate_of_plan, chip=name, **totals | sizes | recorder.changes)

    monkeypatch.setattr(scale, "estimate_video", price)
    monkeypatch.setattr(scale, "chip_seconds", lambda *arguments: recorder.chip_seconds(*arguments))
    return recorder


def estimate_many(workload: Workload, chip: str = "v6e-8", **options) -> ScaleEstimate:
    return estimate_at_scale(MODEL, chip, workload, **options)


def option_of(estimate: ScaleEstimate, name: str) -> Option:
    [match] = [option for option in estimate.options if option.slice == name]
    return match


def rejected_of(estimate: ScaleEstimate, name: str) -> Rejected:
    [match] = [option for option in estimate.rejected if option.slice == name]
    return match


def best_and_quickest(estimate: ScaleEstimate) -> tuple[str | None, str | None]:
    return estimate.best and estimate.best.slice, estimate.quickest and estimate.quickest.slice


START_SECONDS = {"start": 100.0, "download": 1e9}  # loading 20 GB at 0.58 GB/s makes it 154 s


def test_slices_hours_and_cost_are_computed(priced_slices):
    """In 8 hours after the start, a slice of four chips makes 960 videos of 30 s: 10,000 videos need 11 slices."""
    estimate = estimate_many(Workload(10_000, 8 * HOUR + 154.483, 2.0, **START_SECONDS))
    four_chips = option_of(estimate, "v6e-4")
    assert four_chips.startup_seconds.mid == pytest.approx(100 + 20 + 20 / 0.58)
    assert four_chips.slices.mid == 11
    assert four_chips.seconds.mid == pytest.approx(910 * 30 + four_chips.startup_seconds.mid)
    assert four_chips.chip_hours.mid == pytest.approx(11 * 4 * four_chips.seconds.mid / HOUR)
    assert estimate.cost(four_chips).mid == pytest.approx(2.0 * four_chips.chip_hours.mid)
    for option in estimate.options:
        assert option.seconds.high <= 8 * HOUR + 155
        assert option.slices.low <= option.slices.mid <= option.slices.high
        assert option.chip_hours.low < option.chip_hours.mid < option.chip_hours.high


def test_the_best_slice_need_not_be_the_quickest(priced_slices):
    estimate = estimate_many(Workload(10_000, 12 * HOUR, **START_SECONDS))
    assert best_and_quickest(estimate) == ("v6e-1", "v6e-8")
    # v6e-4 may take 112 chip-seconds, and the best slice may take 120
    assert [option.slice for option in estimate.as_good] == ["v6e-4"]
    assert estimate.cost(estimate.best) is None
    assert priced_slices == ["v6e-1", "v6e-4", "v6e-8"]


def test_the_start_time_of_a_slice_counts(priced_slices):
    """Chips that compile for one of two hours make half as many videos, and that hour is paid too."""
    without_compiling, with_compiling = (
        estimate_many(Workload(10_000, 2 * HOUR, compiling=seconds, **START_SECONDS)) for seconds in (0.0, HOUR)
    )
    for option, slow_option in zip(without_compiling.options, with_compiling.options, strict=True):
        assert slow_option.slices.mid > 1.9 * option.slices.mid
        assert slow_option.chip_hours.mid == pytest.approx(
            option.chip_hours.mid + slow_option.slices.mid * slow_option.devices, rel=0.1
        )


def test_slices_that_miss_the_deadline_are_not_chosen(priced_slices):
    estimate = estimate_many(Workload(100, 154.483 + 35, **START_SECONDS))
    assert best_and_quickest(estimate) == ("v6e-4", "v6e-8")
    assert not option_of(estimate, "v6e-1").meets_deadline
    assert json.loads(json.dumps(estimate.to_json(), allow_nan=False))["options"][0]["slices"] == [None] * 3
    late = estimate_many(Workload(100, 60, **START_SECONDS))
    assert best_and_quickest(late) == (None, "v6e-8")


def test_without_a_deadline_one_slice_makes_all_videos(priced_slices):
    estimate = estimate_many(Workload(100, **START_SECONDS))
    assert [option.slices for option in estimate.options] == [(1, 1, 1)] * 3
    assert option_of(estimate, "v6e-8").seconds.mid == pytest.approx(100 * 20 + 154.483, abs=0.01)


def test_far_more_expensive_slices_are_not_priced(priced_slices):
    priced_slices.chip_seconds = lambda tpu_slice, *_: {1: 1.0, 4: 1.2, 8: 4.0}[tpu_slice.devices]
    estimate_many(Workload(10, HOUR, **START_SECONDS))
    assert priced_slices == ["v6e-1", "v6e-4", "v6e-8"]  # v6e-8 is 4 times as expensive, but requested
    priced_slices.chip_seconds = lambda tpu_slice, *_: {1: 2.0, 4: 1.2, 8: 1.28}[tpu_slice.devices]
    priced_slices.clear()
    estimate = estimate_many(Workload(10, HOUR, **START_SECONDS))
    assert priced_slices == ["v6e-4", "v6e-8"]
    assert rejected_of(estimate, "v6e-1").plan is None
    assert rejected_of(estimate, "v6e-1").ratio == pytest.approx(2 / 1.2)


def test_chips_that_are_too_small_for_the_weights_are_not_priced(priced_slices):
    priced_slices.chip_seconds = chip_seconds
    estimate = estimate_at_scale(model_description("wan2.1-t2v-14b"), "v6e-8", Workload(10, HOUR))
    assert "v6e-1" not in priced_slices
    assert rejected_of(estimate, "v6e-1") == Rejected("v6e-1", float("inf"))


def test_a_requested_mesh_is_the_only_option(priced_slices):
    estimate = estimate_many(Workload(10, HOUR, **START_SECONDS), mesh=(2, 2, 2))
    assert [option.slice for option in estimate.options] == ["v6e-8"]
    assert [option.slice for option in estimate_many(Workload(10, HOUR), sp=4).options] == ["v6e-4", "v6e-8"]


def test_a_slice_that_is_too_small_is_rejected_with_a_larger_one(priced_slices):
    priced_slices.changes = {"total_seconds": None, "fits": False, "advice": "v6e-16 should"}
    estimate = estimate_many(Workload(10, HOUR))
    assert best_and_quickest(estimate) == (None, None)
    assert {option.plan.advice for option in estimate.rejected} == {"v6e-16 should"}
    assert has_line_with_words(succeeded(command("--requests", "5")).stdout, "v6e-16 should")


def command(*arguments: str):
    return wanjax("plan", "nano", "-q", "--chip", "v6e-8", *arguments)


def test_the_command_prints_a_table_with_reasons(priced_slices):
    messages = succeeded(command("--requests", "10000", "--deadline", "12h", "--price", "2.7")).stdout
    assert has_line_with_words(messages, "10,000 videos 12 h 2.7 priced not measured")
    for name in SECONDS:
        assert len(re.findall(rf"^{name} .*\d$", messages, re.MULTILINE)) == 2
    assert max(map(len, messages[: messages.index("best")].splitlines())) <= 80
    assert has_line_with_words(messages, "slices hours cost of 1,000")
    assert has_line_with_words(messages, "best throughput: v6e-1 of v6e-8 8 workers")
    assert has_line_with_words(messages, "why: 100 chip-seconds v6e-1 160 v6e-8 soonest collectives")
    assert has_line_with_words(messages, "in doubt: v6e-1 v6e-4")
    assert has_line_with_words(messages, "5 min (estimated) 200 MB/s (estimated) 580 MB/s (measured)")
    options = ("--start-time", "90s", "--download-rate", "1.5GB/s", "--compile-time", "1h30min")
    messages = succeeded(command("--requests", "10", *options)).stdout
    assert has_line_with_words(messages, "1 min 30 s (given) 1.5 GB/s (given) 1 h 30 min (given)")
    assert "cost" not in messages
    assert has_line_with_words(messages, "slices hours chip-hours")


def test_json_contains_the_options_with_their_plans(priced_slices):
    options = ("--requests", "10000", "--deadline", "12h", "--price", "2.7", "--json")
    data = json.loads(succeeded(command(*options)).stdout)
    assert data["workload"]["deadline"] == 12 * HOUR
    assert data["best"] == "v6e-1"
    assert data["why"]
    best = data["options"][0]
    assert best["plan"]["total_seconds"] == best["video_seconds"][1] == 100
    assert data["cost"] == pytest.approx([2.7 * hours for hours in best["chip_hours"]])


def test_a_config_file_sets_the_workload(priced_slices, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[plan]\nrequests = 10\ndeadline = "2h"\nprice = 2\n')
    data = json.loads(succeeded(command("--config", str(file), "--json")).stdout)
    assert (data["workload"]["requests"], data["workload"]["deadline"], data["workload"]["price"]) == (10, 2 * HOUR, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--deadline", "12h"], "--deadline --requests"),
        (["--requests", "5", "--train"], "--train --requests"),
        (["--requests", "0"], "--requests 0"),
        *((["--requests", "5", "--deadline", text], "--deadline 12h") for text in ("12", "-1h", "0s", "1h2", "9e9h")),
        (["--requests", "5", "--deadline", "4000d"], "--deadline 4000d"),
        *((["--requests", "5", "--price", text], "--price") for text in ("nan", "inf", "-2", "0", "two")),
        *((["--requests", "5", "--download-rate", text], "1.5GB/s") for text in ("10Gbit/s", "0MB/s", "200")),
    ],
)
def test_workloads_that_cannot_be_planned_are_refused(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert has_line_with_words(refused("plan", "nano", "-q", "--chip", "cpu", *options), words)


@pytest.mark.parametrize(("text", "seconds"), [("90min", 5400), ("1d12h", 129600), ("1.5h", 5400), ("1h 30m", 5400)])
def test_times_are_written_with_units(priced_slices, text, seconds):
    data = json.loads(succeeded(command("--requests", "1", "--deadline", text, "--json")).stdout)
    assert data["workload"]["deadline"] == seconds
