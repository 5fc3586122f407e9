# SPDX-License-Identifier: Apache-2.0
"""The command `plan`: prices of a video on devices that this machine need not have, and their cache."""

import json
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from click.testing import CliRunner

import wanjax
from tests.support import commands
from tests.support.recorded import counted, programs
from tests.support.small_wan import TEXT, VIDEO, causal_pipeline, small_model
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.plan import estimate, hardware
from wanjax.plan.price import PRICER
from wanjax.pricing import pricer
from wanjax.pricing.chips import SLICES, abstract_mesh
from wanjax.pricing.exporting import export
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pricer import Price, Pricer
from wanjax.registry import model_description
from wanjax.sharding import SHARDING_RULES, Partitioner
from wanjax.stores.results import ResultCache

NETWORKS = small_model(4)
GIB = 2**30
DOCUMENTED = {"model", "chip", "mesh", "fits", "stages", "step_seconds", "step_breakdown", "mfu", "total_seconds"} | {
    "collectives",
    "compiler",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def describe(model, video):
    """Return the description of a Wan model with these settings."""
    return replace(model_description("nano"), model=model, settings=video)


def pipeline(model, video, mesh=None, **options):
    """Return the abstract pipeline of a Wan model on one H200 or on a mesh."""
    mesh = hardware.mesh_on(hardware.find_hardware("h200"), {}) if mesh is None else mesh
    return abstract_pipeline(describe(model, video), Partitioner(mesh, SHARDING_RULES["fsdp"]), **options)


def test_a_folder_s_name_is_printed_as_it_is(tmp_path):
    """Also if rich would read it as markup."""
    folder = shutil.copytree(Path(wanjax.__file__).parent / "nano", tmp_path / "a[red]b")
    run = CliRunner().invoke(main, ["plan", str(folder), "--chip", "cpu"])
    assert run.exit_code == 0, run.output
    assert "a[red]b," in run.stdout


def plan(*arguments: str) -> dict:
    run = CliRunner().invoke(main, ["plan", "nano", "--json", *arguments])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)


def test_json_has_every_documented_entry():
    plan_json = plan("--chip", "h200", "--steps", "7")
    assert plan_json.keys() >= DOCUMENTED
    assert plan_json["fits"] is True
    assert plan_json["peak_dtype"] == "bfloat16"
    assert plan_json["stages"].keys() == {"encode", "denoise", "decode"}
    for stage in plan_json["stages"].values():
        assert 0 < stage["weights_bytes_per_chip"] < stage["peak_bytes_per_chip"] < plan_json["memory_per_chip"]
    assert sum(plan_json["step_breakdown"].values()) == pytest.approx(plan_json["step_seconds"])
    rows = {row["name"]: row for row in plan_json["programs"]}
    assert rows["step"]["times"] == 7
    remaining = plan_json["stages"]["denoise"]["seconds"] - 7 * plan_json["step_seconds"]
    assert remaining == pytest.approx(sum(rows[name]["seconds"] for name in ("begin", "context", "finish")))
    assert plan_json["peak_bytes_per_chip"] == max(
        stage["peak_bytes_per_chip"] for stage in plan_json["stages"].values()
    )
    assert plan_json["total_seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan_json["stages"].values()))
    assert 0 < plan_json["mfu"] < 1
    assert plan_json["disk_bytes"] == plan_json["download_bytes_at_most"]  # nano is stored in float32


@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16"), ("--precision", "int8")])
def test_the_bytes_on_disk_are_those_that_convert_writes(tmp_path, options):
    folder = tmp_path / "mine"
    run = CliRunner().invoke(main, ["convert", "nano", str(folder), *options])
    assert run.exit_code == 0, run.output
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    for model in [str(folder)] if "--dtype" in options else ["nano", str(folder)]:
        precision = options if model == "nano" else ()
        run = CliRunner().invoke(main, ["plan", model, "--chip", "cpu", "--json", *precision])
        assert run.exit_code == 0, run.output
        assert json.loads(run.stdout)["disk_bytes"] == pytest.approx(written, rel=0.04)


def test_the_table_of_a_plan_says_what_it_counts():
    run = CliRunner().invoke(main, ["plan", "nano", "--chip", "cpu"])
    assert run.exit_code == 0, run.output
    for words in (
        "not measured",
        "float32",
        "denoise",
        "attention",
        "the whole run",
        "download",
        "limited by",
        "chips' float32 peak",
    ):
        assert words in run.output, run.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chip", "v9z-8"], "chip 'v9z-8' v5e-1"),
        (["--chip", "v6e-8", "--mesh", "dp=2,tp=2"], "mesh dp=2 sp=1 tp=2 4 devices v6e-8 8"),
        (["--chip", "h200", "--mesh", "tp=8"], "mesh 8 devices h200"),
        (["--chip", "h200", "--size", "60x64"], "width 60"),
        (["--chip", "h200", "--mesh", "tq=8"], "dp=2,sp=1,tp=4"),
    ],
)
def test_an_impossible_request_is_refused_with_a_short_message(arguments, words):
    run = CliRunner().invoke(main, ["plan", "nano", *arguments])
    assert run.exit_code == 2
    assert has_line_with_words(run.stderr, words)
    assert len(run.stderr.strip().splitlines()) == 1


def run_plan(*options: str) -> None:
    raise WanjaxError(commands.refused("plan", "nano", *options))


def price_function() -> None:
    wanjax.price(lambda x: pytest.fail("it is traced"), jax.ShapeDtypeStruct((8,), "float32"))


@pytest.mark.parametrize(
    ("call", "options"),
    [(run_plan, []), (run_plan, ["--train"]), (run_plan, ["--requests", "10"]), (price_function, [])],
)
def test_without_the_compiler_nothing_is_traced(tmp_path, monkeypatch, call, options):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "libtpu", None)  # libtpu is not installed
    with pytest.raises(WanjaxError, match=line_with_words("libtpu missing `pip install '.[plan]'`")) as caught:
        call(*options)
    assert "\n" not in str(caught.value)


def test_the_memory_that_a_compiler_needed_is_read():
    needed = pricer.needed_bytes("RESOURCE_EXHAUSTED: Ran out of memory. Used 41.50G of 31.25G hbm. Exceeded")
    assert needed == 41.5 * GIB
    temporaries = "the total memory required for HLO temporaries (32.62G) exceeds available HBM (31.25G)."
    assert pricer.needed_bytes(temporaries) == round(32.62 * GIB)


@pytest.mark.slow  # `test_a_plan_lists_options_with_which_a_video_fits` has quick advice
def test_advice_when_a_video_does_not_fit(monkeypatch):
    needed = round(41.5 * GIB)
    monkeypatch.setattr(
        Pricer,
        "prices",
        lambda self, _, programs, on_start: enumerate([Price(argument_bytes=0, peak_bytes=needed)] * len(programs)),
    )
    result = estimate.estimate_video(model_description("wan2.1-t2v-14b"), "v6e-1")
    assert not result.fits
    assert result.step_seconds is result.total_seconds is result.mfu is None
    assert result.limit.startswith("the memory of a chip")
    assert has_line_with_words(str(result.advice), "v6e-1 denoise 68.2 GiB chip 31.2 v6e-4 --tile decode")
    model = model_description("wan2.1-t2v-14b")
    weights = model.family.network_of(model.model.spec.networks["transformer"]).parameters
    resident = result.stages["denoise"].kept_bytes_per_chip  # stay in memory while programs without weights run
    assert 2 * weights < resident < 2.01 * weights  # few of them are float32


def prices_with_activations(self, _, programs, on_start):
    """Return prices of programs that need 6 GiB in addition to their arguments."""
    sizes = [
        [x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_call.arguments)] for abstract_call in programs
    ]
    return enumerate([Price(argument_bytes=sum(x), peak_bytes=sum(x) + 6 * GIB) for x in sizes])


def test_a_plan_lists_options_with_which_a_video_fits(monkeypatch):
    """With 6 GiB of activations, the 14B has 27 GiB of weights, 14 with 8 bits, and 1 on the device if offloaded."""
    monkeypatch.setattr(Pricer, "prices", prices_with_activations)
    result = estimate.estimate_video(model_description("wan2.1-t2v-14b"), "v6e-1")
    assert not result.fits
    assert has_line_with_words(
        str(result.advice), "does not fit v6e-1 --precision int8-weights --offload blocks needs about GiB"
    )
    assert "--tile" not in str(result.advice)  # decoding fits
    options = ["--offload blocks", "--precision int8-weights", "--precision int8-weights", ""]
    assert result.fits_in == dict(zip(("16 GiB", "24 GiB", "32 GiB", "80 GiB"), options, strict=True))


@pytest.mark.slow  # `test_sizes_of_memory_are_printed_if_requested` is quick
def test_a_plan_lists_options_of_a_video_that_fits_only_if_requested(monkeypatch):
    monkeypatch.setattr(Pricer, "prices", prices_with_activations)
    small = estimate.estimate_video(model_description("nano"), "v6e-1")
    assert small.fits
    assert small.fits_in == {}
    requested = estimate.estimate_video(model_description("nano"), "v6e-1", finds_options=True)
    assert requested.fits_in == dict.fromkeys(("16 GiB", "24 GiB", "32 GiB", "80 GiB"), "")


def test_sizes_of_memory_are_printed_if_requested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = commands.succeeded(commands.wanjax("plan", "--chip", "cpu", "--fit")).output
    assert has_line_with_words(" ".join(output.split()), "memory chip inputs 16 GiB as it is")
    assert "memory a chip" not in commands.succeeded(commands.wanjax("plan", "--chip", "cpu")).output
    assert has_line_with_words(
        commands.refused("plan", "--chip", "cpu", "--fit", "--train"), "--fit --train --requests"
    )


def test_the_operations_of_a_trace_equal_the_formula():
    result = {
        run.name: counted(run)
        for run in programs(pipeline(NETWORKS, VIDEO, attention=AttentionConfig("reference")), VIDEO)
    }
    context, step, config = result["context"], result["step"], NETWORKS.transformer
    formula = NETWORKS.cost(VIDEO).flops
    embedding, keys = (config.text_width + config.width) * config.width, 2 * config.layers * config.width**2
    assert context.attention + context.matmuls == 2 * (2 * TEXT_LENGTH * (embedding + keys))  # of both prompts
    assert step.attention + step.matmuls == 2 * sum(formula.values())
    assert step.convolutions == context.convolutions == 0
    assert step.live_bytes > 0


def test_a_plan_gives_frames_per_second_of_a_causal_model():
    """It is the rate of one more chunk: its steps, the update of the KV cache, and its decoding."""
    model = causal_pipeline(4, None).model
    model = replace(model, text_encoder=TEXT)
    video = model_description("wan2.1-t2v-1.3b-causal").settings.updated({"height": 12, "width": 12, "frames": 15})
    result = estimate.estimate_video(describe(model, video), "h200")
    runs = {run.name: run for run in programs(pipeline(model, video, attention=AttentionConfig("reference")), video)}
    run_prices = hardware.price_on(
        hardware.find_hardware("h200"), [(name, run.abstract_call) for name, run in runs.items()]
    )
    prices = {name: each.seconds for name, each in zip(runs, run_prices, strict=True)}
    chunk_seconds = prices["begin"] + 4 * prices["step"] + prices["renew"] + prices["finish"] + prices["decode_next"]
    assert result.frames_per_second == pytest.approx(4 / chunk_seconds)
    step = counted(runs["step"])
    assert step.attention + step.matmuls == sum(model.cost(video).flops.values())
    unchunked = estimate.estimate_video(describe(model, video.updated({"frames": 3})), "h200")
    assert unchunked.frames_per_second is None


def test_progress_reports_the_start_and_the_price_of_each_program():
    messages = []
    model = model_description("nano")
    estimate.estimate_video(model, "h200", on_progress=lambda *progress: messages.append(progress))
    names = [run.name for run in programs(pipeline(model.model, model.settings), model.settings)]
    assert messages[::2] == [([name], number, len(names)) for number, name in enumerate(names)]
    assert messages[1::2] == [([], number + 1, len(names)) for number in range(len(names))]


def test_the_progress_bar_counts_only_compilations(monkeypatch):
    """Cached prices come first, before anything is compiled."""

    def partly_cached(self, place, abstract_calls, on_start):
        yield 1, Price(argument_bytes=1, peak_bytes=2)
        on_start(0)
        on_start(2)
        yield 2, Price(argument_bytes=1, peak_bytes=2)
        on_start(0)  # again, because the compiler's process ended
        yield 0, Price(argument_bytes=3, peak_bytes=4)

    monkeypatch.setattr(Pricer, "prices", partly_cached)
    messages = []
    abstract_calls = [(name, AbstractCall(lambda: None, ())) for name in "abc"]
    result = hardware.price_on(SLICES["v6e-8"], abstract_calls, lambda *progress: messages.append(progress))
    assert [x.argument_bytes for x in result] == [3, 1, 1]
    assert messages == [(["a"], 0, 2), (["a", "c"], 0, 2), (["a"], 1, 2), (["a"], 1, 2), ([], 2, 2)]


def test_progress_goes_to_stderr_unless_quiet():
    loud = CliRunner().invoke(main, ["plan", "nano", "--chip", "cpu"])
    assert has_line_with_words(loud.stderr, "plan program of")
    silent = CliRunner().invoke(main, ["plan", "nano", "--chip", "cpu", "-q"])
    assert (silent.stdout, silent.stderr) == (loud.stdout, "")


def test_a_trace_counts_how_often_each_program_runs():
    mesh = abstract_mesh(SLICES["v6e-8"], {"dp": 1, "sp": 1, "tp": 8})
    denoise_programs = {"begin": 1, "context": 1, "step": 2, "finish": 1}
    result = {run.name: run.times for run in programs(pipeline(NETWORKS, VIDEO, mesh), VIDEO)}
    assert result == {"encode_prompts": 1, **denoise_programs, "cut": 1, "decode_first": 1, "decode_next": 1}
    video = VIDEO.updated({"frames": 1})
    single_device = [run.name for run in programs(pipeline(NETWORKS, video, mesh), video)]
    assert single_device == ["encode_prompts", *denoise_programs, "cut", "decode_first"]


def test_cached_prices_are_read_by_the_same_key(tmp_path):
    ResultCache().put("prices", {"a": 1}, {"seconds": 2.0})
    assert ResultCache().get("prices", {"a": 1}) == {"seconds": 2.0}
    assert ResultCache().get("prices", {"a": 2}) is None
    (file,) = (tmp_path / "wanjax" / "prices").iterdir()
    file.write_text("{")
    assert ResultCache().get("prices", {"a": 1}) is None


@pytest.mark.slow
def test_each_compiler_has_separate_cached_prices(monkeypatch):
    requested = {}

    def prices(self, place, programs, on_start):
        requested["jobs"] = [export(program, place) for program in programs]
        return enumerate(
            [Price(argument_bytes=1, peak_bytes=2, seconds=1.0, doubts=["an option was refused"])] * len(programs)
        )

    monkeypatch.setattr(Pricer, "prices", prices)
    keys = {}
    for compiler, options in (("safe", ()), ("fast", ("--compiler", "fast"))):
        plan_json = plan("--chip", "v6e-8", *options)
        assert plan_json["compiler"] == compiler
        assert plan_json["doubts"] == ["an option was refused"]
        keys.setdefault(compiler, set()).add(tuple(json.dumps(PRICER.key(job)) for job in requested["jobs"]))
    [safe], [fast] = keys["safe"], keys["fast"]
    assert len(set(safe) - set(fast)) == 3  # the step, and the decoder's two; the others have the same options in both
    output = CliRunner().invoke(main, ["plan", "nano", "--compiler", "fast"]).output
    assert has_line_with_words(" ".join(output.split()), "fsdp fast compiler")


def test_a_plan_uses_the_attention_kernel_of_the_planned_chip():
    """This machine cannot run that kernel."""
    model = model_description("wan2.1-t2v-14b")
    on_chip = Partitioner(hardware.mesh_on(SLICES["v6e-8"], {"dp": 2, "sp": 4, "tp": 1}), SHARDING_RULES["fsdp"])
    result = estimate._attention_name(AttentionConfig(), model.model.cost(model.settings), "bfloat16", on_chip)
    assert result == "flash_tpu"


def test_a_plan_without_a_compiler_names_no_compiler_options():
    assert plan("--chip", "h200", "--compiler", "fast")["compiler"] is None
    assert "compiler" not in CliRunner().invoke(main, ["plan", "nano", "--chip", "h200"]).output


@pytest.mark.skipif(find_spec("libtpu") is None, reason="prices for TPUs need libtpu")
def test_a_slice_is_priced_by_its_compiler_and_only_once(monkeypatch):
    options = ("--chip", "v6e-8", "--size", "32x32", "--frames", "1", "--mesh", "dp=2,sp=1,tp=4")
    first = plan(*options)
    monkeypatch.setattr(pricer, "compile_jobs", lambda *_, **__: pytest.fail("compiled again"))
    assert plan(*options) == first
    monkeypatch.setitem(sys.modules, "libtpu", None)  # cached prices need no compiler
    assert plan(*options) == first
    assert first["priced_by"] == "the chip's compiler"
    assert first["fits"]
    assert first["doubts"] == []
    assert sum(first["step_breakdown"].values()) == pytest.approx(first["step_seconds"])
    assert first["step_seconds_low"] <= first["step_seconds"] <= first["step_seconds_high"]
    assert first["step_seconds_high"] <= first["step_seconds_worst"]  # nano's heads have no kernel
    assert first["total_seconds_low"] < first["total_seconds"] < first["total_seconds_high"]
    assert {row["operation"] for row in first["collectives"]} & {"all-gather", "all_to_all", "all-to-all"}
    assert all(row["devices"] > 1 for row in first["collectives"])
    assert first["compile_seconds"] > 0


@pytest.mark.parametrize("name", ["empty.safetensors", "notes.txt"])
def test_a_lora_that_cannot_be_read_is_refused(name, tmp_path):
    (tmp_path / name).touch()
    options = ["plan", "nano", "--chip", "h100", "--lora", str(tmp_path / name)]
    output = CliRunner().invoke(main, options)
    assert output.exit_code == 2
    assert has_line_with_words(output.output, name)


def test_a_narrow_terminal_cuts_no_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = commands.succeeded(commands.wanjax("plan", "nano", "--chip", "cpu")).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert "not measured" in " ".join(lines)


@pytest.mark.parametrize("options", [(), ("--train",)])
def test_an_estimate_does_not_claim_that_a_video_cannot_fit(options):
    """An estimate ignores fusion, so its peak is too high. The weights alone are 27 GiB of an H100's 80 GB."""
    run = CliRunner().invoke(main, ["plan", "wan2.1-t2v-14b", "--chip", "h100", "--json", *options])
    planned = json.loads(run.stdout)
    assert planned["fits"] is None
    assert has_line_with_words(planned["advice"], "may fit h100 nothing fused compiled warmup")
