# SPDX-License-Identifier: Apache-2.0
"""The rules of step caches: which steps they reuse, compared with independent computations, and their texts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wanjax
from tests.support.recorded import run_counts
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.figures import pluralize
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.caching.cache_tables import (
    NO_TABLES,
    CacheTables,
    MagCacheTable,
    TeaCacheTable,
    checkpoint_key,
    measured_file,
    merge_tables,
    read_tables,
    to_json,
)
from wanjax.pipelines.caching.rules import (
    NONE,
    DeepCache,
    EasyCache,
    GuidanceCacheRule,
    MagCache,
    TeaCache,
    cache_rule,
    check_separate_forwards,
    resolve_rule,
)
from wanjax.pipelines.phases import Phase
from wanjax.registry import FAMILIES, find_checkpoint, model_description, presets
from wanjax.sharding import one_device_partitioner

PUBLISHED = {name: model_description(name).model.tables for name in presets()}
MAGNITUDES = [name for name, tables in PUBLISHED.items() if tables.magnitudes]
CHANGES = [name for name, tables in PUBLISHED.items() if tables.changes]
PLAIN = [name for name, tables in PUBLISHED.items() if tables.plain]
STEPS = (50, 40, 30, 20)
SETTINGS = ((None, None, None), (0.04, 2, 0.2), (0.06, 2, 0.4), (0.06, 2, 0.1), (0.12, 4, 0.2), (0.24, 6, 0.2))


def make_phase(number: int, start: int, steps: int, total: int, skipped: int, guided: bool) -> Phase:
    return Phase("transformer", start, (3.0 if guided else 1.0,) * steps, total, number, skipped)


def one_phase(steps: int, guided: bool = True) -> Phase:
    return make_phase(0, 0, steps, steps, 0, guided)


def two_phases(split: int, steps: int) -> list[Phase]:
    """Return the phases of two experts."""
    return [make_phase(0, 0, split, steps, 0, True), make_phase(1, split, steps - split, steps, 0, True)]


def reused(rule, phases, tables, changes=None) -> list[bool]:
    return [step for phase in phases for step in rule.reused(phase, tables, changes)]


def skipped_forwards(
    table: MagCacheTable, steps: int, settings: tuple, split: int | None, joined: bool
) -> list[list[bool]]:
    """Return which forward passes of each prompt MagCache's authors skip, counting forward passes as they do.

    With `joined`, a step skips both forward passes or none, and the second expert starts with new sums.
    """
    delta, max_skips, full_share = (b if a is None else a for a, b in zip(settings, table[2:5], strict=True))
    indices = [round(i * (len(table.prompt) - 1) / (steps - 1)) for i in range(steps)]  # halves to even, as NumPy does
    flat = [ratios[index] for index in indices for ratios in (table.prompt, table.negative)]
    first, second = (2 * steps, 0) if split is None else (2 * split, 2 * (steps - split))
    ratio_product, error_sum, count, skipped = [1.0, 1.0], [0.0, 0.0], [0, 0], [[], []]
    for step in range(steps):
        if joined and step == split:
            ratio_product, error_sum, count = [1.0, 1.0], [0.0, 0.0], [0, 0]
        may_skip = []
        for prompt in (0, 1):
            forward = 2 * step + prompt
            if forward < first:
                is_allowed = table.turns[0] and forward >= int(first * full_share)
            elif table.turns[0]:
                is_allowed = forward > second * full_share + first
            else:
                is_allowed = forward >= int(first + second * full_share)
            if not is_allowed:
                may_skip.append(None)
                continue
            ratio_product[prompt] *= flat[forward]
            count[prompt] += 1
            error_sum[prompt] += abs(1 - ratio_product[prompt])
            may_skip.append(error_sum[prompt] < delta and count[prompt] <= max_skips)
        for prompt in (0, 1):
            if joined and None in may_skip:
                ratio_product[prompt], error_sum[prompt], count[prompt] = 1.0, 0.0, 0
            skip = all(may_skip) if joined else bool(may_skip[prompt])
            if may_skip[prompt] is not None and not skip:
                ratio_product[prompt], error_sum[prompt], count[prompt] = 1.0, 0.0, 0
            skipped[prompt].append(skip)
    return skipped


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MAGNITUDES)
def test_magcache_skips_the_published_steps(name, settings):
    tables = PUBLISHED[name]
    for steps in STEPS:
        splits = [steps // 3, steps // 2, steps * 13 // 20] if "a14b" in name else [None]
        for split in splits:
            phases = [one_phase(steps)] if split is None else two_phases(split, steps)
            reused_steps = reused(MagCache(*settings), phases, tables)
            expected = skipped_forwards(tables.magnitudes, steps, settings, split, joined=True)
            assert reused_steps == expected[0] == expected[1]
            if name.startswith("wan2.1"):  # whose two prompts always skip the same steps
                assert [reused_steps, reused_steps] == skipped_forwards(
                    tables.magnitudes, steps, settings, split, joined=False
                )


def test_the_tables_are_the_published_ones():
    """Tables have the published number of ratios, and the 14B model computes the published number of steps."""
    assert len(MAGNITUDES) == 10  # including the bundled model's
    lengths = {name: len(PUBLISHED[name].magnitudes.prompt) for name in MAGNITUDES}
    assert {name for name, length in lengths.items() if length == 40} == {
        "wan2.1-i2v-14b-480p",
        "wan2.1-i2v-14b-720p",
        "wan2.2-t2v-a14b",
        "wan2.2-i2v-a14b",
    }
    assert set(lengths.values()) == {40, 50}
    table = PUBLISHED["wan2.1-t2v-14b"]
    computed = {
        (delta, max_skips): 50 - sum(reused(MagCache(delta, max_skips, 0.2), [one_phase(50)], table))
        for delta, max_skips in ((0.04, 2), (0.06, 2), (0.12, 4), (0.24, 6))
    }
    assert list(computed.values()) == [29, 28, 21, 18]


def test_a_video_that_begins_from_another_reads_the_last_ratios():
    """A run of the last 30 of 40 steps has the ratios of these steps."""
    rising_ratios = tuple(1 + i / 1000 for i in range(40))
    tables = CacheTables(MagCacheTable(rising_ratios, rising_ratios, 0.06, 9, 0.2))
    remaining_phase = make_phase(0, 0, 30, 30, 10, True)
    ratios, error_sum, ratio_product, expected = rising_ratios[10:], 0.0, 1.0, []
    for step in range(30):
        ratio_product, error_sum = (ratio_product * ratios[step], error_sum) if step >= 6 else (1.0, 0.0)
        error_sum += abs(1 - ratio_product)
        expected.append(step >= 6 and error_sum < 0.06)
        ratio_product, error_sum = (ratio_product, error_sum) if expected[-1] else (1.0, 0.0)
    assert list(MagCache().reused(remaining_phase, tables)) == expected
    assert 5 < sum(expected) < 24


@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize(("name", "mode"), [(name, None) for name in CHANGES] + [(name, "plain") for name in PLAIN])
def test_teacache_skips_by_the_published_polynomial(name, mode, threshold):
    """The authors' loop sets the sum to zero at each computed step. The changes are as large as the published ones."""
    tables = PUBLISHED[name]
    table = tables.plain if mode else tables.changes
    for steps in STEPS:
        changes = 0.02 + 0.08 * np.random.default_rng(steps).random(steps)
        total, expected = 0.0, []
        for step in range(steps):
            if step < table.first or step >= steps - table.last:
                skip, total = False, 0.0
            else:
                powers = [c * changes[step] ** (4 - i) for i, c in enumerate(table.polynomial)]
                total += sum(powers)
                skip = total < threshold
                total = total if skip else 0.0
            expected.append(skip)
        assert list(TeaCache(threshold, mode).reused(one_phase(steps), tables, changes.tolist())) == expected


def test_the_polynomials_are_the_published_ones():
    assert len(CHANGES) == 10
    assert PUBLISHED["wan2.1-t2v-14b"].changes.polynomial[:2] == (-303318.725, 49053.7029)
    assert PUBLISHED["cogvideox1.5-5b"].changes == TeaCacheTable(
        (250.210439, -165.061612, 35.7804877, -0.781551492, 0.0358559703), 0.2, 1, 1
    )
    assert {PUBLISHED[name].changes.first for name in CHANGES if name.startswith("wan")} == {5}
    assert [name for name in CHANGES if name.startswith("wan")] == PLAIN
    assert {(PUBLISHED[name].plain.first, PUBLISHED[name].plain.last) for name in PLAIN} == {(1, 1)}
    assert PUBLISHED["wan2.1-t2v-1.3b"].plain.polynomial[1:3] == (-1311.10545, 201.331979)


def test_deepcache_computes_the_published_steps_in_full():
    """The authors' rule: all steps before `start` and from `end` on are full, and between them every `interval`-th."""
    for start, end, interval, steps in ((11, 45, 4, 50), (0, 6, 3, 9), (2, 30, 5, 20)):
        full_steps = {*range(start), *range(start, end, interval), *range(end, steps), 0} & {*range(steps)}
        is_reused = DeepCache(start, end, interval).reused(one_phase(steps), NO_TABLES)
        assert {step for step in range(steps) if not is_reused[step]} == full_steps
    assert sum(DeepCache().reused(one_phase(50), NO_TABLES)) == 25


def test_a_guidance_cache_reuses_four_of_five_middle_steps():
    """From a third to nine tenths of the steps, only every fifth step predicts for the negative prompt."""
    for steps in STEPS:
        is_reused = GuidanceCacheRule().reused(one_phase(steps), NO_TABLES)
        middle = range(steps // 3, steps * 9 // 10)
        assert [i for i in range(steps) if is_reused[i]] == [i for i in middle if (i - steps // 3) % 5]
    assert not any(GuidanceCacheRule().reused(one_phase(50, guided=False), NO_TABLES))


def test_easycache_may_reuse_all_but_the_first_and_last_steps():
    is_reused = EasyCache().reused(one_phase(50), NO_TABLES)
    assert [i for i in range(50) if is_reused[i]] == list(range(10, 49))


@pytest.mark.parametrize("rule", [DeepCache(0, 50, 2), EasyCache(0.1, 1), GuidanceCacheRule(), MagCache(9.0, 99, 0.0)])
def test_a_second_expert_begins_with_a_full_step(rule):
    """This holds for every step at which the second expert takes over."""
    ones = (1.0,) * 50
    tables = CacheTables(MagCacheTable(ones, ones, 0.1, 9, 0.2))
    for split in range(1, 49):
        first, second = (rule.reused(phase, tables) for phase in two_phases(split, 50))
        assert len(first) == split
        assert len(second) == 50 - split
        assert not first[0]
        assert not second[0]


TEXTS = {
    "none": NONE,
    "deepcache": DeepCache(),
    "deepcache:5": DeepCache(5),
    "deepcache:1,6,3": DeepCache(1, 6, 3),
    "magcache": MagCache(),
    "magcache:.06,2,.2": MagCache(0.06, 2, 0.2),
    "teacache:.1": TeaCache(0.1),
    "teacache:mode=plain": TeaCache(mode="plain"),
    "teacache:.1,mode=plain": TeaCache(0.1, "plain"),
    "teacache:mode=plain,threshold=.1": TeaCache(0.1, "plain"),
    "magcache:.06,whole=.1": MagCache(0.06, None, 0.1),
    "deepcache:interval=3": DeepCache(interval=3),
    "easycache:0.1": EasyCache(0.1),
    "guidance:4": GuidanceCacheRule(4),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_names_a_rule(text):
    assert cache_rule(text) == TEXTS[text]
    assert cache_rule(str(TEXTS[text])) == TEXTS[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "magic",
            "step cache 'magic' magcache teacache easycache deepcache guidance auto",
        ),
        ("", "step cache ''"),
        ("none:1", "malformed no values write none"),
        ("deepcache:a", "start whole number 'a' start end interval"),
        ("deepcache:1,2,3,4", "at most 3 values start end interval"),
        ("deepcache:5,5,2", "deepcache:5,5,2"),
        ("deepcache:5,9,1", "never reuses a step"),
        ("deepcache:-1,9,2", "never reuses a step"),
        ("magcache:0", "threshold magcache:0.0 above 0"),
        ("magcache:nan", "threshold magcache:nan above 0"),
        ("magcache:.1,0", "magcache:0.1,0 0 steps"),
        ("magcache:.1,2,1", "magcache:0.1,2,1.0 share 1 full"),
        ("magcache:.1,2.5", "most whole number '2.5'"),
        ("magcache,guidance", "step cache 'magcache,guidance' one of them magcache"),
        ("teacache=0.1", "step cache 'teacache=0.1' teacache:0.1"),
        ("teacache:abc", "threshold number 'abc' threshold mode"),
        ("teacache:inf", "threshold teacache:inf above 0"),
        ("teacache:mode=fast", "mode 'fast' plain"),
        ("teacache:.1,threshold=.2", "malformed threshold twice threshold mode"),
        ("teacache:mode=plain,.1", "malformed '.1' needs name threshold mode"),
        ("magcache:size=3", "malformed no field 'size' delta most whole"),
        ("easycache:-1", "easycache:-1.0,10 threshold 0"),
        ("guidance:1", "guidance:1"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(WanjaxError, match=line_with_words(message)):
        cache_rule(text)


def choose(text, name="wan2.1-t2v-14b", steps=50, guided=True, tables=None):
    tables = PUBLISHED[name] if tables is None else tables
    return resolve_rule(cache_rule(text), lambda count: [one_phase(count, guided)], steps, tables, name)


def test_a_rule_is_completed_with_the_checkpoints_settings():
    assert str(choose("magcache")) == "magcache:0.12,2,0.2"
    assert str(choose("magcache:.06")) == "magcache:0.06,2,0.2"
    assert str(choose("magcache", "wan2.1-vace-1.3b")) == "magcache:0.02,3,0.2"
    assert str(choose("teacache")) == "teacache:0.1"
    assert str(choose("teacache:mode=plain")) == "teacache:0.14,mode=plain"
    assert str(choose("auto")) == "magcache:0.12,2,0.2"
    assert str(choose("auto", "hunyuanvideo1.5-720p-t2v")) == "easycache:0.05,10"


@pytest.mark.parametrize(
    ("name", "steps"),
    [("wan2.1-t2v-14b", 1), ("hunyuanvideo1.5-720p-t2v", 8), ("nano", 1), ("nano", 3), ("nano", 4), ("nano", 6)],
)
def test_auto_runs_whole_steps_where_its_cache_does_not_fit(name, steps):
    with pytest.warns(WanjaxWarning, match=line_with_words(f"auto nothing {pluralize(steps, 'step')} whole")):
        assert choose("auto", name, steps) == NONE
    assert choose("auto", "nano", 7) == choose("magcache", "nano", 7)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            "magcache",
            {"name": "hunyuanvideo1.5-720p-t2v"},
            "magcache calibrate",
        ),
        ("teacache:mode=plain", {"name": "nano"}, "table nano teacache:mode=plain"),
        (
            "teacache",
            {"name": "wan2.2-ti2v-5b"},
            "wan2.2-ti2v-5b teacache calibrate",
        ),
        ("deepcache", {"steps": 8}, "deepcache:11,45,4 8 steps 13 steps"),
        ("easycache", {"steps": 11}, "easycache:0.05,10 11 steps 12 steps"),
        ("magcache:.001", {}, "magcache:0.001,2,0.2 50 steps"),
        (
            "magcache:99,99",
            {},
            "magcache:99.0,99,0.2 steps 10 50",
        ),
        *(
            ("magcache", {"name": "nano", "steps": steps}, f"magcache:0.4,6,0.1 1 {steps} least 7 steps cache none")
            for steps in (2, 3)
        ),
        ("guidance", {"steps": 2}, "guidance:5 2 steps 4 steps"),
        ("teacache", {"steps": 5}, "teacache:0.1 5 steps 6 steps"),
        ("guidance", {"guided": False}, "guidance:5 guidance"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_refused(text, arguments, message):
    with pytest.raises(WanjaxError, match=line_with_words(message)):
        choose(text, **arguments)


def test_teacache_with_too_few_steps_is_refused_before_the_run():
    pipe = wanjax.load("nano")
    for steps in (6, 9):
        with pytest.raises(WanjaxError, match=line_with_words(f"teacache:0.063 {steps} steps 10 steps")):
            pipe.settings(cache="teacache", steps=steps)
    conditioning = pipe.encode("a red circle", size=(32, 32), frames=5)
    pipe.denoise(conditioning, cache="teacache", steps=10)  # the weights decide that a step is reused
    with pytest.raises(WanjaxError, match=line_with_words("teacache:0.064 9 steps threshold 0.34")):
        # the check before the run covers only the default threshold
        pipe.denoise(conditioning, cache="teacache:.064", steps=9)


@pytest.mark.parametrize(
    ("options", "words", "other_cause"),
    [
        ({"batch_guidance": True}, "guidance:5 batched leave batch_guidance cache", "dp"),
        ({"mesh_sizes": {"dp": 2, "sp": 2, "tp": 1}}, "guidance:5 dp=2 tp=4 cache", "batch"),
    ],
)
def test_a_guidance_cache_is_refused_where_both_prompts_run_together(options, words, other_cause):
    with pytest.raises(WanjaxError, match=line_with_words(words)) as error:
        check_separate_forwards(GuidanceCacheRule(5), **options)
    assert other_cause not in str(error.value)
    check_separate_forwards(GuidanceCacheRule(5), mesh_sizes={"dp": 1, "tp": 4})
    check_separate_forwards(MagCache(), **options)


TABLES = CacheTables(MagCacheTable((1.0, 0.9), (1.0, 0.8), 0.1, 2, 0.2), TeaCacheTable((1.0, 0.0), 0.1))


def test_tables_are_written_and_read(tmp_path):
    file = tmp_path / "caches.json"
    file.write_text(json.dumps(to_json(TABLES)))
    assert read_tables(file) == TABLES
    assert read_tables(tmp_path / "none.json") == NO_TABLES
    other_tables = tmp_path / "other.json"
    other_tables.write_text(json.dumps(to_json(replace(TABLES, magnitudes=None))))
    assert merge_tables([(None, None), (other_tables, None), (file, None)]) == TABLES
    file.write_text(
        json.dumps(to_json(all_tables := replace(TABLES, image_magnitudes=TABLES.magnitudes, plain=TABLES.changes)))
    )
    assert read_tables(file) == all_tables
    assert merge_tables([(other_tables, None), (file, None)]).image_magnitudes == all_tables.image_magnitudes
    user_tables = tmp_path / "mine.json"
    user_tables.write_text(json.dumps(to_json(CacheTables(TABLES.magnitudes))))
    assert merge_tables([(user_tables, None), (file, None)]) == replace(all_tables, image_magnitudes=None)


def with_tables(**change):
    tables = to_json(TABLES)
    return json.dumps(tables | {"magcache": tables["magcache"] | change})


BAD_TABLES = [
    *(
        (with_tables(**change), words)
        for change, words in [
            ({"prompt": [1.0]}, "table 1 ratio prompt 2 negative step"),
            ({"prompt": [1.0, "a"]}, "entry that is not a finite number"),
            ({"prompt": [1.0, float("nan")]}, "entry that is not a finite number"),
            ({"prompt": [1.0, -0.5]}, "table ratio -0.5 ratios 0"),
            ({"delta": None}, "table step caches"),
            ({"negative": None}, "table step caches"),
        ]
    ),
    *((text, "table step caches") for text in ("{", "[1]", '{"magcache": 3}')),
]


@pytest.mark.parametrize(("text", "words"), BAD_TABLES)
def test_a_bad_table_is_refused(tmp_path, text, words):
    file = tmp_path / "caches.json"
    file.write_text(text)
    with pytest.raises(WanjaxError, match=line_with_words(f"{file} {words}")):
        read_tables(file)


def test_every_table_belongs_to_a_preset():
    for family in FAMILIES:
        if family.tables is not None:
            tables = json.loads(family.tables.read_text(encoding="utf-8"))
            assert {name for kind in ("magcache", "teacache") for name in tables.get(kind, {})} <= {
                preset.name for preset in family.presets
            }
            assert "https://github.com" in tables["source"]


def test_tables_that_the_user_measured_come_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert model_description("wan2.1-t2v-1.3b").model.tables == PUBLISHED["wan2.1-t2v-1.3b"]
    file = measured_file("wan2.1-t2v-1.3b")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(to_json(replace(TABLES, changes=None))))
    tables = model_description("wan2.1-t2v-1.3b").model.tables
    assert tables == replace(PUBLISHED["wan2.1-t2v-1.3b"], magnitudes=TABLES.magnitudes)


@pytest.mark.parametrize("name", ["", "data"])
def test_an_empty_or_relative_data_folder_is_ignored(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", name)
    assert measured_file("nano").is_relative_to(tmp_path)


def test_tables_are_found_by_the_contents_of_the_weights(tmp_path):
    folder = Path(presets()["nano"].source)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    first_key = checkpoint_key(find_checkpoint(copy)[0])
    assert first_key.startswith("copy-")
    assert checkpoint_key(find_checkpoint(copy)[0]) == first_key
    weights = next((copy / "transformer").glob("*.safetensors"))
    weights.touch()
    assert checkpoint_key(find_checkpoint(copy)[0]) == first_key
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    assert checkpoint_key(find_checkpoint(copy)[0]) != first_key


@pytest.mark.parametrize("cache", ["deepcache:2,39,7", "magcache", "guidance"])
def test_a_plan_counts_the_second_experts_first_step(cache):
    """The first step of each expert is full, also where the rule would reuse that step."""
    model = model_description("wan2.2-t2v-a14b")
    settings = replace(model.settings, cache=cache)
    spec = model.model.spec
    first, second = spec.phases(spec.schedule(settings), settings)
    assert first.start == 0 < len(first.steps) == second.start
    assert len(first.steps) + len(second.steps) == settings.steps
    counts = run_counts(abstract_pipeline(replace(model, settings=settings), one_device_partitioner()), settings)
    assert counts["step"] + counts["reusing_step"] == settings.steps
    if cache.startswith("deepcache"):
        reused_by_rule = {i for i in range(2, 39) if (i - 2) % 7}
        assert second.start in reused_by_rule
        assert counts["reusing_step"] == len(reused_by_rule - {second.start})


def test_a_plan_expects_one_reused_step_if_the_weights_decide():
    model = model_description("wan2.1-t2v-14b")
    settings = replace(model.settings, cache="teacache")
    counts = run_counts(abstract_pipeline(replace(model, settings=settings), one_device_partitioner()), settings)
    # one reused step, so that a warm-up compiles both programs
    assert (counts["step"], counts["reusing_step"]) == (49, 1)
