# SPDX-License-Identifier: Apache-2.0
"""Programs for NVIDIA's cards are priced without a card: from a stored text, or compiled with `plan-cuda`."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.plan_programs import on_cards, on_shapes
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.kernels.compiler_options import offload_options
from wanjax.kernels.target import Target
from wanjax.layers.stack import scan_blocks
from wanjax.models.wan import vae
from wanjax.models.wan.vae import FrameAttention
from wanjax.plan import hardware
from wanjax.pricing import compile as compiling
from wanjax.pricing.card_costs import (
    CONVOLUTION_EFFICIENCY,
    LAUNCH_SECONDS,
    LINK_EFFICIENCY,
    count_kernels,
    price_on_gpu,
)
from wanjax.pricing.chips import CARD_SLICES, CARDS, abstract_mesh
from wanjax.pricing.compile import (
    Compiled,
    Memory,
    check_cuda_compiler,
    compile_jobs,
    has_cuda_compiler,
    temporary_folder,
)
from wanjax.pricing.exporting import export
from wanjax.pricing.lowering import AbstractCall
from wanjax.sharding import SHARDING_RULES, VIDEO_AXES, Partitioner, constrain, replicate, use_partitioner

needs_cuda = pytest.mark.skipif(not has_cuda_compiler(), reason="XLA's GPU compiler (plan-cuda) is not installed")
STORED_MODULE = (Path(__file__).parents[1] / "data/pricing/card_module.txt").read_text()  # `on_cards` for two H100
TOKENS, HEADS, WIDTH, CHANNELS = 1024, 4, 128, 512  # of `on_cards`, with 32 × 32 cells
FLOPS = {  # for each of two cards
    "dot_product_attention_fwd.10": 4 * (TOKENS // 2) * TOKENS * HEADS * WIDTH,  # half of the queries, all keys
    "gemm_fusion_dot.2": 2 * TOKENS * CHANNELS**2,
    "cudnn-conv.1": 2 * CHANNELS**2 * (3 * 32 - 2) ** 2,  # cells at the edges have fewer neighbours
}
FAMILIES = (  # the models that fit according to docs/guides/plan.md
    "wan2.1-t2v-1.3b",
    "wan2.1-t2v-14b",
    "wan2.1-i2v-14b-720p",
    "wan2.2-t2v-a14b",
    "wan2.2-ti2v-5b",
    "cogvideox-5b",
    "cogvideox1.5-5b",
    "hunyuanvideo1.5-480p-t2v",
    "hunyuanvideo1.5-720p-t2v",
)
FITS = 76 * 2**30  # of an H100; libraries need 3 GiB more
REMATERIALIZATION = "Involuntary full rematerialization"


@pytest.fixture(scope="module")
def stored() -> Compiled:
    """Return the stored program for two H100, which is priced without a compiler."""
    return Compiled(CARD_SLICES["h100-2"], Memory(6291456, 13107200), STORED_MODULE, {})


def cost_of(name: str, compiled: Compiled) -> float:
    """Return the typical seconds of a kernel, by its name in the program."""
    return next(item.cost.mid for item in price_on_gpu(compiled).items if item.name == name)


def plan(*arguments: str) -> dict:
    run = CliRunner().invoke(main, ["plan", *arguments, "--json"])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)


def compile_one(abstract_call: AbstractCall, chip: str) -> Compiled:
    [(_, result)] = compile_jobs([export(abstract_call, CARD_SLICES[chip])])
    assert isinstance(result, Compiled), result
    return result


def test_kernels_are_counted_by_kind(stored):
    assert count_kernels(stored, price_on_gpu(stored)) == {
        "all-gather": 2,
        "__cudnn$fmhaSoftmax": 1,
        "__cudnn$convForward": 1,
        "triton_nested_gemm_fusion": 1,
        "loop fusion": 1,
        "input fusion": 1,
    }


def test_operations_of_libraries_and_fusions_count(stored):
    items = {item.name: item.flops for item in price_on_gpu(stored).items if item.flops}
    assert items == FLOPS


def test_a_kernel_takes_the_longest_of_compute_memory_and_launch(stored):
    conv, link = FLOPS["cudnn-conv.1"], CARDS["l40s"].link
    assert cost_of("cudnn-conv.1", stored) == pytest.approx(
        conv / (CARDS["h100"].flops * CONVOLUTION_EFFICIENCY.typical)
    )
    assert cost_of("all-gather-start", stored) == LAUNCH_SECONDS.mid
    on_l40s = replace(stored, slice=CARD_SLICES["l40s-2"])
    shard = 2 * TOKENS // 2 * CHANNELS
    assert cost_of("all-gather-start", on_l40s) == pytest.approx(shard / (link * LINK_EFFICIENCY.typical))


def test_float32_products_have_half_the_peak(stored):
    conv, half = FLOPS["cudnn-conv.1"], CARDS["h100"].flops / 2
    float32_program = replace(stored, module=STORED_MODULE.replace("bf16[", "f32["))
    assert cost_of("cudnn-conv.1", float32_program) == pytest.approx(conv / (half * CONVOLUTION_EFFICIENCY.typical))
    on_t4 = replace(stored, slice=CARD_SLICES["t4-2"])
    assert cost_of("cudnn-conv.1", on_t4) == pytest.approx(conv / (CARDS["t4"].flops * CONVOLUTION_EFFICIENCY.typical))


@needs_cuda
def test_the_compiler_still_writes_the_stored_program(stored):
    compiled = compile_one(on_cards(abstract_mesh(stored.slice, {"dp": 1, "sp": 1, "tp": 2})), "h100-2")
    assert count_kernels(compiled, price_on_gpu(compiled)) == count_kernels(stored, price_on_gpu(stored))
    assert compiled.memory == stored.memory


@needs_cuda
def test_the_compiler_reports_memory_and_time_follows_operations():
    """The program has two arguments, a temporary array that is not fused, and a result."""
    size = 4096
    compiled = compile_one(on_shapes(lambda x, y: (x @ y) @ y, (size, size), (size, size), dtype="bfloat16"), "h100")
    array_bytes = 2 * size * size
    assert compiled.memory.arguments == 2 * array_bytes
    assert 4 * array_bytes <= compiled.memory.peak < 4 * array_bytes + 2**26  # and the workspace of a library
    priced = price_on_gpu(compiled)
    assert priced.flops == 2 * 2 * size**3
    min_seconds = priced.flops / CARDS["h100"].flops
    assert min_seconds < priced.total.low < priced.total.mid < priced.total.high < 4 * min_seconds


@needs_cuda
@pytest.mark.parametrize("card", CARDS)
def test_programs_compile_for_every_card(card):
    assert compile_one(on_shapes(lambda x: jnp.sin(x) @ x, (256, 256)), card).memory.peak >= 2 * 256 * 256 * 4


@needs_cuda
def test_a_plan_lists_kernels_and_marks_its_times_as_estimates(monkeypatch):
    monkeypatch.setattr("wanjax.plan.estimate.JAX_MEMORY_FRACTION", 0)  # so that any peak exceeds it
    run = CliRunner().invoke(main, ["plan", "nano", "--chip", "h100", "--programs"])
    assert run.exit_code == 0, run.output
    assert has_line_with_words(run.output, "estimate not measured memory compiler")
    assert has_line_with_words(run.output, "kernels step __cudnn$fmhaSoftmax fusion")
    assert has_line_with_words(run.output, "JAX default XLA_CLIENT_MEM_FRACTION")


@needs_cuda
def test_a_t4_has_no_cudnn_attention():
    step = next(row for row in plan("nano", "--chip", "t4")["programs"] if row["name"] == "step")
    assert step["kernels"]
    assert not any("fmha" in name for name in step["kernels"])


def test_a_plan_without_the_compiler_recommends_it(monkeypatch):
    monkeypatch.setattr(hardware, "has_cuda_compiler", lambda: False)
    assert has_line_with_words(" ".join(plan("nano", "--chip", "h100")["doubts"]), "plan-cuda memory")
    assert plan("nano", "--chip", "a100")["priced_by"] == "a stated model"
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    with pytest.raises(
        WanjaxError, match=line_with_words("'.[plan-cuda]' jax-cuda13-plugin nvidia-nvvm nvidia-cudnn-cu13")
    ):
        check_cuda_compiler()


@pytest.fixture
def compiler_warnings(monkeypatch):
    """Compile without a cache, and return a list that receives the error output of the compiler's processes."""
    outputs = []

    @contextmanager
    def workspace():
        with temporary_folder() as folder:
            yield folder
            outputs.extend(log.read_text() for log in folder.rglob("errors.txt"))

    monkeypatch.setitem(compiling.ENVIRONMENT, "TF_CPP_MIN_LOG_LEVEL", "1")  # with warnings
    monkeypatch.setattr(hardware, "PRICER", replace(hardware.PRICER, results=None, workspace=workspace))
    return outputs


@needs_cuda
def test_a_copy_of_a_full_array_to_every_card_is_noticed(monkeypatch, compiler_warnings):
    """Without `replicate`, XLA copies all tokens of the autoencoder's attention to every card, and warns of it."""
    mesh = abstract_mesh(CARD_SLICES["h100-8"], {"dp": 2, "sp": 1, "tp": 4})
    network = FrameAttention(8, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))

    def run(x):
        with use_partitioner(Partitioner(mesh, SHARDING_RULES["fsdp"])):
            return constrain(network(constrain(x, VIDEO_AXES)), VIDEO_AXES)

    x = jax.ShapeDtypeStruct((1, 1, 90, 160, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    has_warning = []
    for gather in (replicate, lambda x: x):
        monkeypatch.setattr(vae, "replicate", gather)
        list(hardware.PRICER.prices(CARD_SLICES["h100-8"], [AbstractCall(run, (x,))]))
        has_warning.append(REMATERIALIZATION in compiler_warnings.pop())
    assert has_warning == [False, True]


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h100", "h100-8"])
@pytest.mark.parametrize("model", FAMILIES)
def test_every_program_of_a_family_uses_cudnn_and_fits(model, chip, compiler_warnings):
    planned = plan(model, "--chip", chip)
    kernels = {(row["stage"], row["name"]): row["kernels"] for row in planned["programs"]}
    assert kernels["denoise", "step"].get("__cudnn$fmhaSoftmax", 0) > 0
    assert any("__cudnn$conv" in name for name in kernels["decode", "decode_next"])
    assert any(stage == "encode" and kinds for (stage, _), kinds in kernels.items())
    assert planned["peak_bytes_per_chip"] < FITS
    assert compiler_warnings
    assert not any(REMATERIALIZATION in text for text in compiler_warnings)


@needs_cuda
def test_offloaded_blocks_take_no_memory_of_the_card():
    """The card has two of ten blocks in memory, and copies each block while the block before computes."""
    partitioner = Partitioner(
        abstract_mesh(CARD_SLICES["4090"], {"dp": 1, "sp": 1, "tp": 1}), SHARDING_RULES["fsdp"], num_device_blocks=2
    )
    layers, width = 10, 1024
    stacked = partitioner.weight_sharding(("layers", "embed", "mlp"), (layers, width, width))
    kernel = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16, sharding=stacked)
    x = jax.ShapeDtypeStruct((1, 256, width), jnp.bfloat16, sharding=partitioner.replicated)

    def run(kernel, x):
        with use_partitioner(partitioner):
            return scan_blocks(Stacked(kernel), lambda block, x: jnp.tanh(x @ block.kernel[...]), x)

    options = offload_options(Target("gpu", CARDS["4090"].device_kind))
    compiled = compile_one(AbstractCall(run, (kernel, x), (), options), "4090")
    block = 2 * width**2
    assert not compiled.rejected_options
    assert compiled.memory.arguments < block
    assert 2 * block <= compiled.memory.peak < 5 * block
    priced = price_on_gpu(compiled)
    assert {item.bytes for item in priced.items if item.kind == "offload"} <= {block, 5 * block}
    assert sum(item.bytes for item in priced.items if item.kind == "offload") == (layers + 1) * block


class Stacked(nnx.Module):
    def __init__(self, kernel):
        self.kernel = nnx.Param(kernel)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("model", ["wan2.1-t2v-14b", "wan2.2-t2v-a14b"])
def test_a_model_of_14b_fits_a_card_of_24_gib_with_offloaded_blocks(model):
    size = ("--size", "832x480", "--chip", "4090")
    resident, offloaded = (plan(model, *size, "--offload", offload) for offload in ("stages", "blocks"))
    assert not resident["fits"]
    assert has_line_with_words(resident["advice"], "--offload blocks")
    assert offloaded["fits"]
    assert offloaded["step_breakdown"]["offload"] < 0.1 * offloaded["step_seconds"]
    assert 25 * 2**30 < offloaded["host_bytes"] < 30 * 2**30  # only one of two networks is in memory
