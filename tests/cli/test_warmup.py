# SPDX-License-Identifier: Apache-2.0
"""Compiled programs cached between processes: the same run reads them, other runs do not."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.quick import quick
from tests.support.warm import cached_program_names, wanjax
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings

RUN = ("--size", "32x32", "--frames", "9", "--steps", "3")
OUTPUT_OPTIONS = ("--dir", "stage_outputs", "--out", "video.mp4", "--force")
CHANGED = """
import jax
from wanjax.layers import mlp
mlp.gelu_tanh = jax.nn.silu
from wanjax.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("warmup")


@pytest.fixture(scope="module")
def cached(folder) -> set[str]:
    wanjax(folder, "warmup", *RUN)
    return cached_program_names(folder)


@pytest.fixture(scope="module")
def log(folder, cached) -> str:
    """What a run after the warm-up prints."""
    return wanjax(folder, "generate", "a red circle moving right", *RUN, *OUTPUT_OPTIONS, "--verbose", "--stats")


@pytest.fixture(scope="module")
def latents(folder, cached, log) -> np.ndarray:
    """The latents of that run."""
    assert log.count("cached") == 3, log
    assert f"0 programs compiled, {len(cached)} read from the cache" in log
    assert cached_program_names(folder) == cached
    return read_latents(folder)


def read_latents(folder: Path) -> np.ndarray:
    stages = folder / "stage_outputs"
    return np.asarray(stage_files.load_latents(stages, load_settings(stages)))


def test_a_second_process_compiles_nothing(cached, latents):
    assert Counter(re.match(r"jit_(\w+)-", name)[1] for name in cached) == {
        "encode_prompts": 1, "begin": 1, "make_context": 1, "take_step": 1, "finish": 1, "cut": 1, "decode_chunk": 2
    }  # fmt: skip
    assert np.isfinite(latents).all()


def test_all_seconds_are_accounted_for(log):
    _, account = log.split("where the time went")
    result = re.findall(r"^(\w.*?)  +([\d.]+) (µs|ms|s)\b", account, re.MULTILINE)
    seconds = {name: float(number) / {"µs": 1e6, "ms": 1e3, "s": 1}[unit] for name, number, unit in result}
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, rel=0.02)
    stages = {name.split(":")[0] for name in seconds if ":" in name}
    assert stages == {"encode", "denoise", "decode"}
    assert seconds["starting Python"] > 0.01
    assert "decode: writing" in seconds


COMMAND = "from wanjax.__main__ import main; main()"  # like the installed command, it caches executables too
MODELS = {
    "nano": None,
    "wan": tiny.tiny_checkpoint,
    "cogvideox": tiny.tiny_cogvideox_checkpoint,
    "hunyuanvideo": tiny.tiny_hunyuan_checkpoint,
}
MESHES = {"dp=2,tp=2": 4, "sp=2": 2}


@pytest.mark.parametrize(
    ("model", "mesh"), quick([("nano", "dp=2,tp=2")], [(model, mesh) for model in MODELS for mesh in MESHES])
)
def test_a_second_process_compiles_nothing_on_a_mesh(model, mesh, tmp_path):
    write_checkpoint = MODELS[model]
    name = model if write_checkpoint is None else str(write_checkpoint(tmp_path / "model"))
    run = ("--model", name, "--size", "32x32", "--frames", "5", "--steps", "1", "--mesh", mesh)
    wanjax(tmp_path, "warmup", "--prompt", "a cat", *run, code=COMMAND, devices=MESHES[mesh])
    report_options = (*OUTPUT_OPTIONS, "--verbose", "--stats")
    output = wanjax(tmp_path, "generate", "a cat", *run, *report_options, code=COMMAND, devices=MESHES[mesh])
    assert re.search(r"^0 programs compiled, [1-9]\d* read from the cache", output, re.MULTILINE), output


@pytest.mark.slow  # tests/schedulers has a quick test: the schedule is an argument of the programs
def test_another_schedule_compiles_nothing(folder, cached, latents):
    before = cached_program_names(folder)
    wanjax(folder, "denoise", "--steps", "5", "--flow-shift", "4", "--guidance-scale", "3", "--seed", "1", "--force")
    assert cached_program_names(folder) == before
    assert np.abs(read_latents(folder) - latents).max() > 1e-3


@pytest.mark.slow
def test_changed_code_runs_no_stale_program(folder, cached, latents):
    wanjax(folder, "generate", "a red circle moving right", *RUN, *OUTPUT_OPTIONS, code=CHANGED)
    assert cached_program_names(folder) > cached
    assert np.abs(read_latents(folder) - latents).max() > 1e-3


@pytest.mark.slow
def test_changed_settings_run_no_stale_program(folder, cached, latents):
    before = cached_program_names(folder)
    wanjax(folder, "denoise", "--attention", "reference", "--force")
    assert cached_program_names(folder) > before
