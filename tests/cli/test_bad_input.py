# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the user: one sentence, exit status 2, no traceback, no incomplete files."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.commands import refused
from tests.support.harm import WEIGHTS, corrupt, rewrite, truncated, with_other_keys, without_a_shard
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from wanjax.checkpoints.files import save_safetensors
from wanjax.cli import main
from wanjax.media import stage_files

pytestmark = pytest.mark.usefixtures("kept_programs")

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
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def left() -> list[str]:
    """Returns the files and the empty folders below the current folder."""
    return sorted(str(path) for path in Path().rglob("*") if path.is_file() or not any(path.iterdir()))


AFTER_ENCODING = ["stage_outputs/generation_config.json", "stage_outputs/stage1_embeddings.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size 833x480", r"the width 833 is not a multiple of 16: 832 or 848 would do"),
        ("--height 1", r"the height 1 is not a multiple of 16: 16 would do"),
        ("--height -16", r"the height -16 is not a multiple of 16: 16 would do"),
        ("--width 0", r"the width 0 is not a multiple of 16: 16 would do"),
        ("--frames 80", r"80 frames are not of the form 4n \+ 1: 77 or 81 would do"),
        ("--frames 0", r"0 frames are not of the form 4n \+ 1: 1 would do"),
        ("--steps 0", r"0 steps cannot make a video: at least 1 is needed"),
        ("--steps -3", r"-3 steps cannot make a video"),
        ("--guidance-scale -1", r"the guidance scale -1\.0 is not a finite number from 0 on"),
        ("--guidance-scale nan", r"guidance_scale is nan where a finite"),
        ("--guidance-scale inf", r"guidance_scale is inf where a finite number such as 5\.0 is right"),
        ("--guidance-scale-2 3", r"has one transformer: guidance_scale_2 is for models with two"),
        ("--boundary 0.9", r"has one transformer: boundary is for models with two"),
        ("--strength 0", r"the strength 0\.0 is not above 0 and at most 1"),
        ("--strength 1.1", r"the strength 1\.1 is not above 0 and at most 1"),
        ("--flow-shift 0", r"the flow shift 0\.0 is not a finite number above 0"),
        ("--flow-shift inf", r"flow_shift is inf where a finite"),
        ("--fps 0", r"0 frames a second cannot be played"),
        ("--steps many", r"Invalid value for '--steps': 'many' is not a valid integer"),
        ("--size big", r"Invalid value for '--size': 'big' is not WIDTHxHEIGHT, such as 832x480"),
        ("--size 32x16 --height 32", r"--size is given beside --height or --width: one way is enough"),
        ("--sigmas other", r"'other' is not one of 'official', 'diffusers'"),
        ("--dtype float8", r"'float8' is not one of 'bfloat16', 'float32'"),
        ("--stepps 3", r"No such option '?--stepps'?.*--steps"),
        ("--attention flash", r"no attention is named 'flash': there are auto, reference, chunked, cudnn, flash_tpu"),
        ("--attention chunked --block-q 512", r"chunked has no tiles to choose: those of flash_tpu can be chosen"),
        ("--attention flash_tpu:tp=3", r"the tiles 'tp=3' are not such as block_q=2048"),
        ("--block-q 100", r"block_q=100: a multiple of 128 would do, best of 512"),
        ("--block-kv 2048 --block-kv-compute 768", r"block_kv=2048: a multiple of block_kv_compute=768 would do"),
        ("--noise absent.safetensors", r"there is no file absent\.safetensors"),
        ("--out clip.avi", r"clip\.avi ends in \.avi: \.mp4, \.mov, \.webm, \.gif, \.webp"),
        ("-o clip.png", r"clip\.png is one picture, for a video of one frame"),
        ("--out -", r"a video cannot be written to the standard output, -: the name of a file, or \./-, would do"),
        ("--strength 0.5", r"a strength of 0\.5 is given without a video to begin from: give both, or neither"),
        ("--strength 0.8", r"a strength of 0\.8 is given without a video"),  # the default
        ("--seed 18446744073709551616", r"the seed 18446744073709551616 is not a whole number from 0 to 2\^64 - 1"),
        ("--negative-prompt caf\udce9", r"the negative prompt 'caf\\udce9' is no text: one text, in UTF-8"),
        ("two prompts", r"unexpected extra argument"),
    ],
)
def test_options(intact, options, message):
    assert re.search(message, refused("a", "--model", intact, *SHORT, *options.split()))
    assert left() == []


def test_a_prompt_that_is_not_utf_8(intact):
    """Python keeps a byte of the command line that is no UTF-8 as a surrogate."""
    for command in ("generate", "encode"):
        said = refused(command, os.fsdecode(b"caf\xe9"), "--model", intact)
        assert said == r"the prompt 'caf\udce9' is no text: one text, in UTF-8 on a command line, is right"
    assert left() == []


WITHOUT_DEVICES = {
    "cuda": r"there is no device of cuda, or no plugin for it|Unable to initialize backend 'cuda'",
    "abacus": r"Backend 'abacus' is not in the list of known backends",
}
ASKED = [(platform, command) for platform in WITHOUT_DEVICES for command in ("a red circle", "denoise", "models")]


@pytest.mark.parametrize(
    ("platform", "command"), quick([("abacus", "a red circle"), ("cuda", "denoise"), ("cuda", "models")], ASKED)
)
@pytest.mark.skipif(any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl"))), reason="there is a card")
def test_a_platform_without_devices(platform, command):
    """In a new process, because JAX chooses its devices once."""
    environment = os.environ | {"JAX_PLATFORMS": platform}
    run = subprocess.run([sys.executable, "-m", "wanjax", command], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    [sentence] = run.stderr.splitlines()
    assert sentence.startswith(f"wanjax: JAX cannot use JAX_PLATFORMS={platform} here (")
    assert sentence.endswith("): without JAX_PLATFORMS it takes what there is")
    assert re.search(WITHOUT_DEVICES[platform], sentence)
    assert left() == []


@pytest.mark.skipif(any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl"))), reason="there is a card")
def test_a_mesh_of_a_platform_without_devices():
    """In the library, where `make_mesh` may be the first to ask for devices."""
    code = """if True:
        import wanjax
        try:
            wanjax.make_mesh(tp=4)
        except wanjax.WanjaxError as error:
            print(error)"""
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    [sentence] = run.stdout.splitlines()
    assert sentence.startswith("JAX cannot use JAX_PLATFORMS=cuda here (")


def test_processes_that_are_not_there(intact):
    """In a new process, because JAX joins others before it chooses its devices."""
    command = [sys.executable, "-m", "wanjax", "a", "--model", intact, "--processes", "auto"]
    run = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    [sentence] = run.stderr.splitlines()
    assert sentence.startswith("wanjax: no other processes were found by `auto`, which knows TPU pods, Slurm")
    assert left() == []


def test_a_lora_with_numbers_that_are_not_finite(intact):
    q = "blocks.0.attn1.to_q"
    tensors = {f"{q}.lora_A.weight": np.full((2, 24), np.nan, np.float32), f"{q}.lora_B.weight": np.ones((24, 2))}
    save_safetensors("bad.safetensors", {name: x.astype(np.float32) for name, x in tensors.items()})
    said = refused("a", "--model", intact, *SMALL, "--lora", "bad.safetensors")
    assert re.search(rf"bad\.safetensors holds {q}\.lora_A\.weight with numbers that are not finite", said)


def test_a_strength_for_denoising_without_a_video(stages):
    assert "is given without a video to begin from" in refused("denoise", "--strength", "0.5")
    assert "is given without a video to begin from" in refused("denoise", "--strength", "0.8")


def test_attention_for_other_devices(intact):
    said = refused("a", "--model", intact, *SHORT, "--attention", "flash_tpu", "--block-q", "1024")
    assert said.startswith("flash_tpu runs on TPUs")
    assert left() == []


def test_no_prompt(intact):
    for command in (["generate", "--model", intact], ["--seed", "3"], ["--model", intact, "--steps", "2"]):
        assert "the prompt is missing" in refused(*command)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nanoo", r"nanoo.*nano"),
        ("wan2.1-t2v-1.3", r"wan2\.1-t2v-1\.3.*wan2\.1-t2v-1\.3b"),
        ("no/such-model", r"no/such-model"),
        ("./nowhere", r"there is no folder or file nowhere, and it is not a Hugging Face id, which is OWNER/NAME"),
        ("../nowhere", r"there is no folder or file \.\./nowhere"),
        ("./nowhere.safetensors", r"there is no folder or file nowhere\.safetensors"),
        (".", r"holds no model_index\.json"),
    ],
)
def test_models(name, message):
    assert re.search(message, refused("a", "--model", name))
    assert left() == []


def without_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def without_config(folder: Path) -> None:
    (folder / "vae" / "config.json").unlink()


def with_broken_config(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text("{")


def with_short_config(folder: Path) -> None:
    (folder / "text_encoder" / "config.json").write_text("{}")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def of_another_pipeline(folder: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')


def with_nan(folder: Path) -> None:
    rewrite(
        folder / "transformer" / WEIGHTS, lambda tensors: tensors | {"proj_out.bias": tensors["proj_out.bias"] * np.nan}
    )


def with_unlike_experts(folder: Path) -> None:
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    for file, change in (
        ("model_index.json", {"transformer_2": ["diffusers", "WanTransformer3DModel"]}),
        ("transformer_2/config.json", {"num_layers": 7}),
    ):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (without_index, [r"damaged holds no model_index\.json"]),
        (of_another_pipeline, [r"FluxPipeline"]),
        (without_tokenizer, [r"tokenizer has neither tokenizer\.json nor spiece\.model"]),
        (without_config, [r"vae.*config\.json"]),
        (with_broken_config, [r"transformer/config\.json"]),
        (with_short_config, [r"text encoder's config\.json has model_type None"]),
        (without_a_shard, [r"transformer lacks diffusion_pytorch_model-00002-of-00002\.safetensors"]),
        (truncated, [r"vae/diffusion_pytorch_model\.safetensors cannot be read, incomplete metadata"]),
        (corrupt, [r"text_encoder/model\.safetensors cannot be read, header too large"]),
        (
            with_other_keys,
            [
                r"missing: .*blocks\.0\.attn1\.to_q\.weight",
                r"missing: .*proj_out\.bias",
                r"left over: .*extra\.weight",
                r"left over: .*more\.bias",
                r"blocks\.1\.ffn\.net\.2\.bias \(\[7\] where \[24\] is right",
            ],
        ),
        (with_unlike_experts, [r"the two transformers of .*damaged differ in their config\.json"]),
        (with_nan, [r"not finite after step 1 of 2"]),
    ],
)
def test_checkpoints(damaged, damage, messages):
    damage(damaged)
    said = refused("a", "--model", damaged, *SMALL)
    for message in messages:
        assert re.search(message, said), said
    assert not [name for name in left() if name.endswith(".mp4")]


def noise(path: str, shape: tuple[int, ...], name: str = "noise", dtype=np.float32) -> None:
    save_safetensors(path, {name: np.zeros(shape, dtype)})


@pytest.mark.parametrize(
    ("shape", "name", "message"),
    [
        (
            (1, 4, 3, 2, 4),
            "noise",
            r"noise\.safetensors: the noise has the shape \[1, 4, 3, 2, 4\] where this video needs \[1, 4, 2, 2, 4\]",
        ),
        ((4, 2, 2, 4), "noise", r"noise\.safetensors: the noise has the shape \[4, 2, 2, 4\] where"),
        ((1, 4, 2, 2, 4), "latents", r"no tensor 'noise', only latents"),
    ],
)
def test_noise(intact, shape, name, message):
    noise("noise.safetensors", shape, name)
    assert re.search(message, refused("a", "--model", intact, *SMALL, "--noise", "noise.safetensors"))
    assert left() == ["noise.safetensors"]


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


def test_stage_files_that_do_not_belong_together(intact, stages):
    shutil.copytree(stages, "other")
    assert CliRunner().invoke(main, ["encode", "b", "--model", str(intact), "--dir", "other", "--force"]).exit_code == 0
    assert re.search(
        r"stage2_latents\.safetensors and generation_config\.json in other do not belong together: prompt is 'a' in "
        r"the one and 'b' in the other, so `wanjax denoise --dir other` has to run again",
        refused("decode", "--dir", "other"),
    )
    shutil.copy(stages / stage_files.EMBEDDINGS, Path("other") / stage_files.EMBEDDINGS)
    assert "stage1_embeddings.safetensors and generation_config.json in other" in refused("denoise", "--dir", "other")
    assert not (Path("other") / stage_files.VIDEO).exists()


@pytest.mark.parametrize(
    ("command", "missing", "message"),
    [
        ("denoise", stage_files.CONFIG, r"holds no generation_config\.json, which `wanjax encode` writes"),
        (
            "denoise",
            stage_files.EMBEDDINGS,
            r"holds no stage1_embeddings\.safetensors: run `wanjax encode PROMPT --dir stage_outputs`",
        ),
        (
            "decode",
            stage_files.LATENTS,
            r"holds no stage2_latents\.safetensors: run `wanjax denoise --dir stage_outputs` first",
        ),
        ("decode", stage_files.CONFIG, r"holds no generation_config\.json"),
    ],
)
def test_missing_stages(stages, command, missing, message):
    (stages / missing).unlink()
    assert re.search(message, refused(command))


def test_stage_files_of_another_model(stages):
    wide = np.zeros((1, 8, 99), np.float32)
    save_safetensors(stages / stage_files.EMBEDDINGS, {"prompt_embeds": wide, "negative_prompt_embeds": wide})
    before = (stages / stage_files.LATENTS).read_bytes()
    told = r"stage1_embeddings\.safetensors: .*\[1, 8, 99\] where .* has floats \[1, 8, 16\]"
    assert re.search(told, refused("denoise"))
    assert (stages / stage_files.LATENTS).read_bytes() == before
    save_safetensors(stages / stage_files.LATENTS, {"latents": np.zeros((1, 16, 2, 2, 4), np.float32)})
    assert re.search(r"stage2_latents\.safetensors has 16 channels where .* has 4", refused("decode"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "many"}, r"generation_config\.json gives steps as 'many' where a value such as \d+ is right"),
        ({"steps": True}, r"gives steps as True"),
        ({"model": None}, r"generation_config\.json names no model: --model has to"),
        ({"dtype": "float8"}, r"gives the dtype 'float8' where bfloat16 or float32 is right"),
        ({"sigmas": "other"}, r"other"),
    ],
)
def test_settings_changed_by_hand(stages, change, message):
    settings = json.loads((stages / stage_files.CONFIG).read_text())
    (stages / stage_files.CONFIG).write_text(json.dumps(settings | change))
    assert re.search(message, refused("denoise"))


def test_latents_that_are_not_finite_cannot_be_shown(stages):
    settings = stage_files.load_settings(stages)
    stage_files.save_latents(stages, np.full((1, 4, 2, 2, 4), np.nan, np.float32), settings)
    assert "not finite" in refused("decode")


@pytest.mark.parametrize("option", ["--dir", "--out"])
def test_folders_that_cannot_be_written(intact, option):
    Path("file").write_text("")
    where = {"--dir": "file/stages", "--out": "file/clip.mp4"}[option]
    assert re.search(r"the folder .*file.* cannot be written", refused("a", "--model", intact, *SMALL, option, where))
    assert left() == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission(intact):
    Path("mine").mkdir(mode=0o500)
    assert "cannot be written, Permission denied" in refused("a", "--model", intact, *SMALL, "--dir", "mine/stages")


def test_a_disk_that_fills_with_latents(intact, monkeypatch):
    calls = []

    def sync(descriptor):
        calls.append(descriptor)
        if len(calls) >= 2:  # from the second file on; the kept state is done without, the latents are not
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", sync)
    said = refused("a", "--model", intact, *SMALL, "--dir", "stage_outputs")
    assert said == "stage_outputs/stage2_latents.safetensors cannot be written: No space left on device"
    assert left() == AFTER_ENCODING


def test_a_disk_that_fills_with_the_video(intact, monkeypatch):
    """Simulates the full disk by a limit on the size of files, because ffmpeg runs in another process."""
    run = subprocess.Popen
    limited = ["sh", "-c", 'ulimit -f 1; trap "" XFSZ; exec "$@"', "sh"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kw: run([*limited, *command], **kw))
    said = refused("a", "--model", intact, *SMALL, "--dir", "stage_outputs")
    assert re.search(r"output_video\.mp4 cannot be written: ffmpeg said", said)
    assert left() == [*AFTER_ENCODING, "stage_outputs/stage2_latents.safetensors"]
