# SPDX-License-Identifier: Apache-2.0
"""A traced run and an executed run call the same programs, for every family and every kind of run.

Each traced program is compiled before the run, which then compiles nothing.
"""

import functools
import gc
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import wanjax
from tests.support import tiny
from tests.support.calls import Call, Counting, differences, recorded_calls, steps, wrong_shardings
from tests.support.compilations import compilations
from tests.support.programs import num_compiled
from tests.support.quick import quick
from tests.support.tabled import TABLES
from wanjax.compile_cache.fingerprint import fingerprint
from wanjax.execution import EXECUTE, Trace
from wanjax.layers.tiling import Tiling
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.tracing import trace_programs
from wanjax.registry import inspect_checkpoint

EIGHT_DEVICES = "dp=2,sp=2,tp=2"
MODELS = {
    "wan": tiny.tiny_checkpoint,
    "wan-i2v": tiny.tiny_image_checkpoint,
    "wan-flf": partial(tiny.tiny_image_checkpoint, last=True),
    "wan-vace": tiny.tiny_control_checkpoint,
    "wan-experts": tiny.tiny_experts_checkpoint,
    "wan-ti2v": tiny.tiny_residual_checkpoint,
    "wan-pose": tiny.tiny_pose_checkpoint,
    "wan-causal": tiny.tiny_causal_checkpoint,
    "cogvideox": tiny.tiny_cogvideox_checkpoint,
    "cogvideox-i2v": partial(tiny.tiny_cogvideox_checkpoint, in_channels=8, ofs_embed_dim=24),
    "hunyuanvideo": tiny.tiny_hunyuan_checkpoint,
    "hunyuanvideo-i2v": partial(tiny.tiny_hunyuan_checkpoint, pictured=True),
}


def picture(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


SMALL = {"size": (32, 48), "frames": 5, "steps": 2, "guidance_scale": 3.0}
CACHED_STEPS = SMALL | {"steps": 7}
CLIP, IMAGE = picture(5, 32, 48), picture(30, 45)
CACHES = {"magcache": ".2,1,.1", "teacache": ".5", "easycache": "9,2", "deepcache": "1,6,2", "guidance": "2"}
CACHES_WITH_LARGE_CHANGES = CACHES | {"teacache": "3"}  # these weights change more between timesteps
TILES = {"video": picture(5, 32, 64), "tiling": Tiling((32, 48), (32, 32)), "size": (32, 64)}
POSE_INPUTS = {"image": IMAGE, "video": CLIP, "face": picture(5, 20, 20)}
QUOTED, LONG_PROMPT = 'a cat says "hello"', "a blue dog " * 60
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("wan", SMALL),
    "wan unguided": ("wan", SMALL | {"guidance_scale": 1.0}),
    "wan video": ("wan", SMALL | {"video": picture(7, 40, 60), "strength": 0.7, "steps": 3}),
    "wan tiles": ("wan", SMALL | TILES),
    "wan batch": ("wan", SMALL | {"batch_guidance": True}),
    **{
        f"wan {name}": ("wan", CACHED_STEPS | {"cache": f"{name}:{options_text}"})
        for name, options_text in CACHES.items()
    },
    "wan-i2v": ("wan-i2v", SMALL | {"image": IMAGE}),
    "wan-i2v tiles": ("wan-i2v", SMALL | {"image": IMAGE, "tiling": Tiling((32, 32), (32, 24))}),
    "wan-flf": ("wan-flf", SMALL | {"image": IMAGE, "last_image": IMAGE}),
    "wan-vace": ("wan-vace", SMALL),
    "wan-vace video": (
        "wan-vace",
        SMALL | {"video": CLIP, "mask": CLIP, "references": [picture(40, 40), picture(16, 64)]},
    ),
    "wan-vace magcache": ("wan-vace", CACHED_STEPS | {"references": [IMAGE], "cache": "magcache:.2,1,.1"}),
    "wan-experts": ("wan-experts", SMALL | {"steps": 4, "guidance_scale_2": 2.0}),
    "wan-experts half": ("wan-experts", SMALL | {"steps": 4, "guidance_scale_2": 1.0}),
    "wan-experts deepcache": ("wan-experts", CACHED_STEPS | {"cache": "deepcache:0,7,2"}),
    "wan-experts easycache": ("wan-experts", CACHED_STEPS | {"cache": "easycache:.5,1"}),
    "wan-experts teacache": ("wan-experts", CACHED_STEPS | {"cache": "teacache:.5"}),
    "wan-ti2v": ("wan-ti2v", SMALL | {"size": (64, 96)}),
    "wan-ti2v image": ("wan-ti2v", SMALL | {"size": (64, 96), "image": IMAGE}),
    "wan-pose": ("wan-pose", SMALL | POSE_INPUTS),
    "wan-pose replace": ("wan-pose", SMALL | POSE_INPUTS | {"background": CLIP, "mask": CLIP}),
    "wan-causal": ("wan-causal", {"size": (32, 48), "frames": 29, "steps": 2}),
    "wan-causal short": ("wan-causal", {"size": (32, 48), "frames": 5, "steps": 2}),
    "cogvideox": ("cogvideox", SMALL),
    "cogvideox dynamic": ("cogvideox", SMALL | {"dynamic_guidance": True}),
    "cogvideox video": ("cogvideox", SMALL | {"video": CLIP, "strength": 0.7, "steps": 3}),
    "cogvideox tiles": ("cogvideox", SMALL | TILES),
    "cogvideox batch": ("cogvideox", SMALL | {"batch_guidance": True}),
    **{
        f"cogvideox {name}": ("cogvideox", CACHED_STEPS | {"cache": f"{name}:{options_text}"})
        for name, options_text in CACHES_WITH_LARGE_CHANGES.items()
    },
    "cogvideox-i2v": ("cogvideox-i2v", SMALL | {"image": IMAGE}),
    "hunyuanvideo": ("hunyuanvideo", SMALL),
    "hunyuanvideo unguided": ("hunyuanvideo", SMALL | {"guidance_scale": 1.0}),
    "hunyuanvideo quoted": ("hunyuanvideo", SMALL | {"prompt": QUOTED}),
    "hunyuanvideo batch": (
        "hunyuanvideo",
        SMALL | {"prompt": QUOTED, "negative_prompt": LONG_PROMPT, "batch_guidance": True},
    ),
    "hunyuanvideo tiles": ("hunyuanvideo", SMALL | {"tiling": TILES["tiling"], "size": (32, 64)}),
    **{
        f"hunyuanvideo {name}": ("hunyuanvideo", CACHED_STEPS | {"cache": f"{name}:{options_text}"})
        for name, options_text in CACHES_WITH_LARGE_CHANGES.items()
    },
    "hunyuanvideo-i2v": ("hunyuanvideo-i2v", SMALL | {"image": IMAGE, "prompt": QUOTED}),
}
PLANNED_KINDS = [  # without HunyuanVideo: a plan assumes the longest prompt, and a run uses the actual length
    kind
    for kind, (model, options) in KINDS.items()
    if not model.startswith("hunyuan") and not options.keys() & {"tiling", "batch_guidance", "cache"}
]
QUICK_ON_ONE = {
    *("wan easycache", "wan-vace video", "wan-causal", "cogvideox-i2v", "hunyuanvideo unguided"),
}
QUICK_ON_EIGHT = {"wan"}


def kinds_and_meshes() -> list[Any]:
    """Return every kind of run on one device and on eight; those that take long are marked slow."""
    return [
        pytest.param(kind, mesh, marks=() if kind in quick else pytest.mark.slow, id=f"{kind} on {count}")
        for model in MODELS
        for mesh, count, quick in ((None, 1, QUICK_ON_ONE), (EIGHT_DEVICES, 8, QUICK_ON_EIGHT))
        for kind in KINDS
        if KINDS[kind][0] == model and not (mesh and KINDS[kind][1].get("cache", "").startswith("guidance"))
    ]


@dataclass
class ComparedRun:
    """A run that was traced, compiled and executed.

    Attributes:
        trace: The trace of the run.
        traced_calls: The number of each call in the trace.
        executed_calls: The number of each call in the executed run.
        late_programs: The number of programs that were compiled during the run.
        shardings: The shardings of all programs that were compiled for the model so far.
    """

    trace: Trace
    traced_calls: Counter[Call]
    executed_calls: Counter[Call]
    late_programs: int
    shardings: list[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda model: MODELS[model](root / model))


@pytest.fixture(scope="module")
def load_model(folder):
    """Return a function that loads a model with tables for step caches. It keeps the programs of the last model."""

    @functools.lru_cache(maxsize=1)
    def load(model: str, mesh: str | None) -> tuple[Any, Counting]:
        pipe = wanjax.load(folder(model), mesh=mesh)
        pipe.model, pipe.progress = replace(pipe.model, tables=TABLES), False
        return pipe, Counting()

    yield load
    load.cache_clear()


@pytest.fixture(scope="module")
def compare_runs(load_model):
    @functools.cache
    def compare(kind: str, mesh: str | None) -> ComparedRun:
        model, options = KINDS[kind]
        pipe, strategy = load_model(model, mesh)
        run_options = {name: options[name] for name in ("tiling", "batch_guidance") if name in options}
        arguments = {name: x for name, x in options.items() if name not in run_options} | {
            "prompt": options.get("prompt", "a cat")
        }
        pictures, settings = pipe.prepare(**arguments)
        trace = trace_programs(pipe, settings, pictures, **run_options)
        for program in trace.programs:
            strategy.compile(program.traced_program)
        compiled_before = num_compiled(strategy=strategy)
        strategy.calls.clear()
        prompt = arguments.pop("prompt")
        pipe.with_strategy(strategy)(prompt, **arguments, **run_options)
        return ComparedRun(
            trace,
            recorded_calls(trace),
            strategy.calls.copy(),
            num_compiled(strategy=strategy) - compiled_before,
            [*strategy.shardings],
        )

    return compare


@pytest.mark.parametrize(("kind", "mesh"), kinds_and_meshes())
def test_a_traced_run_makes_the_calls_of_an_executed_run(compare_runs, kind, mesh):
    run = compare_runs(kind, mesh)
    executed, traced = run.executed_calls, run.traced_calls
    assert run.late_programs == 0
    if "teacache" in kind:  # the weights decide which steps reuse
        assert executed.keys() == traced.keys()
        executed_steps, traced_steps = steps(executed), steps(traced)
        assert traced_steps.total() == executed_steps.total()
        assert executed_steps[False] <= traced_steps[False] < traced_steps.total()
        other_calls = [
            Counter({c: n for c, n in x.items() if c.program.name != "take_step"}) for x in (executed, traced)
        ]
        assert not differences(*other_calls)
    else:
        assert not differences(executed, traced)
    if "cache" in KINDS[kind][1]:
        assert steps(traced)[True] > 0
    keys = {EXECUTE.key_of(program.traced_program) for program in run.trace.programs}
    assert len(set(map(fingerprint, keys))) == len(keys)  # the fingerprints name cached executables


@pytest.mark.parametrize(("kind", "mesh"), [case for case in kinds_and_meshes() if case.values[1]])
def test_the_compiler_shards_results_as_programs_state(compare_runs, kind, mesh):
    shardings_of_programs = compare_runs(kind, mesh).shardings
    assert not wrong_shardings(shardings_of_programs)
    assert any(not sharding.is_fully_replicated for _, shardings in shardings_of_programs for sharding in shardings)


KINDS_WITHOUT_WEIGHTS = ["wan-flf", "wan-experts", "cogvideox-i2v", "hunyuanvideo quoted"]


@pytest.mark.parametrize("kind", quick(["wan-experts"], KINDS_WITHOUT_WEIGHTS))
def test_a_trace_reads_no_weights_and_computes_nothing(folder, kind):
    model, options = KINDS[kind]
    reads: list[Any] = []
    pipe = wanjax.load(folder(model), progress=lambda *message: reads.append(message))
    pictures, settings = pipe.prepare(**{"prompt": "a cat"} | options)
    gc.collect()
    arrays_before = len(jax.live_arrays())
    with compilations() as compiled:
        trace = trace_programs(pipe, settings, pictures)
    assert recorded_calls(trace).total() > 6
    assert compiled == reads == pipe.components.networks() == []
    assert len(jax.live_arrays()) == arrays_before


@pytest.mark.parametrize("kind", quick(["wan"], PLANNED_KINDS))
@pytest.mark.parametrize("mesh", quick([EIGHT_DEVICES], [None, EIGHT_DEVICES]), ids=["1", "8"])
def test_a_plan_traces_the_programs_of_the_loaded_model(folder, kind, mesh):
    """A plan, which has neither weights nor tokenizers, then prices the programs of the loaded model.

    Prompts have the length that the small tokenizers give.
    """
    model, options = KINDS[kind]
    pipe, checkpoint = (
        wanjax.load(folder(model), mesh=mesh),
        inspect_checkpoint(folder(model), reads_encoder_configs=True),
    )
    family = replace(checkpoint.family, prompt_lengths=lambda video_model: {"tokenizer": (tiny.TEXT_LENGTH,) * 2})
    description = replace(checkpoint, family=family, settings=pipe.defaults)
    planned = abstract_pipeline(description, pipe.partitioner, param_dtype=pipe.defaults.dtype)
    calls = []
    for pipeline in (pipe, planned):
        pipeline.model = replace(pipeline.model, tables=TABLES)
        pictures, settings = pipeline.prepare(**{"prompt": "a cat"} | options)
        calls.append(recorded_calls(trace_programs(pipeline, settings, pictures)))
    assert not differences(*calls)
