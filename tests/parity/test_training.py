# SPDX-License-Identifier: Apache-2.0
"""Training against torch: diffusers' model, PEFT's LoRA, torch's AdamW, the same noise and timesteps."""

from functools import cached_property
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from flax import nnx

import wanjax
from tests.support.tiny import (
    COGVIDEOX_SCHEDULER,
    LATENT_CHANNELS,
    TEXT_LENGTH,
    TEXT_WIDTH,
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_experts_checkpoint,
    tiny_image_checkpoint,
)
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.modules import ExportedTensors, parameters
from wanjax.checkpoints.network_kinds import network_of
from wanjax.training.adapters import LoraConfig, LoraLinear, adapt, export_factors, is_factor
from wanjax.training.loop import Trainer, all_parameters
from wanjax.training.objective import Batch, denoising_error
from wanjax.training.optimizers import OptimizerConfig, make_optimizer
from wanjax.training.saving import save_lora

pytestmark = pytest.mark.usefixtures("cached_programs")

FILE = "diffusion_pytorch_model.safetensors"
STEPS, BATCH_SIZE, RATE = 3, 2, 1e-3
LATENTS = (BATCH_SIZE, LATENT_CHANNELS, 3, 4, 6)
LORA = LoraConfig(rank=4, alpha=6.0, targets=("to_q", "to_k", "to_v", "to_out.0"))
OPTIMIZER = OptimizerConfig(learning_rate=RATE, max_grad_norm=0.0, weight_decay=0.01, beta2=0.999)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Wan:
    """A Wan model, whose noise levels are fractions of a thousand timesteps."""

    component, text = "transformer", (BATCH_SIZE, 512, TEXT_WIDTH)
    fractions = np.array([0.31, 0.77], np.float32)

    def __init__(self, folder):
        self.folder = self.write_checkpoint(folder)
        self.pipe = wanjax.load(self.folder)
        self.reference = WanTransformer3DModel.from_pretrained(self.folder / self.component)

    def write_checkpoint(self, folder):
        return tiny_checkpoint(folder)

    @cached_property
    def inputs(self):
        return {}

    def loss(self, model, x0, noise):
        s = torch.tensor(self.fractions).reshape(-1, 1, 1, 1, 1)
        x = (1 - s) * x0 + s * noise
        text = torch.tensor(normal(2, *self.text))
        prediction = model(
            self.model_input(x), 1000 * torch.tensor(self.fractions), text, **self.image_options(), return_dict=False
        )
        return torch.mean((prediction[0] - (noise - x0)) ** 2)

    def model_input(self, x):
        return x

    def image_options(self):
        return {}


class WanImage(Wan):
    @cached_property
    def inputs(self):
        return {
            "condition": normal(5, BATCH_SIZE, LATENT_CHANNELS + 4, *LATENTS[2:]),
            "image_embeds": normal(6, BATCH_SIZE, 5, 16),
        }

    def write_checkpoint(self, folder):
        return tiny_image_checkpoint(folder)

    def model_input(self, x):
        return torch.cat([x, torch.tensor(self.inputs["condition"])], 1)

    def image_options(self):
        return {"encoder_hidden_states_image": torch.tensor(self.inputs["image_embeds"])}


class WanExpert(Wan):
    """The second of two experts, at its noise levels."""

    component, fractions = "transformer_2", np.array([0.12, 0.8], np.float32)

    def write_checkpoint(self, folder):
        folder = tiny_experts_checkpoint(folder)
        first, second = (folder / name / FILE for name in ("transformer", "transformer_2"))
        save_safetensors(second, {name: np.flip(x) * 0.9 for name, x in load_safetensors(first).items()})
        return folder


class CogVideoX:
    """CogVideoX-1.5, whose training script weights the error of the clean sample."""

    component, text = "transformer", (BATCH_SIZE, TEXT_LENGTH, TEXT_WIDTH)
    timesteps = np.array([310, 771])

    def __init__(self, folder):
        self.folder = tiny_cogvideox_checkpoint(folder)
        self.pipe = wanjax.load(self.folder)
        self.reference = CogVideoXTransformer3DModel.from_pretrained(self.folder / "transformer")
        self.fractions = ((self.timesteps + 0.5) / 1000).astype(np.float32)
        self.inputs = {}

    def loss(self, model, x0, noise):
        entries = {k: v for k, v in COGVIDEOX_SCHEDULER.items() if not k.startswith("_")}
        scheduler, t = CogVideoXDDIMScheduler(**entries), torch.tensor(self.timesteps)
        x0 = torch.cat([x0[:, :, :1], x0], 2).transpose(1, 2)  # [B T C H W], padded to patches of two frames
        noise = noise.transpose(1, 2)
        x = scheduler.add_noise(x0, noise, t)
        pipeline = SimpleNamespace(
            vae_scale_factor_spatial=8,
            transformer=SimpleNamespace(config=self.reference.config),
        )
        frames, (height, width) = x.shape[1], LATENTS[3:]
        rope = CogVideoXPipeline._prepare_rotary_positional_embeddings(
            pipeline, 8 * height, 8 * width, frames, torch.device("cpu")
        )
        prediction = model(x, torch.tensor(normal(2, *self.text)), t, image_rotary_emb=rope, return_dict=False)[0]
        clean = scheduler.get_velocity(prediction, x, t)
        weights = 1 / (1 - scheduler.alphas_cumprod[t]).reshape(-1, 1, 1, 1, 1)
        return torch.mean(weights * (clean - x0) ** 2)


CASES = {"wan": Wan, "wan-i2v": WanImage, "wan-experts": WanExpert, "cogvideox1.5": CogVideoX}


@pytest.fixture(
    scope="module",
    params=["wan", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cogvideox1.5", "wan-i2v", "wan-experts"))],
)
def case(request, tmp_path_factory):
    return CASES[request.param](tmp_path_factory.mktemp(request.param))


def noise_of(case):
    x = jnp.asarray(normal(0, *LATENTS))
    return normal(1, *case.pipe.model.spec.to_training_latents(x).shape)


def make_batch(case):
    text = normal(2, *case.text)
    texts = {"prompt_embeds": text, "negative_prompt_embeds": text}
    encoded = case.pipe.model.conditioning_type(**{name: jnp.asarray(x) for name, x in (texts | case.inputs).items()})
    return Batch(jnp.asarray(normal(0, *LATENTS)), encoded)


def make_loss(case):
    def loss(network, batch, key):
        value = denoising_error(case.pipe, network, *batch, key)
        return value, {}

    return loss


def make_data(case):
    return make_batch(case), jnp.asarray(case.fractions), jnp.asarray(noise_of(case))


def reference_loss(case, model):
    noise = torch.tensor(np.moveaxis(noise_of(case), -1, 1).copy())
    return case.loss(model, torch.tensor(normal(0, *LATENTS)), noise)


def gradients_of(network, trainable, loss, data):
    graphdef, weights, rest = nnx.split(network, trainable, ...)

    @jax.jit
    def compute(weights):
        return jax.value_and_grad(lambda w: loss(nnx.merge(graphdef, w, rest), data, jax.random.key(0))[0])(weights)

    value, gradients = compute(weights)
    return float(value), nnx.merge(graphdef, gradients, rest)


def train(case, network, trainable, tmp_path):
    trainer = Trainer(network, make_loss(case), make_optimizer(OPTIMIZER, STEPS), tmp_path, 0, trained=trainable)
    trainer.run(STEPS, lambda step, generator: make_data(case))
    trainer.close()
    return trainer.network()


def train_reference(case, model):
    """Train a reference for some steps; return the first loss, the first gradients, and the model's parameters."""
    weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
    adam = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.01)
    first = None
    for _ in range(STEPS):
        adam.zero_grad()
        loss = reference_loss(case, model)
        loss.backward()
        if first is None:
            first = (
                float(loss.detach()),
                {name: x.grad.numpy().copy() for name, x in weights.items() if x.grad is not None},
            )
        adam.step()
    return *first, {name: x.detach().numpy() for name, x in weights.items()}


def assert_near(result, expected, bound, description):
    assert result.keys() == expected.keys()
    largest = max(
        np.abs(result[key] - expected[key]).max() / max(np.abs(expected[key]).max(), 1e-6) for key in expected
    )
    total = np.sqrt(
        sum(((result[k] - expected[k]) ** 2).sum() for k in expected) / sum((expected[k] ** 2).sum() for k in expected)
    )
    print(f"{description}: largest {largest:.1e}, together {total:.1e}")
    assert total <= bound
    return largest


def test_training_a_lora_equals_torch(case, tmp_path):
    rules = network_of(case.pipe.model.spec.networks[case.component], case.pipe.components.kinds).rules
    network, trainable = adapt_network(case, rules)
    model = case.reference
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(LORA.targets), init_lora_weights=False))
    initial_factors = {_peft_name(name): x for name, x in export_factors(network, rules, trainable).items()}
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.requires_grad_("lora_" in name)
            if "lora_" in name:
                x.copy_(torch.tensor(initial_factors[name]))
    loss, gradients, weights = train_reference(case, model)
    value, result = gradients_of(network, is_factor, make_loss(case), make_data(case))
    assert abs(value - loss) <= 1e-6 * max(1, abs(loss))
    factors = {_peft_name(name): x for name, x in export_factors(result, rules, trainable).items()}
    assert_near(factors, gradients, 1e-5, f"gradients of {type(case).__name__}")
    trained_factors = export_factors(train(case, network, is_factor, tmp_path), rules, trainable)
    largest = assert_near({_peft_name(k): x for k, x in trained_factors.items()}, weights, 1e-5, "weights")
    assert largest <= 1e-4
    model.delete_adapters("default")
    case.pipe.free()


def test_a_trained_lora_is_the_same_in_diffusers(case, tmp_path):
    """Compare the adapted network, the file loaded by diffusers, and the file merged by wanjax."""
    info = network_of(case.pipe.model.spec.networks[case.component], case.pipe.components.kinds)
    network, trainable = adapt_network(case, info.rules, std=1.0)
    file = tmp_path / "lora.safetensors"
    save_lora(file, export_factors(network, info.rules, trainable), LORA, info)
    model = type(case.reference).from_pretrained(case.folder / case.component)
    unadapted = float(reference_loss(case, model).detach())
    pipeline = CogVideoXPipeline if isinstance(case, CogVideoX) else WanPipeline
    state = pipeline.lora_state_dict(str(file), return_lora_metadata=True)
    assert not [key for key in state[0] if not key.startswith("transformer.")]
    pipeline.load_lora_into_transformer(state[0], model, adapter_name="trained", metadata=state[1])
    with torch.no_grad():
        expected = float(reference_loss(case, model))
    value, _ = gradients_of(network, is_factor, make_loss(case), make_data(case))
    assert abs(value - expected) <= 1e-6 * max(1, abs(expected))
    assert abs(unadapted - expected) > 1e-4 * abs(expected)
    expert = "low=" if case.component == "transformer_2" else ""
    merged = wanjax.load(case.folder, lora=f"{expert}{file}", note=lambda text: None)
    network = merged.components.get(case.component)
    value, _ = gradients_of(network, all_parameters, make_loss(case), make_data(case))
    assert abs(value - expected) <= 2e-6 * max(1, abs(expected))


def adapt_network(case, rules, std=0.1):
    """Return the adapted network with factors that all differ from zero, and the names of the adapted layers."""
    network, trainable = adapt(case.pipe.components.get(case.component), rules, LORA, 0)
    for seed, (_, module) in enumerate(nnx.iter_modules(network)):
        if isinstance(module, LoraLinear):  # at zeros, half of the gradients would be zero
            kernel = module.lora_up.kernel
            kernel[...] = jnp.asarray(std * normal(100 + seed, *kernel.shape))
    return network, trainable


def _peft_name(name):
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


@pytest.mark.slow
def test_training_all_weights_equals_torch(case, tmp_path):
    info = network_of(case.pipe.model.spec.networks[case.component], case.pipe.components.kinds)
    kind = type(case.reference)
    model = kind.from_pretrained(case.folder / case.component).requires_grad_(True)
    loss, gradients, weights = train_reference(case, model)
    network = case.pipe.components.get(case.component)
    value, result = gradients_of(network, all_parameters, make_loss(case), make_data(case))
    assert abs(value - loss) <= 1e-6 * max(1, abs(loss))
    assert_near(_export(result, info.rules, gradients), gradients, 1e-5, f"gradients of {type(case).__name__}")
    trained_network = train(case, network, all_parameters, tmp_path)
    assert_near(_export(trained_network, info.rules, weights), weights, 1e-5, "weights")
    case.pipe.free()


def _export(network, rules, keys):
    exported = ExportedTensors({name: np.asarray(x) for name, x in parameters(network).items()}, rules)
    return {key: np.asarray(exported.read(key)) for key in exported.specs if key in keys}
