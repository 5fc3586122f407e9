# SPDX-License-Identifier: Apache-2.0
"""Mistakes that are reported before JAX is imported, which takes seconds, or before a model is downloaded."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.support.commands import refused
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.inputs import IMAGE, REFERENCES, VIDEO
from wanjax.media.pictures import read_pictures

MISTAKES = {
    "a --image nope.png": "nope.png --image",
    "a --video nope.mp4": "nope.mp4 --video",
    "a --model wan2.1-vace-1.3b --reference here.png --reference nope.png": "nope.png",
    "a --noise nope.safetensors": "nope.safetensors --noise",
    "a --noise here.txt": "here.txt safetensors 'noise' floats",
    "a --strength 0.5": "strength 0.5 --video",
    "a --then b --then c --windows 2": "3 prompts 2 windows",
    "a --then b --then c --windows 2 --print-command": "3 prompts 2 windows",
    "batch here.txt --overlap 3": "--overlap --windows",
    "--prompts here.txt --match colour": "--match --windows",
    "batch here.txt --strength 0.5": "strength 0.5 --video",
    "a --size 100000x100000": "100000 16384",
    "train nano here.png --out x": "here.png picture here.txt",
    "a --model trained": "trained LoRA --lora trained",
    "a --model trained_fully": "trained_fully training trained_fully/checkpoint",
    "convert '' x": "SOURCE empty name",
    "convert nano x.safetensors": "x.safetensors suffix folder",
    "convert nano nano": "nano name model my-nano",
    "a --then ''": "--then empty prompt",
    "here.txt": "here.txt prompt --prompts",
    "encode here.txt": "here.txt one prompt text",
    "here.png": "here.png --image",
    "a --at http://localhost:1 --token x": "'--token' WANJAX_TOKEN",
    "'a cat' --workers 2": "--workers wanjax batch --help wanjax generate",
    "--revision x 'a cat'": "--revision wanjax convert wanjax generate",
    "batch ''": "PROMPTS empty name",
    "train '' nano --out x": "MODEL empty name",
    "train nano . --out x.safetensors": "x.safetensors suffix folder",
    "a --seeds 1..2 --out new.v1": "new.v1 suffix name folder",
    "batch sizes.jsonl": "line 1: size name model's sizes [64, 64]",
    "train here nano --out x": "nano is a model wanjax train nano here",
    "a --lora high=nope.safetensors:0.5": "nope.safetensors OWNER/NAME/FILE",
    "a --decoder nope.safetensors": "nope.safetensors --decoder",
    "a --preview-decoder nope.safetensors": "nope.safetensors --preview-decoder",
    "serve --preview-decoder nope.safetensors": "nope.safetensors --preview-decoder",
    "a --config nope.toml": "nope.toml --config TOML",
    "a --from nope.mp4": "nope.mp4",
    "--prompts nope.txt": "nope.txt",
    "batch nope.csv": "nope.csv",
    "batch 'a red circle'": "red circle wanjax generate",
    "info nano": "nano wanjax models",
    "info nope.mp4": "nope.mp4",
    "plan --chip h1000": "'h1000' h100 v6e-8",
    "plan --chip v6e": "'v6e' v6e-1 v6e-8",
    "warmup --chip h1000": "'h1000' v6e-8",
    "serve --host 0.0.0.0": "0.0.0.0 16 characters --token WANJAX_TOKEN",
    "serve --token short": "token 16",
    "train nano nodir --out x": "nodir",
    "a --seeds 5..1": "5..1 1..5",
    "batch here.txt --seeds one": "'one' 1,5,8..11",
    "a --seeds 1,2 --count 3": "--seeds --count",
    "a --seeds 1,2 --seed 3": "--seeds --seed",
    "a --model nanno": "'nanno' nano OWNER/NAME",
    "a --model nanoo": "'nanoo' nano OWNER/NAME",
    "batch here.txt --model nanoo": "'nanoo' nano OWNER/NAME",
    "convert nanoo x": "'nanoo' nano OWNER/NAME",
    "a --model wan2.1-t2v-1.3": "'wan2.1-t2v-1.3' wan2.1-t2v-1.3b",
    "a --model wan2.1-t2v-13b": "'wan2.1-t2v-13b' wan2.1-t2v-1.3b wan2.1-t2v-14b",
    "a --model Wan2.2": "'Wan2.2' wan2.2-t2v-a14b",
    "a --model hunyuan": "'hunyuan' hunyuanvideo1.5-480p-t2v",
    "a --model cogvideo-5b": "'cogvideo-5b' cogvideox-5b",
    "a --model qwertz": "'qwertz' models",
    "a --model ./nodir": "nodir OWNER/NAME",
    "a --model 'Wan-AI/Wan 2.1'": "Wan-AI/Wan 2.1 Hugging Face OWNER/NAME",
    "convert Wan-AI/Wan2.1/T2V x": "Wan-AI/Wan2.1/T2V OWNER/NAME",
    "models nanno": "'nanno' nano",
    "plan nanno": "'nanno' nano",
    "plan --model nanno": "'nanno' nano",
    "warmup --model nanno": "'nanno' nano",
    "convert nanno x": "'nanno' nano",
    "train nanno . --out x": "'nanno' nano",
    "bench nanno": "'nanno' nano",
    "calibrate nanno": "'nanno' nano",
    "serve --model nanno": "'nanno' nano",
    "denoise --dir nodir": "nodir encode",
    "denoise --dir encoded": "encoded stage1_embeddings.safetensors encode",
    "decode --dir nodir": "nodir encode",
    "decode --dir encoded": "encoded stage2_latents.safetensors denoise",
    "a --model wan2.1-t2v-1.3b --image here.png": "wan2.1-t2v-1.3b image video",
    "a --model wan2.1-i2v-14b-480p": "wan2.1-i2v-14b-480p image",
    "encode a --model wan2.1-i2v-14b-480p": "wan2.1-i2v-14b-480p image",
    "a --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --frames 18": "18 17",
    "a --model Wan2.1-T2V-1.3B-Diffusers --frames 18": "18 17",
    "a --out x.avi": "x.avi .mp4",
    "decode --dir encoded --out x.avi": ".avi .mp4",
    "a --extend-prompt localhost": "'localhost' http://localhost:11434/v1",
    "a --mesh xx": "'xx' dp=2,sp=1,tp=4 auto",
    "a --mesh dp=0": "dp=0 1",
    "a --attention chunky": "--attention 'chunky' chunked flash_tpu",
    "train nano . --out x --attention nope": "--attention 'nope' auto",
    "a --cache magcach": "--cache 'magcach' magcache easycache",
    "a --scheduler UniPCMultistepScheduler": "--scheduler 'UniPCMultistepScheduler' did you mean unipc?",
    "a --scheduler dpmpp_2m": "--scheduler 'dpmpp_2m' did you mean dpm++?",
    "a --guidance-scale -3": "--guidance-scale 0 100 -3",
    "a --scheduler heun": "--scheduler 'heun' unipc euler",
    "a --guidance-rule apgg:eta=1": "--guidance-rule 'apgg:eta=1' apg nag",
    "batch here.txt --workers 0": "--workers 0 --database",
    "batch here.txt --hosts 2": "--hosts --ray",
    "batch here.txt --ray nonsense": "'nonsense' auto HOST:PORT local",
    "batch here.txt --ray host:99999": "'host:99999' auto HOST:PORT local",
    "batch here.txt --ray ray://host:1": "ray://host:1 auto HOST:6379",
    "batch here.txt --ray host:0": "'host:0' auto HOST:PORT 1 65535 local",
    "a --processes localhost:99999,2,0": "--processes 'localhost:99999' HOST:PORT 1 65535",
    "train nano . --out x --processes localhost:0,2,0": "--processes 'localhost:0' HOST:PORT 1 65535",
    "worker --database here.txt --out x --processes :80,2,0": "--processes ':80' HOST:PORT",
    "batch here.txt --workers 2 --processes auto": "--processes one worker",
    "batch here.txt --out x.mp4": "x.mp4 --out folder",
    "a --seeds 1,2 --noise here.txt": "--noise one video",
    "a --seeds 1,2 --dir x": "--dir one --out",
    "serve --workers 0": "--workers 0 --database",
    "serve --dashboard": "--dashboard --workers --ray",
    "serve --ray auto": "--ray --workers",
    "a --dir here.txt": "--dir here.txt file folder",
    "serve --dir here.txt": "--dir here.txt file folder",
    "a --image encoded": "--image encoded folder picture",
    "encode a --image encoded": "--image encoded folder picture",
    "batch encoded": "encoded folder file prompt line",
    "convert nano --verify --dtype bfloat16": "--verify --dtype",
    "train nano . --out x --full --lora-rank 4": "--lora-rank LoRA --full",
    "plan nano --train --full --lora-rank 4": "--lora-rank LoRA --full",
    "plan nano --batch-size 2": "--batch-size --train",
    "worker": "--database WANJAX_DATABASE",
    "batch here.txt --database foo": "database foo .sqlite .db postgresql://USER:PASSWORD@HOST/NAME",
    "serve --database foo": "database foo .sqlite .db postgresql://USER:PASSWORD@HOST/NAME",
    "worker --database here.txt": "--dir --out",
    "worker --database nodir/jobs.sqlite --out x": "nodir/jobs.sqlite --database",
    "worker --database here.txt --out x --extend-prompt http://a/v1": "--extend-prompt --dir",
    "serve --workers 2 --ray nonsense": "'nonsense' auto HOST:PORT local",
    "models nnano": "nnano model_index.json",  # a folder of this name exists, so the name is not mistyped
    "convert . x": ". model_index.json checkpoint",
    "convert nano": "missing nano FOLDER",
    "convert nano x --verify": "--verify nano x",
    "convert nano --lora high=here.txt --verify": "--verify --lora",
    "a --model nnano": "nnano model_index.json",
    "train nano encoded --out here.txt": "--out here.txt file give folder",
    "train nnano encoded --out x": "nnano model_index.json",
}
RUN_MISTAKES = """if True:
    import contextlib, io, json, sys
    from wanjax.cli import main
    results = []
    for arguments in json.loads(sys.argv[1]):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            try:
                status = main(arguments, prog_name="wanjax")
            except SystemExit as end:
                status = end.code
        results.append([status, stderr.getvalue(), "jax" in sys.modules])
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each mistake in a new process: the status, the message, and whether JAX was imported."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "here.png").touch()
    (folder / "here.txt").write_text("a red circle\n")
    (folder / "sizes.jsonl").write_text('{"prompt": "a red circle", "size": [64, 64]}\n')
    for name in ("encoded", "nnano", "trained", "trained_fully"):
        (folder / name).mkdir()
    for name in ("trained/training.json", "trained/lora.safetensors", "trained_fully/training.json"):
        (folder / name).touch()
    (folder / "encoded/generation_config.json").write_text('{"model": "nano", "prompt": "a red circle"}')
    commands = json.dumps([shlex.split(text) for text in MISTAKES])
    run = subprocess.run([sys.executable, "-c", RUN_MISTAKES, commands], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(zip(MISTAKES, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_reported_before_jax_is_imported(results, arguments):
    status, message, imported = results[arguments]
    assert status == 2
    assert message.startswith("wanjax: ")
    assert message.count("\n") == 1
    assert has_line_with_words(message, MISTAKES[arguments])
    assert not imported


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cache", "foo", "'foo' easycache"),
        ("--cache", "magcache:-1", "magcache:-1.0 0.06"),
        ("--scheduler", "foo", "'foo' unipc"),
        ("--scheduler", "ddim", "ddim velocity: give unipc, euler, dpm++, consistency, rcm, rcm-ode"),
        ("--guidance-rule", "foo", "'foo' apg"),
    ],
)
def test_settings_that_a_model_refuses_are_reported_before_its_download(tmp_path, monkeypatch, option, value, message):
    monkeypatch.chdir(tmp_path)
    assert has_line_with_words(refused("a", "--model", "wan2.1-t2v-1.3b", option, value), message)


@pytest.mark.parametrize("kind", ["image", "images"])
def test_the_message_for_a_clip_in_place_of_a_picture_names_the_input_for_clips(tmp_path, kind):
    (tmp_path / "clip.mp4").write_bytes(bytes(100))
    options, spec = {"image": tmp_path / "clip.mp4"}, IMAGE
    if kind == "images":
        options, spec = {"references": [tmp_path / "clip.mp4"]}, REFERENCES
    with pytest.raises(WanjaxError, match=line_with_words("clip.mp4 clip input video")):
        read_pictures(options, (spec, VIDEO), frames=5, fps=8)
    with pytest.raises(WanjaxError, match=r"clip\.mp4") as error:
        read_pictures(options, (spec,), frames=5, fps=8)
    assert "video" not in str(error.value)
    (tmp_path / "a.txt").write_text("no clip either")
    with pytest.raises(WanjaxError, match=r"a\.txt") as text:
        read_pictures({"image": tmp_path / "a.txt"}, (IMAGE, VIDEO), frames=5, fps=8)
    assert "video" not in str(text.value)
