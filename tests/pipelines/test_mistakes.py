# SPDX-License-Identifier: Apache-2.0
"""Mistakes in calls of the library: each fails at once, with a message that names the solution.

Mistakes in a request, which all interfaces refuse, are in tests/mistakes.
"""

import inspect
import io
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.support.types import unchecked
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError, WanjaxWarning, user_stack_level
from wanjax.pipelines.windows import CONTROL_INPUT, check_windows

LATENTS = np.zeros((1, 16, 5, 8, 8), np.float32)  # of nano
CLIP = np.zeros((5, 64, 64, 3), np.uint8)
INVALID_TEXT = "caf\udce9"


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["a", ["b"]]}, "prompt ['b'] text"),
    ({"prompt": ["a", None]}, "prompt None"),
    ({"prompt": b"a cat"}, "prompt b'a cat' text"),
    ({"steps": 2.0}, "steps 2.0 whole number 1"),
    ({"batch_guidance": "no"}, "batch_guidance True False 'no'"),
    ({"steps": "2"}, "steps '2' whole number 1"),
    ({"guidance_scale": jnp.ones(3)}, "guidance_scale"),
    ({"size": "64x"}, "size '64x' 64p square 64x64"),
    ({"size": (64.0, 64)}, "size (64.0, 64) (height, width)"),
    ({"size": (64, 64), "height": 64}, "size height width"),
    ({"seeds": 3}, "seeds 3 range(3) [7]"),
    ({"seeds": "3"}, "seeds '3' range(3)"),
    ({"seeds": []}, "seeds [] range(3)"),
    ({"seeds": [1], "seed": 3}, "seeds=[1] seed=3 one"),
    ({"seeds": range(2), "seed": 0}, "seeds=range(0, 2) seed=0 one"),
    ({"prompt": []}, "prompts []"),
    ({"noise": LATENTS, "windows": 2}, "custom noise one window windows is 2 leave out noise or windows"),
    ({"image": io.BytesIO()}, "BytesIO picture PIL image uint8"),
    ({"image": [CLIP[0]]}, "list picture"),
    ({"image": wanjax.Video(CLIP, 8, {})}, "Video picture video[0]"),
    ({"video": wanjax.Video(CLIP, 8, {})}, "Video clip video.frames"),
    ({"lora": "x"}, "'lora' wanjax.load(MODEL, lora=...)"),
    ({"decoder": "x"}, "'decoder' wanjax.load(MODEL, decoder=...)"),
    ({"output_type": "latent"}, "'output_type' pipe.denoise pipe.encode"),
    ({"video": Image.new("RGB", (64, 64))}, "Image clip"),
    ({"video": io.BytesIO()}, "BytesIO clip"),
    ({"noise": [0.0]}, "noise [0.0] [1, 16, 5, 8, 8]"),
    ({"noise": LATENTS[0]}, "noise [16, 5, 8, 8] video [1, 16, 5, 8, 8]"),
    ({"noise": LATENTS.astype(int)}, "noise int64 floats"),
    ({"noise": np.full_like(LATENTS, np.nan)}, "'noise' not finite generate again"),
    ({"callback": 3}, "callback 3 function Step"),
    ({"callback": lambda: None}, "callback function Step () one argument"),
    ({"callback": lambda step, latents: None}, "callback function Step (step, latents) one argument"),
    ({"references": (frame for frame in CLIP)}, "nano reference"),  # a generator can be read only once
]
INVALID_LATENTS = [
    (np.repeat(LATENTS, 2, axis=0), "latents [2, 16, 5, 8, 8] [1, 16, T, H, W]"),
    (LATENTS[0], "latents [16, 5, 8, 8] [1, 16, T, H, W]"),
    (LATENTS[:, :3], "latents [1, 3, 5, 8, 8] [1, 16, T, H, W]"),
    (LATENTS[:, :, :0], "latents [1, 16, 0, 8, 8]"),
    (LATENTS.astype(int), "latents int64 floats"),
    (LATENTS.tolist(), "latents list [1, 16, T, H, W]"),
    ("latents.safetensors", "latents 'latents.safetensors'"),
]
TILINGS = [  # a stride larger than its tile would leave pixels out
    ((4, 4), "size tiles 4 multiple 8"),
    ((0, 0), "size tiles 0 multiple 8"),
    ((32, 12), "stride tiles 12 multiple 8"),
    (((32, 20), 16), "size tiles (32, 20) multiple 8"),
    (((32,), 24), "size tiles (32,) height width"),
    (("a", 8), "size tiles 'a'"),
    ((32, 64), "tiles 32 64 gaps stride"),
    ((32, None), "tiles 32 192 gaps stride"),
    (((64, 32), (32, 40)), "tiles (64, 32) (32, 40) gaps"),
]
CLIPS = [
    (Path("clip.mp4"), "frames uint8 [T, H, W, 3] floats 0 1"),
    ([], "[] frames"),
    (CLIP[0], "uint8 [64, 64, 3] frames"),
    (CLIP.astype(np.int32), "int32 [5, 64, 64, 3] frames"),
    ([CLIP[0], CLIP[0, :32]], "frames different sizes"),
]
CALLS_WITH_TILES: list[tuple[str, Any]] = [
    ("decode", LATENTS),
    ("encode_video", CLIP[:1]),
    ("__call__", "a red circle"),
]
METHODS: list[tuple[str, tuple, dict[str, Any], str]] = [
    *(("decode", (latents,), {}, words) for latents, words in INVALID_LATENTS),
    ("decode", (LATENTS,), {"tiling": True}, "tiling True wanjax.Tiling()"),
    ("decode", (LATENTS,), {"output_type": "pil"}, "'output_type'"),
    *(
        (name, (pixels,), {"tiling": wanjax.Tiling(*tiling)}, words)
        for tiling, words in TILINGS
        for name, pixels in CALLS_WITH_TILES
    ),
    *(("denoise", (x,), {}, "denoise WanConditioning encode") for x in ("a red circle", ("a", "b"), LATENTS, None)),
    *(("encode_video", (clip,), {}, words) for clip, words in CLIPS),
    ("decode", (LATENTS, "floot32"), {}, "dtype uint8 float32 'floot32'"),
    ("decode", (LATENTS, "int32"), {}, "dtype uint8 float32 'int32'"),
    ("encode", (INVALID_TEXT,), {}, r"prompt 'caf\udce9' text UTF-8"),
    ("prepare", (), {"prompt": INVALID_TEXT}, r"prompt 'caf\udce9' text UTF-8"),
    ("encode", ("a",), {"negative_prompt": INVALID_TEXT}, r"negative_prompt 'caf\udce9' text UTF-8"),
    ("videos", ([],), {}, "prompts []"),
    ("videos", (3,), {}, "prompts list 3 pipe(prompt)"),
    ("__call__", (), {}, 'prompt missing pipe("a'),
    ("truncations", (3,), {}, "prompt text 3"),
    *((name, (3,), {}, "settings wanjax.Settings 3 pipe.settings()") for name in ("draws", "noise", "check_memory")),
    ("videos", (["a"],), {"seeds": [1], "seed": "random"}, "seeds=[1] seed='random' one"),
    ("videos", (["a", "b"],), {"noise": LATENTS}, "noise 2 videos"),
    ("free", ("transformers",), {}, "'transformers' transformer"),
    ("__getattr__", ("image_encoder",), {}, "'image_encoder' transformer"),
    ("__reduce_ex__", (5,), {}, "pickled wanjax.load"),
]
LOADS: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "model None 'nano'"),
    ("nano", {"offload": "yes"}, "offload none stages blocks:N 'yes'"),
    ("nano", {"attention": 3}, "attention 3 auto chunked"),
    ("nano", {"lora": 5}, "lora 5 'style.safetensors:0.8'"),
    ("nano", {"lora": Path("no.safetensors")}, "no.safetensors"),
    ("nano", {"mesh": 8}, "mesh 8 wanjax.make_mesh"),
    ("nano", {"torch_dtype": "bfloat16"}, "'torch_dtype' dtype"),
    ("nano", {"num_frames": 9}, "'num_frames' pipe(prompt, frames="),
    ("nano", {"height": 9}, "'height' pipe(prompt, height="),
    ("https://huggingface.co/Wan-AI/Wan2.2-TI2V-5B/tree/main", {}, "hub Wan-AI/Wan2.2-TI2V-5B"),
    ("huggingface.co/Wan-AI/Wan2.2-TI2V-5B", {}, "hub Wan-AI/Wan2.2-TI2V-5B"),
    ("https://example.org/model", {}, "web address curl -LO https://example.org/model"),
    ("nano", {"lora": "https://huggingface.co/a/b/resolve/main/c/d.safetensors"}, "hub a/b/c/d.safetensors"),
    ("nano", {"lora": "https://example.org/d.safetensors:0.5"}, "`curl -LO https://example.org/d.safetensors`"),
    ("nano", {"video": "clip.mp4"}, "video 'clip.mp4' settings {'size'"),
]
PUBLIC: list[tuple[Any, tuple, dict[str, Any], str]] = [
    (wanjax.make_mesh, (), {"xp": 2}, "axis 'xp' dp sp tp"),
    (wanjax.make_mesh, (), {"devices": 3}, "devices list 3 jax.devices()"),
    (wanjax.register, ("nano",), {}, "Family 'nano' wanjax.load"),
    (wanjax.Previews, (3,), {}, "previews path 3 preview.png"),
    (wanjax.Previews, (), {"looks": 0}, "looks 0 1 6"),
    (wanjax.Previews, ("preview.jpg",), {}, "previews .png 'preview.jpg'"),
    (wanjax.extend_prompt, ("a", 3), {}, "URL 3 http://localhost:11434/v1"),
    (wanjax.price, (np.sin,), {"mesh": 3}, "mesh axes 3 'tp'"),
    (wanjax.price, (np.sin,), {"donate": 3}, "donate list 3 [0]"),
    (wanjax.price, (np.sin,), {"options": 3}, "options 3 dict"),
]


@pytest.mark.parametrize(("function", "arguments", "keywords", "words"), PUBLIC)
def test_a_mistake_in_a_public_function_is_reported(function, arguments, keywords, words):
    assert has_line_with_words(refused(function, *arguments, **keywords), words)


@pytest.fixture(scope="module")
def pipe():
    return wanjax.load("nano")


def refused(call, *arguments: Any, **keywords: Any) -> str:
    """Return the message of the WanjaxError that a call raises."""
    with unchecked(), pytest.raises(WanjaxError) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("keywords", "words"), CALLS, ids=lambda x: re.sub(" at 0x.*", "", str(x))[:40])
def test_a_mistake_in_a_call_of_a_pipeline_is_reported(pipe, keywords, words):
    assert has_line_with_words(refused(pipe, **{"prompt": "a red circle"} | keywords), words)


@pytest.mark.parametrize(("name", "arguments", "keywords", "words"), METHODS)
def test_a_mistake_in_a_method_is_reported(pipe, name, arguments, keywords, words):
    assert has_line_with_words(refused(getattr(pipe, name), *arguments, **keywords), words)


def test_seeds_beside_a_seed_are_refused_by_denoise(pipe):
    refusal = refused(pipe.denoise, pipe.encode("a red circle"), seeds=[1], seed=3)
    assert has_line_with_words(refusal, "seeds=[1] seed=3 one")


@pytest.mark.parametrize(("model", "keywords", "words"), LOADS)
def test_a_mistake_in_loading_is_reported(model, keywords, words):
    assert has_line_with_words(refused(wanjax.load, model, **keywords), words)


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        *((wanjax.Video(CLIP, 8, {}).save, name, f"{name!r} file folder") for name in ("", 5, None)),
        (wanjax.make_mesh, "dp=2", "dp 'dp=2' make_mesh(dp=2, tp=4)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_invalid_path_or_mesh_is_reported(call, options, words):
    assert has_line_with_words(refused(call, options), words)


@pytest.mark.parametrize(("latents", "words"), INVALID_LATENTS)
def test_invalid_latents_are_refused_before_the_first_chunk(pipe, latents, words):
    assert has_line_with_words(refused(lambda: next(pipe.decode_chunks(latents))), words)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("image", np.zeros((64, 64))),
        ("image", np.zeros((64, 64), bool)),
        ("image", np.zeros((64, 64, 1), np.uint8)),
        ("image", np.zeros((64, 64, 4), np.uint8)),
        ("image", np.zeros((3, 64, 64), np.uint8)),
        ("image", np.zeros((1, 64, 64), np.float32)),
        ("image", np.zeros((64, 64, 3), np.int64)),
        ("image", CLIP),
        ("video", CLIP[0]),
        ("video", CLIP[None]),
        ("video", np.zeros((5, 64, 64), np.int32)),
        ("video", np.zeros((64, 64), np.uint8)),
        ("video", np.moveaxis(CLIP, -1, 1) / 255),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.dtype}{x.shape}",
)
def test_an_array_of_another_form_suggests_its_conversion_to_a_picture(pipe, name, array):
    """The expression in the message works, and its result is accepted."""
    message = refused(pipe, prompt="a red circle", **{name: array})
    assert has_line_with_words(message, f"{array.dtype} {list(array.shape)} uint8")
    picture = eval(message.rpartition("give ")[2], {"np": np, "x": array})
    assert picture.dtype == np.uint8
    pipe.prepare(prompt="a red circle", frames=1, **{name: picture})


NETWORK: dict[str, tuple[dict[str, Any], str]] = {  # arguments of nano's transformer, and words of the refusal
    "axes": ({"latents": jnp.zeros((1, 2, 8, 16))}, "latents [B T H W C] [1, 2, 8, 16] five axes"),
    "channels": ({"latents": jnp.zeros((1, 2, 8, 8, 3))}, "[1, 2, 8, 8, 3] 16 channels"),
    "list": ({"latents": [0.0]}, "latents [B T H W C] [0.0]"),
    "timesteps": ({"t": jnp.ones(3)}, "timesteps [3] 1 video one number"),
    "timesteps of NumPy": ({"t": np.ones(3)}, "timesteps [3] 1 video one number"),
    "text": ({"context": "x"}, "prompts 'x' text encoder"),
    "width": ({"context": jnp.zeros((1, 5, 7))}, "prompts [1, 5, 7] text encoder"),
}


@pytest.mark.parametrize("mistake", NETWORK)
def test_a_mistake_in_a_call_of_a_transformer_is_reported(pipe, mistake):
    """The transformer is called directly, with arrays of wrong shapes or types."""
    arguments, words = NETWORK[mistake]
    valid_arguments: dict[str, Any] = {"latents": jnp.zeros((1, 2, 8, 8, 16)), "t": 1.0}
    valid_arguments |= {"context": jnp.zeros((1, 5, pipe.transformer.config.text_width))}
    assert has_line_with_words(refused(pipe.transformer, **valid_arguments | arguments), words)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((64, 64, 5), np.uint8), "[64, 64, 5] 3 channels, not 5"),
        (np.zeros((0, 64, 3), np.uint8), "[0, 64, 3] pixels"),
        (np.zeros(3, np.uint8), "uint8 [3] axes"),
    ],
)
def test_an_array_that_is_not_a_picture_is_refused(pipe, array, words):
    assert has_line_with_words(refused(pipe, prompt="a red circle", image=array), words)


@pytest.mark.parametrize(("name", "words"), [("fps", "'fps' pipe(prompt, fps=...)"), ("quality", "'quality' path")])
def test_saving_a_video_takes_no_settings(tmp_path, name, words):
    assert has_line_with_words(refused(wanjax.Video(CLIP, 8, {}).save, tmp_path / "a.mp4", **{name: 30}), words)
    assert list(tmp_path.iterdir()) == []


def test_integers_of_numpy_are_integers(pipe):
    with unchecked():
        settings = pipe.settings(frames=np.int64(17), size=[np.int32(64), 64], guidance_scale=np.float32(2))
    assert (settings.frames, settings.size, settings.guidance_scale) == (17, (64, 64), 2.0)
    assert {type(settings.frames), type(settings.height)} == {int}
    assert type(settings.guidance_scale) is float


def test_an_unknown_name_suggests_a_valid_one(pipe):
    for value, name, message in (
        (pipe, "transfomer", "transformer"),
        (pipe, "from_pretrained", "wanjax.load"),
        (pipe, "to", "JAX"),
        (pipe, "enable_model_cpu_offload", "wanjax.load"),
        (pipe, "load_lora_weights", "wanjax.load"),
        (pipe.vae, "decode", "pipe.decode"),
        (pipe.vae, "encode", "pipe.encode_video"),
        (wanjax.Pipeline, "from_pretrained", "wanjax.load"),
        (wanjax, "WanPipeline", "wanjax.load"),
        (wanjax, "DiffusionPipeline", "wanjax.load"),
        (wanjax, "from_pretrained", "wanjax.load"),
        (wanjax, "save_video", "video.save"),
        (wanjax, "lode", "load"),
        (wanjax, "make_mash", "make_mesh"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(value, name)
        assert not hasattr(value, name)
    assert not hasattr(pipe, "xyzzy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[("schedular", "scheduler"), ("progres", "progress"), ("xyzzy", "progress scheduler")],
        *[("device", "partitioner"), ("transformer", "nnx.update load")],
    ],
)
def test_setting_an_unknown_attribute_suggests_a_valid_one(pipe, name, message):
    with pytest.raises(AttributeError, match=line_with_words(message)):
        setattr(pipe, name, "euler")
    assert name not in vars(pipe)


def test_a_text_in_place_of_a_list_of_prompts_is_refused():
    with pytest.raises(WanjaxError, match=line_with_words("prompts 'a red circle' list")):
        wanjax.load("nano").videos("a red circle")


@pytest.mark.parametrize("name", ["prompt", "negative_prompt"])
def test_prompts_have_no_effect_after_their_encoding(name):
    pipe = wanjax.load("nano")
    prompts = pipe.encode_prompts("a red circle")
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} encode")):
        pipe.denoise(prompts, **{name: "a blue square"})


def test_invalid_settings_for_the_choice_of_a_mesh_are_refused():
    with pytest.raises(WanjaxError, match=line_with_words("'stepz' steps")):
        wanjax.load("nano", video={"stepz": 3})


def test_a_callback_with_wrong_parameters_is_refused_before_the_run():
    """Every callback is checked. Additional parameters with defaults are allowed."""
    pipe: Any = wanjax.load("nano")
    load: Any = wanjax.load
    conditioning = pipe.encode("a")
    wrong_calls: list[tuple[Any, str]] = [
        (lambda: pipe.denoise(conditioning, callback=lambda: None), "callback Step one argument"),
        (lambda: pipe.denoise(conditioning, switched=lambda: None), "switched Switch one argument"),
        (lambda: pipe.denoise(conditioning, continued=lambda done: None), "continued (done) 2 arguments"),
        (lambda: pipe.decode(LATENTS, callback=lambda done: None), "callback chunks (done) 2 arguments"),
        (lambda: pipe.videos(["a"], skip=lambda: True), "skip metadata () one argument"),
        (lambda: load("nano", progress=lambda x: None), "progress bytes (x) 3 arguments"),
        (lambda: load("nano", note=lambda: None), "note sentence () one argument"),
    ]
    for call, words in wrong_calls:
        with pytest.raises(WanjaxError, match=line_with_words(words)):
            call()
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words("note 'a' sentence")):
        load("nano", note="a")
    assert not pipe.components.has("transformer")
    step_indices: list[int] = []
    pipe.denoise(conditioning, steps=1, callback=lambda step, more=1: step_indices.append(step.index))
    assert step_indices == [0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nano",), "price function 'nano' `wanjax plan nano`"),
        ((3,), "price function 3 `wanjax plan MODEL`"),
        ((lambda x: x, "float32"), "price shape 'float32' jax.ShapeDtypeStruct"),
    ],
)
def test_pricing_anything_but_a_function_is_refused(arguments, words):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(words)):
        wanjax.price(*arguments)


def test_pricing_a_pipeline_suggests_the_command():
    with pytest.raises(WanjaxError, match=line_with_words("price function Pipeline `wanjax plan MODEL`")):
        wanjax.price(wanjax.load("nano"))


def test_a_warning_points_to_the_line_of_the_user():
    """This holds for any number of library functions on the call stack."""
    code = (
        "def inner():\n    warnings.warn('x', stacklevel=level())\n"
        "def middle():\n    inner()\ndef outer():\n    middle()\n"
    )
    library: dict[str, Any] = {
        "__name__": "wanjax.fake",
        "warnings": warnings,
        "level": inspect.unwrap(user_stack_level),
    }
    exec(compile(code, "library.py", "exec"), library)
    for call in (library["inner"], library["middle"], library["outer"]):
        with pytest.warns(UserWarning, match="x") as caught:
            call()
        assert caught[0].filename == __file__


def test_a_folder_named_like_the_hub_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("huggingface.co/owner/name").mkdir(parents=True)
    assert has_line_with_words(refused(wanjax.load, "huggingface.co/owner/name"), "model_index.json")


def test_a_conditioning_without_an_array_is_refused(pipe):
    conditioning = pipe.encode("a red circle")
    for value, text in ((None, "None"), ("a red circle", "'a red circle'")):
        message = refused(pipe.denoise, conditioning._replace(prompt_embeds=value))
        assert has_line_with_words(message, f"prompt_embeds array {text} encode")


def test_a_conditioning_has_a_prompt_for_each_seed(pipe):
    message = refused(pipe.denoise, pipe.encode("a red circle"), seeds=[1, 2])
    assert has_line_with_words(message, "conditioning 1 prompt 2 seeds pipe(prompt, seeds=[1, 2])")


def test_only_a_saved_state_is_replaced_by_a_state(pipe, tmp_path):
    picture = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(picture)
    content = picture.read_bytes()
    for path, words in ((tmp_path, f"{tmp_path} folder name file"), (picture, f"{picture} no saved state another")):
        assert has_line_with_words(refused(pipe.denoise, pipe.encode("a red circle"), keep=path), words)
    assert picture.read_bytes() == content
    state = tmp_path / "new" / "state.safetensors"
    for options in ({"steps": 4, "seed": 1}, {"steps": 5, "seed": 2}):  # the second call is of another video
        with pytest.raises(wanjax.Cancelled):
            pipe.denoise(pipe.encode("a red circle"), keep=state, callback=lambda step: step.index < 1, **options)
        assert state.is_file()


def test_a_negative_prompt_without_guidance_gives_a_warning(pipe):
    with pytest.warns(WanjaxWarning, match=line_with_words("guidance off negative prompt no effect")):
        pipe.videos(["a red circle"], negative_prompt="a blue square", guidance_scale=1)
    pipe.videos(["a red circle"], guidance_scale=1)
    pipe.videos(["a red circle"], negative_prompt="a blue square")


def test_a_mistake_in_a_call_of_a_network_is_reported(pipe):
    conditioning = pipe.encode("a red circle")
    x, text = np.zeros((1, 5, 8, 8, 16), np.float32), conditioning.prompt_embeds
    transformer, encoder = pipe.transformer, pipe.text_encoder
    for call, arguments, words in (
        (transformer, (x, 500, conditioning), "encoded prompts WanConditioning prompt_embeds"),
        (transformer, (x, "500", text), "timesteps '500'"),
        (transformer, (x, [500], text), "timesteps [500]"),
        (transformer, (np.concatenate([x, x]), 500, text), "encoded prompts [1, 32, 128] 2 videos"),
        (transformer, (x, 500, text, transformer.rope((5, 4, 5))), "80 tokens rope 100 tokens"),
        (partial(transformer, clean_frames=9), (x, 500, text), "clean_frames 9 5 frames"),
        (partial(transformer, clean_frames=1.5), (x, 500, text), "clean_frames 1.5 5 frames"),
        (transformer.rope, (x,), "grid [1, 5, 8, 8, 16] transformer.grid(latents)"),
        (encoder, ("a red circle",), "tokens [B S] 'a red circle' pipe.encode_prompts(prompt)"),
        (encoder, (np.zeros((1, 5), np.float32),), "tokens ids [B S] [1, 5]"),
    ):
        assert has_line_with_words(refused(call, *arguments), words)


def test_settings_of_a_video_with_a_given_mesh_give_a_warning():
    with pytest.warns(WanjaxWarning, match=line_with_words("video no effect mesh='auto'")):
        wanjax.load("nano", mesh="sp=8", video={"frames": 5})


def test_a_prompt_that_is_too_long_gives_a_warning(pipe):
    prompt = "a red circle moving right " * 60
    texts = {"prompts": ["a red circle", prompt], "negative_prompt": prompt + "b"}
    calls = {  # each with the names of the texts that are cut
        (lambda: pipe.videos(**texts)): ["prompt", "negative prompt"],
        (lambda: pipe.encode_prompts(prompt)): ["prompt"],
        (lambda: pipe.encode(prompt)): ["prompt"],
        (lambda: pipe.videos(["a"], windows=2, then=prompt)): ["prompt"],
        (lambda: pipe.encode("a red circle")): [],
    }
    for call, names in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [str(warning.message).partition(" has 30")[0] for warning in caught] == [f"the {x}" for x in names]


@pytest.mark.parametrize(("frames", "has_smaller_overlap"), [(1, False), (5, True)])
def test_a_smaller_overlap_is_advised_only_if_there_is_one(pipe, frames, has_smaller_overlap):
    settings = pipe.defaults.updated({"windows": 2, "frames": frames, "overlap": frames})
    refusal = refused(check_windows, settings, CONTROL_INPUT)
    assert has_line_with_words(refusal, "add no frames more frames")
    assert ("a smaller overlap" in refusal) == has_smaller_overlap
