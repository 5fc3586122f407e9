# SPDX-License-Identifier: Apache-2.0
"""The table of mistakes in a request for a video of nano. `test_interfaces.py` sends every row through every
interface."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

VALID: dict[str, Any] = {"prompt": "a red circle", "size": "32x32", "frames": 5, "steps": 2}
INTERFACES = ("command", "toml", "rows", "http", "python")


class Mistake(NamedTuple):
    """A mistake in one request.

    Args:
        fields: The fields of `VideoRequest` that make RIGHT wrong; None leaves one out.
        words: What the sentence has to name: the value, and what to do. An interface may write fields with dashes.
        elsewhere: The interfaces by which nobody can make this mistake, with the reason.
    """

    fields: Mapping[str, Any]
    words: str
    elsewhere: Mapping[str, str] = {}


ONLY_TEXT = {"command": "each value on a command line is text"}
NO_PROMPT_IN_TOML = {"toml": "a prompt is typed"}
ONLY_TEXT_WITHOUT_TOML = ONLY_TEXT | NO_PROMPT_IN_TOML
EMPTY_PROMPT_ALLOWED = {"python": "a program may give an empty prompt"}
NO_FLAG = dict.fromkeys(("command", "toml"), "a flag is given or not")
ONE_NAME = dict.fromkeys(("command", "toml", "python"), "the image has one name")
ANY_TEXT = {"python": "a record keeps any text of a program"}
NO_SECONDS = dict.fromkeys(("command", "toml", "python"), "seconds are a field of rows and of HTTP alone")
OTHER_NAME = dict.fromkeys(("command", "toml"), "the scripts before wanjax have the option by this name")
OF_A_PROGRAM = dict.fromkeys(("command", "toml"), "it is a keyword of another library")
NO_FRAMES = {"http": "an answer holds no frames"}
OF_OTHER_RUNS = {"toml": "a file's strength is for those of its runs that begin from a video"}
LATER = {"toml": "a table's height or width replaces that of a size for all commands"}
WHOLE = {"http": "a side alone is refused before"}
SET = {"python": "`pipe.scheduler` is set"}
OF_A_CALL = {"python": "a call takes it"}
AT_LOADING = dict.fromkeys(("command", "toml", "rows", "python"), "it is chosen when the model is loaded")
NEVER_NAMED = {"http": "a file is sent, and never named"}
NEVER_SENT = dict.fromkeys(("command", "toml", "rows", "python"), "a file is named, and never sent")
BY_HTTP = dict.fromkeys(("command", "toml", "rows", "python"), "the server's own bound")

WHOLE_NUMBERS = ("frames", "fps", "windows", "overlap")
NOT_FINITE = (float("nan"), float("inf"))
ADDRESS = "https://example.org/a.png?b=1&c=2"

MISTAKES = (
    # prompts
    Mistake({"prompt": None}, "prompt"),
    Mistake({"prompt": None}, "prompt missing allow_empty_prompt", {"python": "the argument stands in the call"}),
    Mistake({"prompt": " "}, "prompt empty allow_empty_prompt", EMPTY_PROMPT_ALLOWED),
    Mistake({"prompt": ""}, "prompt empty allow_empty_prompt", EMPTY_PROMPT_ALLOWED),
    Mistake(
        {"prompt": " ", "allow_empty_prompt": False}, "prompt empty allow_empty_prompt", EMPTY_PROMPT_ALLOWED | NO_FLAG
    ),
    Mistake({"prompt": 3}, "prompt 3 text", ONLY_TEXT_WITHOUT_TOML),
    Mistake({"prompt": "caf\udce9"}, r"prompt 'caf\udce9' text UTF-8", NO_PROMPT_IN_TOML),
    Mistake({"negative_prompt": "caf\udce9"}, r"negative_prompt 'caf\udce9' text UTF-8", {"toml": "it is in UTF-8"}),
    Mistake({"negative_prompt": ["a"]}, "negative_prompt ['a'] text", ONLY_TEXT),
    Mistake(
        {"negative_prompt": "a\0b"}, "negative_prompt", {"command": "no argument of a process holds \\0"} | ANY_TEXT
    ),
    Mistake({"prompt": "x" * 5000}, "prompt 5000 characters 4000", BY_HTTP),
    Mistake({"then": "x" * 4001}, "then 4001 characters 4000", BY_HTTP),
    Mistake({"scheduler": "x" * 201}, "scheduler 201 characters 200", BY_HTTP),
    # names
    Mistake({"stepz": 4}, "stepz steps"),
    Mistake({"step": 4}, "step steps"),
    Mistake({"xyzzy": 4}, "xyzzy"),
    Mistake({"xyzzy": 4}, "xyzzy prompt", OF_A_PROGRAM),
    Mistake({"num_inference_steps": 4}, "num_inference_steps steps", OTHER_NAME),
    Mistake({"num_frames": 5}, "num_frames frames", OTHER_NAME),
    Mistake({"generator": 3}, "generator"),
    Mistake({"generator": 3}, "generator seed=42", OF_A_PROGRAM),
    Mistake({"output_type": "pil"}, "output_type frames uint8 video.to_pil()", OF_A_PROGRAM | NO_FRAMES),
    Mistake({"sampler_name": "euler"}, "sampler_name scheduler", OF_A_PROGRAM),
    Mistake({"callback": "x"}, "callback", OF_A_CALL),
    Mistake({"tiling": 32}, "tiling"),
    Mistake({"tiling": 32}, "tiling negative_prompt", OF_A_PROGRAM | OF_A_CALL),
    # numbers
    Mistake({"steps": 0}, "steps 0 whole number 1"),
    Mistake({"steps": -3}, "steps -3 whole number 1"),
    Mistake({"steps": 10**12}, "steps 1000000000000 whole number"),
    Mistake({"steps": 201}, "steps 201 200", BY_HTTP),
    Mistake({"steps": "many"}, "steps 'many' number"),
    Mistake({"steps": True}, "steps True whole number", ONLY_TEXT),
    Mistake({"steps": 4.5}, "steps 4.5"),
    Mistake({"steps": [4]}, "steps [4] whole number"),
    Mistake({"frames": 0}, "0 frames 4n + 1 1"),
    Mistake({"frames": 80}, "80 frames 4n + 1 77 81"),
    Mistake({"frames": True}, "frames True whole number", ONLY_TEXT),
    Mistake({"fps": 0}, "fps 0 whole number 1"),
    Mistake({"fps": 10**30}, "fps 240", BY_HTTP),
    Mistake({"guidance_scale": -1}, "guidance_scale -1 finite number 0"),
    *(Mistake({"guidance_scale": x}, f"guidance_scale {x} finite number 0 100") for x in (101, 1e30)),
    Mistake({"flow_shift": 1e30}, "flow_shift 1e+30 finite number 100"),
    Mistake({"guidance_rule": "nag:scale=1e30"}, "nag scale=1e+30 1 100"),
    Mistake({"guidance_scale": float("nan")}, "guidance_scale nan finite number"),
    Mistake({"guidance_scale": float("inf")}, "guidance_scale inf finite number 5"),
    Mistake({"guidance_scale": "high"}, "guidance_scale 'high' number"),
    Mistake({"guidance_scale": False}, "guidance_scale False number", ONLY_TEXT),
    Mistake({"guidance_scale_2": 3.5}, "guidance_scale_2 guidance_scale"),
    Mistake({"boundary": 0.9}, "boundary"),
    Mistake({"boundary_step": 2}, "boundary_step"),
    Mistake({"strength": 0}, "strength 0 1", OF_OTHER_RUNS),
    Mistake({"strength": 1.1}, "strength 1.1 0 1", OF_OTHER_RUNS),
    Mistake({"strength": 0.5}, "strength 0.5 video", OF_OTHER_RUNS),
    Mistake({"flow_shift": 0}, "flow_shift 0 finite number"),
    Mistake({"flow_shift": float("inf")}, "flow_shift inf finite number"),
    Mistake({"windows": 0}, "windows 0 whole number 1"),
    Mistake({"overlap": 0}, "overlap 0 whole number 1"),
    Mistake({"seed": -2}, "seed -2 whole number random"),
    Mistake({"seed": 2**64}, "seed 18446744073709551616 whole number 2^64 - 1"),
    Mistake({"seed": "many"}, "seed 'many' whole number random"),
    Mistake({"seed": [1, 2]}, "seed [1, 2] whole number"),
    *(Mistake({name: "many"}, f"{name} 'many' number") for name in (*WHOLE_NUMBERS, "flow_shift", "strength")),
    *(Mistake({name: x}, f"{name} {x} number") for name in (*WHOLE_NUMBERS, "steps") for x in NOT_FINITE),
    *(Mistake({"seed": x}, f"seed {x} whole number random") for x in NOT_FINITE),
    *(Mistake({"strength": x}, f"strength {x} number", OF_OTHER_RUNS) for x in (*NOT_FINITE, -1)),
    Mistake({"flow_shift": float("nan")}, "flow_shift nan number"),
    Mistake({"flow_shift": -1}, "flow_shift -1 finite number"),
    *(Mistake({name: -1}, f"{name} -1") for name in (*WHOLE_NUMBERS, "steps")),
    # shapes
    Mistake({"size": "large"}, "'large' square"),
    Mistake({"size": "64x"}, "'64x' square"),
    Mistake({"size": "33x32"}, "width 33 16 32 48"),
    Mistake({"size": "0x0"}, "height 0 16"),
    Mistake({"size": "100000x100000"}, "100000"),
    Mistake({"size": "-1x5"}, "-1x5"),
    *(Mistake({"size": str(x)}, f"size {x}") for x in NOT_FINITE),
    Mistake({"size": 64}, "size 64"),
    Mistake({"size": [64.0, 64]}, "size [64.0, 64]"),
    Mistake({"size": [64, 32]}, "size [64, 32]", {"python": "a height and a width"}),
    Mistake({"size": "32x32", "height": 32}, "size height width", LATER),
    Mistake({"size": "32x32", "width": 32}, "size height width", LATER),
    Mistake({"size": None, "height": 1}, "height 1 16", WHOLE),
    Mistake({"size": None, "height": -16}, "height -16 16", WHOLE),
    Mistake({"size": None, "width": 0}, "width 0 16", WHOLE),
    Mistake({"size": None, "width": -1}, "width -1 16", WHOLE),
    *(Mistake({"size": None, "width": x}, f"width {x!r} whole number", WHOLE) for x in ("many", *NOT_FINITE)),
    Mistake({"size": None, "height": 64}, "height alone width", BY_HTTP),
    Mistake({"size": "1024x1024"}, "1024x1024 pixels server", BY_HTTP),
    Mistake({"seconds": 4}, "seconds frames", NO_SECONDS),
    Mistake({"seconds": -4, "frames": None}, "seconds -4 0", NO_SECONDS),
    # choices
    Mistake({"cache": "none of these"}, "'none of these' magcache teacache"),
    Mistake({"cache": "magcache:x"}, "magcache x"),
    *(Mistake({"cache": str(x)}, f"'{x}' magcache teacache") for x in NOT_FINITE),
    Mistake({"cache": ""}, "step cache magcache"),
    Mistake({"cache": "x" * 300}, "step cache magcache"),
    Mistake({"cache": "deepcache"}, "deepcache 2 steps 13 steps"),
    Mistake({"cache": "teacache", "steps": 9}, "teacache 9 steps 10 steps"),
    Mistake({"cache": "easycache", "steps": 11}, "easycache 11 steps 12 steps"),
    Mistake({"cache": "guidance", "guidance_scale": 1}, "guidance 1"),
    Mistake({"cache": "teacache:mode=plain"}, "teacache:mode=plain table nano"),
    Mistake({"guidance_rule": "none of these"}, "'none of these' cfg-zero nag"),
    Mistake({"guidance_rule": "napg"}, "napg nag apg"),
    Mistake({"guidance_rule": "apg", "guidance_scale": 1}, "apg guidance 1"),
    Mistake({"guidance_rule": "cfg-zero:zero_steps=2"}, "cfg-zero:zero_steps=2 2 steps"),
    Mistake({"sigmas": "other"}, "sigmas 'other' official diffusers comfy"),
    Mistake({"follow": "other"}, "follow 'other' official diffusers"),
    Mistake({"resize": "other"}, "resize 'other' crop pad stretch"),
    Mistake({"scheduler": "ddim"}, "ddim v unipc", SET),
    Mistake({"scheduler": "none-of-these"}, "none-of-these unipc", SET),
    Mistake({"scheduler": "rcm", "sigmas": "diffusers"}, "diffusers sigmas official", SET),
    Mistake({"scheduler": "rcm", "sigmas": "comfy"}, "comfy sigmas official", SET),
    Mistake({"scheduler": "consistency:timesteps=500,750"}, "timesteps (500.0, 750.0)", SET),
    Mistake({"scheduler": 3}, "scheduler 3", ONLY_TEXT | SET),
    Mistake({"dtype": "float8"}, "dtype"),
    Mistake({"dtype": "float8"}, "dtype float8 bfloat16 float32", {"http": "it is the server's"}),
    Mistake({"dtype": "bfloat16"}, "dtype", BY_HTTP),
    Mistake({"precision": "int4"}, "precision"),
    Mistake({"precision": "int4"}, "precision int4 int8-weights", {"http": "it is the server's"}),
    Mistake({"precision": "int8"}, "precision", BY_HTTP),
    Mistake({"model": "nanoo"}, "nanoo nano"),
    Mistake({"model": "sora-2"}, "sora-2 nano", BY_HTTP),
    Mistake({"model": 3}, "model 3", ONLY_TEXT),
    Mistake({"lora": "other:1"}, "other LoRA --lora", AT_LOADING),
    Mistake({"lora": 3}, "lora 3 LoRA --lora", AT_LOADING),
    Mistake({"lora": {"other": "x"}}, "lora LoRA --lora", AT_LOADING),
    # pictures and clips
    Mistake({"image": "absent.png"}, "absent.png", NEVER_NAMED),
    Mistake({"image": ADDRESS}, f"{ADDRESS} curl", NEVER_NAMED),
    Mistake({"image": 7}, "image 7", ONLY_TEXT | NEVER_NAMED),
    Mistake({"references": "absent.png"}, "nano reference images"),
    Mistake({"mask": "absent.png"}, "nano mask"),
    Mistake({"last_image": "absent.png"}, "nano last"),
    Mistake({"image": ADDRESS}, "image data: URL", NEVER_SENT),
    Mistake({"image": "/etc/passwd"}, "image data: URL", NEVER_SENT),
    Mistake({"image": {"file_id": "1"}}, "image data: URL", NEVER_SENT),
    Mistake({"image": "data:image/png;base64,!!"}, "image base64", NEVER_SENT),
    Mistake({"image": "data:image/png;base64,AAAA"}, "image picture", NEVER_SENT),
    Mistake({"image": ["data:;base64,AAAA"] * 2}, "2 files image 1", NEVER_SENT),
    Mistake({"image": [["data:;base64,AAAA"]]}, "image file", NEVER_SENT),
    Mistake({"image": reduce(lambda inner, _: [inner], range(600), [])}, "image file", NEVER_SENT),
    Mistake({"image": "a.png", "input_reference": "b.png"}, "image", NEVER_NAMED | ONE_NAME),
)
OF_A_CHECKPOINT = (  # asked of a small checkpoint of each family, in a folder
    Mistake({"frames": 14}, "14 frames 4n + 1 13 17"),
    Mistake({"frames": 6}, "6 frames 4n + 1 5 9"),
    Mistake({"size": "49x32"}, "width 49 16 48 64"),
    Mistake({"guidance_scale_2": 3.5}, "guidance_scale_2 guidance_scale"),
    Mistake({"boundary": 0.9}, "boundary"),
)
