# SPDX-License-Identifier: Apache-2.0
"""The automatic choice of a mesh. Runs, plans, benchmarks and trainings all use it.

`choose_mesh` selects the fastest mesh on which the weights fit. It tries all meshes, and estimates the time of a step
on each with a cheap model. For each device the model counts the operations on its heads, tokens and prompts, the bytes
of the all-gather of weights, and the bytes of tokens that attention exchanges. The model counts no time for sending the
keys of ring attention, because attention computes at the same time. The model assumes the same utilization on all
meshes. The estimated seconds can therefore compare meshes, but do not predict the time of a step. Nothing is compiled
here. A plan compiles its programs for the chosen mesh afterwards.
"""

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.offload import AUTO_OFFLOAD, Offload
from wanjax.layers.precision import Precision
from wanjax.pipelines.family import Family
from wanjax.pipelines.memory import total_memory
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.model import ForwardCost, VideoModel
from wanjax.pipelines.settings import Settings
from wanjax.pricing.chips import Card, Chip
from wanjax.pricing.roofline import Machine, device_model
from wanjax.sharding import SHARDING_RULES, ShardingRules

ATTENTION_UTILIZATION, MATMUL_UTILIZATION = 0.5, 0.75  # fractions of the peak
BFLOAT16_BYTES = 2
MERGE_PASSES = 6
"""The number of reads and writes of a device's tokens with which ring attention merges the float32 outputs of two
turns."""
TPU_MERGE_PASSES = 15
"""`MERGE_PASSES` for a TPU. A TPU also transposes the queries at each turn. The value comes from plans for v6e-16."""
RING_TOKENS_PER_TPU = 6500
"""With at least this many tokens per TPU, attention takes longer than sending the keys and values to the next TPU."""
MIN_TOKENS_PER_DEVICE = 32  # with fewer tokens on a device, more devices take longer, because of their communication


class StepCost(NamedTuple):
    """The work and the weights of a denoising step.

    Attributes:
        forward: The work for one prompt.
        guided: True if a step has two prompts, which the axis `dp` can separate.
        network_bytes: The bytes of the weights of the network that runs the step.
        weight_bytes: The bytes of all weights in memory during the step.
        can_use_ring: True if TPUs can use ring attention, which sends keys while it computes.
        rules: The sharding rules, which decide how weights are sharded and whether they are gathered.
    """

    forward: ForwardCost
    guided: bool
    network_bytes: int
    weight_bytes: int
    can_use_ring: bool = False
    rules: ShardingRules = SHARDING_RULES["fsdp"]

    def weight_shards(self, mesh: MeshSizes) -> int:
        """Return the number of shards of the weights.

        Args:
            mesh: The sizes of `dp`, `sp` and `tp`.
        """
        axes = {axis for mesh_axes in self.rules.weights.values() for axis in mesh_axes}
        return prod(size for axis, size in mesh._asdict().items() if axis in axes)


def step_cost(
    family: Family,
    model: VideoModel[Any],
    settings: Settings,
    *,
    attention: AttentionConfig = AUTO,
    rules: ShardingRules = SHARDING_RULES["fsdp"],
    param_dtype: str | None = None,
    offload: Offload = AUTO_OFFLOAD,
) -> StepCost:
    """Estimate the work and the weights of a denoising step.

    Args:
        family: The family of the model.
        model: The model.
        settings: The settings of the video.
        attention: The requested attention; AUTO is the attention that the model was trained with.
        rules: The sharding rules.
        param_dtype: The dtype of the weights in memory; None means bfloat16.
        offload: As in `load`. If `offload` frees networks, only one expert has to be in memory.
    """
    precision = Precision.of(settings.precision)

    def bytes_of(name: str) -> int:
        return family.network_of(model.spec.networks[name]).weight_bytes(param_dtype or "bfloat16", precision)

    forward = model.cost(settings)
    largest = max(map(bytes_of, model.spec.denoisers))
    frees_networks = offload.frees_stages or offload.frees_on_demand
    resident = largest if frees_networks else sum(map(bytes_of, model.spec.networks))
    can_use_ring = forward.has_single_sequence and model.spec.resolve_attention(attention).supports_ring
    return StepCost(forward, settings.can_split_prompts, largest, resident, can_use_ring, rules)


def auto_mesh(cost: StepCost, devices: Sequence[Any], sp: int | None = None) -> MeshSizes:
    """Choose the mesh for "auto" on these devices.

    Args:
        cost: The cost of a step.
        devices: The devices of this process, or device descriptions.
        sp: The size of `sp`; None chooses `sp` too.
    """
    device = devices[0]
    chip = device_model(device.device_kind)
    if isinstance(chip, Chip):
        return choose_mesh(cost, len(devices), chip.hbm, chip, sp=sp)
    memory = None if device.platform == "cpu" else total_memory(device)  # CPU devices share one memory
    return choose_mesh(cost, len(devices), memory, chip, sp=sp)


def choose_mesh(
    cost: StepCost, devices: int, memory: int | None, chip: Card | Chip | Machine, *, sp: int | None = None
) -> MeshSizes:
    """Choose the mesh with the fastest step, among the meshes on which the weights fit.

    If the weights fit on no mesh, choose among the meshes with the most weight shards. The mesh uses fewer devices if
    the video has too few tokens for all of them.

    Args:
        cost: The cost of a step.
        devices: The number of devices.
        memory: The bytes of memory of each device. If it is None (unknown), every mesh counts as large enough.
        chip: The speed and the links of each device.
        sp: The size of `sp`; None chooses `sp` too.

    Raises:
        WanjaxError: The devices cannot be divided by `sp`.
    """
    if sp is not None and devices % sp:
        raise WanjaxError(f"{pluralize(devices, 'device')} cannot be divided by sp={sp}: use a divisor of {devices}")
    candidates = list(meshes(cost, devices, sp))
    max_shards = max(cost.weight_shards(mesh) for mesh in candidates)
    with_room = [mesh for mesh in candidates if weights_fit(cost, mesh, memory)]
    most_sharded = [mesh for mesh in candidates if cost.weight_shards(mesh) == max_shards]
    return min(with_room or most_sharded, key=lambda mesh: step_seconds(cost, mesh, chip))


def meshes(cost: StepCost, devices: int, sp: int | None = None) -> Iterator[MeshSizes]:
    """Yield all meshes of the devices. With guidance, also yield the meshes whose axis `dp` separates the two prompts.

    The product of `sp` and `tp` is limited, so that each device gets at least `MIN_TOKENS_PER_DEVICE` tokens.

    Args:
        cost: The cost of a step.
        devices: The number of devices.
        sp: The size of `sp`; None yields all sizes.
    """
    min_shards = sp or 1
    for dp in (1, 2) if cost.guided and devices % (2 * min_shards) == 0 else (1,):
        devices_per_prompt = devices // dp
        max_shards = max(min_shards, min(devices_per_prompt, cost.forward.num_tokens // MIN_TOKENS_PER_DEVICE))
        shards = max(n for n in range(min_shards, max_shards + 1, min_shards) if devices_per_prompt % n == 0)
        yield from (
            MeshSizes(dp, shards // tp, tp)
            for tp in range(1, shards + 1)
            if shards % tp == 0 and sp in (None, shards // tp)
        )


def weights_fit(cost: StepCost, mesh: MeshSizes, memory: int | None) -> bool:
    """Return True if the sharded weights leave a fifth of a device's memory free.

    Replicated weights may use all of a device's memory. A plan later checks whether activations fit too.

    Args:
        cost: The cost of a step.
        mesh: The sizes of `dp`, `sp` and `tp`.
        memory: The bytes of memory of each device. If it is None (unknown), the weights count as fitting.
    """
    max_share = 0.8 if cost.rules.weights else 1.0
    return memory is None or cost.weight_bytes / cost.weight_shards(mesh) < max_share * memory


def step_seconds(cost: StepCost, mesh: MeshSizes, chip: Card | Chip | Machine) -> float:
    """Estimate the seconds of one step.

    Args:
        cost: The cost of a step.
        mesh: The sizes of `dp`, `sp` and `tp`.
        chip: The speed and the links of each device.
    """
    work, (dp, sp, tp) = cost.forward, mesh
    shards, forwards = sp * tp, (2 if cost.guided else 1) / dp
    matmul_flops = sum(work.flops.values()) - work.attention_flops
    padding = ceil(work.num_heads / tp) * tp / work.num_heads  # heads are padded if `tp` does not divide their number
    flops = work.attention_flops * padding / ATTENTION_UTILIZATION + matmul_flops / MATMUL_UTILIZATION
    compute_seconds = flops / shards / chip.flops
    weight_bytes = cost.network_bytes * (shards - 1) / shards if cost.rules.gather_weights else 0
    token_bytes = BFLOAT16_BYTES * work.num_layers * work.num_tokens / shards * work.width  # of q, k, v or the output
    all_to_all_bytes = 4 * token_bytes * padding * _all_to_all_share(tp, chip)
    ring_bytes = 2 * token_bytes * (sp - 1)
    merge_passes = TPU_MERGE_PASSES if chip.torus else MERGE_PASSES
    merge_seconds = merge_passes * token_bytes * (sp - 1) / chip.bandwidth
    if cost.can_use_ring and chip.torus and tp == 1:
        ring_bytes, merge_seconds = 0 if hides_ring(work.num_tokens, sp) else ring_bytes, 0
    link_seconds = (
        weight_bytes / _bandwidth(shards, chip)
        + all_to_all_bytes / _bandwidth(tp, chip)
        + ring_bytes / _bandwidth(sp, chip)
    )
    return forwards * (compute_seconds + link_seconds + merge_seconds)


def _all_to_all_share(devices: int, chip: Card | Chip | Machine) -> float:
    """Return the bytes on each link during an all-to-all, relative to the bytes of one device."""
    if devices == 1:
        return 0.0
    return devices / 4 if chip.torus else (devices - 1) / devices


def _bandwidth(devices: int, chip: Card | Chip | Machine) -> float:
    """Return the bytes per second that a device sends in a collective. On a torus a ring sends in both directions."""
    return chip.link * (2 if chip.torus and devices > 2 else 1)


def hides_ring(tokens: int, devices: int) -> bool:
    """Return True if sending keys and values takes no longer than the computation of ring attention on TPUs.

    Args:
        tokens: The number of tokens of the sequence.
        devices: The number of devices in the ring.
    """
    return tokens >= RING_TOKENS_PER_TPU * devices
