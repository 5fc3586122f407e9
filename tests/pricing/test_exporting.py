# SPDX-License-Identifier: Apache-2.0
"""Programs are exported as bytes that change only with the program, and are the key of cached prices."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import wanjax
from tests.support.plan_programs import layers, on_shapes, product_kernel, replicated_product
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.attention.typical_scalars import typical_branch_scalars
from wanjax.plan.price import PRICER
from wanjax.pricing import compile as compiling
from wanjax.pricing import pricer
from wanjax.pricing.chips import SLICES, abstract_mesh
from wanjax.pricing.compile import ENVIRONMENT
from wanjax.pricing.compiler_process import concrete_mesh
from wanjax.pricing.exporting import compile_failure, export, trace
from wanjax.pricing.lowering import AbstractCall, retry_without_rejected_options
from wanjax.pricing.pallas_kernels import kernels_of
from wanjax.pricing.pricer import Pricer

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
V6E = SLICES["v6e-4"]
PROGRAM = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

def double(x_ref, out_ref):
    read = x_ref[...]
    out_ref[...] = read + read

def inner(x):
    with jax.named_scope("attention"):
        y = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double")(jnp.tanh(x))
    return jax.lax.fori_loop(0, 3, lambda i, z: jnp.sin(z) * i, y)

def run(mesh):
    return jax.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
"""
IN_ANOTHER_PROCESS = """
import sys
from tests.pricing.test_exporting import digest
print(digest(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def digest(path):
    """Return the digest of the program in a file."""
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mesh = abstract_mesh(V6E)
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    job = export(AbstractCall(module.run(mesh), (x,)), V6E)
    assert Path(path).name.encode() not in job.program
    assert b"attention" in job.program
    return job.key["program"]


def test_an_edit_that_changes_no_program_changes_no_byte(tmp_path):
    """Blank lines, another file name and renamed variables do not change the bytes, also in another process."""
    texts = {
        "program.py": PROGRAM,
        "lower.py": "\n" * 10 + PROGRAM,
        "renamed.py": PROGRAM.replace("read", "taken").replace("y = pl", "held = pl").replace("i, y)", "i, held)"),
        "other.py": PROGRAM.replace("read + read", "read * 2"),
        "elsewhere.py": PROGRAM.replace('"attention"', '"mlp_attention"'),
    }
    digests = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        digests[name] = digest(tmp_path / name)
    assert digests["program.py"] == digests["lower.py"] == digests["renamed.py"]
    assert len(set(digests.values())) == 3
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "lower.py")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    }
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert output.split()[-1] == digests["program.py"]


def test_the_key_includes_shardings_donation_options_chip_and_mesh():
    def key(*, sp="dp", chip="v6e-4", axes=(2, 2), donate=(), options=None):
        mesh = abstract_mesh(SLICES[chip], dict(zip(("dp", "tp"), axes, strict=True)))
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(sp)))
        return json.dumps(export(AbstractCall(jnp.sin, (x,), donate, options), SLICES[chip]).key)

    changes = [{"sp": "tp"}, {"chip": "v5e-4"}, {"axes": (4, 1)}, {"donate": (0,)}, {"options": {"xla_a": 1}}]
    assert len({key(), *(key(**change) for change in changes)}) == 1 + len(changes)
    assert key() == key()


def test_donated_arguments_become_donated_arrays():
    tree = {"a": (8,), "b": (8, 8)}
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=lambda x: type(x) is tuple
    )
    abstract_call = AbstractCall(
        lambda x, y, z: jax.tree.map(jnp.sin, (x, z)), (shapes, shapes["a"], shapes), donate=(0, 2)
    )
    assert export(abstract_call, SLICES["v6e-1"]).donate == (0, 1, 3, 4)


def test_a_prng_key_can_be_an_argument():
    key = jax.eval_shape(lambda: jax.random.key(0))
    job = export(AbstractCall(jax.random.bits, (jax.ShapeDtypeStruct((), key.dtype),)), SLICES["v6e-1"])
    assert jax.export.deserialize(bytearray(job.program)).in_avals[0].dtype == key.dtype


def test_the_kernels_of_a_program_are_listed_once():
    """Each distinct kernel is listed once, also if it is in a loop or an inner function."""
    mesh = abstract_mesh(V6E)

    def run(x, y):
        inner = jax.shard_map(
            product_kernel, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        looped = jax.lax.fori_loop(0, 3, lambda _, z: jax.jit(inner)(z.astype(x.dtype), y), inner(x, y))
        return inner(looped[:256].astype(x.dtype), y)

    x, y = replicated_product(mesh).arguments
    y = jax.ShapeDtypeStruct((256, 256), y.dtype, sharding=y.sharding)
    kernels = kernels_of(trace(AbstractCall(run, (x, y)), V6E))
    assert [(call.name, [shape for _, shape in call.operands]) for call in kernels] == [
        ("product", [(512, 256), (256, 256)]),
        ("product", [(256, 256), (256, 256)]),
    ]


@needs_libtpu
def test_prices_are_reported_one_by_one_and_cached(monkeypatch):
    """Cached prices need no compiler. A kernel is compiled once for all programs that contain it."""
    mesh = abstract_mesh(V6E)
    kernel = replicated_product(mesh)
    twice = kernel._replace(function=lambda x, y: kernel.function(x, y) + kernel.function(x * 2, y))
    large = layers(abstract_mesh(V6E, {"dp": 1, "tp": 4}), count=20, tokens=2**20, width=2**13)
    requested = []
    compile_jobs = pricer.compile_jobs

    def record_and_compile(jobs, *, schedules, on_start, workspace):
        requested.append((len(jobs), schedules))
        return compile_jobs(jobs, schedules=schedules, on_start=on_start, workspace=workspace)

    monkeypatch.setattr(pricer, "compile_jobs", record_and_compile)
    first = dict(PRICER.prices(V6E, [kernel, twice, kernel, large]))
    assert requested == [(4, range(3, 4))]
    assert first[0] == first[2]
    assert first[1].seconds is not None
    assert first[0].seconds is not None
    assert first[1].seconds > first[0].seconds > 0
    assert first[0].doubts == first[1].doubts == []
    assert (first[3].seconds, first[3].peak_bytes > V6E.memory) == (None, True)
    tripled = kernel._replace(function=lambda x, y: kernel.function(x, y) + kernel.function(x * 3, y))
    assert PRICER.price_all(V6E, [tripled])[0].seconds == pytest.approx(first[1].seconds, rel=0.01)
    assert requested[1:] == [(1, range(1, 1))]  # the kernel's price was cached separately
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    cached = dict(PRICER.prices(V6E, [kernel, twice, kernel, large]))
    assert [json.dumps(asdict(cached[i])) for i in range(4)] == [json.dumps(asdict(first[i])) for i in range(4)]
    monkeypatch.setattr(pricer, "pricing_digest", lambda: "another way to price")
    with pytest.raises(WanjaxError, match=line_with_words("libtpu missing")):
        PRICER.price_all(V6E, [kernel])


def test_a_price_of_another_compiler_version_is_not_used(monkeypatch):
    job = export(on_shapes(jnp.sin, (8, 128)), SLICES["v6e-1"])
    installed, accepted = {"libtpu": "0.0.42.5"}, ["==0.0.42.*"]
    monkeypatch.setattr(pricer, "version", lambda name: installed[name])
    monkeypatch.setattr(pricer, "versions", lambda *names: {x: installed[x] for x in names if x in installed})
    monkeypatch.setattr(pricer, "accepted_libtpu", lambda: compiling.SpecifierSet(accepted[0]))
    PRICER.store("prices", job, 1.0)
    assert PRICER.recall("prices", job) == 1.0
    installed["libtpu"] = "0.0.42.6"
    assert PRICER.recall("prices", job) is None
    del installed["libtpu"]  # without libtpu, a price of an accepted version is used
    assert PRICER.recall("prices", job) == 1.0
    accepted[0] = "==0.0.43.*"
    assert PRICER.recall("prices", job) is None


@pytest.mark.parametrize(
    "part",
    [
        retry_without_rejected_options,
        concrete_mesh,
        compile_failure,
        pricer.needed_bytes,
        Pricer.prices,
        typical_branch_scalars,
    ],
)
def test_an_edit_of_the_pricing_code_invalidates_prices(part, monkeypatch):
    job = export(on_shapes(jnp.sin, (8, 128)), SLICES["v6e-1"])
    key_before = PRICER.key(job)
    edited, read_bytes = Path(str(sys.modules[part.__module__].__file__)), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"#" * (path == edited))
    assert PRICER.key(job) != key_before


@needs_libtpu
def test_any_function_is_priced():
    width, bias = 256, jnp.ones((1, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4096, width), jnp.bfloat16, sharding=PartitionSpec("dp"))
    w = {"w": jax.ShapeDtypeStruct((width, width), jnp.bfloat16)}

    def layer(x, tree):
        return jax.nn.relu(x @ tree["w"] + bias)

    price = wanjax.price(layer, x, w, mesh={"dp": 4}, chip="v6e-4", donate=[0])
    assert price.argument_bytes == 1024 * width * 2 + width * width * 2
    assert price.seconds is not None
    assert 0 < price.low <= price.seconds <= price.high
    assert price.breakdown["matmuls"] > 0
    assert price.collectives == []


@pytest.mark.slow
@needs_libtpu
def test_collectives_of_any_function_are_listed():
    x = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16, sharding=PartitionSpec("dp"))
    price = wanjax.price(lambda x: x.sum(0), x, mesh={"dp": 2, "tp": 2}, chip="v6e-4")
    assert {row["devices"] for row in price.collectives} == {2}


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (jnp.sin, {"mesh": {"tp": 2}}, "mesh tp=2 2 devices v6e-8 8"),
        (jnp.sin, {"chip": "v9"}, "TPU 'v9'"),
        pytest.param(
            lambda x: jnp.concatenate(x, 1.5), {}, "v6e-8 ValueError Zero-dimensional", marks=needs_libtpu, id="traced"
        ),
    ],
)
def test_a_function_is_refused_with_a_short_message(function, options, words):
    with pytest.raises((WanjaxError, compiling.CompilerError), match=line_with_words(words)):
        wanjax.price(function, jax.ShapeDtypeStruct((8,), jnp.float32), **options)


CHIP_CHECKS = """
from wanjax.pricing.chips import SLICES, abstract_mesh, topology_devices
from wanjax.pricing.compiler_process import concrete_mesh
from wanjax.sharding import arrange_mesh
for slice_ in SLICES.values():
    described = abstract_mesh(slice_)
    real = concrete_mesh(slice_.topology, slice_.devices, {"chips": slice_.devices}).abstract_mesh
    assert real == described and real.abstract_device == described.abstract_device, slice_
    axes = {"dp": 1, "sp": max(slice_.devices // 2, 1), "tp": min(slice_.devices, 2)}
    devices = topology_devices(slice_.topology)[:slice_.devices]
    meshes = concrete_mesh(slice_.topology, slice_.devices, axes), arrange_mesh(devices, axes)
    priced, run = ([device.id for device in mesh.devices.flat] for mesh in meshes)
    assert priced == run, slice_
for name, axes in (("v6e-4", (1, 4, 1)), ("v6e-8", (2, 4, 1)), ("v6e-8", (1, 8, 1)), ("v6e-16", (2, 8, 1))):
    mesh = arrange_mesh(topology_devices(SLICES[name].topology), dict(zip(("dp", "sp", "tp"), axes)))
    for ring in mesh.devices[:, :, 0]:
        for device, neighbour in zip(ring, [*ring[1:], ring[0]]):
            assert sum(abs(a - b) for a, b in zip(device.coords, neighbour.coords)) == 1, (name, axes)
"""


@needs_libtpu
def test_described_chips_equal_those_of_the_compiler():
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", CHIP_CHECKS], env=environment, check=True, capture_output=True)
    assert len({replace(slice_, devices=1).chip.device_kind for slice_ in SLICES.values()}) == 5
