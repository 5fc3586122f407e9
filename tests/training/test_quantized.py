# SPDX-License-Identifier: Apache-2.0
"""LoRAs on 8-bit weights have the gradients of the same weights as floats, and give nearly the same videos."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support.clips import write_clips
from tests.support.commands import succeeded
from tests.support.commands import wanjax as wanjax_command
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint
from tests.support.words import line_with_words
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.network_kinds import network_of
from wanjax.checkpoints.quantize import quantize
from wanjax.errors import UnsupportedError, WanjaxError
from wanjax.layers.linear import linear
from wanjax.layers.placement import as_shapes
from wanjax.layers.precision import PRECISIONS
from wanjax.layers.quantized import QuantizedLinear, quantized_layers
from wanjax.plan.training_estimate import estimate_training
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training
from wanjax.training.adapters import LoraLinear, adapt, is_factor, remove_adapters
from wanjax.training.objective import Batch, NoiseLevels, make_loss

pytestmark = pytest.mark.usefixtures("cached_programs")

MODELS = {"wan": tiny_checkpoint, "cogvideox": tiny_cogvideox_checkpoint, "hunyuanvideo": tiny_hunyuan_checkpoint}
LORA = LoraConfig(rank=2)
TRAINABLE = ("int8-weights", "fp8-weights")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: str(write(tmp_path_factory.mktemp(name))) for name, write in MODELS.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data"), 2)


def projection(dtype):
    """Return a dense projection of 24 to 40 channels."""
    return linear(24, 40, ("embed", "mlp"), dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def quantize_projection(dense, precision):
    """Return the projection with its weight quantized in NumPy, with a scale for each output channel."""
    layer = QuantizedLinear(as_shapes(lambda rngs: projection(dense.dtype)), PRECISIONS[precision])
    kernel, largest = np.asarray(dense.kernel[...]), {"int8": 127, "fp8": 448}[layer.number_format]
    scale = np.abs(kernel).max(0) / largest
    values = kernel / scale
    dtype = layer.values.get_value().dtype
    layer.values.set_value(jnp.asarray(np.rint(values) if layer.number_format == "int8" else values).astype(dtype))
    layer.scale.set_value(jnp.asarray(scale, jnp.float32))
    layer.bias = dense.bias
    return layer


def dequantize_projection(layer, dense):
    """Return the dense projection with the dequantized weight."""
    dense.kernel[...] = layer.values[...].astype(jnp.float32) * layer.scale[...][None]
    return dense


@pytest.mark.parametrize("precision", TRAINABLE)
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_gradients_of_an_8_bit_layer_are_those_of_floats(precision, dtype, bound):
    dense = projection(dtype)
    layer = quantize_projection(dense, precision)
    adapted_layers = [LoraLinear(base, LORA, nnx.Rngs(1)) for base in (layer, dequantize_projection(layer, dense))]
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(2, 7, 24)), dtype)
    up = jnp.asarray(random.normal(size=(2, 40)) / 4, jnp.float32)
    outputs, gradients = [], []
    for adapted in adapted_layers:
        adapted.lora_up.kernel[...] = up
        graphdef, factors, frozen = nnx.split(adapted, is_factor, ...)

        def loss(factors, x, graphdef=graphdef, frozen=frozen):
            y = nnx.merge(graphdef, factors, frozen)(x)
            return jnp.square(y.astype(jnp.float32)).sum(), y

        (_, y), gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)(factors, x)
        outputs.append(np.asarray(y, np.float64))
        gradients.append([np.asarray(x, np.float64) for x in jax.tree.leaves(gradient)])
    assert error(*outputs) <= bound
    assert len(gradients[0]) == 3
    assert (
        max(
            error(gradient_of_quantized, gradient_of_float)
            for gradient_of_quantized, gradient_of_float in zip(*gradients, strict=True)
        )
        <= bound
    )


def first_gradients(pipe, network, config):
    """Return the loss and the gradients of the factors for one batch of noise."""
    rules = network_of(config, pipe.components.kinds).rules
    adapted, _ = adapt(network, rules, LORA, 0)
    random = np.random.default_rng(3)
    for path, weight in nnx.to_flat_state(nnx.state(adapted)):
        if is_factor(path, weight) and path[-2] == "lora_up":  # with zeros, the other factor has no gradient
            weight.set_value(jnp.asarray(random.normal(size=weight.get_value().shape) / 8, jnp.float32))
            nnx.update(adapted, nnx.from_flat_state([(path, weight)]))
    settings = pipe.settings(size=(32, 32), frames=5, guidance_scale=1.0)
    conditioning = jax.tree.map(jnp.asarray, pipe.encode("a", size=(32, 32), frames=5))
    _, *shape = pipe.model.spec.latent_shape(settings)
    latents = jnp.asarray(random.normal(size=(1, *shape)), jnp.float32)
    loss = make_loss(pipe, NoiseLevels())
    graphdef, factors, frozen = nnx.split(adapted, is_factor, ...)

    def loss_of_factors(factors, batch):
        return loss(nnx.merge(graphdef, factors, frozen), batch, jax.random.key(4))[0]

    loss_value, gradients = jax.jit(jax.value_and_grad(loss_of_factors))(factors, Batch(latents, conditioning))
    return float(loss_value), [np.asarray(x) for x in jax.tree.leaves(gradients)]


@pytest.mark.slow  # `test_gradients_of_an_8_bit_layer_are_those_of_floats` is quick
@pytest.mark.parametrize("precision", TRAINABLE)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_an_8_bit_network_are_those_of_floats(model, precision, checkpoints):
    pipes = [wanjax.load(checkpoints[model], dtype="float32", precision=name) for name in (precision, None)]
    networks = [pipe.components.get("transformer") for pipe in pipes]
    dense = {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(networks[1])}
    for path, layer in quantized_layers(networks[0]).items():
        values = layer.values[...].astype(jnp.float32) * layer.scale[...][..., None, :]
        float_values = dense[path].kernel[...]
        assert 0 < error(values, float_values) < 0.1
        dense[path].kernel[...] = values
    config = pipes[0].model.spec.networks["transformer"]
    # Gradients of q and k in cross-attention are sums that nearly cancel: a change of the weights by 1e-7 changes them
    # by 2e-4, and rounding the weights to int8 by 1e-2.
    bound = 1e-3
    (loss, gradients), (exact_loss, exact_gradients) = (
        first_gradients(pipe, network, config) for pipe, network in zip(pipes, networks, strict=True)
    )
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    assert len(gradients) == len(exact_gradients) > 2
    assert min(np.abs(gradient).max() for gradient in gradients) > 0
    assert (
        max(
            error(gradient, exact_gradient) for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True)
        )
        <= bound
    )
    adapted, _ = adapt(networks[0], network_of(config, pipes[0].components.kinds).rules, LORA, 0)
    restored = quantized_layers(remove_adapters(adapted))
    assert restored.keys() == quantized_layers(networks[0]).keys()


CONFIG = TrainConfig(
    steps=2,
    size=(32, 32),
    frames=5,
    buckets=False,
    lora=LORA,
    sample_prompts=("a",),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def test_a_lora_is_trained_on_8_bit_weights_and_loads_onto_floats(checkpoints, data, tmp_path):
    """Training does not change the base weights, and the LoRA loads onto float weights and onto 8-bit weights."""
    pipe = wanjax.load(checkpoints["wan"], precision="int8-weights")
    values_before = {path: np.asarray(layer.values[...]) for path, layer in quantized_layers(pipe.transformer).items()}
    file = Training(pipe, data, tmp_path / "out", CONFIG).run()
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) and line["gradient"] > 0 for line in lines)
    assert (tmp_path / "out/samples/000002-0.mp4").exists()
    layers_after = quantized_layers(wanjax.load(checkpoints["wan"], precision="int8-weights").transformer)
    assert all(np.array_equal(values_before[path], layer.values[...]) for path, layer in layers_after.items())
    assert max(np.abs(x).max() for name, x in load_safetensors(file).items() if "lora_B" in name) > 0
    lora_options = {"lora": str(file), "note": lambda sentence: None}
    layers_with_lora = quantized_layers(
        wanjax.load(checkpoints["wan"], precision="int8-weights", **lora_options).transformer
    )
    assert any(not np.array_equal(values_before[path], layer.values[...]) for path, layer in layers_with_lora.items())
    wanjax.load(checkpoints["wan"], **lora_options).components.get("transformer")


@pytest.mark.slow  # tests/checkpoints/test_quantize.py has a quick test: both have equal weights
def test_a_converted_8_bit_checkpoint_can_be_trained(checkpoints, data, tmp_path):
    """Training gives the same LoRA if the weights are quantized by a conversion or while the checkpoint is read."""
    succeeded(wanjax_command("convert", checkpoints["wan"], str(tmp_path / "q"), "--precision", "int8-weights"))
    trainings = [
        Training(
            wanjax.load(model, precision="int8-weights"), data, tmp_path / f"out{number}", replace(CONFIG, steps=1)
        )
        for number, model in enumerate((checkpoints["wan"], str(tmp_path / "q")))
    ]
    converted_while_read, converted_before = (load_safetensors(training.run()) for training in trainings)
    assert converted_while_read.keys() == converted_before.keys()
    assert all(np.array_equal(converted_while_read[name], converted_before[name]) for name in converted_while_read)


VIDEO = {"size": (32, 32), "frames": 5, "steps": 1, "seed": 1}
BOUNDS = {"int8-weights": 0.01, "fp8-weights": 0.05}  # as in tests/pipelines/test_precision.py


@pytest.mark.parametrize("precision", quick(["int8-weights"], list(BOUNDS)))
def test_a_lora_has_nearly_the_same_effect_on_8_bit_weights(precision, checkpoints, tmp_path):
    """The LoRA is merged before the weights are quantized, or added to the quantized weights."""
    name, random = "blocks.{}.attn1.to_v", np.random.default_rng(5)
    factors = {
        f"{name.format(block)}.lora_{letter}.weight": random.normal(size=shape).astype(np.float32)
        for block in range(2)
        for letter, shape in (("A", (2, 24)), ("B", (24, 2)))
    }
    file = tmp_path / "lora.safetensors"
    save_safetensors(file, factors)
    options = {"dtype": "float32", "note": lambda sentence: None}
    floats = wanjax.load(checkpoints["wan"], lora=str(file), **options)
    conditioning = floats.encode("a", size=(32, 32), frames=5)
    base = wanjax.load(checkpoints["wan"], **options)
    exact, without_lora = (np.asarray(pipe.denoise(conditioning, **VIDEO)) for pipe in (floats, base))
    merged = wanjax.load(checkpoints["wan"], lora=str(file), precision=precision, **options)
    dense, untrained = (
        {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(pipe.components.get("transformer"))}
        for pipe in (floats, base)
    )
    for path, layer in quantized_layers(merged.components.get("transformer")).items():  # the sum is quantized once
        for block in range(2):
            rounded_sum = quantize(np.asarray(dense[path].kernel[...][block]), layer)
            np.testing.assert_array_equal(np.asarray(layer.values[...][block]), rounded_sum.values)
    on_quantized = wanjax.load(checkpoints["wan"], precision=precision, **options)
    network_kind = network_of(on_quantized.model.spec.networks["transformer"], on_quantized.components.kinds)
    network, _ = adapt(
        on_quantized.components.get("transformer"), network_kind.rules, LoraConfig(2, targets=("attn1.to_v",)), 0
    )
    change = dense["blocks.self_attn.v"].kernel[...] - untrained["blocks.self_attn.v"].kernel[...]
    down = np.stack([factors[f"{name.format(block)}.lora_A.weight"].T for block in range(2)])
    layer = network.blocks.self_attn.v
    layer.lora_down.kernel[...] = jnp.asarray(down)
    layer.lora_up.kernel[...] = jnp.asarray(np.linalg.pinv(down) @ np.asarray(change))  # rows as in the network
    on_quantized.components.override("transformer", network)
    for pipe in (merged, on_quantized):
        latents = np.asarray(pipe.denoise(conditioning, **VIDEO))
        assert error(latents, exact) <= BOUNDS[precision] < error(without_lora, exact) / 2


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_training_with_quantized_inputs_is_refused(precision, checkpoints, data, tmp_path):
    """Quantized inputs have no gradient. They are refused in a step, and before any clip is encoded."""
    pipe = wanjax.load(checkpoints["wan"], precision=precision)
    with pytest.raises(WanjaxError, match=line_with_words(f"{precision} inputs gradient {precision}-weights none")):
        Training(pipe, data, tmp_path, CONFIG)
    layer = next(iter(quantized_layers(pipe.components.get("transformer")).values()))
    graphdef, state = nnx.split(layer)
    first_layer = nnx.merge(graphdef, jax.tree.map(lambda x: x[0], state))
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(lambda x: first_layer(x).sum())(jnp.ones((1, 3, layer.values.shape[-2]), layer.dtype))


def test_a_checkpoint_of_8_bits_is_refused_with_advice_that_works(checkpoints, data, tmp_path):
    """No option changes the precision of stored weights, so only the original checkpoint can be trained."""
    folder = str(tmp_path / "mine")
    succeeded(wanjax_command("convert", checkpoints["wan"], folder, "--precision", "int8"))
    words = line_with_words("int8 inputs gradient original checkpoint int8-weights")
    with pytest.raises(WanjaxError, match=words):
        Training(wanjax.load(folder), data, tmp_path / "out", CONFIG)
    options = {"lora": LORA, "optimizer_config": OptimizerConfig()}
    with pytest.raises(WanjaxError, match=words):
        estimate_training(wanjax.registry.model_description(folder), "cpu", **options)
    with pytest.raises(WanjaxError, match=r"stored as int8: give the original checkpoint for precision int8-weights$"):
        wanjax.load(folder, precision="int8-weights")


def test_training_all_8_bit_weights_is_refused(checkpoints, data, tmp_path):
    pipe = wanjax.load(checkpoints["wan"], precision="int8-weights", param_dtype="float32")
    with pytest.raises(WanjaxError, match=line_with_words("8 bits int8-weights LoRA none")):
        Training(pipe, data, tmp_path, replace(CONFIG, lora=None))


def test_a_plan_counts_the_bytes_of_8_bit_weights():
    description = wanjax.registry.model_description("nano")
    options = {"lora": LORA, "optimizer_config": OptimizerConfig()}
    floats, integers = (
        estimate_training(wanjax.loading.with_precision(description, name), "cpu", **options)
        for name in ("none", "int8-weights")
    )
    network = network_of(description.model.spec.networks["transformer"], description.family.networks)
    dtype = description.settings.dtype
    saved = network.weight_bytes(dtype) - network.weight_bytes(dtype, PRECISIONS["int8-weights"])
    difference = floats.weights_bytes_per_chip - integers.weights_bytes_per_chip
    assert integers.precision == "int8-weights"
    assert difference == pytest.approx(saved, rel=0.02)
    with pytest.raises(WanjaxError, match="gradient"):
        estimate_training(wanjax.loading.with_precision(description, "int8"), "cpu", **options)
