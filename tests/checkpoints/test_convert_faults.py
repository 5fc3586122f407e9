# SPDX-License-Identifier: Apache-2.0
"""Faults of the source, the disk, the process or the written files are reported, and leave no broken copy."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import wanjax
from tests.support import commands
from tests.support.conversion import COMPONENTS, checksums, convert_command, flip_a_bit, refused, tensors
from tests.support.disks import limit_file_size
from tests.support.harm import WEIGHTS, corrupt, delete_a_shard, rename_keys, truncate, write_nan
from tests.support.quick import quick
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints import convert
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.manifest import own_digest, verify
from wanjax.errors import WanjaxError
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source

pytestmark = pytest.mark.usefixtures("cached_shapes")


def change_shape(folder: Path) -> None:
    change(folder, lambda x: {"proj_out.bias": np.zeros(3, np.float32)})


def change_dtype(folder: Path) -> None:
    change(folder, lambda x: {"proj_out.bias": x["proj_out.bias"].astype(np.int32)})


def change(folder: Path, changed: Callable[[dict], dict]) -> None:
    for file in (folder / "transformer").glob("*.safetensors"):
        stored = {key: np.array(x) for key, x in load_safetensors(file).items()}
        if "proj_out.bias" in stored:
            save_safetensors(file, stored | changed(stored))


def test_weights_that_are_not_finite_are_not_written(damaged, tmp_path):
    after_merging_shards(write_nan)(damaged)
    assert has_line_with_words(refused(damaged, tmp_path / "new"), "proj_out.bias finite")
    assert not (tmp_path / "new").exists()


def after_merging_shards(harm: Callable[[Path], None]) -> Callable[[Path], None]:
    """Apply damage to a transformer that is stored in one file."""

    def damage(folder: Path) -> None:
        (folder / "transformer" / f"{WEIGHTS}.index.json").unlink()
        parts = list((folder / "transformer").glob("*.safetensors"))
        save_safetensors(
            folder / "transformer" / WEIGHTS, {k: v for file in parts for k, v in load_safetensors(file).items()}
        )
        harm(folder)

    return damage


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, "diffusion_pytorch_model.safetensors incomplete metadata"),
        (corrupt, "model.safetensors header"),
        (after_merging_shards(delete_a_shard), "diffusion_pytorch_model-00002-of-00002.safetensors"),
        (after_merging_shards(rename_keys), "missing proj_out.bias unused extra.weight more.bias wrong shape dtype"),
        (change_shape, "proj_out.bias [3] [16]"),
        (change_dtype, "proj_out.bias int32 float32"),
    ],
)
def test_a_fault_of_the_source_is_reported_and_leaves_nothing(damaged, tmp_path, harm, message):
    harm(damaged)
    assert has_line_with_words(refused(damaged, tmp_path / "new"), message)
    assert os.listdir(tmp_path) == ["damaged"]


def test_a_damaged_download_is_reported_by_its_name_in_the_cache(source, damaged, tmp_path):
    """The hub's cache names a large file by its checksum, and the snapshot links to it."""
    file = damaged / "vae" / WEIGHTS
    blob = tmp_path / convert.hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(blob)
    file.symlink_to(blob)
    assert ConversionToWanjax(open_source(damaged), tmp_path / "good", NETWORKS).run()
    contents = bytearray(blob.read_bytes())
    contents[-1] ^= 1
    blob.write_bytes(contents)
    assert has_line_with_words(refused(damaged, tmp_path / "bad"), f"{blob} damaged")
    assert not (tmp_path / "bad").exists()


def test_a_full_disk_is_reported_before_anything_is_written(source, tmp_path, machine):
    machine.has_disk(10_000)
    message = refused(source, tmp_path / "new", status=1)
    assert has_line_with_words(message, "new 10 kB free 318 kB")
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_is_reported_and_the_next_run_resumes(source, converted, tmp_path):
    with limit_file_size(7000):
        message = refused(source, tmp_path / "new", status=1)
    assert has_line_with_words(message, f"{tmp_path / 'new'} File too large resumes")
    assert os.listdir(tmp_path) == [".new.partial"]
    assert list((tmp_path / ".new.partial").rglob("c/*"))
    convert_command(source, tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]
    assert checksums(tmp_path / "new") == checksums(converted)


def test_a_stopped_conversion_is_not_mixed_with_another_source(source, damaged, tmp_path, monkeypatch):
    """A run resumes another only if every file of the source is the same."""
    stop_in(monkeypatch, "_copy_files", damaged, tmp_path / "new")
    change(damaged, lambda x: {"proj_out.bias": x["proj_out.bias"] + 1})
    ConversionToWanjax(open_source(damaged), tmp_path / "new", NETWORKS).run()
    stored = wanjax.load(tmp_path / "new").transformer.proj_out.bias[...]
    expected = wanjax.load(damaged).transformer.proj_out.bias[...]
    np.testing.assert_array_equal(stored, expected)


def stop_in(monkeypatch, method: str, source: Path, target: Path) -> None:
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ConversionToWanjax, method, stop)
        with pytest.raises(KeyboardInterrupt):
            ConversionToWanjax(open_source(source), target, NETWORKS).run()


def test_finished_chunks_are_not_written_again(source, converted, tmp_path, monkeypatch):
    stop_in(monkeypatch, "_copy_files", source, tmp_path / "new")
    chunks = {path: path.stat().st_mtime_ns for path in (tmp_path / ".new.partial").rglob("c/**/*") if path.is_file()}
    lost_file = sorted(chunks)[3]
    lost_file.unlink()
    ConversionToWanjax(open_source(source), tmp_path / "new", NETWORKS).run()
    for path, written in chunks.items():
        now = tmp_path / "new" / path.relative_to(tmp_path / ".new.partial")
        assert (now.stat().st_mtime_ns == written) == (path != lost_file)
    assert checksums(tmp_path / "new") == checksums(converted)


def test_a_chunk_damaged_before_the_end_is_detected_and_rewritten(source, converted, tmp_path, monkeypatch):
    stop_in(monkeypatch, "_copy_files", source, tmp_path / "new")
    flip_a_bit(tmp_path / ".new.partial" / "transformer")
    assert "proj_out.kernel is damaged" in refused(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    convert_command(source, tmp_path / "new")
    assert checksums(tmp_path / "new") == checksums(converted)


@pytest.mark.parametrize("lost", ["transformer/weights/proj_out.bias/c/0", "vae/config.json"])
def test_a_copy_that_lost_a_file_is_not_complete(source, converted, tmp_path, lost):
    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / lost).unlink()
    assert has_line_with_words(refused(source, copy), f"{copy / lost} delete folder convert new")
    shutil.rmtree(copy)
    convert_command(source, copy)
    assert checksums(copy) == checksums(converted)


@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_the_message_of_a_damaged_copy_says_to_delete_it(converted, tmp_path, harm):
    copy = shutil.copytree(converted, tmp_path / "copy")
    file = flip_a_bit(copy / "transformer")
    if harm == "lost":
        file.unlink()
    with pytest.raises(WanjaxError, match=line_with_words("proj_out.kernel delete folder convert new")):
        verify(open_source(copy))


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [
        *product(["transformer/config.json", "model_index.json", "vae"], [True, False]),
        ("wanjax.json", False),  # without this file, nothing says that wanjax converted the folder
    ],
)
def test_a_converted_checkpoint_without_a_part_must_be_converted_again(converted, tmp_path, name, is_lost):
    part = shutil.copytree(converted, tmp_path / "copy") / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    if not is_lost:
        part.mkdir() if name == "vae" else part.touch()

    def read_parts():
        source = open_source(tmp_path / "copy")
        source.check(["transformer", "vae"], [])
        source["transformer"].config()

    with pytest.raises(WanjaxError, match=line_with_words(f"{part.name} delete folder convert new")):
        read_parts()


KILL_SCRIPT = """
import os, random, signal, sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
from wanjax.checkpoints import convert
from wanjax.checkpoints import arrays as store
from wanjax.registry import open_source
from wanjax.pipelines.wan.networks import NETWORKS

store.MAX_CHUNK_BYTES = 1 << 12
os.fsync = lambda descriptor: None  # tests need no protection against a loss of power
source, target, rng = open_source(sys.argv[1]), Path(sys.argv[2]), random.Random(0)
# tensorstore cannot be open in a fork
forth = convert.ConversionToWanjax(source, target, NETWORKS) if sys.argv[3] == "forth" else None


def start():
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        on_progress = lambda *progress: os.write(write, b".")
        (forth or convert.ConversionToDiffusers(source, target, NETWORKS)).run(on_progress)
        os._exit(0)
    os.close(write)
    return pid, os.fdopen(read, "rb")


def wait(pid):
    return os.waitpid(pid, 0)[1]


pid, events = start()
count = len(events.read())
assert wait(pid) == 0
target.rename(target.with_name("uninterrupted"))
for moment in range(int(sys.argv[4])):
    pid, events = start()
    events.read(rng.randrange(count))
    os.kill(pid, signal.SIGKILL)
    if (status := wait(pid)) != 0:  # 0: it had ended before it was killed
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert not target.exists()
        pid, events = start()
        events.read()
        assert wait(pid) == 0
    target.rename(target.with_name(f"run{moment}"))
"""


@pytest.mark.parametrize(("direction", "kills"), quick([("forth", 5)], [("forth", 5), ("forth", 20), ("back", 20)]))
def test_a_conversion_that_is_killed_at_any_moment_completes_when_repeated(
    source, converted, tmp_path, direction, kills
):
    """Each rerun gives the checksums of an uninterrupted run. The autoencoder is left out: it has too many arrays."""
    source_folder = shutil.copytree(converted if direction == "back" else source, tmp_path / "original")
    index = json.loads((source_folder / "model_index.json").read_text())
    (source_folder / "model_index.json").write_text(json.dumps(index | {"vae": [None, None]}))
    run = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, source_folder, tmp_path / "target", direction, str(kills)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    contents_of = {"forth": checksums, "back": tensors}[direction]
    expected = contents_of(tmp_path / "uninterrupted")
    assert len(os.listdir(tmp_path)) == kills + 2
    for run in tmp_path.glob("run*"):
        assert contents_of(run) == expected
        if direction == "forth":
            verify(open_source(run))


def delete_chunk(folder: Path) -> Path:
    flip_a_bit(folder / "transformer").unlink()
    return folder / "transformer" / "weights" / "proj_out.kernel"


def delete_array(folder: Path) -> Path:
    shutil.rmtree(folder / "vae" / "weights" / "quant.kernel")
    return folder / "vae" / "weights" / "quant.kernel"


def flip_kernel_bit(folder: Path) -> Path:
    flip_a_bit(folder / "transformer")
    return folder / "transformer" / "weights" / "proj_out.kernel"


def swap_arrays(folder: Path) -> Path:
    """Swap two valid arrays."""
    weights = folder / "transformer" / "weights"
    for a, b in (
        ("text_embed.up.bias", "x"),
        ("time_embed.up.bias", "text_embed.up.bias"),
        ("x", "time_embed.up.bias"),
    ):
        (weights / a).rename(weights / b)
    return weights


def write_empty_config(folder: Path) -> Path:
    (folder / "vae" / "config.json").write_text("{}")
    return folder / "vae" / "config.json"


def change_manifest(folder: Path, **changes: object) -> Path:
    manifest = json.loads((folder / "wanjax.json").read_text())
    (folder / "wanjax.json").write_text(json.dumps(manifest | changes))
    return folder / "wanjax.json"


def delete_networks(folder: Path) -> Path:
    """Remove all networks from the manifest, and keep its old digest."""
    return change_manifest(folder, networks={})


def delete_networks_and_renew_digest(folder: Path) -> Path:
    delete_networks(folder)
    manifest = json.loads((folder / "wanjax.json").read_text())
    return change_manifest(folder, digest=own_digest(manifest))


def change_licence(folder: Path) -> Path:
    return change_manifest(folder, licence="none")


def delete_arrays(folder: Path) -> Path:
    for weights in folder.glob("*/weights"):
        shutil.rmtree(weights)
    delete_networks_and_renew_digest(folder)
    return folder


def add_file(folder: Path) -> Path:
    (folder / "vae" / "weights" / "quant.kernel" / "more").write_bytes(b"x")
    return folder / "vae" / "weights" / "quant.kernel" / "more"


def swap_chunks(folder: Path) -> Path:
    """Swap the chunks of two arrays of equal shape. The checksum in each chunk stays valid."""
    weights = folder / "transformer" / "weights"
    first, second = (weights / name / "c" / "0" for name in ("text_embed.up.bias", "time_embed.up.bias"))
    first_bytes = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(first_bytes)
    return weights


def manifest_of(text: str) -> Callable[[Path], Path]:
    def harm(folder: Path) -> Path:
        (folder / "wanjax.json").write_text(text)
        return folder / "wanjax.json"

    return harm


MANIFESTS = ["", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "request": 7}']
HARMS = [delete_chunk, delete_array, flip_kernel_bit, swap_arrays, swap_chunks, add_file, write_empty_config]


@pytest.mark.parametrize(
    "harm",
    [
        *HARMS,
        delete_networks,
        delete_networks_and_renew_digest,
        change_licence,
        delete_arrays,
        *map(manifest_of, MANIFESTS),
    ],
)
def test_verify_names_the_damage(converted, tmp_path, harm):
    folder = shutil.copytree(converted, tmp_path / "harmed")
    assert str(harm(folder)) in refused("--verify", folder)


@pytest.mark.parametrize(
    ("harm", "verify", "words"),
    [
        (flip_kernel_bit, False, "proj_out.kernel damaged"),
        (swap_chunks, True, "text_embed.up.bias"),  # the chunks are valid, but the checksums of the manifest differ
        (swap_chunks, False, None),
    ],
)
def test_damaged_weights_are_not_loaded(converted, tmp_path, monkeypatch, harm, verify, words):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(converted, tmp_path / "harmed")
    wanjax.load(folder, verify=verify)
    harm(folder)
    with pytest.raises(WanjaxError, match=line_with_words(words)) if words else nullcontext():
        pipe = wanjax.load(folder, verify=verify)
        [getattr(pipe, network) for network in COMPONENTS]
    if words:
        options = ("generate", "a", "--model", folder, *(["--verify"] if verify else []))
        assert has_line_with_words(commands.refused(*options), words)


def cut(folder: Path) -> Path:
    file = flip_a_bit(folder / "transformer")
    os.truncate(file, file.stat().st_size - 1)
    return file


@pytest.mark.parametrize("harm", [delete_chunk, delete_array, cut])
def test_files_of_another_size_are_refused_before_anything_is_read(converted, tmp_path, monkeypatch, harm):
    folder = shutil.copytree(converted, tmp_path / "harmed")
    name = str(harm(folder))
    size = [f"{os.stat(name).st_size + more:,}" for more in (0, 1)] if harm is cut else []
    monkeypatch.chdir(tmp_path)
    output = commands.refused("generate", "a", "--model", folder, "--dir", "stages")
    assert all(word in output for word in (name, *size))
    assert not Path("stages").exists()


@pytest.mark.parametrize("name", ["..", "../transformer", "/etc", ""])
def test_an_index_cannot_name_a_component_outside_its_folder(damaged, tmp_path, name):
    index = json.loads((damaged / "model_index.json").read_text())
    (damaged / "model_index.json").write_text(json.dumps(index | {name: ["diffusers", "WanTransformer3DModel"]}))
    assert f"lists a component {name!r}" in refused(damaged, tmp_path / "new")
