# SPDX-License-Identifier: Apache-2.0
"""The programs that are priced, held to those that the pipeline runs."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import wanjax.pipelines.wan as pipelines
from tests.test_sharding import VAE, layout, pipeline, transformer_config
from wanjax.models.t5 import T5Config
from wanjax.networks import PUBLISHED, architecture
from wanjax.pipelines.base import Embeddings
from wanjax.pipelines.programs import compiled
from wanjax.pipelines.tasks import FIRST_FRAME_TO_VIDEO
from wanjax.pipelines.text import TEXT_LENGTH
from wanjax.plan.program import find
from wanjax.plan.stages import Architecture, stages
from wanjax.registry import NANO, PRESETS
from wanjax.schedulers import UniPC
from wanjax.sharding import MESH_AXES, make_mesh
from wanjax.sources import open_source

TEXT = T5Config(64, 8, 2, 4, 16, 2, 8, 16, 1e-6, False)
VIDEO = PRESETS["nano"].defaults.updated(
    {"height": 12, "width": 12, "frames": 5, "steps": 2, "guidance_scale": 4.0, "dtype": "float32"}
)


class Given(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    committed: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)


def as_given(x):
    """An array that a program is given; those of the host no one has placed."""
    committed = isinstance(x, jax.Array) and x.committed
    return Given(x.shape, x.dtype, x.sharding if committed else None, committed)


def alike(given, planned):
    """Whether arrays that a program is given are as planned: those that no one has placed go where the program says."""
    return (
        given.shape == planned.shape
        and given.dtype == planned.dtype
        and (not given.committed or given.sharding.is_equivalent_to(planned.sharding, given.ndim))
    )


def leaves(given):
    return jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, Given))


@pytest.fixture
def calls(monkeypatch):
    """What the pipeline's programs are given, by their names, the last call of each."""
    seen = {}

    def recorded(function, donated=(), layout=None):
        def run(static, *arguments):
            shapes = jax.tree.map(as_given, arguments)
            seen[function.__name__] = static, shapes, donated
            return compiled(function, donated, layout)(static, *arguments)

        return run

    monkeypatch.setattr(pipelines, "compiled", recorded)
    return seen


def planned(job):
    """The program of a job, made as the compiling process makes it, for the devices of this one."""
    mesh = make_mesh(*job.mesh.values())
    return find(job.builder)(mesh, **json.loads(json.dumps(job.settings)))


@pytest.mark.parametrize(("axes", "rules"), [((2, 2, 2), "fsdp"), ((1, 4, 2), "tp")])
def test_programs_are_those_that_the_pipeline_runs(calls, axes, rules):
    networks = Architecture(TEXT, transformer_config(4), VAE)
    pipe = pipeline(4, layout(axes, rules))
    pipe.parts.put("scheduler", UniPC(3.0))
    prompts = Embeddings(*(jnp.zeros((1, TEXT_LENGTH, 8)) for _ in range(2)))
    pipe.decode(pipe.denoise(prompts, **VIDEO.to_json()))
    runs = stages(networks, VIDEO, "v6e-8", dict(zip(MESH_AXES, axes, strict=True)), rules=rules)
    assert [run.times for stage in runs.values() for run in stage] == [1, 1, 2, 1, 2]
    names = ("make_context", "guided_step", None, "decode_to_frames")
    for run, name in zip((*runs["denoise"], *runs["decode"]), names, strict=True):
        if name is None:  # of the first frame, which the second's call stands for
            continue
        static, given, donated = calls[name]
        program = planned(run.job)
        assert program.donate == tuple(i - 1 for i in donated)
        assert program.function.args[0][0] == static[0]  # the graph definition
        pairs = zip(leaves(given), jax.tree.leaves(program.arguments), strict=True)
        assert all(alike(*pair) for pair in pairs)


def test_programs_that_are_alike_are_one_job():
    """So that one price does for all of them."""
    mesh = {"dp": 2, "tp": 4}
    text, image, small = (
        stages(PUBLISHED[name], PRESETS[name].defaults, "v6e-8", mesh)
        for name in ("wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "wan2.1-t2v-1.3b")
    )
    assert text["decode"] == image["decode"] != small["decode"]
    assert text["encode"][0] == image["encode"][0] == small["encode"][0]
    assert text["denoise"] != image["denoise"]
    shorter = PRESETS["wan2.1-t2v-14b"].defaults.updated({"frames": 49, "steps": 30})
    again = stages(PUBLISHED["wan2.1-t2v-14b"], shorter, "v6e-8", mesh)
    assert [run.job for run in again["decode"]] == [run.job for run in text["decode"]]
    assert again["denoise"][1].job != text["denoise"][1].job


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_program_of_every_preset_is_traced(name):
    """From configs alone, at its own size."""
    video = PRESETS[name].defaults
    runs = stages(PUBLISHED[name], video, "v6e-8", {"dp": 2, "tp": 4})
    context, step = runs["denoise"]
    assert (context.times, step.times) == (1 if video.boundary is None else 2, video.steps)
    x, *_ = planned(step.job).arguments
    networks = PUBLISHED[name]
    count = (video.frames - 1) // 4 + 1
    height, width = (n // networks.vae.spatial_factor for n in video.size)
    assert x.shape == (1, count, height, width, networks.vae.latent_channels)
    for run in runs["encode"]:
        program = planned(run.job)
        jax.eval_shape(program.function, *program.arguments)


def test_an_architecture_is_read_from_a_checkpoint():
    read = architecture(open_source(NANO))
    assert read.task == FIRST_FRAME_TO_VIDEO
    assert read.transformer.text_width == read.text_encoder.width
    assert stages(read, VIDEO, "v6e-8", {"tp": 8}).keys() == {"encode", "denoise", "decode"}
