# SPDX-License-Identifier: Apache-2.0
"""The files of `--profile`: a trace that names the parts of a block, and a report with consistent figures."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import wanjax
from tests.support.tiny import TRANSFORMER, compile_cache, tiny_checkpoint, tiny_image_checkpoint
from wanjax.cli import main, profile
from wanjax.converters.wan.diffusers import transformer_config
from wanjax.models.wan.config import forward_flops
from wanjax.pipelines.denoiser import State
from wanjax.pipelines.observers import Step
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.pricing.chips import CHIPS_BY_DEVICE_KIND, V6E


class FinishedStep(Step):
    latents = jnp.zeros(1)


SCOPES = ("self_attention", "cross_attention", "mlp", "modulation", "rope", "attention", "guidance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a profiled run of four steps."""
    root = tmp_path_factory.mktemp("profile")
    model = tiny_checkpoint(root / "tiny")
    arguments = ["a red circle", "--model", model, "--size", "32x16", "--frames", "5", "--steps", "4"]
    with compile_cache(tmp_path_factory.getbasetemp() / "xla"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHIPS_BY_DEVICE_KIND, "cpu", V6E)
        run = CliRunner().invoke(main, [*map(str, arguments), "--dir", str(root), "--profile", str(root / "profile")])
    assert run.exit_code == 0, run.output
    assert "of the bfloat16 peak; the trace is in" in run.stderr
    return root / "profile"


def test_the_trace_names_the_parts_of_a_block(folder):
    [trace] = folder.rglob("*.xplane.pb")
    data = trace.read_bytes()
    assert [scope for scope in SCOPES if scope.encode() not in data] == []


def test_a_picture_s_tokens_are_counted(tmp_path):
    pipe = wanjax.load(tiny_image_checkpoint(tmp_path / "image"))
    conditioning = pipe.encode("a", image=np.zeros((32, 32, 3), np.uint8), frames=5)
    assert conditioning.image_embeds.shape[1] == 5
    result = pipe.model.cost(pipe.settings(size=(32, 32), frames=5), conditioning)
    assert result.flops == forward_flops(
        pipe.model.transformer, tokens=2 * 2 * 2, text_tokens=TEXT_LENGTH, image_tokens=5
    )


def test_the_report_counts_both_forwards_of_a_step(folder):
    data = json.loads((folder / profile.STEPS_FILE).read_text())
    parts = forward_flops(transformer_config(TRANSFORMER), tokens=2 * 1 * 2, text_tokens=TEXT_LENGTH)
    assert data["step_flops"] == 2 * sum(parts.values()) == sum(data["step_flops_by_part"].values())
    assert len(data["seconds"]) == 3  # the intervals between the ends of four steps
    assert data["step_seconds"] == data["seconds"][-1]  # the only interval that was not traced
    assert data["achieved_flops_per_second"] == pytest.approx(data["step_flops"] / data["step_seconds"])
    assert data["mfu"] == pytest.approx(data["achieved_flops_per_second"] / V6E.flops)


@pytest.mark.parametrize("options", [{}, {"attention": "auto:window=2"}])
def test_unknown_figures_are_null(options, tmp_path):
    """The time of a single step, and the operations of windowed attention, are null."""
    pipe = wanjax.load("nano", **options)
    settings = pipe.settings(size=(32, 32), frames=5)
    messages, notes = [], []
    step_profile = profile.StepProfile(tmp_path, pipe, settings, notes.append)
    step_profile.started(None)
    for index in (8, 9):
        step_profile.stepped(FinishedStep(index, 10, 0.0, State(None, None), jnp.zeros((1, 1, 1, 1, 1))))
        messages.append(
            (step_profile.report(), json.loads((tmp_path / profile.STEPS_FILE).read_text(), parse_constant=pytest.fail))
        )
    (first, first_report), (second, second_report) = messages
    assert notes == [second]
    assert first_report["step_seconds"] is first_report["mfu"] is None
    assert second_report["step_seconds"] > 0
    assert (
        (second_report["step_flops"] is None) == (second_report["achieved_flops_per_second"] is None) == bool(options)
    )
    assert "nan" not in first
    assert "trace is in" not in first + second
