# SPDX-License-Identifier: Apache-2.0
"""`--from` with a workflow of ComfyUI: `generate`, `plan`, `batch`, `info`, and the printed command."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.commands import files, refused, succeeded, wanjax
from tests.support.words import has_line_with_words
from tests.support.workflows import TEMPLATES, api_form, graph_of, template, with_switch
from wanjax.cli import workflow_options
from wanjax.media.video import read_metadata

T2V, I2V, SMALL = "video_wan2_2_14B_t2v", "video_wan2_2_14B_i2v", "text_to_video_wan"
NANO = ("--model", "nano", "--frames", "5", "--steps", "1", "--size", "32x32", "--scheduler", "euler")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of the command."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def models(folder) -> Path:
    """Return a folder with empty files of the names that the templates have."""
    names = [f"diffusion_models/wan2.2_t2v_{expert}_noise_14B_fp8_scaled.safetensors" for expert in ("high", "low")]
    names += [f"loras/wan2.2_t2v_lightx2v_4steps_lora_v1.1_{expert}_noise.safetensors" for expert in ("high", "low")]
    for name in names:
        path = folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder / "models"


def path_of(name: str) -> Path:
    return TEMPLATES / f"{name}.json"


def save_workflow(workflow: dict[str, Any], name: str = "w.json") -> str:
    Path(name).write_text(json.dumps(workflow), encoding="utf-8")
    return name


def small_workflow() -> dict[str, Any]:
    """Return a workflow in the API's form, with few steps."""
    nodes = api_form(graph_of(template(SMALL)))
    nodes["3"]["inputs"] |= {"steps": 2, "cfg": 1, "sampler_name": "euler"}
    return nodes


def options_in(command: str) -> dict[str, Any]:
    """Return the options of a command, and its prompt under "prompt"."""
    words = shlex.split(command)
    assert words[:2] == ["wanjax", "generate"]
    options: dict[str, Any] = {}
    rest = words[2:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            options["prompt"] = word
        elif "=" in word or word == "--tile":
            name, _, value = word.partition("=")
            options[name] = value
        elif word in options:
            options[word] = [options[word], rest.pop(0)]
        else:
            options[word] = rest.pop(0)
    return options


def test_the_printed_command_has_the_request(models):
    result = succeeded(wanjax("generate", "--from", path_of(T2V), "--models", models, "--print-command"))
    options = options_in(result.stdout)
    assert options["prompt"].startswith("Beautiful young European woman")
    assert options.pop("--negative-prompt")
    assert {name: value for name, value in options.items() if name.startswith("--")} == {
        "--model": str(models / "diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"),
        "--width": "640",
        "--height": "640",
        "--frames": "81",
        "--fps": "16",
        "--steps": "20",
        "--guidance-scale": "3.5",
        "--guidance-scale-2": "3.5",
        "--boundary-step": "10",
        "--flow-shift": "5.0",
        "--sigmas": "comfy",
        "--rng": "torch",
        "--seed": "923510416338945",
        "--scheduler": "euler",
    }
    assert f"wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors: {models}" in result.stderr


def test_the_printed_command_prints_the_same_command(models):
    """The command without --from is the same command."""
    first = succeeded(wanjax("generate", "--from", path_of(T2V), "--models", models, "--print-command", "--steps", "7"))
    words = shlex.split(first.stdout)
    again = succeeded(wanjax(*words[1:], "--print-command"))
    assert options_in(again.stdout) == options_in(first.stdout)
    assert options_in(first.stdout)["--steps"] == "7"


def test_other_steps_keep_the_share_of_the_first_expert(models):
    command = ("generate", "--from", path_of(T2V), "--models", models, "--print-command", "--steps", "8")
    result = succeeded(wanjax(*command))
    assert options_in(result.stdout)["--boundary-step"] == "4"
    assert "after step 4 of 8, as in the workflow after 10 of 20" in result.stderr
    assert options_in(succeeded(wanjax(*command, "--boundary-step", "2")).stdout)["--boundary-step"] == "2"


def test_a_model_of_one_expert_takes_no_settings_of_two():
    result = succeeded(wanjax("generate", "--from", path_of(T2V), "--model", "nano", "--print-command"))
    assert not {"--guidance-scale-2", "--boundary-step"} & options_in(result.stdout).keys()
    assert "nano has no guidance_scale_2 and no boundary_step" in result.stderr


def test_each_expert_gets_its_lora(models):
    file = save_workflow(with_switch(T2V))
    options = options_in(succeeded(wanjax("generate", "--from", file, "--models", models, "--print-command")).stdout)
    loras = [f"{models}/loras/wan2.2_t2v_lightx2v_4steps_lora_v1.1_{expert}_noise" for expert in ("high", "low")]
    assert options["--lora"] == [f"high={loras[0]}.safetensors", f"low={loras[1]}.safetensors"]
    assert (options["--steps"], options["--boundary-step"]) == ("4", "2")


def test_a_file_that_is_not_in_the_folder_is_named_on_the_hub():
    result = succeeded(wanjax("generate", "--from", path_of(T2V), "--print-command"))
    hub_name = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/split_files/diffusion_models/wan2.2_t2v_high_noise_14B"
    assert options_in(result.stdout)["--model"] == f"{hub_name}_fp8_scaled.safetensors"
    assert "on the hub" in result.stderr


def test_nothing_is_downloaded_without_a_question(monkeypatch):
    monkeypatch.setattr("wanjax.workflows.files.hub_files", lambda *names: [])
    monkeypatch.setattr("wanjax.workflows.files._licence", lambda name: "apache-2.0")
    result = wanjax("generate", "--from", path_of(SMALL))
    assert result.exit_code == 2
    assert "wan2.1_t2v_1.3B_fp16.safetensors of Comfy-Org/" in result.stderr
    assert "licence apache-2.0" in result.stderr
    assert "--models FOLDER" in result.stderr


@pytest.mark.parametrize("answer", [False, True])
def test_a_terminal_is_asked_before_a_download(monkeypatch, answer):
    questions = []
    monkeypatch.setattr("wanjax.workflows.files.hub_files", lambda *names: [])
    monkeypatch.setattr("wanjax.workflows.files._licence", lambda name: "apache-2.0")
    monkeypatch.setattr(workflow_options.sys, "stdin", Terminal())
    monkeypatch.setattr(workflow_options.sys, "stderr", Terminal())
    monkeypatch.setattr(workflow_options.click, "confirm", lambda text, err: questions.append(text) or answer)
    from wanjax.cli import main

    context = main.commands["generate"].make_context("generate", ["--from", str(path_of(SMALL))], obj=Report())
    with context:
        if answer:
            workflow_options.confirm_downloads(context)
        else:
            with pytest.raises(workflow_options.WanjaxError, match="files are not downloaded"):
                workflow_options.confirm_downloads(context)
    assert "licence apache-2.0" in questions[0]


class Terminal:
    def isatty(self) -> bool:
        return True


class Report:
    def note(self, text: str) -> None: ...


def test_a_missing_picture_is_named_and_can_be_passed():
    result = wanjax("generate", "--from", path_of(I2V))
    assert result.exit_code == 2
    assert "video_wan2_2_14B_i2v_input_image.jpg" in result.stderr
    assert "give --image FILE, or --inputs FOLDER" in result.stderr
    Image.new("RGB", (32, 32)).save("a.png")
    command = succeeded(wanjax("generate", "--from", path_of(I2V), "--image", "a.png", "--print-command")).stdout
    assert options_in(command)["--image"] == "a.png"
    Path("in").mkdir()
    Image.new("RGB", (32, 32)).save("in/video_wan2_2_14B_i2v_input_image.jpg")
    command = succeeded(wanjax("generate", "--from", path_of(I2V), "--inputs", "in", "--print-command")).stdout
    assert options_in(command)["--image"] == "in/video_wan2_2_14B_i2v_input_image.jpg"


def test_a_composed_picture_is_refused_and_can_be_passed():
    name = "video_wan_vace_inpainting"
    result = wanjax("generate", "--from", path_of(name))
    assert result.exit_code == 2
    assert "ImageCompositeMasked) composes" in result.stderr
    Image.new("RGB", (32, 32)).save("a.png")
    Path("clip").mkdir()
    Image.new("RGB", (32, 32)).save("clip/1.png")
    arguments = ("--video", "clip", "--mask", "a.png", "--reference", "a.png", "--print-command")
    assert options_in(succeeded(wanjax("generate", "--from", path_of(name), *arguments)).stdout)["--mask"] == "a.png"


def test_a_missing_size_can_be_passed():
    nodes = small_workflow()
    nodes["C"] = {"class_type": "LoadVideo", "inputs": {"file": "clip.mp4"}}
    nodes["G"] = {"class_type": "GetVideoComponents", "inputs": {"video": ["C", 0]}}
    nodes["S"] = {"class_type": "GetImageSize", "inputs": {"image": ["G", 0]}}
    nodes["40"]["inputs"] |= {"width": ["S", 0], "height": ["S", 1]}
    file = save_workflow(nodes)
    arguments = ("generate", "--from", file, "--model", "nano", "--print-command")
    assert "loads clip.mp4" in wanjax(*arguments).stderr
    options = options_in(succeeded(wanjax(*arguments, "--size", "64x32")).stdout)
    assert options["--size"] == "64x32"
    assert "--width" not in options


def test_every_command_refuses_an_unsupported_workflow():
    file = path_of("video_wan_dancer")
    for arguments in (("generate", "--from", file), ("plan", "--from", file), ("info", file), ("batch", file)):
        result = wanjax(*arguments)
        assert result.exit_code == 2, arguments
        assert "WanDancerVideo) belongs to Wan Dancer, whose workflows wanjax does not read" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_video_is_made_from_a_workflow():
    file = save_workflow(small_workflow())
    succeeded(wanjax("generate", "--from", file, *NANO, "--out", "a.mp4", "--dir", "d"))
    metadata = read_metadata("a.mp4")
    assert metadata["prompt"] == json.loads(Path(file).read_text())["6"]["inputs"]["text"]
    settings = {
        name: metadata[name]
        for name in ("seed", "rng", "sigmas", "flow_shift", "guidance_scale", "fps", "steps", "scheduler")
    }
    assert settings == {
        "seed": 82628696717253,
        "rng": "torch",
        "sigmas": "comfy",
        "flow_shift": 8.0,
        "guidance_scale": 1.0,
        "fps": 16,
        "steps": 1,
        "scheduler": "euler",
    }


def test_a_batch_is_made_from_a_workflow():
    file = save_workflow(small_workflow())
    succeeded(wanjax("batch", file, *NANO, "--out", "one", "--count", "2"))
    assert len([name for name in files("one") if name.endswith(".mp4")]) == 2
    Path("prompts.txt").write_text("a red circle\na blue circle\n")
    succeeded(wanjax("batch", "prompts.txt", "--from", file, *NANO, "--out", "two"))
    names = [name for name in files("two") if name.endswith(".mp4")]
    assert [read_metadata(f"two/{name}")["sigmas"] for name in names] == ["comfy", "comfy"]
    assert {read_metadata(f"two/{name}")["prompt"] for name in names} == {"a red circle", "a blue circle"}
    assert "give one of them" in wanjax("batch", file, "--from", file).stderr


def test_a_batch_of_a_workflow_prints_a_command_with_its_prompt():
    file = save_workflow(small_workflow())
    result = succeeded(wanjax("batch", file, "--model", "nano", "--count", "2", "--print-command"))
    options = options_in(result.stdout)
    assert options["prompt"] == json.loads(Path(file).read_text())["6"]["inputs"]["text"]
    assert (options["--count"], options["--steps"], options["--sigmas"]) == ("2", "2", "comfy")
    assert succeeded(wanjax(*shlex.split(result.stdout)[1:], "--print-command")).stdout
    output = succeeded(wanjax("batch", file, *NANO, "--count", "2", "--out", "x", "--print-command")).stdout
    assert options_in(output)["--out"] == "x"
    assert "--out names a file" in wanjax("batch", file, "--model", "nano", "--out", "x", "--print-command").stderr


def test_a_batch_is_made_from_a_folder_of_workflows():
    Path("flows/inner").mkdir(parents=True)
    for number, prompt in enumerate(("a red circle", "a blue circle"), 1):
        nodes = small_workflow()
        nodes["3"]["inputs"] |= {"seed": 7 + number, "cfg": number, "steps": 2 * number}
        nodes["6"]["inputs"]["text"] = prompt
        save_workflow(nodes, f"flows/{number}.json")
    Path("flows/notes.txt").write_text("no workflow")
    save_workflow(template(T2V), "flows/inner/other.json")
    succeeded(wanjax("batch", "flows", *NANO[:4], *NANO[6:], "--guidance-scale", "1", "--out", "one"))
    metadata_of_videos = [read_metadata(f"one/{name}") for name in files("one") if name.endswith(".mp4")]
    settings = {
        metadata["prompt"]: [metadata[name] for name in ("seed", "steps", "guidance_scale")]
        for metadata in metadata_of_videos
    }
    assert settings == {"a red circle": [8, 2, 1.0], "a blue circle": [9, 4, 1.0]}
    assert {metadata["rng"] for metadata in metadata_of_videos} == {"torch"}


def test_workflows_of_a_folder_share_their_model():
    Path("flows").mkdir()
    assert "flows contains no workflow of ComfyUI: give a file" in wanjax("batch", "flows").stderr
    save_workflow(small_workflow(), "flows/a.json")
    Path("flows/b.json").write_text(Path("flows/a.json").read_text()[:100])
    for arguments in (("batch", "flows"), ("batch", "prompts.txt", "--from", "flows/b.json")):
        assert has_line_with_words(refused(*arguments, "--model", "nano"), "flows/b.json not valid JSON complete copy")
    Path("flows/b.json").unlink()
    assert "give one of its files" in wanjax("batch", "flows", "--model", "nano", "--print-command").stderr
    assert "leave --count out" in wanjax("batch", "flows", "--model", "nano", "--count", "2").stderr
    assert "are both workflows" in wanjax("batch", "flows", "--from", "flows/a.json").stderr
    save_workflow(template(SMALL), "flows/a.json")
    save_workflow(template(T2V), "flows/b.json")
    result = wanjax("batch", "flows")
    assert result.exit_code == 2
    assert "flows/b.json has another model than flows/a.json" in result.stderr
    save_workflow(template(I2V), "flows/b.json")
    assert "flows/b.json: node" in wanjax("batch", "flows").stderr  # its picture is missing
    save_workflow({"nodes": [], "links": []}, "flows/b.json")
    assert "flows/b.json: the workflow has no node" in wanjax("batch", "flows").stderr


def test_prompts_in_json_may_be_larger_than_a_workflow(monkeypatch):
    monkeypatch.setattr("wanjax.workflows.reading.MAX_BYTES", 100)
    Path("prompts.json").write_text(json.dumps([{"prompt": "a red circle"}, {"prompt": "b" * 100}]))
    assert workflow_options.find_workflow("prompts.json", may_be_prompts=True) is None
    succeeded(wanjax("batch", "prompts.json", *NANO, "--out", "one"))
    assert len([name for name in files("one") if name.endswith(".mp4")]) == 2
    assert "more than the 100" in wanjax("generate", "--from", "prompts.json").stderr
    Path("deep.json").write_text("[" * 90)
    monkeypatch.setattr("wanjax.workflows.reading.json.loads", raise_recursion_error)
    assert workflow_options.find_workflow("deep.json", may_be_prompts=True) is None
    assert "nested too deep" in wanjax("generate", "--from", "deep.json").stderr


def raise_recursion_error(text: str) -> None:
    raise RecursionError


def test_a_plan_downloads_nothing():
    renamed = json.loads(json.dumps(template(SMALL)).replace("wan2.1_t2v_1.3B_fp16", "unfamiliar"))
    result = wanjax("plan", "--from", save_workflow(renamed))
    assert result.exit_code == 2
    assert "a plan does not download Comfy-Org/" in result.stderr


def test_info_shows_the_request(models):
    result = succeeded(wanjax("info", path_of(T2V), "--models", models))
    lines = {line.split("  ")[0]: line for line in result.output.splitlines()}
    assert "640x640" in lines["size"]
    assert "3.5 and 3.5" in lines["guidance"]
    assert f"note: wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors: {models}" in result.output
    values = json.loads(succeeded(wanjax("info", path_of(T2V), "--json")).stdout)
    assert (values["steps"], values["boundary_step"], values["width"]) == (20, 10, 640)


def test_plan_describes_the_model_without_its_files():
    result = succeeded(wanjax("plan", "--from", path_of(I2V), "--print-command"))
    words = shlex.split(result.stdout)
    assert words[words.index("--model") + 1] == "wan2.2-i2v-a14b"
    assert words[words.index("--width") + 1] == "640"
    assert "--image" not in words


@pytest.mark.slow
def test_plan_gives_the_time_of_a_template_on_one_card():
    result = succeeded(wanjax("plan", "--from", path_of(T2V), "--chip", "h100"))
    assert "wan2.2-t2v-a14b, 640x640, 81 frames, 20 steps, bfloat16, on h100" in " ".join(result.stdout.split())
    assert "the whole run: " in result.stdout


@pytest.mark.parametrize(
    ("name", "inputs", "outpaint"),
    [
        (
            "video_wan_vace_flf2v",
            {"--image": "video_wan_vace_flf2v_start_image.png", "--last-image": "video_wan_vace_flf2v_end_image.png"},
            None,
        ),
        (
            "video_wan_vace_outpainting",
            {"--video": "video_wan_vace_outpainting_input_video.mp4"},
            "120,120,120,200",
        ),
    ],
)
def test_a_composed_clip_is_printed_as_options(folder, name, inputs, outpaint):
    (folder / "input").mkdir()
    for file in inputs.values():
        (folder / "input" / file).touch()
    command = (
        "generate",
        "--from",
        path_of(name),
        "--inputs",
        "input",
        "--model",
        "wan2.1-vace-14b",
        "--print-command",
    )
    options = options_in(succeeded(wanjax(*command)).stdout)
    names = ("--image", "--last-image", "--video", "--mask")
    assert {name: options[name] for name in names if name in options} == {
        name: f"input/{file}" for name, file in inputs.items()
    }
    assert options.get("--outpaint") == outpaint


@pytest.mark.parametrize(("name", "windows"), [("video_wan_animate2", None), ("video_wan_animate2_distilled", "1")])
def test_a_character_in_a_clip_is_printed_as_options(folder, name, windows):
    files = {
        "video_wan_animate2": ("pink_hair_mech_arms_ref.png", "street_dance_drive.mp4"),
        "video_wan_animate2_distilled": ("ref_doll_realistic.png", "drive_doll_street_dance.mp4"),
    }[name]
    (folder / "input").mkdir()
    for file in files:
        (folder / "input" / file).touch()
    Path("a.safetensors").touch()
    model_options = ("--model", "wan2.2-animate-2-14b", "--lora", "a.safetensors")
    command = ("generate", "--from", path_of(name), "--inputs", "input", *model_options, "--print-command")
    options = options_in(succeeded(wanjax(*command)).stdout)
    assert [options[name] for name in ("--image", "--video")] == [f"input/{file}" for file in files]
    assert options["--clip-prompt"].startswith("A ")
    assert (options["--scheduler"], options.get("--windows")) == ("consistency", windows)


def test_only_generate_reads_a_video_of_wanjax(tmp_path):
    succeeded(wanjax("generate", "a", *NANO, "--out", "a.mp4", "--dir", "d"))
    for command in (("plan", "--from", "a.mp4"), ("batch", "p.txt", "--from", "a.mp4")):
        result = wanjax(*command)
        assert result.exit_code == 2
        assert "contains no workflow of ComfyUI" in result.stderr
    missing = wanjax("plan", "--from", "missing.json")
    assert missing.exit_code == 2
    assert "there is no file missing.json: give --from" in missing.stderr


def test_folders_of_a_workflow_require_a_workflow(folder):
    succeeded(wanjax("generate", "a", *NANO, "--out", "a.mp4", "--dir", "d"))
    for arguments in (
        *(("generate", "a", "--models"), ("generate", "--from", "a.mp4", "--inputs"), ("info", "a.mp4", "--models")),
        *(("plan", "nano", "--inputs"), ("batch", "p.txt", "--models")),
    ):
        result = wanjax(*arguments, folder)
        assert result.exit_code == 2, arguments
        assert has_line_with_words(result.stderr, f"{arguments[-1]} workflow --from")


def test_files_that_an_option_replaces_are_not_listed():
    arguments = ("generate", "--from", path_of(SMALL), "--print-command")
    complete = succeeded(wanjax(*arguments)).stderr
    assert "wan2.1_t2v_1.3B_fp16.safetensors: Comfy-Org/" in complete
    assert (
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors, wan_2.1_vae.safetensors: not read from ComfyUI's folders, the text "
        "encoder and the VAE come from Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    ) in " ".join(complete.split())
    replaced = succeeded(wanjax(*arguments, "--model", "nano")).stderr
    assert "wan2.1_t2v_1.3B" not in replaced
    assert "umt5" not in replaced


def test_control_characters_of_a_workflow_are_not_printed():
    nodes = small_workflow()
    nodes["6"]["inputs"]["text"] = "a \x1b[2J\x9b\u202e'cat'\\ \x07é\nb"
    nodes["39"]["inputs"]["vae_name"] = "\x1b[2J.safetensors"
    file = save_workflow(nodes)
    arguments = ("generate", "--from", file, "--model", "nano", "--print-command")
    results = [wanjax("info", file), wanjax("info", file, "--json"), wanjax(*arguments)]
    for result in map(succeeded, results):
        assert not set("\x1b\x9b\u202e\x07") & set(result.output)
    command = results[2].stdout
    prompt = command[command.index("$'") :].strip()  # quoted for a shell
    output = subprocess.run(["bash", "-c", f"printf %s {prompt}"], capture_output=True, check=True)
    assert output.stdout.decode() == nodes["6"]["inputs"]["text"]


def test_a_missing_folder_is_named():
    result = wanjax("generate", "--from", path_of(SMALL), "--models", "nowhere")
    assert result.exit_code == 2
    assert "--models nowhere does not exist" in result.stderr


def test_options_of_the_machine_may_come_from_a_config():
    Path("c.toml").write_text('dtype = "float32"\nsteps = 3\n')
    file = save_workflow(small_workflow())
    options = options_in(
        succeeded(wanjax("generate", "--config", "c.toml", "--from", file, "--print-command", "--model", "nano")).stdout
    )
    assert (options["--dtype"], options["--steps"]) == ("float32", "2")


@pytest.mark.parametrize("steps", ["abc", None, [1]])
def test_an_option_replaces_a_wrong_number_of_steps(folder, steps):
    nodes = small_workflow()
    nodes["3"]["inputs"]["steps"] = steps
    file = save_workflow(nodes)
    result = succeeded(wanjax("generate", "--from", file, "--model", "nano", "--steps", "7", "--print-command"))
    assert options_in(result.stdout)["--steps"] == "7"
    assert has_line_with_words(refused("--from", file, "--model", "nano"), "node 3 KSampler steps --steps")


def test_an_option_replaces_the_model_of_a_plan(folder):
    file = save_workflow(small_workflow())
    output = succeeded(wanjax("plan", "--from", file, "--model", "nano", "--print-command")).stdout
    words = shlex.split(output)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--model"] == ["nano"]
    assert has_line_with_words(
        refused("plan", "nano", "--from", file, "--model", "wan2.1-t2v-1.3b"), "nano wan2.1-t2v-1.3b"
    )


def test_an_option_replaces_a_wrong_value_of_metadata(folder):
    values = {"model": "nano", "prompt": "a red circle", "steps": "abc"}
    file = save_workflow(values, "generation_config.json")
    assert has_line_with_words(refused("--from", file), "steps 'abc'")
    assert has_line_with_words(refused("--from", file, "--steps", "0"), "--steps 0")
