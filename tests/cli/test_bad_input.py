# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the user: an error message, exit status 2, no traceback, no incomplete files."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.commands import refused, wanjax
from tests.support.harm import (
    WEIGHTS,
    corrupt,
    delete_a_shard,
    rename_keys,
    truncate,
    unchecked,
    write_nan,
)
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import save_safetensors
from wanjax.cli import main
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.pricing.libtpu import TPUS

pytestmark = pytest.mark.usefixtures("cached_programs")

SHORT = ("--frames", "5", "--steps", "2", "--dtype", "float32")
SMALL = ("--size", "32x16", *SHORT)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return shutil.copytree(intact, tmp_path / "damaged")


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def remaining_files() -> list[str]:
    """Return the files and the empty folders in the current folder and below."""
    return sorted(str(path) for path in Path().rglob("*") if path.is_file() or not any(path.iterdir()))


AFTER_ENCODING = ["stage_outputs/generation_config.json", "stage_outputs/stage1_embeddings.safetensors"]


URL = "https://example.org/it?a=1&b=2"
FETCH_WORDS = f"{URL} curl '{URL}'"
COMMANDS = [  # mistakes in a request itself are in tests/mistakes
    ("a --attention flash", "attention 'flash' auto reference chunked cudnn flash_tpu"),
    ("a --overlap 5", "--overlap --windows"),
    ("a --out /dev/zero", "--out /dev/zero neither file folder"),
    ("a --out /dev/zero --force", "--out /dev/zero neither file folder"),
    ("a --out /etc/passwd --force", "/etc/passwd file folder /etc/passwd.mp4"),
    ("info /dev/zero", "/dev/zero neither file folder"),
    ("a --windows 1 --overlap 5", "--overlap --windows"),
    ("a --attention chunked --block-q 512", "chunked block_q=512 leave flash_tpu TPU"),
    ("a --attention flash_tpu:tp=3", "tiles 'tp=3' block_q=2048 leave TPU"),
    ("a --attention flash_tpu --block-q 1024", "block_q flash_tpu TPUs leave"),
    ("a --block-q 100", "block_q=100 128 512 leave TPU"),
    ("a --block-kv 2048 --block-kv-compute 768", "block_kv=2048 block_kv_compute=768"),
    ("a --noise absent.safetensors", "absent.safetensors"),
    ("a --preview-decoder absent.safetensors", "absent.safetensors"),
    ("a --out clip.avi", "clip.avi .avi .mp4 .mov .webm .gif .webp"),
    ("a -o clip.png", "clip.png picture one frame"),
    ("a --out -", "output ./-"),
    ("a --strength 0.8", "strength 0.8 video"),  # the default
    ("a two prompts", "prompt 3 quotes a two prompts"),
    ("--seed 3", "prompt missing"),
    ("encode", "prompt missing"),
    (f"a --lora x.safetensors --lora {URL}", FETCH_WORDS),
    (f"a --config {URL}", FETCH_WORDS),
    (f"--from {URL}", FETCH_WORDS),
    (f"info {URL}", FETCH_WORDS),
    (f"convert {URL} out", FETCH_WORDS),
    (
        "a --model https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "hub give Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    ),
    ("a --model huggingface.co/Wan-AI/Wan2.2-TI2V-5B", "hub give Wan-AI/Wan2.2-TI2V-5B"),
    ("a --lora https://huggingface.co/a/b/resolve/main/c.safetensors:0.5", "hub give a/b/c.safetensors"),
    (f"a --lora {URL}:0.5", f"curl '{URL}'"),
    ("a --model wan2.1-t2v-1.3", "wan2.1-t2v-1.3 wan2.1-t2v-1.3b"),
    ("a --model no/such-model", "no/such-model"),
    ("a --model ./nowhere", "nowhere OWNER/NAME"),
    ("a --model ../nowhere", "../nowhere"),
    ("a --model ./nowhere.safetensors", "nowhere.safetensors"),
    ("a --model .", "model_index.json"),
]


@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_invalid_commands_are_refused(command, message):
    assert has_line_with_words(refused(*command.split()), message)
    assert remaining_files() == []


WITHOUT_DEVICES = {
    "cuda": r"there is no device of cuda, or no plugin for it|Unable to initialize backend 'cuda'",
    "abacus": r"Backend 'abacus' is not in the list of known backends",
}
MAKE_MESH = """if True:  # the first use of devices in this process
    import sys
    import wanjax
    try:
        wanjax.make_mesh(tp=4)
    except wanjax.WanjaxError as error:
        print(f"wanjax: {error}", file=sys.stderr)
        sys.exit(2)"""
SCRIPTS = {"make_mesh": ["-c", MAKE_MESH]} | {
    name: ["-m", "wanjax", name] for name in ("a red circle", "bench", "warmup")
}
PLATFORM_CASES = [(platform, command) for platform in WITHOUT_DEVICES for command in SCRIPTS]


@pytest.mark.parametrize(("platform", "command"), quick([("abacus", "warmup"), ("cuda", "make_mesh")], PLATFORM_CASES))
@pytest.mark.skipif(any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl"))), reason="there is a card")
def test_a_platform_without_devices_is_reported(platform, command):
    """In a new process, because JAX chooses its devices once."""
    environment = os.environ | {"JAX_PLATFORMS": platform}
    run = subprocess.run([sys.executable, *SCRIPTS[command]], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    [message] = run.stderr.splitlines()
    assert has_line_with_words(message, f"wanjax: JAX_PLATFORMS={platform}")
    assert has_line_with_words(message, "without JAX_PLATFORMS")
    assert re.search(WITHOUT_DEVICES[platform], message)
    assert remaining_files() == []


@pytest.mark.skipif(any(map(glob, TPUS)), reason="there is a TPU")
def test_a_missing_libtpu_is_reported_if_a_tpu_is_requested():
    """In a new process that cannot import libtpu, for all commands."""
    code = """if True:
        import sys
        from contextlib import suppress
        from importlib import util
        find_spec = util.find_spec
        util.find_spec = lambda name, *more: None if name == "libtpu" else find_spec(name, *more)
        sys.modules["libtpu"] = None
        from wanjax.cli import main
        for arguments in ("generate a", "warmup", "bench --quick", "calibrate", "train nano . -o x"):
            with suppress(SystemExit):
                main(arguments.split())"""
    environment = os.environ | {"JAX_PLATFORMS": "tpu"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    messages = [line for line in run.stderr.splitlines() if line.startswith("wanjax: ")]
    assert [line for line in messages if has_line_with_words(line, "JAX_PLATFORMS=tpu libtpu '.[tpu]'")] == messages, (
        run.stderr
    )
    assert len(messages) == 5, run.stderr
    assert "Traceback" not in run.stderr
    assert remaining_files() == []


def test_missing_processes_are_reported(intact):
    """In a new process, because JAX joins other processes before it chooses its devices."""
    command = [sys.executable, "-m", "wanjax", "a", "--model", intact, "--processes", "auto"]
    run = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    [message] = run.stderr.splitlines()
    assert has_line_with_words(message, "wanjax: processes auto Slurm")
    assert remaining_files() == []


def delete_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def delete_config(folder: Path) -> None:
    (folder / "vae" / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text("{")


def write_empty_config(folder: Path) -> None:
    (folder / "text_encoder" / "config.json").write_text("{}")


def delete_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def name_another_pipeline(folder: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')


def delete_tensors(folder: Path) -> None:
    save_safetensors(folder / "transformer" / WEIGHTS, {})


def add_unlike_expert(folder: Path) -> None:
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    for file, change in (
        ("model_index.json", {"transformer_2": ["diffusers", "WanTransformer3DModel"]}),
        ("transformer_2/config.json", {"num_layers": 7}),
    ):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (delete_index, ["damaged model_index.json"]),
        (name_another_pipeline, ["FluxPipeline"]),
        (delete_tokenizer, ["tokenizer tokenizer.json spiece.model"]),
        (delete_config, ["vae config.json"]),
        (break_config, ["transformer/config.json"]),
        (write_empty_config, ["text config.json model_type None"]),
        (delete_a_shard, ["transformer diffusion_pytorch_model-00002-of-00002.safetensors"]),
        (truncate, ["vae/diffusion_pytorch_model.safetensors incomplete metadata"]),
        (corrupt, ["text_encoder/model.safetensors header"]),
        (
            rename_keys,
            [
                "missing blocks.0.attn1.to_q.weight",
                "missing proj_out.bias",
                "unused extra.weight",
                "unused more.bias",
                "blocks.1.ffn.net.2.bias [7] [24]",
            ],
        ),
        (add_unlike_expert, ["transformers damaged config.json"]),
        (write_nan, ["finite step 1 2"]),
        (delete_tensors, ["missing blocks.{0-1}.attn1.to_q.weight"]),
    ],
)
def test_damaged_checkpoints_are_refused(damaged, damage, messages):
    damage(damaged)
    output = refused("a", "--model", damaged, *SMALL)
    for message in messages:
        assert has_line_with_words(output, message), output
    assert not [name for name in remaining_files() if name.endswith(".mp4")]


def zeros(name: str, *shape: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32)}


PROJECTION = "blocks.0.attn1.to_q"
NOT_FINITE = {
    f"{PROJECTION}.lora_A.weight": np.full((2, 24), np.nan, np.float32),
    f"{PROJECTION}.lora_B.weight": np.ones((24, 2), "f"),
}


@pytest.mark.parametrize(
    ("option", "tensors", "message"),
    [
        (
            "--noise",
            zeros("noise", 1, 4, 3, 2, 4),
            "tensors.safetensors noise [1, 4, 3, 2, 4] video [1, 4, 2, 2, 4]",
        ),
        ("--noise", zeros("noise", 4, 2, 2, 4), "tensors.safetensors noise [4, 2, 2, 4]"),
        ("--noise", zeros("latents", 1, 4, 2, 2, 4), "tensor 'noise' latents"),
        ("--lora", NOT_FINITE, f"tensors.safetensors {PROJECTION}.lora_A.weight finite"),
    ],
    ids=["another shape", "fewer axes", "another name", "not finite"],
)
def test_tensors_of_a_wrong_shape_or_name_are_refused(intact, option, tensors, message):
    with unchecked():
        save_safetensors("tensors.safetensors", tensors)
    assert has_line_with_words(refused("a", "--model", intact, *SMALL, option, "tensors.safetensors"), message)
    assert remaining_files() == ["tensors.safetensors"]


@pytest.fixture(scope="module")
def complete(intact, tmp_path_factory) -> Path:
    """The stage files of a video."""
    folder = tmp_path_factory.mktemp("complete")
    for command in (["encode", "a", "--model", str(intact)], ["denoise", *SMALL]):
        result = CliRunner().invoke(main, [*command, "--dir", str(folder)])
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def stages(complete) -> Path:
    """A copy of the stage files, to be damaged."""
    return shutil.copytree(complete, Path("stage_outputs"))


def test_stage_files_of_different_videos_are_refused(intact, stages):
    shutil.copytree(stages, "other")
    assert CliRunner().invoke(main, ["encode", "b", "--model", str(intact), "--dir", "other", "--force"]).exit_code == 0
    output = refused("decode", "--dir", "other")
    assert has_line_with_words(
        output, "stage2_latents.safetensors generation_config.json prompt 'a' 'b' wanjax denoise --dir other"
    )
    shutil.copy(stages / stage_files.EMBEDDINGS_FILE, Path("other") / stage_files.EMBEDDINGS_FILE)
    assert has_line_with_words(
        refused("denoise", "--dir", "other"), "stage1_embeddings.safetensors generation_config.json other"
    )
    assert not (Path("other") / stage_files.VIDEO_FILE).exists()


def deletion_of(name: str) -> Callable[[Path], None]:
    return lambda stages: (stages / name).unlink()


def change_settings(**change: Any) -> Callable[[Path], None]:
    """Return a function that changes the settings of stage files."""

    def harm(stages: Path) -> None:
        settings = json.loads((stages / stage_files.CONFIG).read_text())
        (stages / stage_files.CONFIG).write_text(json.dumps(settings | change))

    return harm


def write_nan_latents(stages: Path) -> None:
    with unchecked():
        stage_files.save_latents(stages, np.full((1, 4, 2, 2, 4), np.nan, np.float32), load_settings(stages))


def write_damaged_settings(stages: Path) -> None:
    (stages / stage_files.CONFIG).write_text("{")


ENCODE_ANEW = "wanjax encode PROMPT --dir stage_outputs --force"
STAGES = {  # the command, the damage to the files, and the words of the message
    "no settings to denoise": ("denoise", deletion_of(stage_files.CONFIG), f"generation_config.json {ENCODE_ANEW}"),
    "damaged settings": ("denoise", write_damaged_settings, f"generation_config.json {ENCODE_ANEW}"),
    "no embeddings": (
        "denoise",
        deletion_of(stage_files.EMBEDDINGS_FILE),
        "stage1_embeddings.safetensors encode PROMPT --dir stage_outputs",
    ),
    "no latents": (
        "decode",
        deletion_of(stage_files.LATENTS_FILE),
        "stage2_latents.safetensors denoise --dir stage_outputs",
    ),
    "no settings to decode": ("decode", deletion_of(stage_files.CONFIG), "generation_config.json"),
    "latents that are not finite": ("decode", write_nan_latents, "not finite"),
    "steps that are a word": ("denoise", change_settings(steps="many"), "generation_config.json steps 'many'"),
    "steps that are true": ("denoise", change_settings(steps=True), "steps True"),
    "no model": ("denoise", change_settings(model=None), "generation_config.json model --model"),
    "another dtype": ("denoise", change_settings(dtype="float8"), "dtype 'float8' bfloat16 float32"),
    "other sigmas": ("denoise", change_settings(sigmas="other"), "other"),
    "a strength without a video": ("denoise --strength 0.5", change_settings(), "strength 0.5 video"),
    "the usual strength without a video": ("denoise --strength 0.8", change_settings(), "strength 0.8 video"),
}


@pytest.mark.parametrize(("command", "harm", "message"), STAGES.values(), ids=STAGES)
def test_stages_with_missing_or_invalid_files_are_refused(stages, command, harm, message):
    harm(stages)
    assert has_line_with_words(refused(*command.split()), message)


def test_stage_files_of_another_model_are_refused(stages):
    wide = np.zeros((1, 8, 99), np.float32)
    save_safetensors(stages / stage_files.EMBEDDINGS_FILE, {"prompt_embeds": wide, "negative_prompt_embeds": wide})
    before = (stages / stage_files.LATENTS_FILE).read_bytes()
    message = r"stage1_embeddings\.safetensors: .* must be floats \[1, 8, 16\], got float32 \[1, 8, 99\]"
    assert re.search(message, refused("denoise"))
    assert (stages / stage_files.LATENTS_FILE).read_bytes() == before
    save_safetensors(stages / stage_files.LATENTS_FILE, {"latents": np.zeros((1, 16, 2, 2, 4), np.float32)})
    assert has_line_with_words(refused("decode"), "stage2_latents.safetensors 16 channels 4")


UNLESS_ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--dir", "file/stages", "file folder another"),
        ("--out", "file/clip.mp4", "file folder another"),
        pytest.param("--dir", "mine/stages", "Permission denied", marks=UNLESS_ROOT),
    ],
)
def test_folders_that_cannot_be_written_are_reported(intact, option, path, words):
    Path("file").write_text("")
    Path("mine").mkdir(mode=0o500)
    assert has_line_with_words(refused("a", "--model", intact, *SMALL, option, path), words)
    assert remaining_files() == ["file", "mine"]


def test_a_file_in_place_of_the_output_folder_is_refused():
    Path("circle.mp4").write_text("")
    run = wanjax("convert", "nano", "circle.mp4")
    assert run.exit_code == 2
    assert has_line_with_words(run.stderr, "circle.mp4 new folder")
    assert "parameters" not in run.stderr  # no table of weights, because nothing is written
    assert "completed work is kept" not in run.stderr  # repeating the command would not help
    assert remaining_files() == ["circle.mp4"]


def test_a_disk_that_fills_with_latents_is_reported(intact, monkeypatch):
    calls = []

    def sync(descriptor):
        calls.append(descriptor)
        if (
            len(calls) >= 2
        ):  # from the second file on; a run continues without its saved state, but not without its latents
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", sync)
    output = refused("a", "--model", intact, *SMALL, "--dir", "stage_outputs", status=1)
    assert has_line_with_words(output, "stage_outputs/stage2_latents.safetensors No space left on device")
    assert remaining_files() == AFTER_ENCODING


@pytest.mark.parametrize("full_at_once", [True, False])
def test_a_disk_that_fills_with_the_video_is_reported(intact, monkeypatch, full_at_once):
    """Simulates the full disk by a limit on the size of files, because ffmpeg runs in another process.

    The disk is full before the first step, or after the trial.
    """
    run = subprocess.Popen
    limited = ["sh", "-c", 'ulimit -f 1; trap "" XFSZ; exec "$@"', "sh"]

    def start(command, **kw):
        return run([*limited, *command] if full_at_once or "trial" not in " ".join(command) else command, **kw)

    monkeypatch.setattr(subprocess, "Popen", start)
    output = refused("a", "--model", intact, *SMALL, "--dir", "stage_outputs", status=1)
    assert has_line_with_words(output, "output_video.mp4 written")
    assert remaining_files() == ([] if full_at_once else [*AFTER_ENCODING, "stage_outputs/stage2_latents.safetensors"])


def test_convert_says_how_to_merge_a_lora():
    save_safetensors(Path("a b.safetensors"), {"blocks.0.attn.q.lora_down.weight": np.zeros((2, 4), np.float32)})
    message = refused("convert", "a b.safetensors", "out")
    assert "is a LoRA" in message
    assert "`wanjax convert MODEL out --lora 'a b.safetensors'`" in message
