# SPDX-License-Identifier: Apache-2.0
"""The lower bound of a video's memory, before anything is compiled, is between half and all of the true memory."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.support.commands import refused
from tests.support.machine import RefuseExecution
from tests.support.quick import quick
from tests.support.tiny import (
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_control_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_residual_checkpoint,
)
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.pipelines.tracing import check_run_memory, peak_bytes, trace_programs
from wanjax.pricing import live_bytes
from wanjax.pricing.live_bytes import min_live_bytes
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import inner_jaxprs

MAKE_CHECKPOINT = {
    "text": tiny_checkpoint,
    "control": tiny_control_checkpoint,
    "first": tiny_residual_checkpoint,
    "cogvideox": tiny_cogvideox_checkpoint,
    "hunyuan": tiny_hunyuan_checkpoint,
}
SIZES = [  # the model, height, width and frames
    ("nano", 64, 64, 17),
    ("nano", 128, 128, 17),
    ("nano", 256, 128, 9),
    ("nano", 256, 256, 1),
    ("text", 256, 256, 9),
    ("text", 256, 512, 17),
    ("control", 128, 256, 9),
    ("control", 256, 256, 9),
    ("first", 256, 256, 9),
    ("cogvideox", 128, 128, 9),
    ("cogvideox", 256, 256, 9),
    ("hunyuan", 128, 128, 9),
    ("hunyuan", 256, 256, 9),
]
CHILD = """
import sys, wanjax
pipe = wanjax.load(sys.argv[1])
pipe.progress = False
pipe("a red circle", size=(int(sys.argv[2]), int(sys.argv[3])), frames=int(sys.argv[4]), steps=2, seed=0)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def model_path(name: str, folder: Path) -> str:
    return name if name == "nano" else str(MAKE_CHECKPOINT[name](folder / name))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak memory of a process")
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_the_lower_bound_is_at_least_half_of_a_video_s_peak(case, tmp_path):
    name, height, width, frames = case
    model_name = model_path(name, tmp_path)
    pipe = wanjax.load(model_name)
    lower_bound, stage = peak_bytes(
        trace_programs(pipe, pipe.settings(size=(height, width), frames=frames, steps=2), memory=0)
    )
    for _ in range(2):  # the second run reads compiled programs from the cache
        completed = subprocess.run(
            [sys.executable, "-c", CHILD, model_name, *map(str, case[1:])], capture_output=True, text=True, check=True
        )
    peak = 1024 * int(completed.stdout.split()[-1])
    print(
        f"| {name} | {width}x{height} | {frames} | {stage} | {lower_bound / 1e6:.0f} | {peak / 1e6:.0f} "
        f"| {lower_bound / peak:.2f} |"
    )
    assert peak / 2 <= lower_bound <= peak


@pytest.mark.parametrize("size", [64, 128])
def test_the_lower_bound_is_at_most_the_memory_of_the_compiled_program(size, tmp_path):
    pipe = wanjax.load(model_path("text", tmp_path))
    programs = trace_programs(pipe, pipe.settings(size=(size, size), frames=5, steps=2)).programs
    [abstract_call] = [traced.traced_program.abstract_call for traced in programs if traced.name == "decode_chunk"][1:]
    compiled = (
        jax.jit(abstract_call.function, donate_argnums=abstract_call.donate).lower(*abstract_call.arguments).compile()
    )
    memory = compiled.memory_analysis()
    argument_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_call.arguments))
    peak = argument_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert peak / 2 <= min_live_bytes(abstract_call) <= peak


SQUARE = jax.ShapeDtypeStruct((256, 256), "float32")
IN_PLACE = {
    "for": lambda a: jax.lax.fori_loop(0, 3, lambda i, x: x + 1, a @ a),
    "while": lambda a: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, a @ a),
    "scan": lambda a: jax.lax.scan(lambda x, row: (x + row[None], row[0]), a @ a, a)[0],
    "cond": lambda a: jax.lax.cond(a[0, 0] > 0, lambda x: x + 1, lambda x: x - 1, a @ a),
    "sort": lambda a: jax.lax.sort(a @ a),
    "scatter": lambda a: (a @ a).at[a[0].astype(int)].set(0),
    "kept": lambda a: (b := a @ a, jax.lax.fori_loop(0, 3, lambda i, x: x + 1, b)),
    "product": lambda a: jax.lax.fori_loop(0, 3, lambda i, x: x @ a, a @ a),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_buffers_that_replace_their_input_are_counted_once(name):
    abstract_call = AbstractCall(IN_PLACE[name], (SQUARE,))
    memory = jax.jit(abstract_call.function).lower(SQUARE).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert peak / 2 <= min_live_bytes(abstract_call) <= peak


def test_memory_is_counted_within_all_loops_and_calls_of_a_run():
    def primitive_names(jaxpr):
        for equation in jaxpr.eqns:
            for inner in inner_jaxprs(equation):
                yield equation.primitive.name
                yield from primitive_names(inner)

    pipe = wanjax.load("nano")
    programs = trace_programs(pipe, pipe.settings(size=(64, 64), frames=5, steps=2)).programs
    abstract_calls = [traced.traced_program.abstract_call for traced in programs]
    names = {
        name
        for call in abstract_calls
        for name in primitive_names(jax.make_jaxpr(call.function)(*call.arguments).jaxpr)
    }
    assert "scan" in names
    assert names <= {*live_bytes.CALL_PRIMITIVES, *live_bytes.CONTROL_FLOW_PRIMITIVES, "pallas_call"}


def test_networks_that_are_freed_for_others_are_not_counted(tmp_path, machine):
    """Without `offload`, a network is freed if the next network does not fit, so that the video can be made."""
    folder = model_path("text", tmp_path)
    pipe = wanjax.load(folder, offload="stages")
    settings = pipe.settings(size=(64, 64), frames=1, steps=2)
    needed, _ = peak_bytes(trace_programs(pipe, settings, memory=0))
    machine.has_memory(needed)
    check_run_memory(wanjax.load(folder), settings)


@pytest.mark.parametrize("name", quick(["nano"], ["nano", *MAKE_CHECKPOINT]))
def test_a_video_that_is_too_large_is_refused_before_anything_is_compiled(name, tmp_path, machine):
    pipe = wanjax.load(model_path(name, tmp_path))
    pipe.progress = False
    conditioning = pipe.encode("a") if name == "text" else None
    pipe = pipe.with_strategy(RefuseExecution())
    machine.has_memory(4_000_000_000)
    with pytest.raises(WanjaxError, match=line_with_words("9600x9600 memory")):
        pipe("a", size=(9600, 9600))
    shape = pipe.model.spec.latent_shape(pipe.settings(size=(9600, 9600)))
    latents = np.broadcast_to(np.float32(0), shape)
    with pytest.raises(WanjaxError, match=line_with_words("9600x9600 memory decode")):
        pipe.decode(latents)
    if conditioning is not None:
        with pytest.raises(WanjaxError, match=line_with_words("9600x9600 memory")):
            pipe.denoise(conditioning, size=(9600, 9600))
    with pytest.raises(AssertionError, match="executed"):  # tiles need less memory
        pipe.decode(np.zeros(pipe.model.spec.latent_shape(pipe.settings(size=(960, 960)))), tiling=Tiling(256, 192))


def test_a_picture_that_is_too_large_to_be_encoded_is_refused_before_anything_is_compiled(machine):
    """Tiles need less memory, and the size does not matter without a picture."""
    picture = np.full((64, 64, 3), 30, np.uint8)
    requested = {"size": (2880, 2880), "frames": 5, "image": picture}
    pipe = wanjax.load("nano").with_strategy(RefuseExecution())
    pipe.progress = False
    machine.has_memory(1_500_000_000)
    with pytest.raises(WanjaxError, match=line_with_words("2880x2880 memory encode")):
        pipe.encode("a", **requested)
    with pytest.raises(AssertionError, match="executed"):
        pipe.encode("a", **requested, tiling=Tiling(256, 192))
    with pytest.raises(AssertionError, match="executed"):
        pipe.encode("a", size=(2880, 2880), frames=5)


@pytest.mark.slow  # the test above is the quick one, without the command
def test_the_command_refuses_a_picture_that_is_too_large_to_be_encoded(tmp_path, monkeypatch, machine):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), (200, 30, 30)).save("a.png")
    command = ("encode", "a", "--model", "nano", "--size", "2880x2880", "--frames", "5", "--dir", "d")
    machine.has_memory(1_500_000_000)
    assert has_line_with_words(refused(*command, "--image", "a.png"), "2880x2880 memory encode")
