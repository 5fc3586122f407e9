# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by folder and by hub id: which files are downloaded, and the message for each error."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import wanjax
from tests.support.disks import limit_file_size
from tests.support.hub import COMMIT, FILES, ID, OLDER, TRANSFORMER, VAE, download_components, files_in
from tests.support.words import has_line_with_words
from wanjax.checkpoints import hub
from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import WanjaxError, is_failure
from wanjax.registry import open_source

OPEN_SOURCE = "from wanjax.registry import open_source"


def error_message(name, components=None, **options):
    """Return the message with which a checkpoint, or the download of its components, fails."""
    with pytest.raises(WanjaxError) as caught:
        open_source(name, **options) if components is None else download_components(name, components)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_existing_folder_is_used_directly(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    assert open_source(tmp_path).root == open_source(str(tmp_path)).root == tmp_path


@pytest.mark.usefixtures("online")
def test_only_the_required_files_are_downloaded(server):
    folder = download_components(ID, ["transformer"])
    assert files_in(folder) == {"model_index.json"} | TRANSFORMER
    assert all((folder / name).read_bytes() == FILES[name] for name in files_in(folder))
    assert download_components(ID, ["transformer", "vae"]) == folder  # existing files are not fetched again
    assert files_in(folder) == {"model_index.json"} | TRANSFORMER | VAE
    assert sorted(server.downloads) == sorted((name, 0) for name in files_in(folder))


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json", "tokenizer_config.json"])
def test_either_form_of_a_tokenizer_is_downloaded(server, name):
    server.files[f"tokenizer/{name}"] = b"{}"
    assert (download_components(ID, ["tokenizer"]) / "tokenizer" / name).read_bytes() == b"{}"


def test_the_cache_is_used_offline_and_missing_files_are_reported(server, set_hub_url):
    set_hub_url(server.url, offline=True)
    assert "unset HF_HUB_OFFLINE" in error_message(ID, ["vae"])
    set_hub_url(server.url)
    folder = download_components(ID, ["vae"])
    server.downloads.clear()
    set_hub_url(server.url, offline=True)
    assert download_components(ID, ["vae"]) == folder
    assert "unset HF_HUB_OFFLINE" in error_message(ID, ["transformer"])
    assert not server.downloads


@pytest.mark.usefixtures("online")
def test_the_requested_revision_is_downloaded(server):
    assert hub.locate(ID, revision="v1").name == OLDER
    assert hub.locate(ID).name == COMMIT


def test_a_user_without_a_home_gets_no_folder_named_tilde(server, tmp_path):
    """The client would create a folder "~" in the current folder."""
    code = f"""
import pwd

def unknown(number):
    raise KeyError("uid not found")

pwd.getpwuid = unknown
from wanjax.checkpoints.hub import locate
print(locate("{ID}"))
"""
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "HF_HOME", "XDG_CACHE_HOME")}
    environment = variables | {"HF_ENDPOINT": server.url, "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    assert printed_path(code, environment, tmp_path / "current").is_relative_to(tmp_path)
    assert os.listdir(tmp_path) == ["current"]


def printed_path(code: str, environment: dict[str, str], folder: Path) -> Path:
    """Run a program in a new folder, where it must write nothing, and return the path that it prints."""
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert os.listdir(folder) == []
    return Path(run.stdout.strip())


def test_a_relative_cache_folder_is_not_created_in_the_current_folder(server, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "HF_HOME"}
    environment |= {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HOME": str(tmp_path), "XDG_CACHE_HOME": "cache"}
    code = f"from wanjax.checkpoints.hub import locate; print(locate({ID!r}))"
    path = printed_path(code, environment, tmp_path / "current")
    assert path.is_relative_to(tmp_path / ".cache" / "huggingface")


LONG = "x" * 300
UNKNOWN = ("nowhere", "./no/where", "/no/where", "a/b/c", "", "a b/c", "ä/b", ".")
NO_FILES = ("a.safetensors", "/a/b/c.safetensors", f"{ID}/../../x", "", f"{ID}/a*.safetensors", LONG)
NAMES = [  # the call, a name that does not exist, and the words of the message
    *((open_source, name, "no") for name in UNKNOWN),
    *((wanjax.load, name, name) for name in (LONG, f"{LONG}.gguf", f"{LONG}.safetensors", f"a/b/c/{LONG}")),
    *((hub.locate_file, name, "OWNER/NAME/FILE") for name in NO_FILES),
    (lambda name: Lora(name).resolve_folder().path, LONG, "OWNER/NAME/FILE"),
    (open_source, "owner/typo", "owner/typo http:// public check spelling `hf auth login`"),
    (lambda name: open_source(name, revision="v9"), ID, f"{ID} revision v9"),
    (hub.locate_file, f"{ID}/lora.safetensors", "owner/video lora.safetensors"),
    (hub.locate_file, "owner/typo/lora.safetensors", "no folder owner/typo"),
]


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(("call", "name", "words"), NAMES)
def test_missing_repositories_and_files_are_reported(call, name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WanjaxError) as caught:
        call(name)
    assert has_line_with_words(str(caught.value), words)


def with_response(status, code):
    def harm(server):
        server.status, server.error_code = status, code

    return harm


HARMS = [  # the error of a hub, the words of the message, and whether it is a failure, not a mistake of the user
    (with_response(401, None), "public hf auth login", False),
    (with_response(403, "GatedRepo"), "owner/video gated terms http://127.0.0.1 hf auth login", False),
    (with_response(401, "GatedRepo"), "owner/video gated terms http://127.0.0.1 hf auth login", False),
    (with_response(429, None), "requests wait minutes", True),
    (with_response(404, "RepoNotFound"), "no folder owner/video", False),
    (with_response(500, None), "reached Server '500", True),
    (lambda server: server.files.pop("model_index.json"), f"{ID} no model_index.json", False),
    (lambda server: server.files.update({"model_index.json": b"[]"}), "model_index.json", False),
    (
        lambda server: server.set_hub_url("http://127.0.0.1:9"),
        "http://127.0.0.1:9 reached check spelling try later",
        True,
    ),
    (lambda server: server.set_hub_url("http://hub.invalid"), "http://hub.invalid reached try later", True),
]


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("harm", "disk_limit", "words", "fails"),
    [
        *((harm, None, words, fails) for harm, words, fails in HARMS),
        (lambda server: None, 100_000, f"http://127.0.0.1 {ID} downloaded File too large", True),
    ],
    ids=[*(words for _, words, _ in HARMS), "a full disk"],
)
def test_a_refusal_of_the_hub_is_explained(server, set_hub_url, harm, disk_limit, words, fails):
    server.set_hub_url = set_hub_url
    harm(server)
    with limit_file_size(disk_limit) if disk_limit else nullcontext(), pytest.raises(WanjaxError) as caught:
        download_components(ID, ["transformer"]) if disk_limit else open_source(ID)
    assert has_line_with_words(str(caught.value), words)
    assert is_failure(caught.value) == fails


@pytest.mark.usefixtures("online")
def test_a_single_file_is_located_on_the_hub_or_on_the_disk(server, tmp_path):
    server.files["loras/style 1.safetensors"] = b"L" * 100
    result = hub.locate_file(f"{ID}/loras/style 1.safetensors")
    assert result.read_bytes() == b"L" * 100
    assert [name for name, _ in server.downloads] == ["loras/style 1.safetensors"]
    assert hub.locate_file(result) == result
    assert hub.locate_file(str(tmp_path / result)) == result


@pytest.mark.usefixtures("online")
def test_a_lora_of_the_hub_is_downloaded_once(server):
    server.files["style.safetensors"] = b"L" * 100
    lora = Lora(f"{ID}/style.safetensors").resolve_folder()
    result = lora.path
    server.status = 500
    assert lora.path == result


def test_the_clients_settings_come_from_the_environment(server, tmp_path):
    """Run a new process, because the client reads the environment when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.support.hub import download_components; print(download_components({ID!r}, ['vae']))",
        ],
        env=environment | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(run.stdout.strip())
    assert folder.is_relative_to(tmp_path / "hub")
    assert files_in(folder) == {"model_index.json"} | VAE


@pytest.mark.usefixtures("online")
def test_configs_of_a_checkpoint_are_downloaded_in_one_request(server):
    source = open_source(ID)
    names = [name for name, _ in server.downloads]
    assert sorted(names) == ["model_index.json", "transformer/config.json", "vae/config.json"]
    server.status = 500
    assert source["vae"].config() == json.loads(FILES["vae/config.json"])


def test_configs_missing_in_the_cache_are_downloaded_when_needed(server, set_hub_url):
    set_hub_url(server.url)
    source = open_source(ID)
    (source.root / "vae/config.json").unlink()
    assert source["vae"].config() == json.loads(FILES["vae/config.json"])
