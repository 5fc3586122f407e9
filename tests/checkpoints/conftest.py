# SPDX-License-Identifier: Apache-2.0
"""A hub on loopback for the client, and a converted checkpoint."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import close_session, constants

from tests.support.conversion import split
from tests.support.hub import running_hub
from tests.support.tiny import tiny_checkpoint
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.network_kinds import Network
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source


@pytest.fixture
def server():
    with running_hub() as server:
        yield server


@pytest.fixture
def set_hub_url(tmp_path, monkeypatch):
    """Return a function that sets the hub's address in the client, which reads the environment only at import."""

    def point(url, offline=False):
        for name, value in {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": offline,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "*")
        close_session()

    yield point
    close_session()


@pytest.fixture
def online(server, set_hub_url):
    set_hub_url(server.url)


@pytest.fixture(scope="module")
def cached_shapes():
    """Trace each network once, because tracing takes most of the time of a small conversion."""
    cache = {}

    def abstract(network, **options):
        key = (network.config, str(options))
        if key not in cache:
            cache[key] = compute(network, **options)
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        compute = Network.abstract
        patch.setattr(Network, "abstract", abstract)
        yield


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A checkpoint with its text encoder in bfloat16, as published, and its transformer in shards."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("source"))
    encoder = folder / "text_encoder" / "model.safetensors"
    halves = {key: np.asarray(x).astype(ml_dtypes.bfloat16) for key, x in load_safetensors(encoder).items()}
    save_safetensors(encoder, halves)
    split(folder / "transformer")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    (folder / "transformer" / "unused.bin").write_bytes(b"0")
    return folder


@pytest.fixture(scope="session")
def converted(source, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "checkpoint"
    assert ConversionToWanjax(open_source(source), target, NETWORKS).run()
    return target


@pytest.fixture
def damaged(source, tmp_path) -> Path:
    return shutil.copytree(source, tmp_path / "damaged")
