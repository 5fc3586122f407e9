# SPDX-License-Identifier: Apache-2.0
"""Measure a GPU in nine minutes: self-test, attention, steps and decoding at real size, also in torch.

Nothing is downloaded: weights are random. Each part runs in a separate process, which frees the card's memory when it
ends. If a part fails or times out, the other parts still run. Torch and diffusers are measured if torch sees the card.

    python -m benchmarks.card [--out FOLDER] [--minutes 9]

It writes card-NAME.json after each part, and prints the table for docs/measured.md.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from wanjax.errors import UnsupportedError
from wanjax.figures import format_duration, format_number
from wanjax.stores.writing import write_atomically

ROOT = Path(__file__).parents[1]
MODELS = ("wan2.1-t2v-1.3b", "wan2.2-ti2v-5b")
SELFTEST = "selftest"
TIMED_SECONDS = 10.0  # seconds of timed runs of a program
MIN_PART_SECONDS = 20.0  # a part starts only if at least these seconds are left


@dataclass(frozen=True)
class Figure:
    """A measured time, or the reason why there is none.

    Attributes:
        what: Name of what was timed, the same for both libraries.
        library: "wanjax" with the implementation that it used, or "torch".
        seconds: The median of the timed runs.
        compiling: Seconds of compiling.
        note: Why there is no time, or what differs.
    """

    what: str
    library: str
    seconds: float | None = None
    compiling: float | None = None
    note: str = ""


Part = Callable[[bool], Iterator[Figure]]  # the argument says whether sizes are small, as in tests


def describe_sized_model(model: str, small: bool) -> Any:
    """Return the description of a model, with bfloat16 and the sizes that it was published for."""
    from wanjax.registry import model_description
    from wanjax.selftest.small_models import describe_small_model

    if small:
        return describe_small_model(model, "float32")
    published = model_description(model)
    return replace(published, settings=published.settings.updated({"dtype": "bfloat16"}))


def attention(small: bool) -> Iterator[Figure]:
    """Time self-attention of the first model in each implementation that runs here."""
    import jax

    from wanjax.bench.measure import measure, mesh_of_first_devices
    from wanjax.bench.operations import attention_program
    from wanjax.kernels.attention import IMPLEMENTATIONS, choose_implementation

    workload_name, shape, dtype = attention_shape(small)
    operand = jax.ShapeDtypeStruct(shape, dtype)
    for name in IMPLEMENTATIONS:
        if name == "reference" and not small:
            continue  # its matrix of scores may not fit
        try:
            choose_implementation(operand, operand, operand, implementation=name)
        except UnsupportedError:
            continue
        sizes = {"queries": shape[1], "keys": shape[1], "heads": shape[2], "head_dim": shape[3], "dtype": dtype}
        abstract_call = attention_program(mesh_of_first_devices({}, devices()), name, **sizes)
        yield time_program(workload_name, f"wanjax, {name}", partial(measure, abstract_call, TIMED_SECONDS))


def attention_shape(small: bool) -> tuple[str, tuple[int, int, int, int], str]:
    """Return the name, the shape [1 L N D] and the dtype of self-attention of the first model."""
    description = describe_sized_model(MODELS[0], small)
    work = description.model.cost(description.settings)
    shape = (1, work.num_tokens, work.num_heads, work.width // work.num_heads)
    return f"attention, {list(shape)}", shape, description.settings.dtype


def devices() -> Sequence[Any]:
    import jax

    return jax.devices()[:1]


def programs(model: str, small: bool) -> Iterator[Figure]:
    """Time a step and the decoding of a video, as one device runs them."""
    from wanjax.bench.measure import measure, mesh_of_first_devices
    from wanjax.loading import abstract_pipeline
    from wanjax.pipelines.tracing import needed_pictures, trace_programs
    from wanjax.plan.video_programs import STEP, programs_of
    from wanjax.sharding import SHARDING_RULES, Partitioner

    description = describe_sized_model(model, small)
    settings = description.settings
    pipe = abstract_pipeline(
        description,
        Partitioner(mesh_of_first_devices({}, devices()), SHARDING_RULES["fsdp"]),
        param_dtype=settings.dtype,
    )
    traced = programs_of(trace_programs(pipe, settings, needed_pictures(pipe, settings)))
    step_name, decode_name = figure_names(model, settings)
    for program in traced:
        if program.name == STEP:
            yield time_program(step_name, "wanjax", partial(measure, program.abstract_call, TIMED_SECONDS))
    total, compiling = 0.0, 0.0
    for program in (priced for priced in traced if priced.stage == "decode"):
        figure = time_program(decode_name, "wanjax", partial(measure, program.abstract_call, TIMED_SECONDS / 2))
        if figure.seconds is None:
            yield figure
            return
        total += program.times * figure.seconds
        compiling += figure.compiling or 0.0
    yield Figure(decode_name, "wanjax", total, compiling, "the sum of its programs")


def figure_names(model: str, settings: Any) -> tuple[str, str]:
    """Return the names of a model's step and decoding, which include their sizes."""
    video = f"{settings.width}x{settings.height}, {settings.frames} frames"
    return f"a step with guidance, {model}, {video}", f"decoding, {model}, {video}"


def time_program(name: str, library: str, run: Callable[[], Any]) -> Figure:
    """Return a measured time, or the first line of the error."""
    try:
        timing = run().timing
    except Exception as error:  # an error of a compiler, or of a full card
        return Figure(name, library, note=first_line(error))
    return Figure(name, library, timing.median_seconds, timing.compile_seconds)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def torch_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torch_attention(small: bool) -> Iterator[Figure]:
    """Time torch's attention on the same shapes."""
    import torch

    name, (batch, length, heads, size), dtype = attention_shape(small)
    shape, kind = (batch, heads, length, size), getattr(torch, dtype)
    q, k, v = (torch.randn(shape, dtype=kind, device=torch_device()) for _ in range(3))
    yield time_torch(name, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))


def torch_programs(model: str, small: bool) -> Iterator[Figure]:
    """Time a step and the decoding of a video by diffusers, with the same sizes."""
    import torch

    description = describe_sized_model(model, small)
    torch.set_default_dtype(getattr(torch, description.settings.dtype))
    for name, make in zip(figure_names(model, description.settings), (torch_step, torch_decoding), strict=True):
        with torch.device(torch_device()):
            yield time_torch(name, make(description))


def torch_step(description: Any) -> Callable[[], Any]:
    """Return a call of diffusers' transformer on two prompts."""
    import torch
    from diffusers import WanTransformer3DModel

    network = description.model.transformer
    transformer = WanTransformer3DModel(
        num_attention_heads=network.heads, attention_head_dim=network.head_dim, num_layers=network.layers,
        ffn_dim=network.mlp_dim, in_channels=network.channels_in, out_channels=network.channels_out,
        text_dim=network.text_width, freq_dim=network.frequency_dim,
    ).eval()  # fmt: skip
    latents = torch.randn(2, network.channels_in, *description.model.spec.latent_shape(description.settings)[2:])
    texts, times = torch.randn(2, 512, network.text_width), torch.full((2,), 500.0)
    return lambda: transformer(latents, times, texts, return_dict=False)


def torch_decoding(description: Any) -> Callable[[], Any]:
    """Return a call of diffusers' decoder."""
    import torch
    from diffusers import AutoencoderKLWan

    vae = description.model.vae
    residual = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12} if vae.patch > 1 else {}
    decoder = AutoencoderKLWan(
        base_dim=vae.width, decoder_base_dim=vae.decoder_width, z_dim=vae.latent_channels,
        dim_mult=list(vae.multipliers), num_res_blocks=vae.res_blocks, latents_mean=list(vae.latents_mean),
        latents_std=list(vae.latents_std), temperal_downsample=list(vae.temporal_downsample), **residual,
    ).eval()  # fmt: skip
    latents = torch.randn(description.model.spec.latent_shape(description.settings))
    return lambda: decoder.decode(latents, return_dict=False)


def time_torch(name: str, run: Callable[[], Any]) -> Figure:
    """Return the time of a torch function, after one run for warm-up."""
    import torch

    def run_once() -> None:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    try:
        with torch.no_grad():
            run_once()
            seconds: list[float] = []
            while len(seconds) < 2 or (sum(seconds) < TIMED_SECONDS and len(seconds) < 20):
                start = perf_counter()
                run_once()
                seconds.append(perf_counter() - start)
    except Exception as error:
        return Figure(name, "torch", note=first_line(error))
    return Figure(name, "torch", sorted(seconds)[len(seconds) // 2])


PARTS: dict[str, Part] = {
    "attention": attention,
    **{model: partial(programs, model) for model in MODELS},
    "torch attention": torch_attention,
    **{f"torch {model}": partial(torch_programs, model) for model in MODELS},
}
"""The parts by name, the most important first. Torch's parts are skipped if torch does not see the card."""


def run_part(name: str, small: bool, seconds: float) -> Iterator[Figure]:
    """Run a part in its own process; yield its figures, and the reason if it failed or timed out."""
    if seconds < MIN_PART_SECONDS:
        yield Figure(name, "", note="left out: no time was left")
        return
    command = [sys.executable, "-m", "benchmarks.card", "--part", name, *(["--small"] if small else [])]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        output, reason = process.stdout, (process.stderr.strip().splitlines() or [""])[-1] if process.returncode else ""
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        reason = f"it was stopped after {seconds:.0f} s"
    yield from (Figure(**json.loads(line)) for line in output.splitlines() if line.startswith("{"))
    if reason:
        yield Figure(name, "", note=reason[:200])


def selftest(out: Path, seconds: float) -> dict[str, Any]:
    """Run the self-test without its timings; return its outcome as JSON."""
    command = [sys.executable, "-m", "wanjax", SELFTEST, "--no-timings", "--json", "--quiet", "--out", str(out)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        return json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return {"passed": False, "error": first_line(error)}


def report_lines(card: str, outcome: dict[str, Any], figures: Sequence[Figure]) -> list[str]:
    """Return the lines for docs/measured.md: a table of the times of each library."""
    checks = outcome.get("checks", [])
    wrong_checks = [check["name"] for check in checks if check["outcome"] == "wrong"]
    summary = f"{len(checks)} checks of `wanjax selftest`, wrong: {', '.join(wrong_checks) or 'none'}"
    table = [f"## {card}", "", f"`python -m benchmarks.card`, measured. {summary}.", ""]
    table += ["| what | by | time | torch / wanjax |", "|---|---|---|---|"]
    torch = {figure.what: figure.seconds for figure in figures if figure.library == "torch"}
    for figure in figures:
        torch_seconds = torch.get(figure.what) if figure.library.startswith("wanjax") else None
        ratio = format_number(torch_seconds / figure.seconds) if torch_seconds and figure.seconds else ""
        time = figure.note if figure.seconds is None else format_duration(figure.seconds)
        table.append(f"| {figure.what} | {figure.library} | {time} | {ratio} |")
    return table


def card_name() -> str:
    """Return the kind of the first device. A separate process reads it, so that this process uses no device memory."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")[
        -2
    ]


def has_torch(small: bool) -> bool:
    """Return whether torch and diffusers are installed and torch sees a card. Small sizes need no card."""
    if not all(map(find_spec, ("torch", "diffusers"))):
        return False
    code = "import torch; print(torch.cuda.is_available())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    return small or "True" in output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit: then the running part stops, and no other part starts"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="small models, as the tests run it")
    options = parser.parse_args()
    if options.part:
        for figure in PARTS[options.part](options.small):
            print(json.dumps(asdict(figure)), flush=True)
        return
    end = perf_counter() + 60 * options.minutes
    card, parts = card_name(), list(PARTS)
    if not has_torch(options.small):
        parts = [name for name in parts if not name.startswith("torch")]
    file = options.out / f"card-{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"
    figures: list[Figure] = []
    outcome = selftest(options.out, min(240.0, end - perf_counter()))
    for name in parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures.extend(run_part(name, options.small, end - perf_counter()))
        record = {"card": card, SELFTEST: outcome, "figures": [asdict(figure) for figure in figures]}
        write_atomically(file, (json.dumps(record, indent=2) + "\n").encode())
    print("\n".join(report_lines(card, outcome, figures)))


if __name__ == "__main__":
    main()
