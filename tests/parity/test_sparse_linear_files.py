# SPDX-License-Identifier: Apache-2.0
"""TurboDiffusion's files, plain and with 8-bit weights, against its computation in torch.

The network is that of turbodiffusion/rcm/networks/wan2pt1.py, the attention that of turbodiffusion/SLA/core.py and
utils.py, the weights those of turbodiffusion/ops/core.py and ops/quant/quant.hpp of thu-ml/TurboDiffusion.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.compare import error
from tests.support.words import line_with_words
from wanjax.checkpoints.network_kinds import network
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AttentionConfig, SparseLinearAttentionConfig
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source

HEADS, HEAD, LAYERS, MLP, TEXT, CHANNELS = 2, 128, 2, 320, 24, 4
WIDTH = HEADS * HEAD
PATCH = (1, 2, 2)
FRAMES, ROWS, COLUMNS = 5, 17, 16  # patches: 1,360 tokens, 22 blocks of 64 keys, the last of 16
TOP = 0.1
PROJECTION = "self_attn.attn_op.local_attn.proj_l"
PLAIN_BOUND, EIGHT_BIT_BOUND = 2e-5, 1e-2


def tensors() -> dict[str, torch.Tensor]:
    """Return random weights by the names of the authors' files."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    def linear(name: str, out: int, inside: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": draw(out, inside, scale=inside**-0.5), f"{name}.bias": draw(out, scale=0.1)}

    cells = math.prod(PATCH) * CHANNELS
    result = linear("patch_embedding", WIDTH, cells)
    result |= linear("text_embedding.0", WIDTH, TEXT) | linear("text_embedding.2", WIDTH, WIDTH)
    result |= linear("time_embedding.0", WIDTH, 32) | linear("time_embedding.2", WIDTH, WIDTH)
    result |= linear("time_projection.1", 6 * WIDTH, WIDTH)
    for block in (f"blocks.{i}" for i in range(LAYERS)):
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                result |= linear(f"{block}.{attention}.{name}", WIDTH, WIDTH)
            for name in ("norm_q", "norm_k"):
                result[f"{block}.{attention}.{name}.weight"] = 1 + draw(WIDTH, scale=0.1)
        result |= linear(f"{block}.{PROJECTION}", HEAD, HEAD)
        result |= {f"{block}.norm3.weight": 1 + draw(WIDTH, scale=0.1), f"{block}.norm3.bias": draw(WIDTH, scale=0.1)}
        result |= linear(f"{block}.ffn.0", MLP, WIDTH) | linear(f"{block}.ffn.2", WIDTH, MLP)
        result[f"{block}.modulation"] = draw(1, 6, WIDTH, scale=0.1)
    result |= linear("head.head", cells, WIDTH)
    result["head.modulation"] = draw(1, 2, WIDTH, scale=0.1)
    return result


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit integers of a matrix, and the scale of each block of 128 × 128: its largest number becomes 127."""
    rows, columns = (math.ceil(size / 128) for size in x.shape)
    rounded, scale = torch.zeros(x.shape, dtype=torch.int8), torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            largest = x[block].abs().max().clamp(min=1e-8)
            rounded[block] = (x[block] * (128 / largest)).round().clamp(-128, 127).to(torch.int8)
            scale[i, j] = largest / 128
    return rounded, scale


def dequantise(rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale_of_elements = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return rounded.float() * scale_of_elements[: rounded.shape[0], : rounded.shape[1]]


def quantise_file(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised file: all projections of blocks except that of linear attention."""
    result = {}
    for key, x in tensors.items():
        module, _, leaf = key.rpartition(".")
        if key.startswith("blocks.") and leaf == "weight" and x.ndim == 2 and not module.endswith("proj_l"):
            result[f"{module}.int8_weight"], result[f"{module}.scale"] = quantise(x)
        else:
            result[key] = x
    return result


@dataclass
class Reference:
    """The network in float32, of a file's tensors; `rounded` also rounds the inputs of a quantised projection."""

    tensors: dict[str, torch.Tensor]
    rounded: bool = True
    blocks: list[int] = field(default_factory=list)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.tensors[f"{name}.bias"]
        if f"{name}.int8_weight" not in self.tensors:
            return functional.linear(x, self.tensors[f"{name}.weight"], bias)
        weight = dequantise(self.tensors[f"{name}.int8_weight"], self.tensors[f"{name}.scale"])
        flat = x.reshape(-1, x.shape[-1])
        flat = dequantise(*quantise(flat)) if self.rounded else flat
        return functional.linear(flat.reshape(x.shape), weight, bias)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.tensors[f"{name}.weight"]

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)  # [B N L D]

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Sparse-linear attention [B N L D]."""
        length = q.shape[2]
        centred_k = k - k.mean(2, keepdim=True)
        q_features = torch.stack([x.mean(2) for x in q.split(128, 2)], 2)
        k_features = torch.stack([x.mean(2) for x in centred_k.split(64, 2)], 2)
        indices = torch.topk(q_features @ k_features.transpose(2, 3), int(TOP * k_features.shape[2])).indices
        self.blocks.append(indices.shape[-1])
        visible = torch.zeros(*q_features.shape[:3], k_features.shape[2], dtype=torch.bool).scatter_(-1, indices, True)
        visible = visible.repeat_interleave(128, 2)[:, :, :length].repeat_interleave(64, 3)[..., :length]
        sparse = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        q_features, k_features = q.softmax(-1), k.softmax(-1)
        linear = (
            q_features
            @ (k_features.transpose(2, 3) @ v)
            / (1e-5 + (q_features * k_features.sum(2, keepdim=True)).sum(-1, keepdim=True))
        )
        return sparse + self.linear(name, linear)

    def block(self, name: str, x: torch.Tensor, mod: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = (self.tensors[f"{name}.modulation"] + mod).chunk(6, 1)
        flat = partial(functional.layer_norm, normalized_shape=(WIDTH,), eps=1e-6)
        y = flat(x) * (1 + scale) + shift
        self_attn = f"{name}.self_attn"
        q, k = (
            rotate(self.heads(self.norm(f"{self_attn}.norm_{n}", self.linear(f"{self_attn}.{n}", y)))) for n in "qk"
        )
        y = self.attend(f"{name}.{PROJECTION}", q, k, self.heads(self.linear(f"{self_attn}.v", y)))
        x = x + self.linear(f"{self_attn}.o", y.transpose(1, 2).flatten(2)) * gate
        cross_attn = f"{name}.cross_attn"
        y = flat(x, weight=self.tensors[f"{name}.norm3.weight"], bias=self.tensors[f"{name}.norm3.bias"])
        q = self.heads(self.norm(f"{cross_attn}.norm_q", self.linear(f"{cross_attn}.q", y)))
        k = self.heads(self.norm(f"{cross_attn}.norm_k", self.linear(f"{cross_attn}.k", text)))
        y = functional.scaled_dot_product_attention(q, k, self.heads(self.linear(f"{cross_attn}.v", text)))
        x = x + self.linear(f"{cross_attn}.o", y.transpose(1, 2).flatten(2))
        y = self.linear(f"{name}.ffn.0", flat(x) * (1 + scale_2) + shift_2)
        return x + self.linear(f"{name}.ffn.2", functional.gelu(y, approximate="tanh")) * gate_2

    def __call__(self, latents: torch.Tensor, t: float, text: torch.Tensor) -> torch.Tensor:
        """Return the velocity of latents [B C T H W] at a timestep, for encoded prompts [B S E]."""
        grid = latents.unflatten(4, (COLUMNS, 2)).unflatten(3, (ROWS, 2))  # [B C T h 2 w 2]
        x = self.linear("patch_embedding", grid.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3))
        angles = t * 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
        time = torch.cat([angles.cos(), angles.sin()]).float()[None]
        time = self.linear("time_embedding.2", functional.silu(self.linear("time_embedding.0", time)))
        mod = self.linear("time_projection.1", functional.silu(time)).unflatten(1, (6, WIDTH))
        text = self.linear("text_embedding.0", text)
        text = self.linear("text_embedding.2", functional.gelu(text, approximate="tanh"))
        for i in range(LAYERS):
            x = self.block(f"blocks.{i}", x, mod, text)
        shift, scale = (self.tensors["head.modulation"] + time[:, None]).chunk(2, 1)
        x = self.linear("head.head", functional.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale) + shift)
        x = x.unflatten(2, (1, 2, 2, CHANNELS)).unflatten(1, (FRAMES, ROWS, COLUMNS))  # [B T h w 1 2 2 C]
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(latents.shape)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels [B N L D] by the token's frame, row and column: 22, 21 and 21 pairs."""
    positions = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in (FRAMES, ROWS, COLUMNS)))
    sizes = (HEAD - 2 * (HEAD // 6 * 2), HEAD // 6 * 2, HEAD // 6 * 2)
    angles = [
        position[:, None] * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        for position, size in zip(positions.T, sizes, strict=True)
    ]
    rotation = torch.polar(torch.ones(1, dtype=torch.float64), torch.cat(angles, 1))
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2).float()


@pytest.fixture(scope="module")
def operands():
    """Return latents [B C T H W] and encoded prompts [B S E]."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, CHANNELS, FRAMES, 2 * ROWS, 2 * COLUMNS)
    return torch.randn(shape, generator=generator), torch.randn((1, 7, TEXT), generator=generator)


T = 934.0


def velocity_of(path, latents, text, param_dtype=jnp.float32):
    """Return the velocity [B C T H W] of the network in a file."""
    source = open_source(path)
    read = network(source, "transformer", NETWORKS)
    assert read.config.sparse_linear
    shapes = read.abstract(dtype=jnp.float32, param_dtype=param_dtype)
    assert shapes.attention == AttentionConfig(sparse=SparseLinearAttentionConfig(TOP))
    transformer = source["transformer"].load(shapes, read.rules)
    x = jnp.asarray(np.moveaxis(latents.numpy(), 1, -1))
    forward = jax.jit(lambda network, *arguments: network(*arguments))
    return np.moveaxis(np.asarray(forward(transformer, x, jnp.array([T]), jnp.asarray(text.numpy()))), -1, 1)


@pytest.mark.parametrize("kind", ["exported", "trained"])
def test_a_plain_file_predicts_as_the_reference(kind, operands, tmp_path):
    """A file of the trainer has its tensors in a nested table, and a prefix in their names."""
    weights, path = tensors(), tmp_path / "model.pth"
    with torch.inference_mode():
        reference = Reference(weights)
        expected = reference(operands[0], T, operands[1]).numpy()
    assert reference.blocks == [2, 2]  # of 22
    file_contents = (
        weights if kind == "exported" else {"state_dict": {f"net.{key}": x for key, x in weights.items()}, "step": 7}
    )
    torch.save(file_contents, path)
    measured = error(velocity_of(path, *operands), expected)
    print(f"the velocity of a {kind} file: {measured:.1e}")
    assert measured <= PLAIN_BOUND


def test_a_quantised_file_predicts_as_the_reference(operands, tmp_path):
    """Its weights are read in bfloat16; unlike in the reference, inputs are not rounded to 8 bits."""
    quantised, path = quantise_file(tensors()), tmp_path / "model-quant.pth"
    torch.save(quantised, path)
    with torch.inference_mode():
        only_weights, weights_and_inputs = (
            Reference(quantised, x)(operands[0], T, operands[1]).numpy() for x in (False, True)
        )
    result = velocity_of(path, *operands, param_dtype=jnp.bfloat16)
    distance, total = error(result, only_weights), error(result, weights_and_inputs)
    print(f"the velocity of 8-bit weights: {distance:.1e}, and of 8-bit products {total:.1e}")
    assert distance <= EIGHT_BIT_BOUND
    assert total <= 2 * EIGHT_BIT_BOUND


def test_a_file_without_the_projection_of_a_block_is_refused(tmp_path):
    damaged = {key: x for key, x in tensors().items() if key != f"blocks.1.{PROJECTION}.bias"}
    torch.save(damaged, tmp_path / "model.pth")
    source = open_source(tmp_path / "model.pth")
    read = network(source, "transformer", NETWORKS)
    with pytest.raises(WanjaxError, match=line_with_words("missing blocks.1.attn1.proj_l.bias")):
        source["transformer"].load(read.abstract(dtype=jnp.float32, param_dtype=jnp.float32), read.rules)
