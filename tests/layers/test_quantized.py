# SPDX-License-Identifier: Apache-2.0
"""Projections with 8-bit weights: their precision, and the bytes that devices exchange."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.compare import error
from tests.support.devices import on_eight_devices
from tests.support.projections import SIZES, dense, quantized
from wanjax.errors import WanjaxError
from wanjax.layers.linear import Linear
from wanjax.layers.placement import as_shapes, axes_of
from wanjax.layers.precision import PRECISIONS, Precision
from wanjax.layers.quantized import quantize_layers, quantized_layers
from wanjax.layers.stack import stack


def tokens(outlier=1):
    """Return tokens with three channels that are `outlier` times larger."""
    x = np.random.default_rng(0).normal(size=(2, 40, 256))
    x[..., [3, 100, 201]] *= outlier
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(
    ("name", "bound", "bound_with_outliers"),
    [("int8-weights", 0.006, 0.006), ("int8", 0.012, 0.012), ("fp8-weights", 0.03, 0.03), ("fp8", 0.04, 0.04)],
)
def test_a_quantized_projection_is_close_to_its_dense_one(name, bound, bound_with_outliers):
    """The rotation keeps the error small where a few channels of the input are much larger."""
    base = dense(nnx.Rngs(0), (256, 64))
    layer = quantized(base, PRECISIONS[name])
    assert error(layer(tokens()), base(tokens())) <= bound
    assert error(layer(tokens(30)), base(tokens(30))) <= bound_with_outliers


def test_outlier_channels_need_the_rotation():
    base = dense(nnx.Rngs(0), (256, 64))
    layer, unrotated = (quantized(base, PRECISIONS[name]) for name in ("int8", "int8-weights"))
    unrotated.activations = "int8"
    x = tokens(30)
    assert (layer.hadamard_size, unrotated.hadamard_size) == (256, 0)
    assert error(unrotated(x), base(x)) > 3 * error(layer(x), base(x))


def test_projections_of_blocks_are_quantized_and_excluded_ones_are_not():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.mod = dense(rngs), dense(rngs)

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first, self.blocks, self.layers = dense(rngs), stack(Block, 3, rngs), nnx.List([dense(rngs)])

    abstract = as_shapes(Network)
    network = quantize_layers(abstract, PRECISIONS["int8"], ["first", "*.mod"])
    assert quantized_layers(network).keys() == {"blocks.up", "layers.0"}
    assert isinstance(abstract.blocks.up, Linear)
    layer = network.blocks.up
    assert (layer.hadamard_size, layer.axis, layer.values.get_value().dtype) == (64, "mlp", jnp.int8)
    assert (layer.values.get_value().shape, axes_of(layer.values)) == ((3, *SIZES), ("layers", "embed", "mlp"))
    assert (layer.scale.get_value().shape, axes_of(layer.scale)) == ((3, SIZES[1]), ("layers", "mlp"))
    assert (layer.scale.get_value().dtype, layer.bias.get_value().shape) == (jnp.float32, (3, SIZES[1]))
    assert quantize_layers(abstract, PRECISIONS["none"], []) is abstract


def test_an_unknown_precision_is_refused():
    assert Precision.of("fp8-weights") is Precision.of(PRECISIONS["fp8-weights"])
    for value in ("int4", None, 8):
        with pytest.raises(WanjaxError, match="int8-weights"):
            Precision.of(value)


ON_DEVICES = """
import re
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from tests.support.projections import dense, quantized
from tests.support.compare import error
from wanjax.layers.linear import gather_kernels
from wanjax.layers.placement import axes_of
from wanjax.layers.precision import PRECISIONS
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, use_partitioner

x = np.random.default_rng(0).normal(size=(2, 64, 256)).astype(np.float32)
for precision in PRECISIONS.values():
    base = dense(nnx.Rngs(0), (256, 128))
    layer = quantized(base, precision) if precision.quantizes else base
    one_device = layer(x)
    for rules in ("fsdp", "tp", "replicated"):
        partitioner = Partitioner(make_mesh(2, 2, 2), SHARDING_RULES[rules])
        graphdef, weights = nnx.split(layer)
        weights = jax.tree.map(
            lambda w: w.replace(jax.device_put(w[...], partitioner.weight_sharding(axes_of(w), w[...].shape))),
            weights, is_leaf=lambda w: isinstance(w, nnx.Variable),
        )

        @jax.jit
        def run(weights, x):
            first, second = gather_kernels(*(nnx.merge(graphdef, weights) for _ in range(2)))
            return first(x) + second(x)

        with use_partitioner(partitioner):
            lowered = run.lower(weights, x)
            difference = error(run(weights, x), 2 * one_device)
        assert difference <= 1e-6, (precision.name, rules, difference)
        gathered = re.findall(r"= (\\w+)\\[256,128\\][^ ]* all-gather", lowered.compile().as_text())
        expected_dtype = {"int8": "s8", "fp8": "f8e4m3fn", None: "f32"}[precision.weights]
        print(precision.name, rules, *sorted(set(gathered)))
        if rules == "fsdp" and precision.weights != "fp8":  # the CPU has no collectives of 8-bit floats
            assert set(gathered) == {expected_dtype}, gathered
"""


def test_devices_exchange_8_bit_weights_and_compute_the_same():
    assert "int8 fsdp s8" in on_eight_devices(ON_DEVICES)
