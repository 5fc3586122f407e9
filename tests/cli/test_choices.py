# SPDX-License-Identifier: Apache-2.0
"""Options that choose how a video is made: the scheduler."""

from pathlib import Path

import pytest

from tests.support.commands import refused, succeeded, wanjax
from tests.support.tiny import compile_cache, tiny_checkpoint
from wanjax.checkpoints.files import load_safetensors
from wanjax.media import stage_files

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def latents(folder: str) -> bytes:
    return load_safetensors(Path(folder) / stage_files.LATENTS)["latents"].tobytes()


def test_a_scheduler_is_chosen_and_kept_for_the_next_stage(model):
    succeeded(wanjax("encode", "a", "--model", model, "--dir", "one"))
    succeeded(wanjax("denoise", *SMALL, "--dir", "one"))
    own = latents("one")
    succeeded(wanjax("denoise", *SMALL, "--scheduler", "euler", "--dir", "one"))
    euler = latents("one")
    assert euler != own
    assert stage_files.load_settings(Path("one"))["scheduler"] == "euler"
    succeeded(wanjax("denoise", *SMALL, "--dir", "one"))
    assert latents("one") == euler
    succeeded(wanjax("denoise", *SMALL, "--scheduler", "unipc", "--dir", "one"))
    assert latents("one") == own


def test_an_unknown_scheduler_is_refused(model):
    assert refused("a", "--model", model, *SMALL, "--scheduler", "dpm") == (
        "no scheduler is named 'dpm': there are unipc, euler and unipc:order=1"
    )
