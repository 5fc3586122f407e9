# SPDX-License-Identifier: Apache-2.0
"""Videos that follow a driving clip: windows, sizes, attention by frames, eight devices, and int8."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support.attention import attend_while_gathering
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.small_wan import animate_conditioning, animate_pipeline, partitioner
from tests.support.tiny import tiny_animate_checkpoint
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import kernel_with_lse
from wanjax.kernels.attention.clip_kv import attention_with_frames, store_clip_kv
from wanjax.media.pictures import Pictures, read_pictures
from wanjax.media.video import Video
from wanjax.pipelines.wan.animate import CHARACTER, DRIVING_VIDEO, compute_clip_keys
from wanjax.pipelines.wan.letterbox import BILINEAR, content_box, letterbox, video_size, visible_box
from wanjax.pipelines.wan.segments import ClipSegments, segments
from wanjax.registry import presets
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh

SETTINGS = presets()["wan2.2-animate-2-14b"].defaults
WINDOWING = ClipSegments(16)


def settings_of(follow: str, frames: int = 81, overlap: int = 1, windows: int = 1000) -> Any:
    return replace(SETTINGS, follow=follow, frames=frames, overlap=overlap, windows=windows)


@pytest.mark.parametrize("overlap", [1, 5])
@pytest.mark.parametrize("count", [41, 80, 81, 82, 85, 161, 162, 240])
def test_diffusers_windows_all_have_the_same_length(count, overlap):
    """The clip is padded with its last frames in reverse; the last frame is repeated."""
    step = 81 - overlap
    padding = -(count - overlap) % step
    padded = [*range(count), *range(count - padding, count)[::-1]]
    numbers = segments(count, settings_of("diffusers", overlap=overlap))
    assert len(numbers) == (len(padded) - overlap) / step
    for k, segment in enumerate(numbers):
        np.testing.assert_array_equal(segment, padded[k * step : k * step + 81])


def test_the_last_window_of_the_authors_is_shorter():
    """The last window adds at least 28 frames, a multiple of 4. Reversed frames do not repeat the last frame."""
    lengths = {
        count: [len(x) for x in segments(count, settings_of("official"))] for count in (81, 82, 109, 110, 141, 240)
    }
    assert lengths == {
        81: [81], 82: [81, 29], 109: [81, 33], 110: [81, 33], 141: [81, 65], 240: [81, 81, 81],
    }  # fmt: skip
    np.testing.assert_array_equal(segments(82, settings_of("official"))[1][:4], [80, 81, 80, 79])


def test_a_short_clip_is_repeated_forwards_and_backwards():
    np.testing.assert_array_equal(segments(3, settings_of("diffusers", frames=9))[0], [0, 1, 2, 2, 1, 0, 0, 1, 2])
    np.testing.assert_array_equal(segments(3, settings_of("official", frames=9))[0], [0, 1, 2, 1, 0, 1, 2, 1, 0])
    assert segments(1, settings_of("official", frames=9))[0].tolist() == [0] * 9


def test_a_limit_of_windows_shortens_the_video():
    settings = settings_of("diffusers", frames=9, windows=2)
    clip = np.zeros((30, 20, 30, 3), np.uint8)
    pictures = Pictures(image=np.zeros((64, 64, 3), np.uint8), video=clip)
    assert WINDOWING.clip_frames(settings, None, is_limited=True) == 17
    windows = WINDOWING.windows(settings, pictures)
    assert [(x.count, x.settings.frames, x.settings.seed) for x in windows] == [(2, 9, 42), (2, 9, 43)]
    assert windows[0].settings.size == (704, 704)  # of the area 640x800
    previous_frames: Any = None
    lengths = []
    for window in windows:
        decoded = np.ones((9, 704, 704, 3), np.float32)
        frames, previous_frames, _ = WINDOWING.finish(window, settings, pictures, decoded, previous_frames)
        lengths.append(len(frames))
    assert lengths == [9, 8]
    assert len(previous_frames) == 1


@pytest.mark.parametrize(
    ("picture", "area", "follow", "size", "visible_width"),
    [
        ((200, 120), 64 * 64, "diffusers", (80, 48), 46),
        ((200, 120), 64 * 64, "official", (80, 48), 48),
        ((1000, 800), 800 * 640, "diffusers", (784, 640), 632),  # the proportions of 992x800
        ((1000, 800), 800 * 640, "official", (800, 640), 640),
    ],
)
def test_the_video_has_the_proportions_of_the_picture(picture, area, follow, size, visible_width):
    assert video_size(picture, area, 16, follow) == size
    assert visible_box(picture, size, 16, follow).width == visible_width


def test_a_picture_is_padded_with_black():
    picture = np.full((30, 10, 3), 255, np.uint8)
    assert content_box((30, 10), (48, 48)) == (0, 16, 48, 16)
    frame = letterbox(picture, (48, 48), BILINEAR)
    assert (frame[:, 16:32] == 255).all()
    assert frame.sum() == 48 * 16 * 3 * 255


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resize": "crop"}, "pads crop resize pad"),
        ({"overlap": 3}, "overlap 3 1 5"),
        ({"match": "colour"}, "match colour leave out"),
        ({"frames": 5, "overlap": 5}, "segments 5 frames overlap"),
    ],
)
def test_settings_that_animate_does_not_have_are_refused(changes, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        WINDOWING.check(replace(SETTINGS, **changes), "video")


def test_a_picture_that_is_too_narrow_is_refused():
    with pytest.raises(WanjaxError, match=line_with_words("picture 9000x3 size")):
        video_size((3, 9000), 640 * 800, 16, "official")


@pytest.mark.parametrize(("rate", "count"), [(12, 24), (24, 12), (48, 6)])
def test_a_slower_clip_repeats_frames(tmp_path, rate, count):
    """Each time takes the nearest frame. The reader has already dropped frames of a faster clip."""
    clip = np.stack([np.full((16, 16, 3), 20 * number, np.uint8) for number in range(12)])
    file = tmp_path / "clip.mp4"
    Video(clip, rate, {}).save(file)
    sources = {"video": file, "image": clip[0]}
    pictures = read_pictures(sources, (CHARACTER, DRIVING_VIDEO), frames=100, fps=24)
    resampled = WINDOWING.match_frame_rate(pictures, sources, SETTINGS)["video"]
    assert len(resampled) == count
    if rate == 12:
        numbers = np.clip(np.round(np.arange(24) / 24 * 12), 0, 11)
        np.testing.assert_allclose(resampled[:, 8, 8, 0], 20 * numbers, atol=6)


def operands() -> list[Any]:
    """Return q, k and v of two videos of 4 frames, and k and v of a clip of 3 frames; a frame has 5 tokens."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, 20, 3, 8)] * 3 + [(1, 15, 3, 8)] * 2
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("bias", [None, -1.3])
def test_attention_by_frames_is_one_softmax(bias):
    """A query attends to one frame of the clip, and the scores of frame 1 are biased."""
    q, k, v, clip_k, clip_v = operands()
    all_k, all_v = (jnp.concatenate([x, jnp.repeat(y, 2, axis=0)], axis=1) for x, y in ((k, clip_k), (v, clip_v)))
    scores = np.asarray(jnp.einsum("BLND,BSND->BNLS", q, all_k, precision="highest"), np.float64) * 8**-0.5
    query_frame, key_frame = np.arange(20) // 5, np.append(np.arange(20) // 5, np.arange(15) // 5 + 1)
    is_clip = np.arange(35) >= 20
    scores[..., ~is_clip & (key_frame == 1)] += bias or 0
    scores[..., is_clip[None] & (key_frame[None] != query_frame[:, None])] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = np.einsum(
        "BNLS,BSND->BLND", weights / weights.sum(axis=-1, keepdims=True), np.asarray(all_v, np.float64)
    )
    out = attention_with_frames(
        kernel_with_lse(q, k, v), q, k, v, store_clip_kv(clip_k, clip_v, 15, in_int8=False), length=20, frame_tokens=5,
        bias=None if bias is None else jnp.float32(bias),
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("axes", [pytest.param((1, 1, 8), marks=pytest.mark.slow), (1, 8, 1)])
def test_attention_by_frames_gathers_weights(axes):
    partitioner = Partitioner(make_mesh(*axes), SHARDING_RULES["fsdp"])

    def attend(q, k, v, clip_k, clip_v):
        clip = store_clip_kv(clip_k, clip_v, 15, in_int8=False)
        return attention_with_frames(kernel_with_lse(q, k, v), q, k, v, clip, length=20, frame_tokens=5)

    np.testing.assert_allclose(attend_while_gathering(partitioner, attend, *operands()), attend(*operands()), atol=2e-6)


def test_keys_and_values_in_int8_have_a_scale_for_each_token_and_head():
    q, k, v, clip_k, clip_v = operands()
    clip_k = clip_k.at[0, 0, 0].mul(100)  # only this token and head is rounded more coarsely
    stored = store_clip_kv(clip_k, clip_v, 15, in_int8=True)
    assert (stored.k.dtype, stored.k.shape, stored.k_scale.shape) == (jnp.int8, (1, 15, 24), (1, 15, 3))
    scale = np.asarray(stored.k_scale)[..., None]
    values = np.asarray(stored.k).reshape(1, 15, 3, 8) * scale
    assert (np.abs(values - np.asarray(clip_k)) <= scale * 0.5001).all()
    options: dict[str, Any] = {"length": 20, "frame_tokens": 5}
    unquantized, coarse = (
        attention_with_frames(
            kernel_with_lse(q, k, v), q, k, v, store_clip_kv(clip_k, clip_v, 15, in_int8=x), **options
        )
        for x in (False, True)
    )
    error = float(jnp.linalg.norm(unquantized - coarse) / jnp.linalg.norm(unquantized))
    print(f"relative error {error:.1e}")
    assert 1e-4 < error < 2e-3


PRECISIONS = [("none", "float32"), ("int8-weights", "float32"), ("int8", "int8")]


@pytest.mark.parametrize(("precision", "dtype"), quick(PRECISIONS[1:], PRECISIONS))
def test_the_precision_int8_keeps_the_clip_in_int8(tmp_path, precision, dtype):
    pipe = wanjax.load(tiny_animate_checkpoint(tmp_path), precision=precision, dtype="float32")
    random, network = np.random.default_rng(0), pipe.runtime.split("transformer")
    shapes = [(1, 4, 3, 8, 6), (1, 512, 16), (1, 5, 1280)]
    inputs = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    keys = pipe.call(compute_clip_keys, network.graphdef, network.weights, *inputs)
    assert (keys.k.dtype, keys.v.dtype, keys.k.shape) == (dtype, dtype, (2, 1, 36, 24))
    assert (keys.k_scale is None) == (dtype != "int8")


CONDITIONING = animate_conditioning(-1.3)
OPTIONS: dict[str, Any] = {"steps": 2, "guidance_scale": 3.0, "seed": 1}


@pytest.fixture(scope="module")
def pipe():
    """Return a pipeline of ten blocks, of which only the prediction for the negative prompt skips one."""
    return animate_pipeline(3, None, layers=10)


@pytest.fixture(scope="module")
def latents(pipe):
    return np.asarray(pipe.denoise(CONDITIONING, **OPTIONS))


def test_both_prompts_in_one_batch_give_the_same_latents(pipe, latents):
    assert error(pipe.denoise(CONDITIONING, **OPTIONS, batch_guidance=True), np.float64(latents)) <= 1e-5


CHANGES: list[dict[str, Any]] = [
    {"cache": "deepcache:1,4,2"},
    {"cache": "easycache:9,2"},
    {"cache": "guidance:2"},
    {"guidance_rule": "nag"},
    {"rng": "torch"},
]


@pytest.mark.slow  # tests/pipelines/test_step_cache.py and test_guidance_rules.py have quick tests of Wan
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_caches_and_guidance_rules_work_with_a_clip(pipe, change):
    options = OPTIONS | {"steps": 4}
    changed = pipe.denoise(CONDITIONING, **options, **change)
    assert np.isfinite(changed).all()
    assert (changed != pipe.denoise(CONDITIONING, **options)).any()


def test_a_clip_is_not_trained(pipe):
    with pytest.raises(WanjaxError, match=line_with_words("driving clip training")):
        pipe.model.spec.check_trainable(pipe.settings(frames=9, windows=3))


MESHES = [((2, 2, 2), "fsdp"), ((1, 1, 8), "fsdp"), ((1, 2, 4), "tp")]


@pytest.mark.parametrize(("axes", "rules"), quick(MESHES[:1], MESHES))
def test_eight_devices_give_the_latents_of_one(latents, axes, rules):
    eight_devices = animate_pipeline(3, partitioner(axes, rules), layers=10).denoise(CONDITIONING, **OPTIONS)
    assert error(eight_devices, np.float64(latents)) <= 1e-5
