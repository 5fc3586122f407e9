# SPDX-License-Identifier: Apache-2.0
"""The commands with a checkpoint of random weights: their files, their output and their exit status."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support import listing
from tests.support.commands import Arguments, files, refused, succeeded, wanjax
from tests.support.tiny import compile_cache, tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.cli import main, report, stages
from wanjax.errors import SettingError
from wanjax.media import stage_files
from wanjax.media import video as video_files
from wanjax.media.metadata import load_settings
from wanjax.pipelines.resume import ResumeObserver
from wanjax.pricing.libtpu import TPUS

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")
STAGE_FOLDER = ("--dir", "stage_outputs")
STAGE_FILES = [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE, stage_files.LATENTS_FILE]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "xla") as folder:
        yield folder


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def parsed(record_arguments) -> Arguments:
    """The arguments that the command line passes to a stage, which does not run."""
    return record_arguments({stages: ["generate", "encode", "denoise", "decode"]})


def test_help_lists_the_commands():
    output = succeeded(wanjax("--help")).output
    commands = (
        "generate batch encode denoise decode plan warmup calibrate convert train info models bench selftest serve"
    )
    assert re.findall(r"^  (\w+)  ", output, re.MULTILINE) == [*commands.split(), "worker"]
    assert succeeded(wanjax("--version")).output.startswith("wanjax ")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "generate",
            "models inputs print-command "
            "allow-empty-prompt "
            "from prompts extend-prompt extend-model seeds count model negative-prompt clip-prompt "
            "image last-image video face background mask "
            "reference max-picture resize outpaint size height width frames windows overlap match then fps steps "
            "guidance-scale boundary-step "
            "guidance-scale-2 boundary strength dynamic-guidance guidance-rule flow-shift follow sigmas cache seed "
            "rng scheduler noise lora attention block-q block-kv block-kv-compute window batch-guidance dtype "
            "vae-dtype precision compiler "
            "mesh rules processes compile-cache trust-compile-cache tile decoder offload no-offload at profile preview "
            "preview-decoder dir out force verify quiet verbose stats json config help",
        ),
        (
            "batch",
            "from models inputs print-command "
            "workers database ray hosts resources retries dashboard seeds count "
            "model extend-prompt extend-model negative-prompt clip-prompt "
            "image last-image video face background mask reference max-picture resize outpaint "
            "boundary-step "
            "size height width frames windows overlap match then fps steps guidance-scale guidance-scale-2 boundary "
            "strength dynamic-guidance guidance-rule flow-shift follow sigmas cache seed rng scheduler noise lora "
            "attention block-q block-kv block-kv-compute window batch-guidance dtype vae-dtype precision "
            "compiler mesh rules processes "
            "compile-cache trust-compile-cache tile decoder offload no-offload out force verify quiet verbose stats "
            "json config help",
        ),
        (
            "encode",
            "allow-empty-prompt "
            "model negative-prompt clip-prompt "
            "image last-image video face background mask reference max-picture resize outpaint size height width "
            "frames "
            "follow dtype vae-dtype precision "
            "compiler mesh rules processes compile-cache trust-compile-cache tile offload no-offload dir force verify "
            "quiet verbose stats json config help",
        ),
        (
            "denoise",
            "boundary-step "
            "model size height width frames fps steps guidance-scale guidance-scale-2 boundary strength "
            "dynamic-guidance guidance-rule flow-shift follow sigmas cache seed rng scheduler noise lora attention "
            "block-q block-kv block-kv-compute window batch-guidance dtype vae-dtype "
            "precision compiler mesh rules processes "
            "compile-cache trust-compile-cache offload no-offload profile preview preview-decoder dir force verify "
            "quiet verbose stats json config help",
        ),
        (
            "decode",
            "model fps dtype vae-dtype precision "
            "compiler mesh rules processes compile-cache trust-compile-cache tile decoder dir out "
            "force verify quiet verbose stats json config help",
        ),
        (
            "plan",
            "from models inputs print-command "
            "model chip prompt image last-image video face background mask reference max-picture resize outpaint "
            "size height width frames fps boundary-step "
            "windows overlap match then steps guidance-scale guidance-scale-2 boundary strength dynamic-guidance "
            "guidance-rule flow-shift follow sigmas cache seed rng scheduler noise lora attention block-q block-kv "
            "block-kv-compute window batch-guidance dtype vae-dtype precision "
            "fit programs compiler mesh rules tile decoder offload no-offload train lora-rank "
            "full batch-size optimizer requests deadline price start-time download-rate compile-time json quiet config "
            "help",
        ),
        (
            "warmup",
            "model chip prompt image last-image video face background mask reference max-picture resize outpaint "
            "size height width frames fps boundary-step "
            "steps windows overlap match then guidance-scale guidance-scale-2 boundary strength dynamic-guidance "
            "guidance-rule flow-shift follow sigmas cache seed rng scheduler noise lora attention block-q block-kv "
            "block-kv-compute window batch-guidance dtype vae-dtype "
            "precision compiler mesh rules processes compile-cache "
            "trust-compile-cache tile decoder offload no-offload quiet verbose stats config help",
        ),
        (
            "calibrate",
            "with-prompt image size height width frames steps guidance-scale attention block-q block-kv "
            "block-kv-compute window dtype vae-dtype precision compiler mesh rules quiet verbose config help",
        ),
        (
            "convert",
            "to dtype precision lora revision verify quiet verbose config help",
        ),
        (
            "info",
            "models inputs json config help",
        ),
        (
            "models",
            "json config help",
        ),
        (
            "bench",
            "quick keep json quiet verbose config help",
        ),
        (
            "selftest",
            "timings out json quiet verbose config help",
        ),
        (
            "train",
            "out steps batch-size grad-accum-steps seed lora-rank lora-alpha lora-dropout lora-target full lora-format "
            "expert optimizer learning-rate warmup-steps lr-scheduler max-grad-norm weight-decay ema-decay fps cut "
            "resize buckets min-frames latent-cache timesteps shift logit-mean logit-std caption-dropout "
            "uncaptioned-preservation sample-prompt sample-every holdout-every validation-every save-every size height "
            "width frames attention block-q block-kv block-kv-compute window dtype vae-dtype precision "
            "compiler "
            "mesh rules processes compile-cache trust-compile-cache quiet verbose stats json config help",
        ),
        (
            "serve",
            "model attention block-q block-kv block-kv-compute window batch-guidance lora dtype vae-dtype precision "
            "compiler mesh rules "
            "processes compile-cache trust-compile-cache tile decoder offload no-offload workers ray resources "
            "dashboard host port token origin dir database max-queue max-pixels max-steps max-upload preview "
            "preview-decoder rehearse extend-prompt extend-model verify quiet verbose config help",
        ),
    ],
)
def test_help_is_complete(command, options):
    output = succeeded(wanjax(command, "--help-all")).output
    message = re.findall(r"^  (?:-\w, )?--([a-z0-9-]+)(?: |$)", output, re.MULTILINE)
    assert sorted(message) == sorted(options.split())
    short = succeeded(CliRunner(env={"COLUMNS": "80"}).invoke(main, [command, "--help"])).output.splitlines()
    assert len(short) <= 50
    assert max(map(len, short)) <= 80
    assert ("--help-all" in "".join(short)) == (len(output.splitlines()) > 50)


@pytest.mark.parametrize(
    "arguments",
    ["--help", "models", "models wan2.2-i2v-a14b", "a --frames 18", "plan --size 9p", "a b"],
)
def test_quick_commands_do_not_import_jax(arguments):
    code = f"""if True:
        import sys, wanjax.cli
        try:
            wanjax.cli.main({arguments.split()}, standalone_mode=False)
        finally:
            print(sorted(sys.modules))
    """
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True).stdout.decode()
    assert "'click'" in modules
    assert "'jax'" not in modules
    assert "'numpy'" not in modules


def test_the_listing_of_models_matches_the_presets():
    """`python -m tests.support.listing` updates it."""
    assert listing.FILE.read_text(encoding="utf-8") == listing.source()


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(any(map(glob, TPUS)), reason="there is a TPU")
def test_libtpu_is_silent_without_a_tpu():
    code = """if True:
        import jax
        from wanjax.cli import main
        main.command("look")(lambda: print(jax.devices()))
        main(["look"])"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_"))}
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else libtpu gives up silently while another process uses it
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_generate_writes_a_video_and_its_stage_files(model):
    result = succeeded(wanjax("a red circle", "--model", model, *SMALL, *STAGE_FOLDER))
    path = Path("stage_outputs") / stage_files.VIDEO_FILE
    assert result.stdout.strip() == str(path.absolute())
    assert files("stage_outputs") == sorted([*STAGE_FILES, stage_files.VIDEO_FILE])
    settings = load_settings(Path("stage_outputs"))
    assert video_files.read_metadata(path) == settings
    assert (settings["prompt"], settings["model"], settings["width"], settings["height"]) == (
        "a red circle",
        model,
        32,
        16,
    )
    assert load_safetensors(Path("stage_outputs") / stage_files.LATENTS_FILE)["latents"].shape == (1, 4, 2, 2, 4)
    assert "wanjax decode" not in result.stderr
    assert "wanjax denoise" not in result.stderr
    for stage in ("encode", "denoise", "decode"):
        assert re.search(
            rf"^{stage} +[\d.]+ m?s +([\d.]+ m?s|cached|nothing) +[\d.]+ [MG]B", result.stderr, re.MULTILINE
        )
    assert "step 2 of 2" in result.stderr
    assert "chunk 2 of 2" in result.stderr


def test_three_stages_equal_one_generate(model):
    result = succeeded(
        wanjax("a red circle", "--model", model, *SMALL, "--seed", "5", "--dir", "one", "--out", "one/frames")
    )
    succeeded(wanjax("encode", "a red circle", "--model", model, "--dir", "three", "--dtype", "float32"))
    assert files("three") == [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE]
    succeeded(wanjax("denoise", *SMALL, "--seed", "5", "--dir", "three"))
    three = succeeded(wanjax("decode", "--dir", "three", "--out", "three/frames/"))
    for name in STAGE_FILES[1:]:
        assert (Path("one") / name).read_bytes() == (Path("three") / name).read_bytes()
    assert load_settings(Path("one")) == load_settings(Path("three"))
    frames = files("one/frames")
    assert len(frames) == 5
    for name in frames:
        assert (Path("one/frames") / name).read_bytes() == (Path("three/frames") / name).read_bytes()
    assert result.stdout.strip().endswith("one/frames")
    assert three.stdout.strip().endswith("three/frames")


def test_the_printed_command_resumes_the_run(model):
    output = succeeded(wanjax("encode", "a", "--model", model, "--dir", "with space")).stderr
    [command] = map(shlex.split, re.findall(r"wanjax (denoise --dir .*)$", output, re.MULTILINE))
    output = succeeded(wanjax(*command, *SMALL)).stderr
    [command] = map(shlex.split, re.findall(r"wanjax (decode --dir .*)$", output, re.MULTILINE))
    succeeded(wanjax(*command, "--fps", "8", "--out", "a.gif"))
    assert video_files.read_metadata("a.gif")["fps"] == 8
    assert load_settings(Path("with space"))["fps"] != 8


def test_another_seed_for_denoise_gives_other_latents(model):
    succeeded(wanjax("encode", "a", "--model", model))
    result = []
    for seed in ("1", "2", "1"):
        succeeded(wanjax("denoise", *SMALL, "--seed", seed, "--force"))
        result.append(load_safetensors(Path("stage_outputs") / stage_files.LATENTS_FILE)["latents"].copy())
    assert load_settings(Path("stage_outputs"))["seed"] == 1
    assert not np.array_equal(result[0], result[1])
    np.testing.assert_array_equal(result[0], result[2])


def test_noise_from_a_file_replaces_the_seed(model):
    noise = np.random.default_rng(0).normal(size=(1, 4, 2, 2, 4)).astype(np.float32)
    save_safetensors("noise.safetensors", {"noise": noise})
    latents = []
    for seed in ("1", "2"):
        noisy = ("--seed", seed, "--noise", "noise.safetensors", "--force")
        result = succeeded(wanjax("a", "--model", model, *SMALL, *noisy, *STAGE_FOLDER))
        latents.append(load_safetensors(Path("stage_outputs") / stage_files.LATENTS_FILE)["latents"].copy())
    np.testing.assert_array_equal(*latents)
    file = str(Path("noise.safetensors").absolute())
    assert has_line_with_words(result.stderr, f"noise {file}")
    assert video_files.read_metadata(Path("stage_outputs") / stage_files.VIDEO_FILE)["noise"] == file


def test_two_experts_share_the_steps(model):
    folder = shutil.copytree(model, "experts")
    shutil.copytree(Path(folder) / "transformer", Path(folder) / "transformer_2")
    index = Path(folder) / "model_index.json"
    added = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.8}
    index.write_text(json.dumps(json.loads(index.read_text()) | added))
    scales = ("--guidance-scale", "2", "--guidance-scale-2", "3")
    output = succeeded(wanjax("a", "--model", folder, *SMALL, *scales, *STAGE_FOLDER)).stderr
    assert "guidance 2 and 3" in output
    assert has_line_with_words(output, "step 2 transformer_2 loaded")
    settings = json.loads((Path("stage_outputs") / stage_files.CONFIG).read_text())
    assert (settings["guidance_scale"], settings["guidance_scale_2"], settings["boundary"]) == (2.0, 3.0, 0.8)


def test_denoising_can_start_from_a_video(model):
    Path("first").mkdir()
    for i, frame in enumerate(np.random.default_rng(0).integers(0, 256, (5, 16, 32, 3), dtype=np.uint8)):
        Image.fromarray(frame).save(f"first/{i}.png")
    options = ("--video", "first", *SMALL)
    output = succeeded(
        wanjax("b", "--model", model, *options, "--strength", "0.5", "--out", "second", *STAGE_FOLDER)
    ).stderr
    assert "step 1 of 1" in output or "1 of 1" in output
    embeddings = load_safetensors(Path("stage_outputs") / stage_files.EMBEDDINGS_FILE)
    assert embeddings["video_latents"].shape == (1, 4, 2, 2, 4)
    assert video_files.read_metadata("second/frame_00000.png")["strength"] == 0.5
    latents = load_safetensors(Path("stage_outputs") / stage_files.LATENTS_FILE)["latents"].copy()
    succeeded(wanjax("denoise"))  # from the files of the first stage
    np.testing.assert_array_equal(
        load_safetensors(Path("stage_outputs") / stage_files.LATENTS_FILE)["latents"], latents
    )
    stderr = wanjax("b", "--model", model, *options, "--strength", "0.4").stderr
    assert has_line_with_words(stderr, "strength 0.4 2 steps 0.5")


def test_unintended_settings_give_notes(model):
    output = wanjax("encode", "word " * 40 + "end", "--model", model).stderr
    assert has_line_with_words(output, 'prompt tokens 24 "word')
    output = wanjax(" ", "--allow-empty-prompt", "--model", model, *SMALL, "--guidance-scale", "1").stderr
    assert "the prompt is empty" in output
    assert "guidance is off" in output


def test_embeddings_of_226_tokens_give_a_note(model, failing_in):
    succeeded(wanjax("encode", "a", "--model", model))
    embeds = np.zeros((1, 226, 16), np.float32)
    path = Path("stage_outputs") / stage_files.EMBEDDINGS_FILE
    save_safetensors(path, {"prompt_embeds": embeds, "negative_prompt_embeds": embeds})
    with failing_in("latents", KeyboardInterrupt()):  # after all notes are printed
        assert has_line_with_words(wanjax("denoise", *SMALL).stderr, "226 tokens 512")


def test_latents_are_saved_before_decoding(model, failing_in):
    with failing_in("frames", KeyboardInterrupt()):
        result = wanjax("a", "--model", model, *SMALL, "--out", "b c.mp4", *STAGE_FOLDER)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-2] == "wanjax: stopped"
    assert result.stderr.endswith(": wanjax decode --dir stage_outputs --out 'b c.mp4'\n")
    assert files("stage_outputs") == STAGE_FILES
    assert files(".") == ["stage_outputs"]
    succeeded(wanjax("decode", "--out", "b c.mp4"))
    assert files(".") == ["b c.mp4", "stage_outputs"]


def test_an_interrupted_denoising_leaves_the_embeddings(model, failing_in, monkeypatch):
    command = ["a", "--model", model, *SMALL, *STAGE_FOLDER]
    monkeypatch.setattr(sys, "argv", ["wanjax", *command])
    with failing_in("latents", KeyboardInterrupt()):
        result = wanjax(*command)
    assert result.exit_code == 130
    assert result.stderr.endswith(f": {shlex.join(['wanjax', *command])}\n")  # the same command resumes
    assert files("stage_outputs") == [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE]
    succeeded(wanjax("denoise"))
    assert load_settings(Path("stage_outputs"))["steps"] == 2  # the setting of the first command


def test_windows_stopped_before_their_first_step_restart(failing_in, monkeypatch):
    command = ["a red circle", "--size", "32x32", "--frames", "5", "--steps", "2", "--windows", "2"]
    monkeypatch.setattr(sys, "argv", ["wanjax", *command])
    with failing_in("latents", KeyboardInterrupt()):
        result = wanjax(*command)
    assert result.exit_code == 130
    assert result.stderr.endswith(f"no work is complete; start again with: {shlex.join(['wanjax', *command])}\n")


def test_no_resume_command_is_printed_for_a_wrong_setting(model, failing_in):
    """A step cache that depends on weights can refuse the number of steps only when they are loaded."""
    with failing_in("latents", SettingError("the step cache teacache:0.13 reuses nothing: take more steps", "cache")):
        result = wanjax("a", "--model", model, *SMALL, *STAGE_FOLDER)
    assert result.exit_code == 2
    assert result.stderr.endswith("reuses nothing: take more steps\n")


def test_steps_of_other_settings_are_not_discarded(model, monkeypatch):
    """They are protected like a finished stage, because the user named the folder."""

    def interrupt(observer, step):
        observer.stopped(step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResumeObserver, "stepped", interrupt)
        assert wanjax("a", "--model", model, *SMALL, *STAGE_FOLDER).exit_code == 130
    changed = ("a", "--model", model, *SMALL, *STAGE_FOLDER, "--guidance-scale", "3")
    before = {name: (Path("stage_outputs") / name).read_bytes() for name in files("stage_outputs")}
    assert has_line_with_words(refused(*changed), "stage2_state guidance scale --dir --force")
    assert {name: (Path("stage_outputs") / name).read_bytes() for name in files("stage_outputs")} == before
    assert "resumed after 1 of 2 steps" in succeeded(wanjax("a", "--model", model, *SMALL, *STAGE_FOLDER)).stderr
    with monkeypatch.context() as patch:
        patch.setattr(ResumeObserver, "stepped", interrupt)
        assert wanjax("a", "--model", model, *SMALL, "--dir", "two").exit_code == 130
    succeeded(wanjax("a", "--model", model, *SMALL, "--dir", "two", "--guidance-scale", "3", "--force"))


def test_an_interrupted_encoding_leaves_nothing(model, failing_in):
    with failing_in("encode", KeyboardInterrupt()):
        result = wanjax("a", "--model", model, *SMALL)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "wanjax: stopped")
    assert files(".") == []


def test_peak_memory_is_read_on_each_platform(monkeypatch):
    assert report._device_peak_memory() is None  # a CPU reports no device memory
    assert (report._host_peak_memory() or 0) > 1e7
    monkeypatch.setattr(report, "PROC_STATUS", Path("absent"))  # a system other than Linux
    assert (report._host_peak_memory() or 0) > 1e7
    chips = [SimpleNamespace(platform="tpu", memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (3, 5)]
    monkeypatch.setattr(jax, "local_devices", lambda: chips)
    assert report._device_peak_memory() == 5


def test_a_failure_has_a_traceback(model, failing_in):
    with failing_in("frames", RuntimeError("a bug")):
        result = wanjax("a", "--model", model, *SMALL, *STAGE_FOLDER)
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)
    assert "wanjax decode --dir stage_outputs" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory while ...")])
def test_the_message_for_a_lack_of_memory_suggests_a_smaller_size(model, failing_in, error):
    with failing_in("latents", error):
        result = wanjax("a", "--model", model, *SMALL)
    assert result.exit_code == 1
    assert has_line_with_words(result.stderr.splitlines()[-2], "wanjax: memory --size")


def test_models_describes_one_model():
    descriptions = json.loads(succeeded(wanjax("models", "wan2.2-i2v-a14b", "--json")).stdout)
    assert descriptions["sizes"] == {"720p": "1280x720", "480p": "832x480", "portrait": "720x1280", "square": "960x960"}
    assert (descriptions["takes"], descriptions["needs"]) == (["image", "last_image"], ["image"])
    assert descriptions["licence"] == "Apache-2.0"
    output = succeeded(wanjax("models", "wan2.2-i2v-a14b")).stdout
    assert re.search(r"^takes  +a prompt, --image \(needed\), --last-image$", output, re.MULTILINE)
    assert re.search(r"^sizes  +720p 1280x720, 480p 832x480", output, re.MULTILINE)
    assert has_line_with_words(refused("models", "nan"), "'nan' nano")


def test_models_lists_all_models():
    descriptions = json.loads(succeeded(wanjax("models", "--json")).stdout)
    assert descriptions[0]["name"] == "nano"
    for model in descriptions:
        assert {"name", "about", "source", "parameters", "licence", "defaults"} <= model.keys()
        assert model["memory"] == sum(model["networks"].values()) > 2 * model["parameters"] > 0
        assert {"text_encoder", "transformer", "vae"} <= model["networks"].keys()
    sizes = {model["name"]: model["networks"] for model in descriptions}
    assert sizes["wan2.1-t2v-14b"]["text_encoder"] == 2 * 5_680_910_336
    assert sizes["wan2.1-t2v-14b"]["vae"] == 4 * 126_892_531
    assert sizes["wan2.2-t2v-a14b"]["transformer_2"] == 2 * 14_288_491_584
    output = succeeded(CliRunner(env={"COLUMNS": "200"}).invoke(main, ["models"])).stdout
    for model in descriptions:
        size = f"{model['defaults']['width']}x{model['defaults']['height']}"
        assert re.search(
            rf"^{re.escape(model['name'])} .* {size} .*{re.escape(model['licence'])}", output, re.MULTILINE
        )


def test_the_command_runs_next_to_a_folder_of_its_name():
    """As in a clone's parent folder, where `import wanjax` imports the folder before an editable install."""
    Path("wanjax").mkdir()
    code = "from wanjax.__main__ import main; main()"  # as the installed script does
    for command in (["-m", "wanjax"], ["-c", code]):
        run = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=False)
        assert run.stdout.startswith("wanjax "), run.stderr
