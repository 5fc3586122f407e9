# SPDX-License-Identifier: Apache-2.0
"""Get the programs of a video from a trace of its run, and give each program a name.

model = model_description("wan2.1-t2v-14b")
mesh = mesh_on(find_hardware("v6e-8"), {"dp": 2, "sp": 1, "tp": 4})
pipe = abstract_pipeline(model, Partitioner(mesh, RULES["fsdp"]))
for program in programs_of(trace_programs(pipe, model.settings)):
    compiled = compile_program(program.abstract_call, "v6e-8")
    print(program.stage, program.name, compiled.memory.peak, program.times * price_compiled(compiled).total.mid)
"""

from collections import Counter
from typing import NamedTuple

from wanjax.execution import StageProgram, Trace
from wanjax.pipelines.denoiser import take_step
from wanjax.pipelines.frames import decode_chunk, decode_tile, encode_chunk
from wanjax.pricing.lowering import AbstractCall

STEP, REUSING, DENSE = "step", "reusing_step", "dense_step"
CONTEXTS = ("make_context", "begin_past")
CHUNKS = {decode_chunk: "decode", decode_tile: "decode_tile", encode_chunk: "encode"}


class VideoProgram(NamedTuple):
    """A named program of a stage, and how often a video runs it.

    `resident_bytes` counts the bytes of weights that stay on one device while the program runs but are not its
    arguments.
    """

    stage: str
    name: str
    abstract_call: AbstractCall
    times: int
    resident_bytes: int


def programs_of(trace: Trace) -> list[VideoProgram]:
    """Return the named programs of a traced run, in the order of their first calls."""
    return [
        VideoProgram(program.stage, name, program.traced_program.abstract_call, program.calls, program.resident_bytes)
        for name, program in zip(program_names(trace), trace.programs, strict=True)
    ]


def program_names(trace: Trace) -> list[str]:
    """Name the programs of a traced run. If a stage has two programs of the same name, the second name ends in _2."""
    counts: Counter[tuple[str, str]] = Counter()
    names = []
    for program in trace.programs:
        name = _name(program)
        counts[program.stage, name] += 1
        number = counts[program.stage, name]
        names.append(name if number == 1 else f"{name}_{number}")
    return names


def _name(stage_program: StageProgram) -> str:
    """Name a program. The name of a step is its kind. The name of a decoded chunk says whether the chunk is the first.

    Any other program has the name of its function.
    """
    program, traced_program = stage_program.traced_program.program, stage_program.traced_program
    if program is take_step:
        state, *_ = traced_program.shapes
        if traced_program.static.dense:
            return DENSE
        return STEP if state.cached is None else REUSING
    if program in CHUNKS:
        cache = traced_program.shapes[-2]
        return f"{CHUNKS[program]}_{'first' if cache is None else 'next'}"
    return "context" if program.name in CONTEXTS else program.name
