# SPDX-License-Identifier: Apache-2.0
"""A plan of many videos: how many slices, which of them are cheapest, and what is not priced."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.commands import refused, succeeded, wanjax
from tests.support.small_wan import VIDEO, small_model
from tests.support.words import has_line_with
from wanjax.plan import scale
from wanjax.plan.estimate import estimate_video
from wanjax.plan.scale import Option, Rejected, ScaleEstimate, Workload, chip_seconds, estimate_at_scale
from wanjax.pricing.chips import Slice
from wanjax.registry import model_description

MODEL = replace(model_description("nano"), model=small_model(4), settings=VIDEO)
GB = 10**9
SECONDS = {"v6e-1": (90.0, 100.0, 120.0), "v6e-4": (28.0, 30.0, 33.0), "v6e-8": (17.0, 20.0, 24.0)}
"""The seconds of a video, so that a chip takes 100, 120 and 160 for it."""
HOUR = 3600.0


@pytest.fixture(scope="module")
def estimate_of_plan():
    """The plan of a small video, whose seconds other plans change."""
    return estimate_video(MODEL, "cpu")


class Priced(list[str]):
    """The slices that were priced; `changes` are those of each plan, `chip_seconds` what the model says of a slice."""

    changes: Mapping[str, Any] = {}

    def chip_seconds(self, place: Slice, *_: Any) -> float:
        return place.devices * SECONDS[place.name][1]


@pytest.fixture
def priced(estimate_of_plan, monkeypatch):
    """The slices that are priced, each with its seconds above; the small model has room and is cheap anywhere."""
    requested = Priced()

    def price(description, name, mesh, **arguments):
        requested.append(name)
        low, mid, high = SECONDS[name]
        totals = {"total_seconds": mid, "total_seconds_low": low, "total_seconds_high": high}
        sizes = {"disk_bytes": 20 * GB, "download_bytes_at_most": 20 * GB, "compile_seconds": 0.0}
        return replace(estimate_of_plan, chip=name, **totals | sizes | requested.changes)

    monkeypatch.setattr(scale, "estimate_video", price)
    monkeypatch.setattr(scale, "chip_seconds", lambda *arguments: requested.chip_seconds(*arguments))
    return requested


def many(workload: Workload, chip: str = "v6e-8", **how) -> ScaleEstimate:
    return estimate_at_scale(MODEL, chip, workload, **how)


def option_of(result: ScaleEstimate, name: str) -> Option:
    [chosen] = [option for option in result.options if option.slice == name]
    return chosen


def rejected_of(result: ScaleEstimate, name: str) -> Rejected:
    [chosen] = [option for option in result.rejected if option.slice == name]
    return chosen


def names(result: ScaleEstimate) -> tuple[str | None, str | None]:
    return result.best and result.best.slice, result.quickest and result.quickest.slice


START_SECONDS = {"start": 100.0, "download": 1e9}  # with 20 GB, which are loaded at .58 GB/s: 154 s


def test_slices_hours_and_cost_by_hand(priced):
    """8 hours hold 960 videos of 30 s after the start: 10,000 take 11 slices of four chips, of 910 videos at most."""
    result = many(Workload(10_000, 8 * HOUR + 154.483, 2.0, **START_SECONDS))
    four = option_of(result, "v6e-4")
    assert four.startup_seconds.mid == pytest.approx(100 + 20 + 20 / 0.58)
    assert four.slices.mid == 11
    assert four.seconds.mid == pytest.approx(910 * 30 + four.startup_seconds.mid)
    assert four.chip_hours.mid == pytest.approx(11 * 4 * four.seconds.mid / HOUR)
    assert result.cost(four).mid == pytest.approx(2.0 * four.chip_hours.mid)
    for option in result.options:
        assert option.seconds.high <= 8 * HOUR + 155
        assert option.slices.low <= option.slices.mid <= option.slices.high
        assert option.chip_hours.low < option.chip_hours.mid < option.chip_hours.high


def test_the_best_for_throughput_is_not_the_quickest(priced):
    result = many(Workload(10_000, 12 * HOUR, **START_SECONDS))
    assert names(result) == ("v6e-1", "v6e-8")
    assert [option.slice for option in result.as_good] == [
        "v6e-4"
    ]  # from 112 chip-seconds on, where the best takes up to 120
    assert result.cost(result.best) is None
    assert priced == ["v6e-1", "v6e-4", "v6e-8"]


def test_the_start_of_a_slice_counts(priced):
    """Chips that compile for an hour of two make half as many videos, and are paid for the hour."""
    quick, slow = (many(Workload(10_000, 2 * HOUR, compiling=seconds, **START_SECONDS)) for seconds in (0.0, HOUR))
    for fast, late in zip(quick.options, slow.options, strict=True):
        assert late.slices.mid > 1.9 * fast.slices.mid
        assert late.chip_hours.mid == pytest.approx(fast.chip_hours.mid + late.slices.mid * late.devices, rel=0.1)


def test_a_deadline_that_some_slices_miss(priced):
    result = many(Workload(100, 154.483 + 35, **START_SECONDS))
    assert names(result) == ("v6e-4", "v6e-8")
    assert not option_of(result, "v6e-1").meets_deadline
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["options"][0]["slices"] == [None] * 3
    late = many(Workload(100, 60, **START_SECONDS))
    assert names(late) == (None, "v6e-8")


def test_without_a_deadline_one_slice_makes_all(priced):
    result = many(Workload(100, **START_SECONDS))
    assert [option.slices for option in result.options] == [(1, 1, 1)] * 3
    assert option_of(result, "v6e-8").seconds.mid == pytest.approx(100 * 20 + 154.483, abs=0.01)


def test_options_that_are_estimated_far_dearer_are_not_priced(priced):
    priced.chip_seconds = lambda place, *_: {1: 1.0, 4: 1.2, 8: 4.0}[place.devices]
    many(Workload(10, HOUR, **START_SECONDS))
    assert priced == ["v6e-1", "v6e-4", "v6e-8"]  # the last takes 4 times as much, and is the requested one
    priced.chip_seconds = lambda place, *_: {1: 2.0, 4: 1.2, 8: 1.28}[place.devices]
    priced.clear()
    result = many(Workload(10, HOUR, **START_SECONDS))
    assert priced == ["v6e-4", "v6e-8"]
    assert rejected_of(result, "v6e-1").plan is None
    assert rejected_of(result, "v6e-1").ratio == pytest.approx(2 / 1.2)


def test_weights_that_a_chip_has_no_room_for_are_not_priced(priced):
    priced.chip_seconds = chip_seconds
    result = estimate_at_scale(model_description("wan2.1-t2v-14b"), "v6e-8", Workload(10, HOUR))
    assert "v6e-1" not in priced
    assert rejected_of(result, "v6e-1") == Rejected("v6e-1", float("inf"))


def test_a_requested_mesh_is_the_only_option(priced):
    result = many(Workload(10, HOUR, **START_SECONDS), mesh=(2, 2, 2))
    assert [option.slice for option in result.options] == ["v6e-8"]
    assert [option.slice for option in many(Workload(10, HOUR), sp=4).options] == ["v6e-4", "v6e-8"]


def test_a_slice_that_does_not_fit_is_rejected_with_one_that_does(priced):
    priced.changes = {"total_seconds": None, "fits": False, "advice": "v6e-16 should"}
    result = many(Workload(10, HOUR))
    assert names(result) == (None, None)
    assert {option.plan.advice for option in result.rejected} == {"v6e-16 should"}
    assert has_line_with(succeeded(command("--requests", "5")).stdout, "v6e-16 should")


def command(*arguments: str):
    return wanjax("plan", "nano", "-q", "--chip", "v6e-8", *arguments)


def test_the_table_and_its_sentences(priced):
    messages = succeeded(command("--requests", "10000", "--deadline", "12h", "--price", "2.7")).stdout
    assert has_line_with(messages, "10,000 videos 12 h 2.7 priced not measured")
    for name in SECONDS:
        assert len(re.findall(rf"^{name} .*\d$", messages, re.MULTILINE)) == 2
    assert max(map(len, messages[: messages.index("best")].splitlines())) <= 80
    assert has_line_with(messages, "slices hours cost of 1,000")
    assert has_line_with(messages, "best throughput: v6e-1 of v6e-8 8 workers")
    assert has_line_with(messages, "why: 100 chip-seconds v6e-1 160 v6e-8 soonest collectives")
    assert has_line_with(messages, "in doubt: v6e-1 v6e-4")
    assert has_line_with(messages, "5 min (estimated) 200 MB/s (estimated) 580 MB/s (measured)")
    options = ("--start-time", "90s", "--download-rate", "1.5GB/s", "--compile-time", "1h30min")
    messages = succeeded(command("--requests", "10", *options)).stdout
    assert has_line_with(messages, "1 min 30 s (given) 1.5 GB/s (given) 1 h 30 min (given)")
    assert "cost" not in messages
    assert has_line_with(messages, "slices hours chip-hours")


def test_json_has_the_ways_with_their_plans(priced):
    options = ("--requests", "10000", "--deadline", "12h", "--price", "2.7", "--json")
    data = json.loads(succeeded(command(*options)).stdout)
    assert data["workload"]["deadline"] == 12 * HOUR
    assert data["best"] == "v6e-1"
    assert data["why"]
    best = data["options"][0]
    assert best["plan"]["total_seconds"] == best["video_seconds"][1] == 100
    assert data["cost"] == pytest.approx([2.7 * hours for hours in best["chip_hours"]])


def test_options_of_a_file_count_too(priced, tmp_path):
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
    assert has_line_with(refused("plan", "nano", "-q", "--chip", "cpu", *options), words)


@pytest.mark.parametrize(("text", "seconds"), [("90min", 5400), ("1d12h", 129600), ("1.5h", 5400), ("1h 30m", 5400)])
def test_times_as_people_write_them(priced, text, seconds):
    data = json.loads(succeeded(command("--requests", "1", "--deadline", text, "--json")).stdout)
    assert data["workload"]["deadline"] == seconds
