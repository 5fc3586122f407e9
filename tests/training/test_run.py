# SPDX-License-Identifier: Apache-2.0
"""Trainings of every family, of a LoRA or of all weights, write files that load, also if stopped and resumed."""

import json
import os
import shutil
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from PIL import Image

import wanjax
from tests.support.clips import write_clips
from tests.support.quick import quick
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_experts_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_image_checkpoint,
)
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints.files import SafetensorsFile, load_safetensors
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.stores.locks import FileLock
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training
from wanjax.training.latent_cache import LatentCache
from wanjax.training.loop import STATES_FOLDER, NotFiniteError, Trainer
from wanjax.training.objective import NoiseLevels
from wanjax.training.step_metrics import TENSORBOARD_FOLDER
from wanjax.training.train import LOCK

pytestmark = pytest.mark.usefixtures("cached_programs")

slow = pytest.mark.slow
MODELS = {
    "wan": tiny_checkpoint,
    "wan-i2v": tiny_image_checkpoint,
    "cogvideox": tiny_cogvideox_checkpoint,
    "hunyuanvideo": tiny_hunyuan_checkpoint,
}
LORA = LoraConfig(rank=2)
SMALL = TrainConfig(
    steps=3,
    batch_size=2,
    size=(32, 32),
    frames=5,
    buckets=False,
    lora=LORA,
    save_every=2,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data"), 4)


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("wan"))


def train(model, data, out, **changes):
    messages = []
    config = TrainConfig(**{**vars(SMALL), **changes})
    path = Training(wanjax.load(model), data, out, config, note=messages.append).run()
    return path, messages


RESUMABLE_SETTINGS = {
    "lora": LoraConfig(rank=2, dropout=0.2),
    "save_every": 1,
}  # a training with these can resume at any step


@pytest.fixture(scope="module")
def expected_factors(tmp_path_factory, data, wan):
    """Return the LoRA factors of an uninterrupted training."""
    return load_safetensors(train(wan, data, tmp_path_factory.mktemp("whole"), **RESUMABLE_SETTINGS)[0])


def transformer_weights(pipe):
    return {name: np.asarray(x) for name, x in nnx.to_flat_state(nnx.state(pipe.components.get("transformer")))}


def test_a_training_can_resume_after_its_clips_are_encoded(tmp_path, data, wan):
    """After the clips are encoded, the next run resumes; before, it starts again."""
    training = Training(wanjax.load(wan), data, tmp_path / "out", replace(SMALL, latent_cache=tmp_path / "encoded"))
    assert not training.has_saved_work()
    training.encode()
    assert training.has_saved_work()
    shutil.rmtree(tmp_path / "encoded")
    assert not training.has_saved_work()
    (tmp_path / "out" / STATES_FOLDER / "2").mkdir(parents=True)
    assert training.has_saved_work()


@pytest.mark.parametrize("family", ["wan", *(pytest.param(name, marks=slow) for name in list(MODELS)[1:])])
def test_a_lora_of_every_family_is_merged_as_it_was_trained(family, tmp_path, data):
    model = MODELS[family](tmp_path / "model")
    file, messages = train(model, data, tmp_path / "out", lora_format="comfy" if family == "wan-i2v" else "diffusers")
    assert any("clips: 4 of 32x32, 5 frames" in sentence for sentence in messages)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(np.isfinite(line["loss"]) and line["gradient"] > 0 for line in lines)
    notes = []
    merged = wanjax.load(model, lora=str(file), note=notes.append)
    changed = transformer_weights(merged)
    base = transformer_weights(wanjax.load(model))
    assert " of " in notes[0]
    assert "rest" not in notes[0]
    different = [name for name in base if not np.array_equal(base[name], changed[name])]
    assert different
    assert all(name[-1] == "kernel" for name in different)


@slow
def test_the_written_lora_equals_the_trained_network(tmp_path, data, wan):
    """The network with the merged LoRA predicts the same as the trained network with its factors."""
    file, _ = train(wan, data, tmp_path / "out")
    training = Training(wanjax.load(wan), data, tmp_path / "out", SMALL)
    training.encode()
    training.begin("transformer")
    assert training.trainer.step == 3
    adapted = wanjax.load(wan)
    adapted.components.override("transformer", training.trainer.network())
    merged = wanjax.load(wan, lora=str(file), note=lambda text: None)
    options = {"size": (32, 32), "frames": 5, "steps": 2, "guidance_scale": 1.0, "seed": 0}
    adapted_latents, merged_latents = (
        np.asarray(p.denoise(p.encode("a red circle", **options), **options)) for p in (adapted, merged)
    )
    base_pipe = wanjax.load(wan)
    base = np.asarray(base_pipe.denoise(base_pipe.encode("a red circle", **options), **options))
    assert np.abs(adapted_latents - base).max() > 1e-3
    assert np.abs(adapted_latents - merged_latents).max() <= 2e-5 * max(1, np.abs(merged_latents).max())
    assert "lora_adapter_metadata" in SafetensorsFile(file).metadata


def test_files_of_equal_names_and_times_are_different_clips(tmp_path, wan):
    for folder, value in (("one", 40), ("two", 200)):
        (tmp_path / "data" / folder).mkdir(parents=True)
        file = tmp_path / "data" / folder / "001.bmp"
        Image.fromarray(np.full((32, 32, 3), value, np.uint8)).save(file)
        os.utime(file, ns=(10**18, 10**18))
    rows = [{"file_name": f"{folder}/001.bmp", "text": "a"} for folder in ("one", "two")]
    (tmp_path / "data/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names_of_latents = []
    for value in (40, 100):
        Image.fromarray(np.full((32, 32, 3), value, np.uint8)).save(file := tmp_path / "data/one/001.bmp")
        os.utime(file, ns=(10**18, 10**18))
        training = Training(wanjax.load(wan), tmp_path / "data", tmp_path / "out", SMALL)
        training.encode()
        names_of_latents.append({piece.latents.name for piece in training.train_clips})
    assert [len(names) for names in names_of_latents] == [2, 2]
    assert len(names_of_latents[0] & names_of_latents[1]) == 1


@slow  # `test_optimisers_of_several_parts_train_all_weights` is quick
def test_a_full_training_ends_in_a_checkpoint(tmp_path, data, wan):
    folder, _ = train(wan, data, tmp_path / "out", lora=None)
    before, after = transformer_weights(wanjax.load(wan)), transformer_weights(wanjax.load(folder))
    assert before.keys() == after.keys()
    assert sum(not np.array_equal(before[name], after[name]) for name in before) > len(before) / 2
    wanjax.load(folder)("a red circle", size=(32, 32), frames=5, steps=1)


@slow  # the next tests are quick: an interrupted training, and a training with NaN that resumes with the same result
def test_a_stopped_training_ends_with_the_same_weights(tmp_path, data, wan, expected_factors):
    def stop(unit, done, total):
        if (unit, done) == ("step", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(
            wanjax.load(wan),
            data,
            tmp_path / "b",
            TrainConfig(**vars(SMALL) | RESUMABLE_SETTINGS),
            report_progress=stop,
        ).run()
    lora_file, messages = train(wan, data, tmp_path / "b", **RESUMABLE_SETTINGS)
    assert any(
        has_line_with_words(text, "resuming after 2 of 3 steps") for text in messages
    )  # only the last step remains
    resumed = load_safetensors(lora_file)
    assert all(np.array_equal(expected_factors[name], resumed[name]) for name in resumed)
    with pytest.raises(WanjaxError, match=line_with_words("seed 0 1")):
        train(wan, data, tmp_path / "b", **RESUMABLE_SETTINGS, seed=1)


def test_an_interrupted_training_writes_the_metrics_of_all_saved_steps(tmp_path, data, wan):
    def interrupt(unit, done, total):
        if (unit, done) == ("step", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(wanjax.load(wan), data, tmp_path, replace(SMALL, save_every=9), report_progress=interrupt).run()
    last_step = max(int(x.name) for x in (tmp_path / "checkpoints").iterdir())
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [*range(1, last_step + 1)]


def all_finite(folder):
    """Return whether all numbers in all files of a training are finite."""
    assert not list(folder.rglob("*tmp*"))  # no partial file
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    arrays = [np.array(list(line.values())) for line in lines]
    for file in folder.rglob("*.safetensors"):
        arrays += load_safetensors(file).values()
    for state in (folder / "checkpoints").iterdir():
        restored = ocp.StandardCheckpointer().restore(state / "default")
        arrays += [np.asarray(x) for x in jax.tree.leaves(restored)]
    return all(np.isfinite(x).all() for x in arrays)


def draw_nan_at(nan_step):
    """Return a function that draws batches, with NaN in the batch of one step."""

    def draw(training, step, generator):
        batch = DRAW(training, step, generator)
        return batch._replace(latents=batch.latents * np.float32(np.nan if step + 1 == nan_step else 1))

    return draw


DRAW, LENGTH = Training._draw_batch, 20


@pytest.mark.parametrize("nan_step", [2, *(pytest.param(n, marks=slow) for n in range(1, LENGTH + 1) if n != 2)])
def test_numbers_that_are_not_finite_are_never_written(nan_step, tmp_path, data, wan, expected_factors, monkeypatch):
    """The training resumes from the last finite state, at a lower rate or, with the same result, at the same rate."""
    options = RESUMABLE_SETTINGS if nan_step == 2 else {"save_every": 1, "steps": LENGTH, "ema_decay": 0.9}
    monkeypatch.setattr(Training, "_draw_batch", draw_nan_at(nan_step))
    with pytest.raises(NotFiniteError, match=line_with_words(f"step {nan_step}")):
        train(wan, data, tmp_path / "out", **options)
    assert all_finite(tmp_path / "out")
    assert sorted(int(x.name) for x in (tmp_path / "out/checkpoints").iterdir()) == [
        *range(max(1, nan_step - 2), nan_step)
    ]
    monkeypatch.setattr(Training, "_draw_batch", DRAW)
    shutil.copytree(tmp_path / "out", tmp_path / "lower")
    lower_rate, messages = train(
        wan, data, tmp_path / "lower", **options, optimizer=OptimizerConfig(learning_rate=1e-3)
    )
    assert nan_step == 1 or any(has_line_with_words(text, f"0.01 0.001 step {nan_step}") for text in messages)
    assert all_finite(tmp_path / "lower")
    same_rate = load_safetensors(train(wan, data, tmp_path / "out", **options)[0])
    expected = (
        expected_factors if nan_step == 2 else load_safetensors(train(wan, data, tmp_path / "whole", **options)[0])
    )
    assert all(np.array_equal(same_rate[name], x) for name, x in expected.items())
    assert any(not np.array_equal(x, expected[name]) for name, x in load_safetensors(lower_rate).items())


@slow
@pytest.mark.parametrize("rate", [1e30, 3e38])
def test_a_training_recovers_from_a_far_too_high_rate(rate, tmp_path, data, wan):
    """The weights after step 1 are not finite or too large. A training at a lower rate ignores them."""
    config = {"save_every": 1, "steps": 3}
    for _ in range(2):
        with pytest.raises(NotFiniteError, match=line_with_words("step rate")):
            train(wan, data, tmp_path, **config, optimizer=OptimizerConfig(learning_rate=rate))
        assert all_finite(tmp_path)
        assert not (tmp_path / "lora.safetensors").exists()
    train(wan, data, tmp_path, **config)
    assert all_finite(tmp_path)


def test_each_differing_entry_is_reported(tmp_path):
    long_text = "x" * 200
    first, second = ({"c": f"{long_text}{word}", "d": [*range(n)]} for word, n in (("one", 3), ("two", 2)))
    Trainer._check_and_save_identity(SimpleNamespace(folder=tmp_path, step=2), {"a": 1, "b": first, "steps": 2})
    with pytest.raises(WanjaxError, match=line_with_words("a none 1 e 7 b.c b.d differ")) as refused:
        Trainer._check_and_save_identity(
            SimpleNamespace(folder=tmp_path, step=2), {"a": None, "b": second, "steps": 2, "e": 7}
        )
    assert all(f"x{word}'" in str(refused.value) for word in ("one", "two"))
    assert len(str(refused.value)) < 500 + len(str(tmp_path))


def test_a_run_without_a_saved_step_may_get_other_settings(tmp_path):
    trainer = SimpleNamespace(folder=tmp_path, step=0)
    Trainer._check_and_save_identity(trainer, {"lora": {"rank": 10**5}, "steps": 2})
    Trainer._check_and_save_identity(trainer, {"lora": {"rank": 8}, "steps": 2})
    assert json.loads((tmp_path / "training.json").read_text())["lora"] == {"rank": 8}
    (tmp_path / "training.json").write_text('{"rank": 8}')  # by another program
    with pytest.raises(WanjaxError, match="another training run"):
        Trainer._check_and_save_identity(trainer, {"lora": {"rank": 8}, "steps": 2})


@pytest.mark.parametrize(("step", "is_allowed"), [(0, True), (1, True), (2, False)])
def test_remaining_steps_may_have_another_learning_rate(step, is_allowed, tmp_path):
    advice = "rate 0.001 0.0001 also give more steps"
    for rate in (1e-3, 1e-4):
        identity = {"optimizer": {"learning_rate": rate}, "steps": 2}
        with nullcontext() if is_allowed or rate == 1e-3 else pytest.raises(WanjaxError, match=line_with_words(advice)):
            changed = Trainer._check_and_save_identity(SimpleNamespace(folder=tmp_path, step=step), identity)
            assert changed == ({} if rate == 1e-3 else {"optimizer.learning_rate": 1e-3})


@slow
def test_a_finished_training_continues_with_more_steps(tmp_path, data, wan):
    """With a constant rate, the result equals that of a training with all the steps from the start."""
    out = tmp_path / "out"
    train(wan, data, out)
    continued_file, messages = train(wan, data, out, steps=5)
    assert any(has_line_with_words(text, "3 steps 5 constant rate 0.01 step 4") for text in messages)
    uninterrupted, _ = train(wan, data, tmp_path / "whole", steps=5)
    continued_factors, expected = load_safetensors(continued_file), load_safetensors(uninterrupted)
    assert all(np.array_equal(continued_factors[name], expected[name]) for name in expected)
    with pytest.raises(WanjaxError, match=line_with_words("steps 5 4")):
        train(wan, data, out, steps=4)


def test_two_experts_are_trained_at_their_noise_levels(tmp_path, data):
    model = tiny_experts_checkpoint(tmp_path / "model")
    pipe = wanjax.load(model)
    training = Training(pipe, data, tmp_path / "out", TrainConfig(**vars(SMALL) | {"steps": 1}))
    assert [(x.low, x.high) for x in training.noise_levels.values()] == [(0.875, 1.0), (0.0, 0.875)]
    folder = training.run()
    files = [folder / name / "lora.safetensors" for name in ("transformer", "transformer_2")]
    high, low = (load_safetensors(file).keys() for file in files)
    # diffusers reads this prefix for both experts
    assert all(name.startswith("transformer.") for name in (*high, *low))
    loras = [f"{expert}={file}" for expert, file in zip(("high", "low"), files, strict=True)]
    assert wanjax.load(model, lora=loras, note=lambda text: None).components.get("transformer_2")
    one_expert = Training(pipe, data, tmp_path / "low", replace(SMALL, expert="low"))
    assert [(x.low, x.high) for x in one_expert.noise_levels.values()] == [(0.0, 0.875)]


@slow  # the test before it is quick, and trains both experts
def test_one_of_two_experts_is_trained(tmp_path, data):
    model = tiny_experts_checkpoint(tmp_path / "model")
    low_noise_lora, _ = train(model, data, tmp_path / "low", expert="low", steps=1)
    wanjax.load(model, lora=f"low={low_noise_lora}", note=lambda text: None).components.get("transformer_2")


@slow
def test_validation_losses_and_samples_are_written(tmp_path, data, wan):
    messages = train(
        wan,
        data,
        tmp_path / "out",
        holdout_every=2,
        validation_every=2,
        sample_every=2,
        sample_prompts=("a cat",),
        steps=2,
    )[1]
    validation_lines = [line for line in messages if "validation loss" in line]
    assert len(validation_lines) == 2
    assert sorted(path.name for path in (tmp_path / "out/samples").iterdir()) == ["000000-0.mp4", "000002-0.mp4"]


def test_clips_are_encoded_once_and_damaged_ones_are_skipped(tmp_path, wan, monkeypatch):
    folder = write_clips(tmp_path / "data", 3)
    (folder / "cannot be written.mp4").write_bytes(b"no film")  # the error contains this name
    (folder / "cannot be written.txt").write_text("bad")
    messages: list[str] = []
    Training(wanjax.load(wan), folder, tmp_path / "one", SMALL, note=messages.append).encode()
    assert any("1 skipped: cannot be written.mp4: " in sentence for sentence in messages)
    encoded_clips = {path: path.stat().st_mtime_ns for path in (folder / ".wanjax").glob("clip-*")}
    assert len(encoded_clips) == 3
    pipe = wanjax.load(wan)
    Training(pipe, folder, tmp_path / "two", TrainConfig(**vars(SMALL) | {"steps": 1})).encode()
    assert {path: path.stat().st_mtime_ns for path in (folder / ".wanjax").glob("clip-*")} == encoded_clips
    assert not pipe.components.has("vae")
    for path in folder.glob("*.gif"):
        path.write_bytes(b"")
    monkeypatch.delattr(LatentCache, "encode_captions")  # the error comes before the text encoder is loaded
    with pytest.raises(WanjaxError, match=r"no clip of .* can be used"):
        Training(wanjax.load(wan), folder, tmp_path / "three", SMALL).encode()


def test_all_skipped_clips_are_listed(tmp_path, wan):
    folder = write_clips(tmp_path / "data", 1)
    for number in range(7):
        (folder / f"bad {number}.mp4").write_bytes(b"no film")
        (folder / f"bad {number}.txt").write_text("bad")
    messages: list[str] = []
    Training(wanjax.load(wan), folder, out := tmp_path / "out", SMALL, note=messages.append).encode()
    assert any(has_line_with_words(sentence, "7 skipped 2 more left_out.txt") for sentence in messages)
    assert [line.partition(":")[0] for line in (out / "left_out.txt").read_text().splitlines()] == [
        f"bad {number}.mp4" for number in range(7)
    ]
    for file in folder.glob("bad*"):
        file.unlink()
    Training(wanjax.load(wan), folder, out, SMALL).encode()
    assert not (out / "left_out.txt").exists()


def test_a_truncated_caption_is_reported(tmp_path, wan):
    """One warning names the clips and their number, also if the captions are already encoded."""
    folder = write_clips(tmp_path / "data", 3)
    for name in ("0.txt", "2.txt"):
        (folder / name).write_text("a cat and a dog " * 40 + "by the sea")
    for _ in range(2):
        with pytest.warns(WanjaxWarning) as caught:
            Training(wanjax.load(wan), folder, tmp_path / "out", SMALL).encode()
        assert [has_line_with_words(str(entry.message), "2 captions 0.gif 2.gif 24") for entry in caught] == [True]
    assert len((tmp_path / "out/cut_captions.txt").read_text().splitlines()) == 2


def test_samples_have_the_shape_of_a_moving_clip(tmp_path, wan):
    folder = write_clips(tmp_path / "data", 2)
    for suffix in (".png", ".txt"):  # the picture comes before the clips
        file = write_clips(tmp_path / "still", 1, frames=1, suffix=".png") / f"0{suffix}"
        file.rename(folder / f"00 first{suffix}")
    training = Training(wanjax.load(wan), folder, tmp_path / "out", SMALL)
    training.encode()
    assert training.train_clips[0].bucket.frames == 1
    assert training.sample_clip.bucket.frames == 5


@contextmanager
def lock_folder(out, patch):
    with closing(FileLock(out / LOCK, "training", "folder")):
        yield


@contextmanager
def fill_disk(out, patch):
    def raise_no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    patch.setattr("os.fsync", raise_no_space)
    yield


@contextmanager
def block_tensorboard(out, patch):
    (out / TENSORBOARD_FOLDER).write_text("a file where the folder is to be")
    yield


def no_obstacle(out, patch):
    return nullcontext()


REFUSED = {  # an obstacle, changes of SMALL, and words of the message
    "an unknown layer": (no_obstacle, {"lora": LoraConfig(rank=2, targets=("to_x",))}, "layer to_x"),
    "parts of a batch": (no_obstacle, {"batch_size": 3, "grad_accum_steps": 2}, "grad_accum_steps 2 batch_size 3"),
    "no steps": (no_obstacle, {"steps": 0}, "steps 0"),
    "all clips held out": (no_obstacle, {"holdout_every": 1}, "holdout_every 1 2 or more"),
    "an expert of one network": (no_obstacle, {"expert": "high"}, "one network"),
    "clips that are too short": (no_obstacle, {"min_frames": 9}, "9 5"),
    "a folder of another training": (lock_folder, {}, "training folder"),
    "a full disk": (fill_disk, {}, "No space left on device"),
    "curves that cannot be written": (block_tensorboard, {}, "tensorboard written"),
}


@pytest.mark.parametrize(("obstacle", "changes", "words"), REFUSED.values(), ids=REFUSED)
def test_untrainable_settings_are_reported(obstacle, changes, words, tmp_path, data, wan, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    with obstacle(out, monkeypatch), pytest.raises(WanjaxError, match=line_with_words(words)):
        train(wan, data, out, latent_cache=tmp_path / "store", **changes)


def test_training_all_weights_needs_a_checkpoint(tmp_path, data, wan):
    pipe = wanjax.load(wan)
    pipe.components.source = None
    with pytest.raises(WanjaxError, match="checkpoint"):
        Training(pipe, data, tmp_path / "full", replace(SMALL, lora=None))


def write_preserved_clips(folder, values):
    rows = [{"file": f"{i}.gif", "text": "a cat", "preserve": value} for i, value in enumerate(values)]
    (write_clips(folder, len(values)) / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def first_loss(wan, data, out, preservation):
    train(wan, data, out, steps=1, caption_dropout=1.0, uncaptioned_preservation=preservation)
    return json.loads((out / "metrics.jsonl").read_text())["loss"]


@slow  # the next test is quick
def test_half_of_an_error_has_a_quarter_of_the_loss(tmp_path, wan):
    mixed = write_preserved_clips(tmp_path / "mixed", (0, 1))
    full_loss, half_loss = (first_loss(wan, mixed, tmp_path / f"{x}", x) for x in (0.0, 0.5))
    assert full_loss == pytest.approx(4 * half_loss, rel=1e-3)


def test_preserved_clips_keep_the_model_unchanged(tmp_path, wan):
    """At the first step, preserved clips have almost no loss."""
    preserved, mixed = (
        write_preserved_clips(tmp_path / name, x) for name, x in {"preserved": (1, 1), "mixed": (0, 1)}.items()
    )
    full_loss, no_loss = (first_loss(wan, data, tmp_path / f"{data.name} out", 0.0) for data in (mixed, preserved))
    assert no_loss < 1e-9 < 1e-2 < full_loss
    with pytest.raises(WanjaxError, match=line_with_words("LoRA --full")):
        train(wan, preserved, tmp_path / "full", lora=None)


@pytest.mark.parametrize(("name", "value"), [("beta1", 1.0), ("beta2", -0.1), ("beta2", float("nan"))])
def test_invalid_betas_of_an_optimiser_are_refused(name, value):
    """With 1, the first step would divide by zero."""
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} {value}")):
        OptimizerConfig(**{name: value})


@pytest.mark.parametrize("name", quick(["muon"], ["muon", "adafactor"]))
def test_optimisers_of_several_parts_train_all_weights(name, tmp_path, data, wan):
    """Muon trains the matrices and Adam all other weights, so that each part of the state lacks some weights."""
    trained_model, _ = train(wan, data, tmp_path / "out", lora=None, steps=1, optimizer=OptimizerConfig(name, 1e-2))
    before, after = (transformer_weights(wanjax.load(model)) for model in (wan, trained_model))
    unchanged = [".".join(map(str, path)) for path in before if np.array_equal(before[path], after[path])]
    assert len(unchanged) < len(before) / 4, unchanged


@slow
def test_a_training_accumulates_gradients(tmp_path, data, wan):
    (one_part, _), (two_parts, _) = (train(wan, data, tmp_path / str(n), grad_accum_steps=n, steps=1) for n in (1, 2))
    assert load_safetensors(one_part).keys() == load_safetensors(two_parts).keys()


def test_noise_levels_follow_their_distribution():
    key = jax.random.key(0)
    shifted = np.asarray(NoiseLevels("shift", 3.0).draw(key, 4000))
    uniform = np.asarray(NoiseLevels().draw(key, 4000))
    np.testing.assert_allclose(shifted, 3 * uniform / (1 + 2 * uniform), rtol=1e-5)
    normal = np.asarray(NoiseLevels("logit-normal", mean=0.5).draw(key, 4000))
    assert abs(np.mean(np.log(normal / (1 - normal))) - 0.5) < 0.05
    for kind in ("uniform", "shift", "logit-normal"):
        limited = np.asarray(NoiseLevels(kind, 3.0, low=0.875).draw(key, 4000))
        assert 0.875 <= limited.min() < 0.88
        assert 0.97 < limited.max() <= 1


def test_noise_levels_are_the_same_in_a_compiled_step():
    levels, key = NoiseLevels("logit-normal", low=0.875), jax.random.key(0)
    compiled = jax.jit(lambda key: levels.draw(key, 16))(key)
    np.testing.assert_allclose(compiled, levels.draw(key, 16), rtol=1e-6)
