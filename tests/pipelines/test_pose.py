# SPDX-License-Identifier: Apache-2.0
"""Videos that follow poses and a face: windows, masks, sizes, step caches, guidance, precisions, eight devices."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support.devices import on_eight_devices
from tests.support.small_wan import pose_conditioning, pose_pipeline
from tests.support.tiny import tiny_pose_checkpoint
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.layers.quantized import quantized_layers
from wanjax.media.pictures import Pictures
from wanjax.models.wan.faces import blur, same_frame_bias
from wanjax.pipelines.wan.conditioning import frame_channels
from wanjax.pipelines.wan.letterbox import LANCZOS, content_box, letterbox
from wanjax.pipelines.wan.pose import PoseSegments
from wanjax.pipelines.wan.segments import full_segments
from wanjax.registry import presets

SETTINGS = presets()["wan2.2-animate-14b"].defaults
WINDOWING = PoseSegments()


def settings_of(frames: int = 77, overlap: int = 1, windows: int = 1000) -> Any:
    return replace(SETTINGS, frames=frames, overlap=overlap, windows=windows)


@pytest.mark.parametrize("overlap", [1, 5])
@pytest.mark.parametrize("count", [40, 77, 78, 81, 153, 154, 240])
def test_windows_are_full_and_the_clip_is_reversed_at_its_end(count, overlap):
    """The clip is padded with its frames in reverse, without a repeated last frame."""
    step = 77 - overlap
    target = max(count + -(count - overlap) % step, 77)
    padded = ([*range(count), *range(count - 2, 0, -1)] * 3)[:target]
    numbers = full_segments(count, count, settings_of(overlap=overlap))
    assert len(numbers) == (target - overlap) / step
    for k, segment in enumerate(numbers):
        np.testing.assert_array_equal(segment, padded[k * step : k * step + 77])


def test_a_shorter_clip_is_repeated_forwards_and_backwards():
    assert full_segments(15, 3, settings_of(frames=9))[1].tolist() == [0, 1, 2, 1, 0, 1, 2, 1, 0]
    assert full_segments(9, 1, settings_of(frames=9))[0].tolist() == [0] * 9
    assert len(full_segments(100, 100, settings_of(frames=9, windows=2))) == 2


def test_each_window_gets_its_part_of_every_clip():
    def clip(count: int) -> np.ndarray:
        return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 32, 48, 3))

    clips = {"video": clip(15), "face": clip(20), "background": clip(15), "mask": clip(15)}
    pictures = Pictures(image=np.zeros((64, 64, 3), np.uint8), **clips)
    settings = replace(settings_of(frames=9), height=32, width=48)
    assert WINDOWING.video_shape(pictures, settings, is_limited=False) == {"windows": 2}
    windows = WINDOWING.windows(settings, pictures)
    assert [(x.count, x.settings.size, x.settings.seed) for x in windows] == [(2, (32, 48), 42), (2, (32, 48), 43)]
    previous_frames: Any = None
    lengths = []
    for window in windows:
        part = WINDOWING.pictures(window, settings, pictures, previous_frames, "video")
        assert part["face"][:, 0, 0, 0].tolist() == [*range(window.index * 8, window.index * 8 + 9)]
        assert ("previous_frames" in part) == (window.index > 0)
        decoded = np.full((9, 32, 48, 3), 0.3 + window.index, np.float32)
        frames, previous_frames, _ = WINDOWING.finish(window, settings, pictures, decoded, previous_frames)
        lengths.append(len(frames))
    assert lengths == [9, 6]
    np.testing.assert_array_equal(previous_frames, decoded[-1:])


@pytest.mark.parametrize(("name", "words"), [("mask", "mask background"), ("background", "background mask")])
def test_a_mask_needs_a_background(name, words):
    clip = np.zeros((9, 32, 48, 3), np.uint8)
    pictures = Pictures(image=clip[0], video=clip, face=clip, **{name: clip})
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        WINDOWING.video_shape(pictures, settings_of(frames=9), is_limited=False)


@pytest.mark.parametrize(
    ("clip", "size"),
    [((480, 832), (480, 832)), ((720, 1280), (720, 1280)), ((1080, 1920), (720, 1280)), ((90, 50), (80, 48))],
)
def test_a_video_has_the_size_of_its_pose_clip_if_the_model_has_it(clip, size):
    model = presets()["wan2.2-animate-14b"].model
    assert model is not None
    assert model.size_for((*clip, 3), SETTINGS) == size


def test_diffusers_puts_the_larger_bar_above():
    assert content_box((31, 48), (48, 48)).top == 8
    assert content_box((31, 48), (48, 48), larger_bar_first=True).top == 9
    frame = letterbox(np.full((31, 48, 3), 255, np.uint8), (48, 48), LANCZOS, larger_bar_first=True)
    assert frame[:, 0, 0].tolist() == [0] * 9 + [255] * 31 + [0] * 8


def test_values_of_frames_become_channels_of_latent_frames():
    channels = frame_channels(np.arange(9, dtype=np.float32), 4)
    np.testing.assert_array_equal(channels.T, [[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8]])
    by_pixel = np.arange(18, dtype=np.float32).reshape(9, 2)
    np.testing.assert_array_equal(frame_channels(by_pixel, 4)[..., 1], frame_channels(by_pixel[:, 1], 4))


def test_only_the_masked_area_is_replaced(tmp_path):
    """The picture and carried frames are fixed, also where the mask is white. Grey levels of the mask are preserved."""
    pipe, random = wanjax.load(tiny_pose_checkpoint(tmp_path), dtype="float32"), np.random.default_rng(0)
    clip = random.integers(0, 256, (9, 48, 64, 3), dtype=np.uint8)
    mask = np.zeros((9, 48, 64, 3), np.uint8)
    mask[:, 8:16, 16:24] = 255
    mask[4, 0, 0] = 102
    inputs = {"video": clip, "face": clip, "background": clip[::-1], "mask": mask}
    pictures = Pictures(image=clip[0], **inputs, previous_frames=np.ones((1, 48, 64, 3), np.float32))
    settings = pipe.settings(height=48, width=64, frames=9, follow="diffusers")

    def channels(pictures: Pictures) -> np.ndarray:
        return np.asarray(pipe.model.encode_inputs(pipe.runtime, pictures, settings)["condition"])[0, :4]

    later_window, first_window = channels(pictures), channels(pictures.with_inputs(previous_frames=None))
    without_mask = channels(pictures.with_inputs(mask=None, background=None))
    for part in (later_window, first_window, without_mask):
        assert (part[:, 0] == 1).all()
    assert (without_mask[:, 1] == 1).all()
    assert (without_mask[:, 2:] == 0).all()
    assert (later_window[:, 1] == 1).all()
    expected = np.ones((4, 6, 8))
    expected[:, 1, 2] = 0
    np.testing.assert_array_equal(first_window[:, 1], expected)
    np.testing.assert_allclose(first_window[3, 2, 0, 0], 0.6, atol=1e-6)  # frame 4 is the last of its latent frame
    np.testing.assert_array_equal(first_window[:, 3], expected)


def test_a_blurred_picture_keeps_its_mean():
    x = jnp.zeros((1, 5, 5, 1)).at[0, 2, 2].set(64.0)
    expected = np.outer([1, 3, 3, 1], [1, 3, 3, 1])
    np.testing.assert_array_equal(blur(x, 1)[0, :, :, 0], expected)


def test_tokens_attend_only_to_keys_of_their_frame():
    """Padding after the last frame attends to the keys of the last frame."""
    visible = np.asarray(same_frame_bias(7, 2, 6, 2))[0, 0] == 0
    assert visible.sum(axis=1).tolist() == [2] * 7
    assert visible[:, ::2].argmax(axis=1).tolist() == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.slow
def test_caches_guidance_and_batches_work_with_poses():
    """Both prompts in one batch give the same latents, although only the positive prompt uses the face."""
    pipe, conditioning = pose_pipeline(2, None, layers=4), pose_conditioning()
    options: dict[str, Any] = {"steps": 4, "guidance_scale": 3.0, "seed": 1}
    baseline = pipe.denoise(conditioning, **options)
    batched = pipe.denoise(conditioning, **options, batch_guidance=True)
    assert np.linalg.norm(batched - baseline) <= 1e-5 * np.linalg.norm(baseline)
    without_face = conditioning._replace(face_pictures=np.zeros_like(conditioning.face_pictures))
    assert (pipe.denoise(without_face, **options) != baseline).any()
    changes: list[dict[str, Any]] = [
        *({"cache": cache} for cache in ("deepcache:1,4,2", "easycache:9,2", "guidance:2")),
        *({"guidance_rule": "nag"}, {"rng": "torch"}),
    ]
    for change in changes:
        changed = pipe.denoise(conditioning, **options, **change)
        assert np.isfinite(changed).all()
        assert (changed != baseline).any(), change
    with pytest.raises(WanjaxError, match=line_with_words("driving clip training")):
        pipe.model.spec.check_trainable(pipe.settings(frames=9, windows=3))


def test_a_precision_rounds_the_blocks_and_not_the_face(tmp_path):
    pipe = wanjax.load(tiny_pose_checkpoint(tmp_path), precision="int8-weights", dtype="float32")
    layers = quantized_layers(pipe.transformer)
    assert layers
    assert {path.partition(".")[0] for path in layers} == {"blocks"}


EIGHT_DEVICES = """
import numpy as np
from tests.support.small_wan import partitioner, pose_conditioning, pose_pipeline

def latents(axes, rules="fsdp"):
    pipe = pose_pipeline(3, partitioner(axes, rules), layers=4)
    return np.asarray(pipe.denoise(pose_conditioning(), steps=2, guidance_scale=3.0, seed=1))

one_device = latents(None)
for axes, rules in [((1, 1, 8), "fsdp"), ((2, 2, 2), "fsdp"), ((1, 2, 4), "tp")]:
    print(axes, rules, np.linalg.norm(latents(axes, rules) - one_device) / np.linalg.norm(one_device))
"""


@pytest.mark.slow
def test_eight_devices_give_the_latents_of_one():
    lines = on_eight_devices(EIGHT_DEVICES).splitlines()
    assert len(lines) == 3
    assert all(float(line.split()[-1]) < 1e-5 for line in lines), lines
