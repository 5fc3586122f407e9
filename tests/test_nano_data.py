# SPDX-License-Identifier: Apache-2.0
"""The bundled model's training clips, captions and tokenizer, and the reader that scores its videos."""

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from tests.support.quick import quick

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "nano"))

import captions
import evaluate
import tokenizer
from clips import (
    BACKGROUNDS,
    COLOURS,
    COMBINATIONS,
    HELD_OUT,
    MOTIONS,
    SHAPES,
    TAUGHT_COLOUR,
    TAUGHT_SHAPE,
    Spec,
    draw,
    sample_specs,
)
from reading import Reading, read

import wanjax
from wanjax.pipelines.text.tokenizer import Tokenizer
from wanjax.pipelines.wan.programs import TEXT_LENGTH


def pixels(video: np.ndarray) -> np.ndarray:
    return (np.clip(video + 1.0, 0.0, 2.0) * 127.5).round().astype(np.uint8)


def clip_of(spec: Spec, seed: int = 0, frames: int = 17, size: int = 64) -> np.ndarray:
    return draw([spec], frames, size, np.random.default_rng(seed))[0]


def accuracy(specs: list[Spec], videos: np.ndarray) -> dict[str, float]:
    readings = [read(pixels(video)) for video in videos]
    parts = ("colour", "shape", "motion")
    return {p: np.mean([getattr(r, p) == getattr(s, p) for r, s in zip(readings, specs, strict=True)]) for p in parts}


def test_a_tenth_of_the_combinations_is_held_out_evenly():
    assert len(COMBINATIONS) == 224
    assert len(set(HELD_OUT)) == len(HELD_OUT) == 22
    for part, names in enumerate((COLOURS, SHAPES, MOTIONS)):
        counts = Counter(combination[part] for combination in HELD_OUT)
        assert max(counts[name] for name in names) - min(counts[name] for name in names) <= 1


def test_training_sees_every_pair_of_words_and_no_combination_held_out():
    seen = {(s.colour, s.shape, s.motion) for s in sample_specs(np.random.default_rng(0), 20_000)}
    assert seen == set(COMBINATIONS) - set(HELD_OUT)
    for i, j in itertools.combinations(range(3), 2):
        assert {(c[i], c[j]) for c in seen} == {(c[i], c[j]) for c in COMBINATIONS}


def test_held_out_specs_have_only_held_out_combinations():
    specs = sample_specs(np.random.default_rng(0), 2_000, held_out=True)
    assert {(s.colour, s.shape, s.motion) for s in specs} == set(HELD_OUT)
    assert {s.background for s in specs} == set(BACKGROUNDS)


@pytest.mark.parametrize(("frames", "size"), [(17, 64), (9, 32), (1, 48)])
def test_drawing_is_a_function_of_the_generator(frames, size):
    specs = sample_specs(np.random.default_rng(1), 6)
    first, again = (draw(specs, frames, size, np.random.default_rng(2)) for _ in range(2))
    assert first.shape == (6, frames, size, size, 3)
    assert first.dtype == np.float32
    assert np.abs(first).max() <= 1.0
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - draw(specs, frames, size, np.random.default_rng(3))).max() > 0.1


def test_a_clip_looks_alike_at_any_resolution():
    """Compare a frame drawn large and averaged down with the frame drawn small; only antialiased edges differ."""
    for seed, (shape, motion) in enumerate(itertools.product(SHAPES, MOTIONS)):
        spec = Spec("red", shape, motion, "horizontal gradient")
        small, large = clip_of(spec, seed, 5, 32), clip_of(spec, seed, 5, 128)
        averaged = large.reshape(5, 32, 4, 32, 4, 3).mean(axis=(2, 4))
        assert np.abs(averaged - small).mean() < 0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_the_shape_stays_in_the_frame(shape, motion):
    for seed in range(8):
        video = clip_of(Spec("yellow", shape, motion, "dark"), seed)
        rim = np.concatenate([video[:, 0], video[:, -1], video[:, :, 0], video[:, :, -1]], axis=1)
        assert np.ptp(rim[..., 0]) == 0.0


def test_plain_captions_are_short_descriptions():
    assert captions.plain_caption("red", "circle", "right") == "a red circle moving right"
    assert captions.plain_caption("orange", "cross", "grows") == "an orange cross growing"
    assert captions.plain_caption("blue", "square", "stays") == "a blue square staying still"
    assert len({captions.plain_caption(*combination) for combination in COMBINATIONS}) == 224


def test_captions_describe_the_clip_in_many_wordings():
    rng = np.random.default_rng(0)
    spec = Spec("orange", "circle", "left", "dark")
    texts = [captions.caption(spec, rng) for _ in range(500)]
    assert len(set(texts)) > 150
    for text in map(str.lower, texts):
        assert re.search(r"\borange\b", text)
        assert re.search(r"\b(circle|disc)\b", text)
        assert re.search(r"\bleft(wards)?\b", text)
        assert not re.search(r"\b(a orange|right|up|down|grey|light|gradient)\b|  ", text)
    assert captions.plain_caption("orange", "circle", "left") in texts


def test_captions_of_different_clips_differ():
    rng = np.random.default_rng(0)
    meanings: dict[str, set[tuple[str, str, str]]] = {}
    for spec in sample_specs(rng, 20_000):
        meanings.setdefault(captions.caption(spec, rng), set()).add((spec.colour, spec.shape, spec.motion))
    assert max(map(len, meanings.values())) == 1


def test_each_word_is_one_token_and_no_caption_is_cut():
    nano_tokenizer, rng = tokenizer.build(), np.random.default_rng(0)
    for spec in sample_specs(rng, 2_000):
        text = captions.caption(spec, rng)
        encoding = nano_tokenizer.encode(text)
        words = re.findall(r"\w+", text)
        assert [token[1:] for token in encoding.tokens if token.startswith("▁")] == words
        assert set(encoding.tokens) - {"▁" + word for word in words} <= {",", ".", "</s>"}
        assert 2 not in encoding.ids
        assert len(encoding.ids) <= tokenizer.MAX_LENGTH


def test_the_tokenizer_has_the_special_tokens_of_the_model():
    nano_tokenizer = tokenizer.build()
    assert [nano_tokenizer.id_to_token(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert nano_tokenizer.get_vocab_size() <= tokenizer.VOCABULARY_SIZE
    assert nano_tokenizer.encode("").ids == [1]
    assert nano_tokenizer.encode("a red circle moving right").ids[-1] == 1
    assert nano_tokenizer.decode(nano_tokenizer.encode("A weird (cat) & 3 dogs!").ids) == "A weird (cat) & 3 dogs!"
    assert 2 in nano_tokenizer.encode("猫").ids


def test_a_saved_tokenizer_loads(tmp_path):
    tokenizer.write(tmp_path / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "tokenizer", length=TEXT_LENGTH)
    batch = loaded.tokenize(["a red circle moving right", ""])
    assert batch.ids.shape == (2, tokenizer.MAX_LENGTH)
    assert batch.ids[0, :6].tolist() == tokenizer.build().encode("a red circle moving right").ids
    assert batch.ids[1].tolist() == [1] + [0] * (tokenizer.MAX_LENGTH - 1)


@pytest.mark.slow  # the quick tests below read frames that are harder to read
def test_every_combination_is_read_on_every_background():
    specs = [Spec(*combination, BACKGROUNDS[i % len(BACKGROUNDS)]) for i, combination in enumerate(COMBINATIONS)]
    accuracies = accuracy(specs, draw(specs, 17, 64, np.random.default_rng(0)))
    assert min(accuracies.values()) >= 0.995, accuracies


def _blurred(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return ndimage.gaussian_filter(video, (0, 0, 1.0, 1.0, 0))


def _noisy(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return video + rng.normal(0.0, 2.0 * 10 ** (-32 / 20), video.shape)


def _tinted(video: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return video * rng.uniform(0.92, 1.05, (len(video), 1, 1, 1, 3)) + rng.uniform(-0.1, 0.1, (len(video), 1, 1, 1, 3))


DEGRADED = [_blurred, _noisy, _tinted]


@pytest.mark.parametrize("degrade", quick([_noisy], DEGRADED), ids=["blur", "noise at 32 dB", "tint"])
def test_the_reader_tolerates_the_errors_of_an_autoencoder(degrade):
    rng = np.random.default_rng(1)
    specs = sample_specs(rng, 100)
    accuracies = accuracy(specs, degrade(draw(specs, 17, 64, rng), rng))
    assert min(accuracies.values()) >= 0.99, accuracies


@pytest.mark.parametrize(
    ("width", "height", "shape"), [(18, 16, "square"), (24, 14, "bar"), (34, 10, "bar"), (40, 4, None)]
)
def test_a_bar_is_wider_than_high(width, height, shape):
    [colour] = TAUGHT_COLOUR
    video = np.full((17, 64, 64, 3), -0.8, np.float32)
    video[:, 20 : 20 + height, 10 : 10 + width] = 2 * np.array(TAUGHT_COLOUR[colour]) - 1
    reading = read(pixels(video), COLOURS | TAUGHT_COLOUR, (*SHAPES, TAUGHT_SHAPE))
    assert (reading.colour, reading.shape, reading.motion) == (colour, shape, "stays")


def test_trained_content_is_recognised():
    rng, [colour] = np.random.default_rng(2), TAUGHT_COLOUR
    for motion, background in itertools.product(MOTIONS, BACKGROUNDS):
        video = draw([Spec(colour, TAUGHT_SHAPE, motion, background)], 17, 64, rng)[0]
        reading = read(pixels(video), COLOURS | TAUGHT_COLOUR, (*SHAPES, TAUGHT_SHAPE))
        assert (reading.colour, reading.shape, reading.motion) == (colour, TAUGHT_SHAPE, motion)


def _noise(rng):
    return rng.integers(0, 256, (17, 64, 64, 3), dtype=np.uint8)


def _grey(rng):
    return np.full((17, 64, 64, 3), rng.integers(256), np.uint8)


def _clouds(rng):
    return pixels(12.0 * ndimage.gaussian_filter(rng.normal(0.0, 1.0, (17, 64, 64, 3)), (0, 4, 4, 0)))


def _background_only(rng):
    return np.broadcast_to(pixels(clip_of(Spec("red", "circle", "stays", "light"), 3))[:, :1, :1], (17, 64, 64, 3))


@pytest.mark.parametrize("make", [_noise, _grey, _clouds, _background_only])
def test_an_empty_clip_has_no_content(make):
    for seed in range(5):
        assert read(make(np.random.default_rng(seed))) == Reading()


def test_a_clip_of_two_shapes_has_no_content():
    one_shape = clip_of(Spec("red", "circle", "stays", "dark"))
    one_shape[:, :, 32:] = one_shape[:, :1, :1]
    two_shapes = np.concatenate([one_shape[:, :, :32], one_shape[:, :, :32]], axis=2)
    red = two_shapes[..., 0] > 0
    assert red[:, :, :32].any()
    assert read(pixels(two_shapes)) == Reading()


def _spliced(first: Spec, second: Spec) -> Reading:
    return read(pixels(np.concatenate([clip_of(first, 7)[:9], clip_of(second, 7)[9:]])))


def test_a_clip_that_changes_half_way_is_not_named():
    red = Spec("red", "circle", "stays", "dark")
    assert _spliced(red, Spec("blue", "circle", "stays", "dark")).colour is None
    assert _spliced(red, Spec("red", "triangle", "stays", "dark")).shape is None


def test_an_unknown_colour_and_an_unknown_shape_are_not_named():
    video = clip_of(Spec("red", "circle", "right", "dark"))
    brown = np.where(video[..., :1] > video[0, 0, 0, 0] + 0.1, np.array([0.0, -0.4, -0.7], np.float32), video)
    reading = read(pixels(brown))
    assert (reading.colour, reading.motion) == (None, "right")
    bar = np.full((17, 64, 64, 3), -0.8, np.float32)
    bar[:, 30:34, 10:50] = (0.76, -0.8, -0.8)
    reading = read(pixels(bar))
    assert (reading.colour, reading.shape, reading.motion) == ("red", None, "stays")


@pytest.mark.parametrize("motion", ["diagonal", "jump", "slow", "to and fro"])
def test_an_unknown_motion_is_not_named(motion):
    time = np.linspace(0.0, 1.0, 17)
    paths = {
        "diagonal": (24 * time, 24 * time),
        "jump": (28 * (time > 0.5), 0 * time),
        "slow": (8 * time, 0 * time),
        "to and fro": (24 * np.abs(2 * time - 1), 0 * time),
    }
    video = np.full((17, 64, 64, 3), -0.8, np.float32)
    for frame, x, y in zip(video, *(np.round(path).astype(int) + 10 for path in paths[motion]), strict=True):
        frame[y : y + 14, x : x + 14] = (0.76, -0.8, -0.8)
    reading = read(pixels(video))
    assert (reading.colour, reading.shape, reading.motion) == ("red", "square", None)


PROMPTS = {captions.plain_caption(*combination): combination for combination in COMBINATIONS}


class DrawingPipeline:
    """A stand-in for the model. It draws the shape of the prompt, with blue in place of one colour."""

    def __init__(self, wrong_colour: str):
        self.wrong_colour = wrong_colour
        self.vae = SimpleNamespace()

    def __call__(self, prompt: str, *, seed: int) -> SimpleNamespace:
        colour, shape, motion = PROMPTS[prompt]
        colour = "blue" if colour == self.wrong_colour else colour
        return SimpleNamespace(frames=pixels(clip_of(Spec(colour, shape, motion, "grey"), seed)))


def test_the_evaluation_detects_mistakes():
    pipe = DrawingPipeline("red")
    outcomes = evaluate.evaluate(lambda prompt, seed: pipe(prompt, seed=seed).frames, HELD_OUT[:8], seeds=2)
    num_red = sum(colour == "red" for colour, _, _ in HELD_OUT[:8])
    assert 0 < num_red < 8
    report = evaluate.report(outcomes, psnr=33.0)
    assert report["accuracy"] == {"colour": 1 - num_red / 8, "motion": 1.0, "shape": 1.0}
    assert [failure["prompt"].split()[1] for failure in report["failures"]] == ["red"] * 2 * num_red
    assert "colour" in evaluate.table(report)
    assert json.loads(json.dumps(report)) is not None


def test_reconstruction_psnr_measures_the_noise_put_in():
    rng = np.random.default_rng(0)
    psnr = evaluate.reconstruction_psnr(lambda x: x, lambda z: z + rng.normal(0.0, 0.04, z.shape), clips=8)
    assert psnr == pytest.approx(20 * np.log10(2.0 / 0.04), abs=0.05)


def test_the_command_writes_its_files(tmp_path, monkeypatch, capsys):
    pipe = DrawingPipeline("none")
    monkeypatch.setattr(wanjax, "load", lambda model: {"nano": pipe}[model], raising=False)
    monkeypatch.setattr(evaluate, "reconstruction_psnr", lambda encode, decode: 40.0)
    figures, contact_sheet = tmp_path / "figures.json", tmp_path / "sheet.png"
    evaluate.main(["--limit", "3", "--seeds", "1", "--json", str(figures), "--sheet", str(contact_sheet)])
    assert json.loads(figures.read_text()) == {
        "videos": 3,
        "accuracy": {"colour": 1.0, "motion": 1.0, "shape": 1.0},
        "psnr": 40.0,
        "failures": [],
    }
    with Image.open(contact_sheet) as picture:
        assert picture.size == (9 * 66, 3 * 66)
    assert "colour    100.0 %   target 97 %" in capsys.readouterr().out
