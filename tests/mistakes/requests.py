# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a request for a video of nano. `test_interfaces.py` sends each row through each interface."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

VALID: dict[str, Any] = {"prompt": "a red circle", "size": "32x32", "frames": 5, "steps": 2}
INTERFACES = ("command", "toml", "rows", "http", "python")


class Mistake(NamedTuple):
    """A mistake in one request.

    Args:
        fields: The fields of `VideoRequest` that make VALID wrong; None omits one.
        words: The words of the message: the value, and what to do. An interface may write fields with dashes.
        excluded: The interfaces where this mistake is impossible or allowed, with the reason.
    """

    fields: Mapping[str, Any]
    words: str
    excluded: Mapping[str, str] = {}


ONLY_TEXT = {"command": "each value on a command line is text"}
NO_PROMPT_IN_TOML = {"toml": "the command line has the prompt"}
ONLY_TEXT_WITHOUT_TOML = ONLY_TEXT | NO_PROMPT_IN_TOML
EMPTY_PROMPT_ALLOWED = {"python": "a program may give an empty prompt"}
FLAG_WITHOUT_VALUE = dict.fromkeys(("command", "toml"), "a flag has no value")
ONE_IMAGE_NAME = dict.fromkeys(("command", "toml", "python"), "the image has one name")
RECORDS_ALLOW_ANY_TEXT = {"python": "a record may have any text"}
ONLY_ROWS_HAVE_SECONDS = dict.fromkeys(("command", "toml", "python"), "only rows and HTTP have the field seconds")
NAME_OF_OLD_SCRIPTS = dict.fromkeys(("command", "toml"), "the scripts before wanjax had an option of this name")
ONLY_PROGRAMS = dict.fromkeys(("command", "toml"), "it is a keyword of another library")
NO_FRAMES_BY_HTTP = {"http": "a response has no frames"}
STRENGTH_OF_OTHER_RUNS = {"toml": "a file's strength applies only to runs that start from a video"}
SIZE_REPLACED_IN_TOML = {"toml": "the height or width of a table replaces that of a size"}
ONE_SIDE_REFUSED_BEFORE = {"http": "a request with one side is refused before"}
SCHEDULER_IS_AN_ATTRIBUTE = {"python": "a program sets `pipe.scheduler`"}
KEYWORD_OF_A_CALL = {"python": "a call has this keyword"}
CHOSEN_AT_LOADING = dict.fromkeys(("command", "toml", "rows", "python"), "it is chosen when the model is loaded")
NO_FILE_NAMES_BY_HTTP = {"http": "a request contains the file, not its name"}
FILES_ONLY_BY_HTTP = dict.fromkeys(("command", "toml", "rows", "python"), "the user names the file")
LIMIT_OF_THE_SERVER = dict.fromkeys(("command", "toml", "rows", "python"), "only the server has this limit")

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
        {"prompt": " ", "allow_empty_prompt": False},
        "prompt empty allow_empty_prompt",
        EMPTY_PROMPT_ALLOWED | FLAG_WITHOUT_VALUE,
    ),
    Mistake({"prompt": 3}, "prompt 3 text", ONLY_TEXT_WITHOUT_TOML),
    Mistake({"prompt": "caf\udce9"}, r"prompt 'caf\udce9' text UTF-8", NO_PROMPT_IN_TOML),
    Mistake({"negative_prompt": "caf\udce9"}, r"negative_prompt 'caf\udce9' text UTF-8", {"toml": "it is in UTF-8"}),
    Mistake({"negative_prompt": ["a"]}, "negative_prompt ['a'] text", ONLY_TEXT),
    Mistake(
        {"negative_prompt": "a\0b"},
        "negative_prompt",
        {"command": "no argument of a process holds \\0"} | RECORDS_ALLOW_ANY_TEXT,
    ),
    Mistake({"prompt": "x" * 5000}, "prompt 5000 characters 4000", LIMIT_OF_THE_SERVER),
    Mistake({"then": "x" * 4001}, "then 4001 characters 4000", LIMIT_OF_THE_SERVER),
    Mistake({"scheduler": "x" * 201}, "scheduler 201 characters 200", LIMIT_OF_THE_SERVER),
    # names
    Mistake({"stepz": 4}, "stepz steps"),
    Mistake({"step": 4}, "step steps"),
    Mistake({"xyzzy": 4}, "xyzzy"),
    Mistake({"xyzzy": 4}, "xyzzy prompt", ONLY_PROGRAMS),
    Mistake({"num_inference_steps": 4}, "num_inference_steps steps", NAME_OF_OLD_SCRIPTS),
    Mistake({"num_frames": 5}, "num_frames frames", NAME_OF_OLD_SCRIPTS),
    Mistake({"generator": 3}, "generator"),
    Mistake({"generator": 3}, "generator seed=42", ONLY_PROGRAMS),
    Mistake({"output_type": "pil"}, "output_type frames uint8 video.to_pil()", ONLY_PROGRAMS | NO_FRAMES_BY_HTTP),
    Mistake({"sampler_name": "euler"}, "sampler_name scheduler", ONLY_PROGRAMS),
    Mistake({"callback": "x"}, "callback", KEYWORD_OF_A_CALL),
    Mistake({"tiling": 32}, "tiling"),
    Mistake({"tiling": 32}, "tiling negative_prompt", ONLY_PROGRAMS | KEYWORD_OF_A_CALL),
    # numbers
    Mistake({"steps": 0}, "steps 0 whole number 1"),
    Mistake({"steps": -3}, "steps -3 whole number 1"),
    Mistake({"steps": 10**12}, "steps 1000000000000 whole number"),
    Mistake({"steps": 201}, "steps 201 200", LIMIT_OF_THE_SERVER),
    Mistake({"steps": "many"}, "steps 'many' number"),
    Mistake({"steps": True}, "steps True whole number", ONLY_TEXT),
    Mistake({"steps": 4.5}, "steps 4.5"),
    Mistake({"steps": [4]}, "steps [4] whole number"),
    Mistake({"frames": 0}, "0 frames 4n + 1 1"),
    Mistake({"frames": 80}, "80 frames 4n + 1 77 81"),
    Mistake({"frames": True}, "frames True whole number", ONLY_TEXT),
    Mistake({"fps": 0}, "fps 0 whole number 1"),
    Mistake({"fps": 10**30}, "fps 240", LIMIT_OF_THE_SERVER),
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
    Mistake({"strength": 0}, "strength 0 1", STRENGTH_OF_OTHER_RUNS),
    Mistake({"strength": 1.1}, "strength 1.1 0 1", STRENGTH_OF_OTHER_RUNS),
    Mistake({"strength": 0.5}, "strength 0.5 video", STRENGTH_OF_OTHER_RUNS),
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
    *(Mistake({"strength": x}, f"strength {x} number", STRENGTH_OF_OTHER_RUNS) for x in (*NOT_FINITE, -1)),
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
    Mistake({"size": "32x32", "height": 32}, "size height width", SIZE_REPLACED_IN_TOML),
    Mistake({"size": "32x32", "width": 32}, "size height width", SIZE_REPLACED_IN_TOML),
    Mistake({"size": None, "height": 1}, "height 1 16", ONE_SIDE_REFUSED_BEFORE),
    Mistake({"size": None, "height": -16}, "height -16 16", ONE_SIDE_REFUSED_BEFORE),
    Mistake({"size": None, "width": 0}, "width 0 16", ONE_SIDE_REFUSED_BEFORE),
    Mistake({"size": None, "width": -1}, "width -1 16", ONE_SIDE_REFUSED_BEFORE),
    *(
        Mistake({"size": None, "width": x}, f"width {x!r} whole number", ONE_SIDE_REFUSED_BEFORE)
        for x in ("many", *NOT_FINITE)
    ),
    Mistake({"size": None, "height": 64}, "height alone width", LIMIT_OF_THE_SERVER),
    Mistake({"size": "1024x1024"}, "1024x1024 pixels server", LIMIT_OF_THE_SERVER),
    Mistake({"seconds": 4}, "seconds frames", ONLY_ROWS_HAVE_SECONDS),
    Mistake({"seconds": -4, "frames": None}, "seconds -4 0", ONLY_ROWS_HAVE_SECONDS),
    # choices
    Mistake({"cache": "none of these"}, "'none of these' magcache teacache"),
    Mistake({"cache": "magcache:x"}, "magcache x"),
    *(Mistake({"cache": str(x)}, f"'{x}' magcache teacache") for x in NOT_FINITE),
    Mistake({"cache": ""}, "step cache magcache"),
    Mistake({"cache": "x" * 300}, "step cache magcache"),
    Mistake({"cache": "magcache", "steps": 3}, "magcache 1 3 7 steps none"),
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
    Mistake({"scheduler": "ddim"}, "ddim velocity unipc", SCHEDULER_IS_AN_ATTRIBUTE),
    Mistake({"scheduler": "none-of-these"}, "none-of-these unipc", SCHEDULER_IS_AN_ATTRIBUTE),
    Mistake({"scheduler": "rcm", "sigmas": "diffusers"}, "diffusers sigmas official", SCHEDULER_IS_AN_ATTRIBUTE),
    Mistake({"scheduler": "rcm", "sigmas": "comfy"}, "comfy sigmas official", SCHEDULER_IS_AN_ATTRIBUTE),
    Mistake({"scheduler": "consistency:timesteps=500,750"}, "timesteps (500.0, 750.0)", SCHEDULER_IS_AN_ATTRIBUTE),
    Mistake({"scheduler": 3}, "scheduler 3", ONLY_TEXT | SCHEDULER_IS_AN_ATTRIBUTE),
    Mistake({"dtype": "float8"}, "dtype"),
    Mistake({"dtype": "float8"}, "dtype float8 bfloat16 float32", {"http": "it is the server's"}),
    Mistake({"dtype": "bfloat16"}, "dtype", LIMIT_OF_THE_SERVER),
    Mistake({"precision": "int4"}, "precision"),
    Mistake({"precision": "int4"}, "precision int4 int8-weights", {"http": "it is the server's"}),
    Mistake({"precision": "int8"}, "precision", LIMIT_OF_THE_SERVER),
    Mistake({"model": "nanoo"}, "nanoo nano"),
    Mistake({"model": "sora-2"}, "sora-2 nano", LIMIT_OF_THE_SERVER),
    Mistake({"model": 3}, "model 3", ONLY_TEXT),
    Mistake({"lora": "other:1"}, "other LoRA --lora", CHOSEN_AT_LOADING),
    Mistake({"lora": 3}, "lora 3 LoRA --lora", CHOSEN_AT_LOADING),
    Mistake({"lora": {"other": "x"}}, "lora LoRA --lora", CHOSEN_AT_LOADING),
    # pictures and clips
    Mistake({"image": "absent.png"}, "absent.png", NO_FILE_NAMES_BY_HTTP),
    Mistake({"image": ADDRESS}, f"{ADDRESS} curl", NO_FILE_NAMES_BY_HTTP),
    Mistake({"image": 7}, "image 7", ONLY_TEXT | NO_FILE_NAMES_BY_HTTP),
    Mistake({"references": "absent.png"}, "nano reference images"),
    Mistake({"mask": "absent.png"}, "nano mask"),
    Mistake({"last_image": "absent.png"}, "nano last"),
    Mistake({"image": ADDRESS}, "image data: URL", FILES_ONLY_BY_HTTP),
    Mistake({"image": "/etc/passwd"}, "image data: URL", FILES_ONLY_BY_HTTP),
    Mistake({"image": {"file_id": "1"}}, "image data: URL", FILES_ONLY_BY_HTTP),
    Mistake({"image": "data:image/png;base64,!!"}, "image base64", FILES_ONLY_BY_HTTP),
    Mistake({"image": "data:image/png;base64,AAAA"}, "image picture", FILES_ONLY_BY_HTTP),
    Mistake({"image": ["data:;base64,AAAA"] * 2}, "2 files image 1", FILES_ONLY_BY_HTTP),
    Mistake({"image": [["data:;base64,AAAA"]]}, "image file", FILES_ONLY_BY_HTTP),
    Mistake({"image": reduce(lambda inner, _: [inner], range(600), [])}, "image file", FILES_ONLY_BY_HTTP),
    Mistake({"image": "a.png", "input_reference": "b.png"}, "image", NO_FILE_NAMES_BY_HTTP | ONE_IMAGE_NAME),
)
CHECKPOINT_MISTAKES = (  # sent to a small checkpoint of each family
    Mistake({"frames": 14}, "14 frames 4n + 1 13 17"),
    Mistake({"frames": 6}, "6 frames 4n + 1 5 9"),
    Mistake({"size": "49x32"}, "width 49 16 48 64"),
    Mistake({"guidance_scale_2": 3.5}, "guidance_scale_2 guidance_scale"),
    Mistake({"boundary": 0.9}, "boundary"),
)
