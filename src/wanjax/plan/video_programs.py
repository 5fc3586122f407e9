# SPDX-License-Identifier: Apache-2.0
"""Get the programs of a video from a trace of its run, with a name for each.

model = outline("wan2.1-t2v-14b")
mesh = mesh_on(find_hardware("v6e-8"), {"dp": 2, "sp": 1, "tp": 4})
pipe = abstract_pipeline(model, Partitioner(mesh, RULES["fsdp"]))
for program in programs_of(trace_programs(pipe, model.settings)):
    compiled = compile_program(program.lowering, "v6e-8")
    print(program.stage, program.name, compiled.memory.peak, program.times * price_compiled(compiled).total.mid)
"""

from collections import Counter
from typing import NamedTuple

from wanjax.execution import Trace, TracedProgram
from wanjax.pipelines.denoiser import take_step
from wanjax.pipelines.frames import decode_chunk, decode_tile, encode_chunk
from wanjax.pricing.lowering import Lowering

STEP, REUSING, DENSE = "step", "reusing_step", "dense_step"
CONTEXTS = ("make_context", "begin_past")
CHUNKS = {decode_chunk: "decode", decode_tile: "decode_tile", encode_chunk: "encode"}


class VideoProgram(NamedTuple):
    """A named program of a stage, and how often a video runs it.

    `beside` is the number of bytes on one device of weights that stay there while it runs, but are not its arguments.
    """

    stage: str
    name: str
    lowering: Lowering
    times: int
    beside: int


def programs_of(trace: Trace) -> list[VideoProgram]:
    """Return the named programs of a traced run, in the order of their first calls."""
    return [
        VideoProgram(program.stage, name, program.instance.lowering, program.calls, program.resident_bytes)
        for name, program in zip(program_names(trace), trace.programs, strict=True)
    ]


def program_names(trace: Trace) -> list[str]:
    """Return the names of a traced run's programs; the second of a name in a stage ends in _2."""
    counts: Counter[tuple[str, str]] = Counter()
    names = []
    for program in trace.programs:
        name = _name(program)
        counts[program.stage, name] += 1
        number = counts[program.stage, name]
        names.append(name if number == 1 else f"{name}_{number}")
    return names


def _name(traced_program: TracedProgram) -> str:
    """Return the name of a program.

    Steps have the name of their kind, chunks are named by whether they are the first, and others by their function.
    """
    program, instance = traced_program.instance.program, traced_program.instance
    if program is take_step:
        state, *_ = instance.shapes
        if instance.static.dense:
            return DENSE
        return STEP if state.cached is None else REUSING
    if program in CHUNKS:
        cache = instance.shapes[-2]
        return f"{CHUNKS[program]}_{'first' if cache is None else 'next'}"
    return "context" if program.name in CONTEXTS else program.name
