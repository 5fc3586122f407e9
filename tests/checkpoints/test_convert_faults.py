# SPDX-License-Identifier: Apache-2.0
"""`wanjax convert`: bit for bit there and back, read like any other checkpoint, and no fault leaves a broken one."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import wanjax
from tests.test_bad_input import corrupt, truncated, with_other_keys, without_a_shard
from tests.tiny import (
    tiny_checkpoint,
    tiny_control_checkpoint,
    tiny_experts_checkpoint,
    tiny_image_checkpoint,
    tiny_residual_checkpoint,
)
from wanjax import convert, registry
from wanjax.checkpoint import SafetensorsFolder, load_safetensors, save_safetensors
from wanjax.cli import main
from wanjax.convert import ToDiffusers, ToWanjax
from wanjax.converters import engine
from wanjax.converters.engine import parameters
from wanjax.errors import WanjaxError
from wanjax.manifest import verify
from wanjax.networks import Network
from wanjax.sources import open_source
from wanjax.store import Arrays

NETWORKS = ("text_encoder", "transformer", "vae")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def _shapes_are_found_once():
    """What takes the time in converting so small a checkpoint is to trace how its networks are made."""
    known = {}

    def abstract(network, **options):
        key = (network.config, str(options))
        if key not in known:
            known[key] = found(network, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        found = Network.abstract
        patch.setattr(Network, "abstract", abstract)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint of which the text encoder is in bfloat16, as it is published, and the transformer in shards."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("source"))
    encoder = folder / "text_encoder" / "model.safetensors"
    halves = {key: np.asarray(x).astype(ml_dtypes.bfloat16) for key, x in load_safetensors(encoder).items()}
    save_safetensors(encoder, halves)
    split(folder / "transformer")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    (folder / "transformer" / "unused.bin").write_bytes(b"0")
    return folder


def split(folder: Path) -> None:
    tensors = {key: np.array(x) for key, x in load_safetensors(folder / WEIGHTS).items()}
    names = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(tensors)}
    for name in names:
        save_safetensors(folder / name, {k: v for k, v in tensors.items() if weight_map[k] == name})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "checkpoint"
    assert ToWanjax(open_source(source), target).run()
    return target


@pytest.fixture
def damaged(source, tmp_path) -> Path:
    return shutil.copytree(source, tmp_path / "damaged")


def wanjax_command(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["convert", *map(str, arguments)], prog_name="wanjax")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: str | Path) -> str:
    """Runs the command, which has to be refused, and returns the sentence that says why."""
    status, out, err = wanjax_command(*arguments)
    sentences = re.findall(r"^wanjax: (.*)$", err, re.MULTILINE)
    assert (status, out, len(sentences)) == (2, "", 1), err
    return sentences[0]


def tensors(folder: Path) -> dict[str, tuple]:
    """The dtype, the shape and the bytes of all tensors of a folder in the layout of diffusers."""
    present = (name for name in (*NETWORKS, "transformer_2", "image_encoder") if (folder / name).exists())
    weights = {name: SafetensorsFolder(folder / name) for name in present}
    return {
        f"{name}.{key}": (*reader.spec(key), reader.read(key).tobytes())
        for name, reader in weights.items()
        for key in reader.keys()  # noqa: SIM118
    }


def checksums(folder: Path) -> dict:
    return json.loads((folder / "wanjax.json").read_text())["networks"]


# --- there and back ---


def test_there_and_back_is_equal_bit_for_bit(source, converted, tmp_path):
    assert ToDiffusers(open_source(converted), tmp_path / "back").run()
    assert tensors(tmp_path / "back") == tensors(source)
    beside = ["model_index.json", "tokenizer/tokenizer.json", "scheduler/scheduler_config.json", "README.md"]
    for name in [*beside, *(f"{network}/config.json" for network in NETWORKS)]:
        assert json_or_text(tmp_path / "back" / name) == json_or_text(source / name)
    assert not list((tmp_path / "back").rglob("*.bin"))
    again = tmp_path / "again"
    ToWanjax(open_source(tmp_path / "back"), again).run()
    assert checksums(again) == checksums(converted)


@pytest.mark.parametrize(
    "make",
    [
        partial(tiny_image_checkpoint, last=True),
        tiny_control_checkpoint,
        tiny_experts_checkpoint,
        tiny_residual_checkpoint,
    ],
    ids=["first and last", "control", "two experts", "residual"],
)
def test_every_model_goes_there_and_back(make, tmp_path):
    given = make(tmp_path / "given")
    assert ToWanjax(open_source(given), tmp_path / "there").run()
    assert ToDiffusers(open_source(tmp_path / "there"), tmp_path / "back").run()
    assert tensors(tmp_path / "back") == tensors(given)
    for file in given.rglob("*.json"):
        assert json_or_text(tmp_path / "back" / file.relative_to(given)) == json_or_text(file)


@pytest.mark.parametrize("prefix", ["vision_model.", ""])
def test_what_a_network_has_no_use_for_goes_there_and_back_too(prefix, tmp_path):
    """CLIP's last block and norm, by whichever of their names; no more is read of them when it is loaded."""
    given = tiny_image_checkpoint(tmp_path / "given")
    weights = given / "image_encoder" / "model.safetensors"
    used = {key: np.array(x) for key, x in load_safetensors(weights).items()}
    last = {key.replace(".0.", ".1."): x + 1 for key, x in used.items() if ".layers.0." in key}
    more = {"vision_model.post_layernorm.weight": np.ones(16, np.float32), **last}
    more["vision_model.embeddings.position_ids"] = np.arange(5)[None]
    whole = {prefix + key.removeprefix("vision_model."): x for key, x in (used | more).items()}
    save_safetensors(weights, whole)
    assert ToWanjax(open_source(given), tmp_path / "there").run()
    verify(open_source(tmp_path / "there"))
    assert ToDiffusers(open_source(tmp_path / "there"), tmp_path / "back").run()
    assert tensors(tmp_path / "back") == tensors(given)
    assert set(tensors(given)) >= {f"image_encoder.{key}" for key in whole}
    encoders = [parameters(registry.load(tmp_path / name).image_encoder) for name in ("given", "there")]
    for name, x in encoders[0].items():
        np.testing.assert_array_equal(x, encoders[1][name])


def json_or_text(path: Path):
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()


def test_large_components_go_back_in_shards(source, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "shards", lambda reader, stem: store_shards(reader, stem, 20_000))
    ToDiffusers(open_source(converted), tmp_path / "back").run()
    assert (tmp_path / "back" / "transformer" / f"{WEIGHTS}.index.json").is_file()
    assert tensors(tmp_path / "back") == tensors(source)


store_shards = convert.shards


def test_it_says_where_it_comes_from(source, converted):
    manifest = json.loads((converted / "wanjax.json").read_text())
    assert manifest["licence"] == "apache-2.0"
    assert manifest["request"]["source"] == str(source)
    assert manifest["request"]["revision"] is None
    assert manifest["networks"].keys() == set(NETWORKS)
    assert "text_encoder/config.json" in manifest["files"]


def test_a_converted_checkpoint_is_loaded_like_any_other(source, converted):
    told = []
    here = wanjax.load(source, param_dtype="bfloat16")
    there = wanjax.load(converted, param_dtype="bfloat16", progress=lambda *at: told.append(at))
    assert there.defaults.updated({"model": ""}) == here.defaults.updated({"model": ""})
    for name in NETWORKS:
        weights, wanted = (engine.parameters(getattr(pipe, name)) for pipe in (there, here))
        assert weights.keys() == wanted.keys()
        for path, x in weights.items():
            assert (x.dtype, np.asarray(x).tobytes()) == (wanted[path].dtype, np.asarray(wanted[path]).tobytes())
    for name in NETWORKS:
        done, total = [at[1:] for at in told if at[0] == name][-1]
        assert done == total > 0
    assert there.tokenize("a red circle").ids.tolist() == here.tokenize("a red circle").ids.tolist()


# --- the command ---


def test_the_command_says_what_it_reads_and_writes(source, tmp_path):
    target = tmp_path / "made" / "here"
    status, out, err = wanjax_command(source, target, "--dtype", "bfloat16")
    assert (status, out) == (0, "")
    for words in (
        r"transformer +19,832 ",
        r"together +0\.3 MB",
        r"converting.*281\.2/281\.2 kB",
        r"is complete and verified",
    ):
        assert re.search(words, err), err
    dtypes = {name: {words.split()[0] for words in arrays.values()} for name, arrays in checksums(target).items()}
    assert dtypes["vae"] == {"float32"}
    assert dtypes["transformer"] == {"bfloat16", "float32"}  # its norms stay as they were
    assert dtypes["text_encoder"] == {"bfloat16"}
    assert "was already there" in wanjax_command(source, target, "--dtype", "bfloat16")[2]
    status, _, err = wanjax_command("--verify", target)
    assert (status, "is as it was written" in err) == (0, True)


KERNELS = {"text_encoder": "blocks.attn.q.kernel", "transformer": "proj_out.kernel", "vae": "quant.kernel"}


def test_a_component_can_have_a_dtype_of_its_own(source, tmp_path):
    wanjax_command(
        source, tmp_path / "x", "--dtype", "bfloat16", "--dtype", "text_encoder=float32", "--dtype", "vae=bfloat16"
    )
    arrays = checksums(tmp_path / "x")
    assert {words.split()[0] for words in arrays["text_encoder"].values()} >= {"float32"}
    assert arrays["transformer"]["proj_out.kernel"].startswith("bfloat16")
    pipe = registry.load(tmp_path / "x")  # where each is kept as it is stored, but for the autoencoder
    kinds = [parameters(getattr(pipe, name))[key].dtype.name for name, key in KERNELS.items()]
    assert kinds == ["float32", "bfloat16", "float32"]
    assert arrays["vae"]["quant.kernel"].startswith("bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{source}",), r"where to is missing: `wanjax convert .* FOLDER`"),
        (
            ("nanoo", "{new}"),
            r"no model is named 'nanoo', nor is there such a folder or file: a near name is nano, and",
        ),
        (
            ("qqqqqqqq", "{new}"),
            r"nor is there such a folder or file: `wanjax models` lists the names, and a hub id is",
        ),
        (("{source}/model_index.json", "{new}"), r"model_index\.json is no file of weights that can be read: one that"),
        (("{source}", "{new}", "--revision", "abc"), r"source.* is not on the hub: it has no revision abc"),
        (("{source}", "{source}"), r"is there already and is not what was asked for: name a new folder"),
        (("{source}", "{converted}", "--dtype", "bfloat16"), r"is there already and is not what was asked for"),
        (("{converted}", "{new}"), r"is a wanjax checkpoint already: `--to diffusers` writes it back"),
        (("{source}", "{new}", "--to", "diffusers"), r"is no wanjax checkpoint: only what `convert` wrote"),
        (("{source}", "--verify"), r"is no wanjax checkpoint, whose checksums could be compared"),
        (("{converted}", "{new}", "--verify"), r"--verify takes one folder"),
        (
            ("{source}", "{new}", "--dtype", "float8"),
            r"--dtype float8 is no dtype to store weights in",
        ),
        (
            ("{source}", "{new}", "--dtype", "unet=float32"),
            r"has no unet to store in another dtype, but sch",
        ),
        (
            ("{source}", "/proc/nowhere/x"),
            r"/proc/nowhere/x cannot be written, No such file or directory: name a folder that can",
        ),
        (("{source}", "{source}/README.md/x"), r"README.md/x cannot be written, Not a directory"),
    ],
)
def test_mistakes_are_told_in_a_sentence(source, converted, tmp_path, arguments, message):
    places = {"source": source, "converted": converted, "new": tmp_path / "new"}
    assert re.search(message, refused(*(argument.format(**places) for argument in arguments)))
    assert not os.listdir(tmp_path)


# --- faults of the source ---


def with_another_shape(folder: Path) -> None:
    change(folder, lambda x: {"proj_out.bias": np.zeros(3, np.float32)})


def with_another_dtype(folder: Path) -> None:
    change(folder, lambda x: {"proj_out.bias": x["proj_out.bias"].astype(np.int32)})


def change(folder: Path, changed: Callable[[dict], dict]) -> None:
    for file in (folder / "transformer").glob("*.safetensors"):
        held = {key: np.array(x) for key, x in load_safetensors(file).items()}
        if "proj_out.bias" in held:
            save_safetensors(file, held | changed(held))


def whole(harm: Callable[[Path], None]) -> Callable[[Path], None]:
    """The harm done to a transformer in one file."""

    def do(folder: Path) -> None:
        (folder / "transformer" / f"{WEIGHTS}.index.json").unlink()
        parts = list((folder / "transformer").glob("*.safetensors"))
        save_safetensors(
            folder / "transformer" / WEIGHTS, {k: v for file in parts for k, v in load_safetensors(file).items()}
        )
        harm(folder)

    return do


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncated, r"diffusion_pytorch_model\.safetensors cannot be read, it has \d+ bytes where its header promises"),
        (corrupt, r"model\.safetensors cannot be read, its header claims"),
        (whole(without_a_shard), r"lacks diffusion_pytorch_model-00002-of-00002\.safetensors"),
        (whole(with_other_keys), r"missing: .*proj_out\.bias.*left over: extra\.weight, more\.bias; unfit"),
        (with_another_shape, r"proj_out\.bias \(\[3\] where \[16\] is right\)"),
        (with_another_dtype, r"proj_out\.bias \(int32 where float32 is right\)"),
    ],
)
def test_a_fault_of_the_source_is_told_and_leaves_nothing(damaged, tmp_path, harm, message):
    harm(damaged)
    assert re.search(message, refused(damaged, tmp_path / "new"))
    assert os.listdir(tmp_path) == ["damaged"]


def test_a_damaged_download_is_found_by_its_name_in_the_cache(source, damaged, tmp_path):
    """The hub's cache names a large file by its checksum, and the snapshot links to it."""
    file = damaged / "vae" / WEIGHTS
    blob = tmp_path / convert.hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(blob)
    file.symlink_to(blob)
    assert ToWanjax(open_source(damaged), tmp_path / "good").run()
    contents = bytearray(blob.read_bytes())
    contents[-1] ^= 1
    blob.write_bytes(contents)
    assert refused(damaged, tmp_path / "bad") == f"{blob} is damaged: delete it, and it is downloaded again"
    assert not (tmp_path / "bad").exists()


# --- faults while writing ---


def test_a_disk_without_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 10_000))
    message = refused(source, tmp_path / "new")
    assert re.search(r"new cannot be written, 0\.00 GB are free where 0\.00 GB are needed", message)
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_is_told_and_the_next_run_goes_on(source, converted, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7000, limits[1]))
    try:
        message = refused(source, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message == f"{tmp_path / 'new'} cannot be written, File too large: what is complete is kept for the next run"
    assert os.listdir(tmp_path) == [".new.partial"]
    assert list((tmp_path / ".new.partial").rglob("c/*"))
    wanjax_command(source, tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]
    assert checksums(tmp_path / "new") == checksums(converted)


def test_what_was_stopped_is_not_mixed_with_another_source(source, damaged, tmp_path, monkeypatch):
    """What another run has begun is taken up only if its source is the same, file by file."""
    stop_in(monkeypatch, "_copy_files", damaged, tmp_path / "new")
    change(damaged, lambda x: {"proj_out.bias": x["proj_out.bias"] + 1})
    ToWanjax(open_source(damaged), tmp_path / "new").run()
    stored = wanjax.load(tmp_path / "new").transformer.proj_out.bias[...]
    wanted = wanjax.load(damaged).transformer.proj_out.bias[...]
    np.testing.assert_array_equal(stored, wanted)


def stop_in(monkeypatch, method: str, source: Path, target: Path) -> None:
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ToWanjax, method, stop)
        with pytest.raises(KeyboardInterrupt):
            ToWanjax(open_source(source), target).run()


def test_what_is_written_is_not_written_again(source, converted, tmp_path, monkeypatch):
    stop_in(monkeypatch, "_copy_files", source, tmp_path / "new")
    chunks = {path: path.stat().st_mtime_ns for path in (tmp_path / ".new.partial").rglob("c/**/*") if path.is_file()}
    lost = sorted(chunks)[3]
    lost.unlink()
    ToWanjax(open_source(source), tmp_path / "new").run()
    for path, written in chunks.items():
        now = tmp_path / "new" / path.relative_to(tmp_path / ".new.partial")
        assert (now.stat().st_mtime_ns == written) == (path != lost)
    assert checksums(tmp_path / "new") == checksums(converted)


def test_a_chunk_that_was_damaged_before_the_end_is_found_and_written_again(source, converted, tmp_path, monkeypatch):
    stop_in(monkeypatch, "_copy_files", source, tmp_path / "new")
    flip(tmp_path / ".new.partial" / "transformer")
    assert "proj_out.kernel is damaged" in refused(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    wanjax_command(source, tmp_path / "new")
    assert checksums(tmp_path / "new") == checksums(converted)


def flip(transformer: Path) -> Path:
    [file] = (path for path in (transformer / "weights" / "proj_out.kernel" / "c").rglob("*") if path.is_file())
    contents = bytearray(file.read_bytes())
    contents[7] ^= 1
    file.write_bytes(contents)
    return file


KILLED = """
import os, random, signal, sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
from wanjax import convert, store
from wanjax.sources import open_source

store.CHUNK = 1 << 12
os.fsync = lambda descriptor: None  # which waits for a disk that does not lose its power here
source, target, moments = open_source(sys.argv[1]), Path(sys.argv[2]), random.Random(0)
forth = convert.ToWanjax(source, target) if sys.argv[3] == "forth" else None  # tensorstore cannot be open in a fork


def save(told):
    import jax.numpy as jnp

    begin = store.StoredArray.begin
    store.StoredArray.begin = lambda self, *piece: (told(), begin(self, *piece), told())[1]
    store.Arrays.save(target, {name: jnp.arange(i * 9e3) for i, name in enumerate("abcdefgh", 1)})


def begun():
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        told = lambda *at: os.write(write, b".")
        if sys.argv[3] == "saving":
            save(told)
        else:
            (forth or convert.ToDiffusers(source, target)).run(told)
        os._exit(0)
    os.close(write)
    return pid, os.fdopen(read, "rb")


def ended(pid):
    return os.waitpid(pid, 0)[1]


pid, events = begun()
count = len(events.read())
assert ended(pid) == 0
target.rename(target.with_name("whole"))
for moment in range(20):
    pid, events = begun()
    events.read(moments.randrange(count))
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(ended(pid)) == signal.SIGKILL
    assert not target.exists()
    pid, events = begun()
    events.read()
    assert ended(pid) == 0
    target.rename(target.with_name(f"run{moment}"))
"""


def digests(folder: Path) -> dict[str, str]:
    arrays = Arrays(folder)
    return {name: arrays[name].digest() for name in arrays.keys()}  # noqa: SIM118


@pytest.mark.parametrize("way", ["forth", "back", "saving"])
def test_killed_at_random_moments_each_rerun_completes(source, converted, tmp_path, way):
    """Twenty times: with the same checksums as a run that was left alone. Without the autoencoder's many arrays."""
    given = shutil.copytree(converted if way == "back" else source, tmp_path / "given")
    index = json.loads((given / "model_index.json").read_text())
    (given / "model_index.json").write_text(json.dumps(index | {"vae": [None, None]}))
    run = subprocess.run(
        [sys.executable, "-c", KILLED, given, tmp_path / "target", way],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    read = {"forth": checksums, "back": tensors, "saving": digests}[way]
    wanted = read(tmp_path / "whole")
    assert len(os.listdir(tmp_path)) == 22
    for run in tmp_path.glob("run*"):
        assert read(run) == wanted
        if way == "forth":
            verify(open_source(run))


# --- faults of what was written ---


def lost_chunk(folder: Path) -> Path:
    flip(folder / "transformer").unlink()
    return folder / "transformer" / "weights" / "proj_out.kernel"


def lost_array(folder: Path) -> Path:
    shutil.rmtree(folder / "vae" / "weights" / "quant.kernel")
    return folder / "vae" / "weights" / "quant.kernel"


def flipped(folder: Path) -> Path:
    flip(folder / "transformer")
    return folder / "transformer" / "weights" / "proj_out.kernel"


def swapped_arrays(folder: Path) -> Path:
    """Each is as good as the other, but they are not where they were."""
    weights = folder / "transformer" / "weights"
    for a, b in (
        ("text_embed.up.bias", "x"),
        ("time_embed.up.bias", "text_embed.up.bias"),
        ("x", "time_embed.up.bias"),
    ):
        (weights / a).rename(weights / b)
    return weights


def another_config(folder: Path) -> Path:
    (folder / "vae" / "config.json").write_text("{}")
    return folder / "vae" / "config.json"


@pytest.mark.parametrize("harm", [lost_chunk, lost_array, flipped, swapped_arrays, another_config])
def test_verify_names_what_is_wrong(converted, tmp_path, harm):
    folder = shutil.copytree(converted, tmp_path / "harmed")
    assert str(harm(folder)) in refused("--verify", folder)


@pytest.mark.parametrize("harm", [lost_chunk, lost_array, flipped])
def test_nothing_broken_is_loaded(converted, tmp_path, harm):
    folder = shutil.copytree(converted, tmp_path / "harmed")
    name = str(harm(folder))
    pipe = wanjax.load(folder)
    with pytest.raises(WanjaxError, match=re.escape(name)):
        [getattr(pipe, network) for network in NETWORKS]


@pytest.mark.parametrize("name", ["..", "../transformer", "/etc", ""])
def test_an_index_cannot_name_a_component_outside_its_folder(damaged, tmp_path, name):
    index = json.loads((damaged / "model_index.json").read_text())
    (damaged / "model_index.json").write_text(json.dumps(index | {name: ["diffusers", "WanTransformer3DModel"]}))
    assert f"lists a component {name!r}" in refused(damaged, tmp_path / "new")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "request": 7}'])
def test_a_broken_manifest_is_named(converted, tmp_path, text):
    folder = shutil.copytree(converted, tmp_path / "harmed")
    (folder / "wanjax.json").write_text(text)
    assert str(folder / "wanjax.json") in refused("--verify", folder)
