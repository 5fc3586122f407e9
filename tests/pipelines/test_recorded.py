# SPDX-License-Identifier: Apache-2.0
"""A recorded run against an executed one: of every family and every kind of run, the same calls of programs.

Each recorded program is compiled before the run is executed, which then compiles nothing.
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
from tests.support.programs import compiled
from tests.support.quick import quick
from tests.support.tabled import TABLES
from wanjax.compile_cache.fingerprint import fingerprint
from wanjax.execution import EXECUTE, Trace
from wanjax.layers.tiling import Tiling
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.tracing import trace_programs
from wanjax.registry import inspect_checkpoint

EIGHT = "dp=2,sp=2,tp=2"
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
CACHED = SMALL | {"steps": 7}
CLIP, IMAGE = picture(5, 32, 48), picture(30, 45)
CACHES = {"magcache": ".2,1,.1", "teacache": ".5", "easycache": "9,2", "deepcache": "1,6,2", "guidance": "2"}
OTHERS = CACHES | {"teacache": "3"}  # for weights whose timesteps differ by more
TILES = {"video": picture(5, 32, 64), "tiling": Tiling((32, 48), (32, 32)), "size": (32, 64)}
POSED = {"image": IMAGE, "video": CLIP, "face": picture(5, 20, 20)}
QUOTED, LONG = 'a cat says "hello"', "a blue dog " * 60
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("wan", SMALL),
    "wan unguided": ("wan", SMALL | {"guidance_scale": 1.0}),
    "wan video": ("wan", SMALL | {"video": picture(7, 40, 60), "strength": 0.7, "steps": 3}),
    "wan tiles": ("wan", SMALL | TILES),
    "wan batch": ("wan", SMALL | {"batch_guidance": True}),
    **{f"wan {name}": ("wan", CACHED | {"cache": f"{name}:{how}"}) for name, how in CACHES.items()},
    "wan-i2v": ("wan-i2v", SMALL | {"image": IMAGE}),
    "wan-i2v tiles": ("wan-i2v", SMALL | {"image": IMAGE, "tiling": Tiling((32, 32), (32, 24))}),
    "wan-flf": ("wan-flf", SMALL | {"image": IMAGE, "last_image": IMAGE}),
    "wan-vace": ("wan-vace", SMALL),
    "wan-vace video": (
        "wan-vace",
        SMALL | {"video": CLIP, "mask": CLIP, "references": [picture(40, 40), picture(16, 64)]},
    ),
    "wan-vace magcache": ("wan-vace", CACHED | {"references": [IMAGE], "cache": "magcache:.2,1,.1"}),
    "wan-experts": ("wan-experts", SMALL | {"steps": 4, "guidance_scale_2": 2.0}),
    "wan-experts half": ("wan-experts", SMALL | {"steps": 4, "guidance_scale_2": 1.0}),
    "wan-experts deepcache": ("wan-experts", CACHED | {"cache": "deepcache:0,7,2"}),
    "wan-experts easycache": ("wan-experts", CACHED | {"cache": "easycache:.5,1"}),
    "wan-experts teacache": ("wan-experts", CACHED | {"cache": "teacache:.5"}),
    "wan-ti2v": ("wan-ti2v", SMALL | {"size": (64, 96)}),
    "wan-ti2v image": ("wan-ti2v", SMALL | {"size": (64, 96), "image": IMAGE}),
    "wan-pose": ("wan-pose", SMALL | POSED),
    "wan-pose replace": ("wan-pose", SMALL | POSED | {"background": CLIP, "mask": CLIP}),
    "wan-causal": ("wan-causal", {"size": (32, 48), "frames": 29, "steps": 2}),
    "wan-causal short": ("wan-causal", {"size": (32, 48), "frames": 5, "steps": 2}),
    "cogvideox": ("cogvideox", SMALL),
    "cogvideox dynamic": ("cogvideox", SMALL | {"dynamic_guidance": True}),
    "cogvideox video": ("cogvideox", SMALL | {"video": CLIP, "strength": 0.7, "steps": 3}),
    "cogvideox tiles": ("cogvideox", SMALL | TILES),
    "cogvideox batch": ("cogvideox", SMALL | {"batch_guidance": True}),
    **{f"cogvideox {name}": ("cogvideox", CACHED | {"cache": f"{name}:{how}"}) for name, how in OTHERS.items()},
    "cogvideox-i2v": ("cogvideox-i2v", SMALL | {"image": IMAGE}),
    "hunyuanvideo": ("hunyuanvideo", SMALL),
    "hunyuanvideo quoted": ("hunyuanvideo", SMALL | {"prompt": QUOTED}),
    "hunyuanvideo batch": ("hunyuanvideo", SMALL | {"prompt": QUOTED, "negative_prompt": LONG, "batch_guidance": True}),
    "hunyuanvideo tiles": ("hunyuanvideo", SMALL | {"tiling": TILES["tiling"], "size": (32, 64)}),
    **{f"hunyuanvideo {name}": ("hunyuanvideo", CACHED | {"cache": f"{name}:{how}"}) for name, how in OTHERS.items()},
    "hunyuanvideo-i2v": ("hunyuanvideo-i2v", SMALL | {"image": IMAGE, "prompt": QUOTED}),
}
OUTLINED = [  # prompts of HunyuanVideo are as long as their texts, and a plan's as long as they may be
    kind
    for kind, (model, options) in KINDS.items()
    if not model.startswith("hunyuan") and not options.keys() & {"tiling", "batch_guidance", "cache"}
]
ALONE = {
    *("wan easycache", "wan deepcache", "wan-flf", "wan-vace video", "wan-experts", "wan-causal"),
    *("cogvideox magcache", "cogvideox-i2v"),
}
TOGETHER = {"wan", "hunyuanvideo quoted"}


def places() -> list[Any]:
    """Return every kind of run on one device and on eight, those that take long as slow ones."""
    return [
        pytest.param(kind, mesh, marks=() if kind in quick else pytest.mark.slow, id=f"{kind} on {count}")
        for model in MODELS
        for mesh, count, quick in ((None, 1, ALONE), (EIGHT, 8, TOGETHER))
        for kind in KINDS
        if KINDS[kind][0] == model and not (mesh and KINDS[kind][1].get("cache", "").startswith("guidance"))
    ]


@dataclass
class Compared:
    """A run that was recorded, compiled and executed. `late` is the number of programs that were compiled last.

    `shardings` are those of all programs that were compiled for the model so far, of which runs share many.
    """

    record: Trace
    recorded: Counter[Call]
    executed: Counter[Call]
    late: int
    shardings: list[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda model: MODELS[model](root / model))


@pytest.fixture(scope="module")
def loaded(folder):
    """A model with tables for step caches, whose programs stay cached until the next."""

    @functools.lru_cache(maxsize=1)
    def load(model: str, mesh: str | None) -> tuple[Any, Counting]:
        pipe = wanjax.load(folder(model), mesh=mesh)
        pipe.model, pipe.progress = replace(pipe.model, tables=TABLES), False
        return pipe, Counting()

    yield load
    load.cache_clear()


@pytest.fixture(scope="module")
def compared(loaded):
    @functools.cache
    def compare(kind: str, mesh: str | None) -> Compared:
        model, options = KINDS[kind]
        pipe, counting = loaded(model, mesh)
        messages = {name: options[name] for name in ("tiling", "batch_guidance") if name in options}
        arguments = {name: x for name, x in options.items() if name not in messages} | {
            "prompt": options.get("prompt", "a cat")
        }
        pictures, settings = pipe.prepare(**arguments)
        result = trace_programs(pipe, settings, pictures, **messages)
        for noted in result.programs:
            counting.compile(noted.traced_program)
        before = compiled(strategy=counting)
        counting.calls.clear()
        prompt = arguments.pop("prompt")
        pipe.with_strategy(counting)(prompt, **arguments, **messages)
        return Compared(
            result,
            recorded_calls(result),
            counting.calls.copy(),
            compiled(strategy=counting) - before,
            [*counting.shardings],
        )

    return compare


@pytest.mark.parametrize(("kind", "mesh"), places())
def test_a_traced_run_makes_the_calls_of_an_executed_one(compared, kind, mesh):
    result = compared(kind, mesh)
    executed, recorded = result.executed, result.recorded
    assert result.late == 0
    if "teacache" in kind:  # whose weights decide which steps reuse
        assert executed.keys() == recorded.keys()
        executed_steps, planned = steps(executed), steps(recorded)
        assert planned.total() == executed_steps.total()
        assert executed_steps[False] <= planned[False] < planned.total()
        other_calls = [
            Counter({c: n for c, n in x.items() if c.program.name != "take_step"}) for x in (executed, recorded)
        ]
        assert not differences(*other_calls)
    else:
        assert not differences(executed, recorded)
    if "cache" in KINDS[kind][1]:
        assert steps(recorded)[True] > 0
    keys = {EXECUTE.key_of(noted.traced_program) for noted in result.record.programs}
    assert len(set(map(fingerprint, keys))) == len(keys)  # by which executables are kept between processes


@pytest.mark.parametrize(("kind", "mesh"), [place for place in places() if place.values[1]])
def test_the_compiler_shards_results_as_programs_state(compared, kind, mesh):
    options = compared(kind, mesh).shardings
    assert not wrong_shardings(options)
    assert any(not sharding.is_fully_replicated for _, shardings in options for sharding in shardings)


NO_WEIGHTS = ["wan-flf", "wan-experts", "cogvideox-i2v", "hunyuanvideo quoted"]


@pytest.mark.parametrize("kind", quick(["wan-experts"], NO_WEIGHTS))
def test_a_recording_reads_no_weights_and_computes_nothing(folder, kind):
    model, options = KINDS[kind]
    read: list[Any] = []
    pipe = wanjax.load(folder(model), progress=lambda *message: read.append(message))
    pictures, settings = pipe.prepare(**{"prompt": "a cat"} | options)
    gc.collect()
    before = len(jax.live_arrays())
    with compilations() as compiled:
        result = trace_programs(pipe, settings, pictures)
    assert recorded_calls(result).total() > 6
    assert compiled == read == pipe.components.networks() == []
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("kind", quick(["wan-flf"], OUTLINED))
@pytest.mark.parametrize("mesh", quick([EIGHT], [None, EIGHT]), ids=["1", "8"])
def test_a_description_records_what_its_checkpoint_does(folder, kind, mesh):
    """So a plan, which has neither weights nor tokenizers, prices the programs of the model that is loaded.

    Prompts have the length of the small tokenizers.
    """
    model, options = KINDS[kind]
    pipe, result = wanjax.load(folder(model), mesh=mesh), inspect_checkpoint(folder(model), reads_encoder_configs=True)
    family = replace(result.family, prompt_lengths=lambda video_model: {"tokenizer": (tiny.TEXT_LENGTH,) * 2})
    description = replace(result, family=family, settings=pipe.defaults)
    planned = abstract_pipeline(description, pipe.partitioner, param_dtype=pipe.defaults.dtype)
    noted = []
    for each in (pipe, planned):
        each.model = replace(each.model, tables=TABLES)
        pictures, settings = each.prepare(**{"prompt": "a cat"} | options)
        noted.append(recorded_calls(trace_programs(each, settings, pictures)))
    assert not differences(*noted)
