# SPDX-License-Identifier: Apache-2.0
"""Workflows in the files that ComfyUI writes, and the files that workflows name."""

import json
import os
import resource
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from tests.support.workflows import api_form, graph_of, request_of, template, template_text
from wanjax.errors import WanjaxError
from wanjax.media.ffmpeg import run_ffmpeg
from wanjax.media.video import write_video
from wanjax.registry import companion_files
from wanjax.workflows import files, reading
from wanjax.workflows.files import Folders, check_pair, find_file, locate
from wanjax.workflows.graph import Node
from wanjax.workflows.request import read_workflow
from wanjax.workflows.values import File

NAME = "video_wan2_2_14B_t2v"
FRAMES = np.zeros((5, 16, 16, 3), np.uint8)


def template_forms() -> dict[str, str]:
    """Return both forms of a template, as ComfyUI writes them. Its prompt has characters that ffmpeg escapes."""
    editor = template_text(NAME).replace("Beautiful young", "Beautiful; = # \\\\ \\n [x]\\nkey=young")
    return {"prompt": json.dumps(api_form(graph_of(json.loads(editor)))), "workflow": editor}


def ffmetadata(tags: dict[str, str], path: Path) -> Path:
    """Write a file of metadata for ffmpeg."""
    lines = [";FFMETADATA1"]
    for name, text in tags.items():
        escaped = "".join(f"\\{letter}" if letter in "=;#\\\n" else letter for letter in text)
        lines.append(f"{name}={escaped}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def container(path: Path, tags: dict[str, str]) -> Path:
    """Write a video with entries in its container's metadata."""
    metadata = ffmetadata(tags, path.with_suffix(".txt"))
    source = ["-f", "lavfi", "-i", "color=black:s=16x16:r=8:d=1", "-i", str(metadata), "-map_metadata", "1"]
    flags = ["-movflags", "use_metadata_tags"] if path.suffix == ".mp4" else []
    run_ffmpeg([*source, *flags, "-y", str(path)])
    return path


def mp4(folder: Path) -> Path:
    return container(folder / "a.mp4", template_forms())


def webm(folder: Path) -> Path:
    return container(folder / "a.webm", template_forms())


def combined(folder: Path) -> Path:
    """Write a video whose comment has both forms, one of them as a string in JSON."""
    texts = template_forms()
    comment = json.dumps({"prompt": texts["prompt"], "workflow": json.loads(texts["workflow"])})
    return container(folder / "b.mp4", {"comment": comment})


def png(folder: Path) -> Path:
    chunks = PngImagePlugin.PngInfo()
    for name, text in template_forms().items():
        chunks.add_text(name, text)
    Image.new("RGB", (16, 16)).save(folder / "a.png", pnginfo=chunks)
    return folder / "a.png"


def webp(folder: Path) -> Path:
    texts, exif = template_forms(), Image.Exif()
    exif[0x0110], exif[0x010F] = f"prompt:{texts['prompt']}", f"workflow:{texts['workflow']}"
    pictures = [Image.new("RGB", (16, 16), (k, 0, 0)) for k in range(3)]
    pictures[0].save(folder / "a.webp", save_all=True, append_images=pictures[1:], exif=exif)
    return folder / "a.webp"


def editor_json(folder: Path) -> Path:
    (folder / "editor.json").write_text(template_forms()["workflow"], encoding="utf-8")
    return folder / "editor.json"


def api_json(folder: Path) -> Path:
    (folder / "api.json").write_text(template_forms()["prompt"], encoding="utf-8")
    return folder / "api.json"


@pytest.mark.parametrize("write", [mp4, webm, combined, png, webp, editor_json, api_json])
def test_a_graph_gives_the_same_request_from_any_file(tmp_path, write):
    graph = reading.find_workflow(write(tmp_path))
    assert graph is not None
    expected = request_of(json.loads(template_forms()["workflow"]))
    assert "key=young" in expected.settings["prompt"]
    workflow = read_workflow(graph)
    assert {**vars(workflow), "addresses": {}} == {**vars(expected), "addresses": {}}
    assert workflow.addresses == ({} if write is api_json else expected.addresses)


def test_a_video_of_wanjax_has_no_workflow(tmp_path):
    for suffix in (".mp4", ".webp"):
        write_video(tmp_path / f"a{suffix}", FRAMES, 8, {"prompt": "a cat", "model": "nano"})
        assert reading.find_workflow(tmp_path / f"a{suffix}") is None


def test_other_files_have_no_workflow(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "a cat"}')
    (tmp_path / "b.json").write_text(" ")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.png").write_bytes(b"\x89PNG broken")
    (tmp_path / "e.mp4").write_bytes(b"broken")
    Image.new("RGB", (4, 4)).save(tmp_path / "f.png")
    for path in sorted(tmp_path.iterdir()):
        assert reading.find_workflow(path) is None, path
    assert reading.find_workflow(tmp_path / "missing.json") is None
    (tmp_path / "b.json").write_text("not JSON")
    with pytest.raises(WanjaxError, match=r"b.json is not valid JSON, .*: get a complete copy"):
        reading.find_workflow(tmp_path / "b.json")


def test_a_huge_file_is_refused_and_not_read(tmp_path):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.write(b'{"nodes": [')
        file.truncate(50 * 2**20)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(WanjaxError, match="more than the 16"):
        reading.find_workflow(huge)
    assert time.process_time() - start < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_a_huge_text_in_a_picture_is_ignored(tmp_path):
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("workflow", " " * (50 * 2**20), zip=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=chunks)
    assert reading.find_workflow(tmp_path / "a.png") is None  # Pillow refuses the text


def test_a_workflow_of_many_nodes_is_read_quickly(tmp_path):
    nodes = json.loads(template_forms()["prompt"])
    for k in range(15_000):
        nodes[f"x{k}"] = {"class_type": "Unknown", "inputs": {"a": [f"x{k + 1}", 0]}}
    (tmp_path / "a.json").write_text(json.dumps(nodes))
    start = time.process_time()
    graph = reading.find_workflow(tmp_path / "a.json")
    assert graph is not None
    assert read_workflow(graph).settings["steps"] == 20
    assert time.process_time() - start < 2


def test_deep_json_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(WanjaxError, match="nested too deep"):
        reading.find_workflow(tmp_path / "a.json")


# Files that a workflow names

LOADER = Node("1", "UNETLoader")
ADDRESS = "https://huggingface.co/owner/video/resolve/main/split files/a.safetensors?download=true"


def file_named(name: str, kind: str = "diffusion_models") -> File:
    return File(name, kind, LOADER)


@pytest.fixture
def models(tmp_path) -> Path:
    """Return ComfyUI's folder, with files of each kind."""
    for name in ("diffusion_models/wan/a.safetensors", "unet/b.gguf", "loras/x/c.safetensors", "vae/d.safetensors"):
        path = tmp_path / "ComfyUI/models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "ComfyUI/input").mkdir()
    (tmp_path / "ComfyUI/input/e.png").touch()
    (tmp_path / "secret.safetensors").touch()
    return tmp_path / "ComfyUI/models"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("a.safetensors", "diffusion_models", "diffusion_models/wan/a.safetensors"),
        ("wan\\a.safetensors", "diffusion_models", "diffusion_models/wan/a.safetensors"),
        ("elsewhere/a.safetensors", "diffusion_models", "diffusion_models/wan/a.safetensors"),
        ("b.gguf", "diffusion_models", "unet/b.gguf"),
        ("c.safetensors", "loras", "loras/x/c.safetensors"),
        ("c.safetensors", "diffusion_models", None),
    ],
)
def test_a_file_is_searched_in_the_folders_of_its_kind(models, name, kind, expected):
    for root in (models, models.parent):
        path = find_file(file_named(name, kind), Folders(root))
        assert path == (expected and models / expected)


def test_pictures_are_searched_in_the_folder_of_inputs(models):
    for folders in (Folders(inputs=models.parent / "input"), Folders(models.parent)):
        assert find_file(file_named("e.png [input]", "input"), folders) == models.parent / "input/e.png"
    assert find_file(file_named("e.png", "input"), Folders(models)) is None


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "C:\\x.safetensors",
        "..\\..\\x",
        "a\0b",
        "x/..",
        "\\\\host\\x",
        "",
        "x/.. [input]",
    ],
)
def test_a_name_outside_the_folders_is_refused(models, name):
    with pytest.raises(WanjaxError, match="may not lead out"):
        find_file(file_named(name), Folders(models))


def test_a_link_out_of_the_folder_is_refused(models):
    (models / "loras/l.safetensors").symlink_to(models.parents[1] / "secret.safetensors")
    with pytest.raises(WanjaxError, match="is a link out of"):
        find_file(file_named("l.safetensors", "loras"), Folders(models))
    (models / "loras/inside.safetensors").symlink_to(models / "loras/x/c.safetensors")
    assert find_file(file_named("inside.safetensors", "loras"), Folders(models)) is not None
    os.symlink(models.parents[1], models / "loras/out")
    # links to folders are not followed
    assert find_file(file_named("secret.safetensors", "loras"), Folders(models)) is None
    with pytest.raises(WanjaxError, match="is a link out of"):
        find_file(file_named("out/secret.safetensors", "loras"), Folders(models))


def test_two_files_with_the_same_name_are_refused(models):
    (models / "loras/y").mkdir()
    (models / "loras/y/c.safetensors").touch()
    with pytest.raises(WanjaxError, match=r"at x/c\.safetensors and at y/c\.safetensors"):
        find_file(file_named("c.safetensors", "loras"), Folders(models))
    assert find_file(file_named("y/c.safetensors", "loras"), Folders(models)) == models / "loras/y/c.safetensors"


def test_a_missing_file_is_downloaded_from_its_url(models, monkeypatch):
    addresses = {"f.safetensors": ADDRESS.replace("a.saf", "f.saf")}
    monkeypatch.setattr(files, "is_cached", lambda name: False)
    located = locate(file_named("f.safetensors"), Folders(models), addresses)
    assert (located.name, located.needs_download) == ("owner/video/split files/f.safetensors", True)
    monkeypatch.setattr(files, "is_cached", lambda name: True)
    assert not locate(file_named("f.safetensors"), Folders(), addresses).needs_download


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://civitai.com/api/download/models/1", "download it from https://civitai.com"),
        ("https://huggingface.co/owner/video/resolve/0123/a.safetensors", "download it from"),
        ("https://huggingface.co.evil.org/owner/video/resolve/main/a.safetensors", "download it from"),
        ("file:///etc/passwd", "download it from"),
        ("https://huggingface.co/owner/video/resolve/main/../../x.safetensors", "is not that of weights"),
        ("https://huggingface.co/owner/video/resolve/main/a.py", "is not that of weights"),
        (None, "has no address of it"),
    ],
)
def test_other_addresses_are_reported_and_not_opened(url, words):
    addresses = {} if url is None else {"f.safetensors": url}
    with pytest.raises(WanjaxError, match=words):
        locate(file_named("f.safetensors"), Folders(), addresses)


def test_experts_must_be_a_pair():
    check_pair("/m/wan2.2_t2v_high_noise_14B.safetensors", "/m/wan2.2_t2v_low_noise_14B.safetensors", companion_files)
    check_pair("o/n/Wan2.2-I2V-A14B-high-rCM4.0-merged.pt", "o/n/Wan2.2-I2V-A14B-low-rCM1.0-merged.pt", companion_files)
    high = "/m/wan2.2_t2v_high_noise_14B.safetensors"
    for first, second in (
        (high, "/m/wan2.2_t2v_low_noise_14B_fp8.safetensors"),
        (high, "/n/wan2.2_t2v_low_noise_14B.safetensors"),
        ("/m/HighFlow.safetensors", "/m/LowFlow.safetensors"),
        ("/m/high/x_high.safetensors", "/m/low/x_low.safetensors"),
    ):
        with pytest.raises(WanjaxError, match="into one folder"):
            check_pair(first, second, companion_files)


def test_the_size_of_a_clip_is_read_from_its_file(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    write_video(tmp_path / "a.mp4", FRAMES, 8, {"prompt": ""})
    assert reading.measure(tmp_path / "a.png") == (30, 20, 1, 1.0)
    assert reading.measure(tmp_path / "a.mp4") == (16, 16, 5, 8.0)
    (tmp_path / "b.mp4").write_bytes(b"broken")
    assert reading.measure(tmp_path / "b.mp4") is None
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "c.jpg", exif=exif)
    assert reading.measure(tmp_path / "c.jpg") == (20, 30, 1, 1.0)


def test_a_picture_that_claims_to_be_huge_has_no_workflow(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(Image.DecompressionBombError), Image.open(tmp_path / "a.png"):
        pass
    assert reading.find_workflow(tmp_path / "a.png") is None


def test_a_size_taken_from_a_clip_needs_the_clip(tmp_path):
    nodes = api_form(graph_of(template("video_wan_vace_14B_v2v")))
    nodes["S"] = {"class_type": "GetImageSize", "inputs": {"image": ["144", 0]}}
    nodes["49"]["inputs"] |= {"width": ["S", 0], "height": ["S", 1], "length": ["S", 2]}
    nodes["68"]["inputs"]["fps"] = ["144", 2]
    graph = graph_of(nodes)
    workflow = read_workflow(graph)
    assert "loads video_wan_vace_14B_v2v" in workflow.settings["width"].sentence
    write_video(tmp_path / "a.mp4", FRAMES, 8, {"prompt": ""})
    settings = read_workflow(graph, lambda file: reading.measure(tmp_path / "a.mp4")).settings
    assert [settings[name] for name in ("width", "height", "frames", "fps")] == [16, 16, 5, 8]
