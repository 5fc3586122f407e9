# SPDX-License-Identifier: Apache-2.0
"""The commands `train` and `plan --train`."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import wanjax
from tests.support.clips import write_clips
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.cli import main
from wanjax.cli.training import clip_size

pytestmark = pytest.mark.usefixtures("cached_programs")
SHORT = ("--frames", 5, "--one-size", "--steps", 2)
SMALL = ("--size", "32x32", *SHORT, "--lora-rank", 2)


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def test_train_writes_a_lora_and_resumes(model, tmp_path):
    data = write_clips(tmp_path / "data", 2)
    result = run("train", model, data, "--out", tmp_path / "out", *SMALL, "--json")
    result_json = json.loads(result.stdout)
    assert result_json["file"] == str(tmp_path / "out/lora.safetensors")
    assert "2 clips: 2 of 32x32, 5 frames" in result.stderr
    wanjax.load(model, lora=result_json["file"], note=lambda text: None)
    resumed = run("train", model, data, "--out", tmp_path / "out", *SMALL)
    assert has_line_with_words(resumed.stderr, "after 2 of 2 steps")
    refusal = run("train", model, data, "--out", tmp_path / "out", *SMALL[:-1], 3, "--seed", 1, status=2)
    assert has_line_with_words(refusal.stderr, "whose --lora-rank was 2 and is 3, --seed was 0 and is 1: another --out")
    assert "goes on" not in refusal.stderr  # the same command would be refused again
    assert "Traceback" not in refusal.stderr


def test_mistakes_of_a_training_are_refused(model, tmp_path):
    data = write_clips(tmp_path / "data", 1)
    for options, words in (
        (("--size", "32x32", "--lora-rank", 0), "--lora-rank got 0"),
        (("--size", "32x32", "--learning-rate", -1), "the learning rate is -1.0: give a number above 0"),
        (("--size", "32x32", "--learning-rate", 1e39), "the learning rate is 1e+39: give a number above 0"),
        (("--size", "33x32"), "width must be a multiple of"),
        (("--size", "32x32", "--width", 64), "--size cannot be combined with --height or --width"),
        (("--size", "32x32", "--lora-target", "to_x"), "no layer named to_x"),
        (("--size", "32x32", "--lora-rank", 1000), "no projection has a rank above"),
        (
            ("--size", "32x32", "--batch-size", 3, "--grad-accum-steps", 2),
            "--grad-accum-steps 2 does not divide --batch-size 3",
        ),
    ):
        refused = run("train", model, data, "--out", tmp_path / "out", *SHORT, *options, status=2)
        assert words in refused.stderr
    refused = run("train", model, tmp_path / "none", "--out", tmp_path / "out", *SMALL, status=2)
    assert "none does not exist: give a folder of clips" in refused.stderr


def test_a_height_alone_keeps_the_model_s_width(model):
    none = {"size": None, "height": None, "width": None}
    model_size = wanjax.registry.model_description(str(model)).settings.size
    assert clip_size(str(model), **none) is None
    assert clip_size(str(model), **none | {"height": 64}) == (64, model_size[1])
    assert clip_size(str(model), **none | {"width": 64}) == (model_size[0], 64)
    assert clip_size(str(model), **none | {"size": (32, 64)}) == (32, 64)


def test_a_plan_prices_a_training_step():
    arguments = ("plan", "nano", "--train", "--chip", "cpu")
    lora, full = (json.loads(run(*arguments, "--json", *options).stdout) for options in ((), ("--full",)))
    assert lora["fits"]
    assert full["fits"]
    assert lora["trained"] == "a LoRA of rank 32"
    assert full["weights_bytes_per_chip"] > lora["weights_bytes_per_chip"]
    assert lora["step_seconds"] > lora["forward_seconds"] > 0
    assert 0.5 < lora["backward_ratio"] < 3
    assert "backward pass and the optimiser take" in run("plan", "nano", "--train", "--chip", "cpu").stdout


ENCODE = """
import resource, sys
import wanjax
from wanjax.training import TrainConfig, Training
training = Training(wanjax.load(sys.argv[1]), sys.argv[2], sys.argv[3], TrainConfig(
    steps=1, size=(32, 32), frames=9, buckets=False))
training.encode()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_two_hundred_clips_need_little_more_memory_than_twenty(model, tmp_path):
    peaks = []
    for count in (2, 20, 200):  # the first run compiles the programs of all
        data = write_clips(tmp_path / str(count), count)
        arguments = [sys.executable, "-c", ENCODE, model, data, tmp_path / f"out{count}"]
        peaks.append(int(subprocess.run([*map(str, arguments)], check=True, capture_output=True).stdout.split()[-1]))
    print(f"peaks of 20 and of 200 clips: {peaks[1] / 1e3:.0f} and {peaks[2] / 1e3:.0f} MB")
    assert peaks[2] <= 1.3 * peaks[1]
