# SPDX-License-Identifier: Apache-2.0
"""Videos are read back from what was written, stage files from what this and the scripts before it wrote."""

import errno
import json
import subprocess
from pathlib import Path

import imageio_ffmpeg
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from wanjax import io
from wanjax.checkpoint import SafetensorsFile, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.pipelines.base import Embeddings

COLOURS = np.array([[220, 30, 40], [30, 180, 60], [40, 60, 220], [240, 220, 40], [128, 128, 128]], np.uint8)
SETTINGS = {
    "model": "nano",
    "prompt": 'a "red" circle; 红 = #1 \\ 100%\nnew line\x00',
    "negative_prompt": "",
    "height": 32,
    "width": 64,
    "frames": 5,
    "fps": 16,
    "steps": 4,
    "guidance_scale": 5.0,
    "seed": 7,
}


def clip(frames: int = 5, height: int = 32, width: int = 64) -> np.ndarray:
    """Five colours in turn, each filling a frame."""
    return np.broadcast_to(COLOURS[np.arange(frames) % 5][:, None, None], (frames, height, width, 3)).copy()


def embeddings(tokens: int = 6, dtype=np.float32) -> Embeddings:
    values = np.random.default_rng(0).normal(size=(2, 1, tokens, 8)).astype(dtype)
    return Embeddings(*values)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ffmpeg(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", *arguments], capture_output=True, check=False
    )


def decoded(path: Path) -> np.ndarray:
    """The frames of a video 64 wide and 32 high, as ffmpeg reads them."""
    raw = ffmpeg("-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-").stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, 32, 64, 3)


def atoms(path: Path) -> list[str]:
    """The names of an mp4's outermost boxes, in order."""
    data, names, at = path.read_bytes(), [], 0
    while at < len(data):
        names.append(data[at + 4 : at + 8].decode())
        at += int.from_bytes(data[at : at + 4], "big")
    return names


def test_mp4(tmp_path):
    path = io.Video(clip(), 16, SETTINGS).save(tmp_path / "new" / "clip.mp4")
    said = ffmpeg("-i", path).stderr.decode()
    assert "Video: h264" in said
    assert "yuv420p(tv, bt709" in said
    assert "64x32" in said
    assert "16 fps" in said
    assert atoms(path).index("moov") < atoms(path).index("mdat")  # faststart
    assert io.read_metadata(path) == SETTINGS
    frames = decoded(path)
    assert frames.shape == (5, 32, 64, 3)
    assert np.abs(frames.astype(int) - clip()).max() <= 6  # 8-bit YUV with half the chroma
    assert leftovers(path.parent) == ["clip.mp4"]


def test_mp4_of_chunks_and_long_settings(tmp_path):
    settings = {"prompt": "红" * 5000}
    path = io.write_video(tmp_path / "clip.MP4", (clip(n) for n in (1, 4, 4)), 23.976, settings)
    assert decoded(path).shape == (9, 32, 64, 3)
    assert io.read_metadata(tmp_path / "clip.MP4") == settings


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_animations(tmp_path, suffix):
    path = io.write_video(tmp_path / f"clip{suffix}", clip(height=31, width=33), 16, SETTINGS)
    with Image.open(path) as image:
        assert (image.n_frames, image.size, image.info["loop"]) == (5, (33, 31), 0)
        total = 0
        for index in range(5):
            image.seek(index)
            image.load()
            total += image.info["duration"]
            assert np.abs(np.asarray(image.convert("RGB")).astype(int) - clip(height=31, width=33)[index]).max() <= 8
    assert total == pytest.approx(5 * 1000 / 16, abs=10)  # rounding a frame to 10 ms does not add up
    assert io.read_metadata(path) == SETTINGS
    assert leftovers(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["frames", "frames.mp4/", "frames/"])
def test_folder_of_png(tmp_path, name):
    path = io.write_video(f"{tmp_path}/{name}", clip(7, 5, 3), 16, SETTINGS)
    io.write_video(f"{tmp_path}/{name}", clip(2, 5, 3), 16, SETTINGS)  # takes the place of the first
    assert leftovers(path) == ["frame_00000.png", "frame_00001.png"]
    assert leftovers(tmp_path) == [path.name]
    np.testing.assert_array_equal(np.asarray(Image.open(path / "frame_00001.png")), clip(2, 5, 3)[1])
    assert io.read_metadata(path) == SETTINGS


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(WanjaxError, match=r"thesis\.txt, which is not a frame"):
        io.write_video(f"{tmp_path}/", clip(), 16)
    assert leftovers(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "frames", "message"),
    [
        ("clip.avi", clip(), r"clip\.avi ends in \.avi: \.mp4, \.gif, \.webp, or no suffix"),
        ("clip.mp4", clip(height=31), r"frames of 64x31 cannot become an mp4"),
        ("clip.mp4", clip().astype(np.float32), r"uint8 \[T, H, W, 3\], all alike, not float32"),
        ("clip.mp4", [clip(), clip(height=16)], r"all alike, not uint8 \(5, 16, 64, 3\)"),
        ("clip.mp4", clip(0), "no frames|at least 1"),
        ("clip.gif", [], "no frames"),
        ("frames", [], "no frames"),
        ("file/clip.mp4", clip(), "the folder .*file cannot be written"),
        ("file", clip(), "which is not a frame"),
    ],
)
def test_refused_videos_leave_nothing(tmp_path, name, frames, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(WanjaxError, match=message):
        io.write_video(tmp_path / name, frames, 16)
    assert leftovers(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif", "clip.webp", "frames"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError("decoding failed")])
def test_what_stops_half_way_leaves_the_file_before(tmp_path, name, failure):
    before = io.write_video(tmp_path / name, clip(), 16, {"seed": 1})

    def frames():
        yield clip()
        raise failure

    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        io.write_video(tmp_path / name, frames(), 16, {"seed": 2})
    assert io.read_metadata(before) == {"seed": 1}
    assert leftovers(tmp_path) == [name]


@pytest.mark.parametrize("name", ["clip.gif", "clip.webp", "frames"])
def test_a_full_disk_leaves_nothing(tmp_path, name, monkeypatch):
    def full(self, file, *args, **kwargs):
        Path(file).write_bytes(b"the first bytes")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(WanjaxError, match=f"{name} cannot be written: No space left on device"):
        io.write_video(tmp_path / name, clip(), 16)
    assert leftovers(tmp_path) == []


def test_a_full_disk_leaves_no_mp4(tmp_path, monkeypatch):
    """A limit on the size of files is what ffmpeg, another process, meets in place of a full disk."""
    run = subprocess.Popen
    limited = ["sh", "-c", 'ulimit -f 8; trap "" XFSZ; exec "$@"', "sh"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kw: run([*limited, *command], **kw))
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), np.uint8)
    with pytest.raises(WanjaxError, match=r"clip\.mp4 cannot be written: ffmpeg said"):
        io.write_video(tmp_path / "clip.mp4", noise, 16)
    assert leftovers(tmp_path) == []


def test_no_ffmpeg(tmp_path, monkeypatch):
    def missing():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", missing)
    with pytest.raises(WanjaxError, match="`pip install imageio-ffmpeg` brings one"):
        io.write_video(tmp_path / "clip.mp4", clip(), 16)
    assert leftovers(tmp_path) == []


def test_files_without_settings(tmp_path):
    (tmp_path / "text.mp4").write_text("not a video")
    Image.fromarray(clip()[0]).save(tmp_path / "bare.gif")
    for name in ("text.mp4", "bare.gif"):
        with pytest.raises(WanjaxError, match="holds no settings"):
            io.read_metadata(tmp_path / name)
    with pytest.raises(WanjaxError, match="there is no file"):
        io.read_metadata(tmp_path / "absent.mp4")


PICTURES = {"condition": np.ones((1, 8, 3, 2, 4), np.float32), "image_embeds": np.ones((1, 5, 6), np.float32)}


@pytest.mark.parametrize("made", [{}, {"condition": PICTURES["condition"]}, PICTURES], ids=len)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_stage_files_return_what_they_were_given(tmp_path, dtype, made):
    io.save_settings(tmp_path, SETTINGS)
    settings = io.load_settings(tmp_path)
    assert settings == SETTINGS
    written = embeddings(dtype=dtype)._replace(**{name: x.astype(dtype) for name, x in made.items()})
    io.save_embeddings(tmp_path, written, settings)
    for before, read in zip(written, io.load_embeddings(tmp_path, settings), strict=True):
        assert (before is None) == (read is None)
        assert before is None or read.dtype == dtype
        np.testing.assert_array_equal(read, before)
    latents = jnp.arange(48.0).reshape(1, 4, 3, 2, 2).astype(dtype)
    io.save_latents(tmp_path, latents, settings)
    read = io.load_latents(tmp_path, settings)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, latents)
    assert SafetensorsFile(tmp_path / io.LATENTS).spec("latents").shape == (1, 4, 3, 2, 2)
    assert leftovers(tmp_path) == [io.CONFIG, io.EMBEDDINGS, io.LATENTS]


def test_stage_files_that_do_not_belong_together(tmp_path):
    io.save_embeddings(tmp_path, embeddings(), SETTINGS)
    io.save_latents(tmp_path, np.zeros((1, 4, 3, 2, 2), np.float32), SETTINGS)
    io.load_embeddings(tmp_path, SETTINGS | {"seed": 8})  # which shapes the latents alone
    io.load_latents(tmp_path, SETTINGS | {"fps": 8})  # which shapes neither
    io.load_embeddings(tmp_path, SETTINGS | {"height": 8})  # which shapes what is made of pictures, of which are none
    other = SETTINGS | {"prompt": "a blue square" * 20}
    with pytest.raises(
        WanjaxError, match=r"do not belong together: prompt is .* in the one and 'a blue square.*\.\.\. in"
    ):
        io.load_embeddings(tmp_path, other)
    with pytest.raises(WanjaxError, match=r"do not belong together: seed is 7 in the one and 8 in the other"):
        io.load_latents(tmp_path, SETTINGS | {"seed": 8})
    io.save_embeddings(tmp_path, embeddings()._replace(**PICTURES), SETTINGS | {"image": "a.png", "frames": 9})
    for name, value in (("image", "b.png"), ("frames", 5)):
        with pytest.raises(WanjaxError, match=rf"do not belong together: {name} is .* in the one and {value!r} in"):
            io.load_embeddings(tmp_path, SETTINGS | {"image": "a.png", "frames": 9} | {name: value})


def test_files_of_the_scripts_before(tmp_path):
    """float32 that was bfloat16, as `dtype_info` tells, 226 tokens, other names, and no record of the settings."""
    old = {"prompt": "a cat", "model_id": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "num_inference_steps": 50, "frames": 81}
    (tmp_path / io.CONFIG).write_text(json.dumps(old))
    settings = io.load_settings(tmp_path)
    assert settings == {"prompt": "a cat", "model": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "steps": 50, "frames": 81}
    rounded = [x.astype(ml_dtypes.bfloat16) for x in embeddings(226)[:2]]
    tensors = {name: x.astype(np.float32) for name, x in zip(Embeddings._fields[:2], rounded, strict=True)}
    info = {"dtype_info": json.dumps(dict.fromkeys(tensors, "bfloat16"))}
    save_safetensors(tmp_path / io.EMBEDDINGS, tensors, info)
    with pytest.warns(UserWarning, match="has 226 tokens where Wan reads 512"):
        read = io.load_embeddings(tmp_path, settings)
    for x, y in zip(read[:2], rounded, strict=True):
        assert x.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(x, y)
    latents = np.ones((1, 4, 3, 2, 2), np.float32)
    save_safetensors(tmp_path / io.LATENTS, {"latents": latents}, {"dtype_info": '{"latents": "torch.float32"}'})
    assert io.load_latents(tmp_path, settings).dtype == np.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no generation_config.json, which `wanjax encode` writes"),
        ("{", "cannot be read, Expecting property name"),
        ("[1]", "is not a JSON object"),
    ],
)
def test_broken_settings(tmp_path, config, message):
    if config is not None:
        (tmp_path / io.CONFIG).write_text(config)
    with pytest.raises(WanjaxError, match=message):
        io.load_settings(tmp_path)


def test_missing_stages_name_the_command(tmp_path):
    with pytest.raises(WanjaxError, match="run `wanjax encode PROMPT --dir"):
        io.load_embeddings(tmp_path, {})
    with pytest.raises(WanjaxError, match="run `wanjax denoise --dir"):
        io.load_latents(tmp_path, {})


ONE = np.zeros((1, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"prompt_embeds": ONE}, {}, "no tensor 'negative_prompt_embeds', only prompt_embeds"),
        ({}, {}, "no tensor 'prompt_embeds', only none at all"),
        ({"prompt_embeds": ONE[0], "negative_prompt_embeds": ONE[0]}, {}, r"float32 \[3, 4\], where floats of 3 axes"),
        ({"prompt_embeds": ONE.astype(int), "negative_prompt_embeds": ONE}, {}, r"int64 \[1, 3, 4\], where floats"),
        ({"prompt_embeds": ONE, "negative_prompt_embeds": ONE[:, :2]}, {}, "where their shapes are equal"),
        ({"prompt_embeds": ONE, "negative_prompt_embeds": ONE}, {"settings": "{"}, "'settings' in its metadata"),
        ({"prompt_embeds": ONE, "negative_prompt_embeds": ONE}, {"dtype_info": "3"}, "'dtype_info' in its metadata"),
    ],
)
def test_unfit_embeddings(tmp_path, tensors, metadata, message):
    save_safetensors(tmp_path / io.EMBEDDINGS, tensors, metadata)
    with pytest.raises(WanjaxError, match=message):
        io.load_embeddings(tmp_path, {})


def test_noise(tmp_path):
    noise = np.random.default_rng(0).normal(size=(1, 4, 3, 2, 2)).astype(np.float32)
    save_safetensors(tmp_path / "noise.safetensors", {"noise": noise})
    np.testing.assert_array_equal(io.load_noise(tmp_path / "noise.safetensors"), noise)
    save_safetensors(tmp_path / "other.safetensors", {"latents": noise})
    with pytest.raises(WanjaxError, match="no tensor 'noise', only latents"):
        io.load_noise(tmp_path / "other.safetensors")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "stages", Path("/proc/stages")):
        with pytest.raises(WanjaxError, match=r"cannot be written, .*: another one is needed"):
            io.check_folder(folder)
