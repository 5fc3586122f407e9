# SPDX-License-Identifier: Apache-2.0
"""The choice of a mesh: one function, by which a run, a plan, a bench and a training have the same one.

`choose_mesh` takes the fastest mesh on which the weights fit, by a model that is cheap enough to try on every mesh. The
model counts, for each device, the operations of its heads, tokens and prompts, the bytes of its weights' all-gather,
and the bytes of the tokens that attention exchanges, but for keys that go round a ring beside its work. It assumes the
same share of the peak on all meshes, so only the order of its results is meaningful. Nothing is compiled; a plan then
compiles for the chosen mesh and prices it.
"""

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.pipelines.family import Family
from wanjax.pipelines.memory import total_memory
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.model import Cost, VideoModel
from wanjax.pipelines.settings import Settings
from wanjax.pricing.chips import Card, Chip
from wanjax.pricing.roofline import Machine, device_model
from wanjax.sharding import RULES, Rules

ATTENTION, PRODUCTS = 0.5, 0.75  # shares of the peak
BYTES = 2  # a bfloat16 number
MERGED = 6  # times a device's share of the tokens: what joining the outputs of two turns reads and writes, in float32
TURNED = 15  # times the same, on a TPU: it transposes the queries anew at each turn, by the prices of v6e-16
RING_TOKENS = 6500  # of a TPU, from which on it attends for longer than it sends keys and values to the next
TOKENS_PER_DEVICE = 32  # with fewer tokens on a device, communication costs more than it saves


class StepCost(NamedTuple):
    """What a step of denoising costs.

    Attributes:
        forward: The work for one prompt.
        guided: True where a step takes two prompts, which a mesh may separate.
        network: Bytes of the weights of the network that takes the step.
        weights: Bytes of all weights that are in memory meanwhile.
        ring: True where TPUs may pass keys round beside the work of self-attention.
        rules: Those that say which mesh axes divide the weights, and whether the weights are gathered.
    """

    forward: Cost
    guided: bool
    network: int
    weights: int
    ring: bool = False
    rules: Rules = RULES["fsdp"]

    def weight_shards(self, mesh: MeshSizes) -> int:
        """Return the number of devices that divide the weights.

        Args:
            mesh: Sizes of `dp`, `sp` and `tp`.
        """
        axes = {axis for taken in self.rules.weights.values() for axis in taken}
        return prod(size for axis, size in mesh._asdict().items() if axis in axes)


def step_cost(
    family: Family,
    model: VideoModel[Any],
    settings: Settings,
    *,
    attention: AttentionConfig = AUTO,
    rules: Rules = RULES["fsdp"],
    param_dtype: str | None = None,
    offload: bool | None = None,
) -> StepCost:
    """Return what a step of a video costs. Of two experts only one has to be in memory.

    Args:
        family: That of the model, which knows its networks.
        model: The model.
        settings: Those of the video.
        attention: The attention that is asked for; AUTO is the one that the model was trained with.
        rules: The rules of sharding.
        param_dtype: The dtype in which weights are kept; None counts them in bfloat16.
        offload: False keeps the weights of all networks in memory.
    """
    size = jnp.dtype(param_dtype or "bfloat16").itemsize

    def bytes_of(name: str) -> int:
        network = family.network_of(model.spec.networks[name])
        return network.parameters * (4 if network.float32 else size)

    forward = model.cost(settings)
    largest = max(map(bytes_of, model.spec.denoisers))
    held = sum(map(bytes_of, model.spec.networks)) if offload is False else largest
    ring = forward.ring and model.spec.attention(attention).supports_ring
    return StepCost(forward, settings.split, largest, held, ring, rules)


def auto_mesh(cost: StepCost, devices: Sequence[Any], sp: int | None = None) -> MeshSizes:
    """Return the mesh that "auto" is on these devices.

    Args:
        cost: What a step costs.
        devices: Devices of this process, or described ones.
        sp: The size of `sp`, if it is given.
    """
    first = devices[0]
    chip = device_model(first.device_kind)
    if isinstance(chip, Chip):
        return choose_mesh(cost, len(devices), chip.hbm, chip, sp=sp)
    memory = None if first.platform == "cpu" else total_memory(first)  # CPU devices share one memory
    return choose_mesh(cost, len(devices), memory, chip, sp=sp)


def choose_mesh(
    cost: StepCost, devices: int, memory: int | None, chip: Card | Chip | Machine, *, sp: int | None = None
) -> MeshSizes:
    """Choose the mesh with which a step is fastest, among those on which the weights fit.

    Where they fit on none, those are considered that divide them most. The mesh has fewer devices than there are if a
    video has too few tokens for all of them.

    Args:
        cost: What a step costs.
        devices: Their number.
        memory: Bytes of each device; None where they are unknown, which rules out no mesh.
        chip: What each device is: its speed and its links.
        sp: The size of `sp`, if it is given.

    Raises:
        WanjaxError: The devices cannot be divided by `sp`.
    """
    if sp is not None and devices % sp:
        raise WanjaxError(f"{quantity(devices, 'device')} cannot be divided by sp={sp}: use a divisor of {devices}")
    candidates = list(meshes(cost, devices, sp))
    most = max(cost.weight_shards(mesh) for mesh in candidates)
    fitting = [mesh for mesh in candidates if has_room(cost, mesh, memory)]
    closest = [mesh for mesh in candidates if cost.weight_shards(mesh) == most]
    return min(fitting or closest, key=lambda mesh: step_seconds(cost, mesh, chip))


def meshes(cost: StepCost, devices: int, sp: int | None = None) -> Iterator[MeshSizes]:
    """Yield every mesh of so many devices; under guidance also those with its two prompts on `dp`.

    `sp` and `tp` have no more devices together than leave each of them some tokens.

    Args:
        cost: What a step costs.
        devices: Their number.
        sp: The size of `sp`, if it is given.
    """
    least = sp or 1
    for dp in (1, 2) if cost.guided and devices % (2 * least) == 0 else (1,):
        rest = devices // dp
        most = max(least, min(rest, cost.forward.tokens // TOKENS_PER_DEVICE))
        parts = max(n for n in range(least, most + 1, least) if rest % n == 0)
        yield from (
            MeshSizes(dp, parts // tp, tp)
            for tp in range(1, parts + 1)
            if parts % tp == 0 and sp in (None, parts // tp)
        )


def has_room(cost: StepCost, mesh: MeshSizes, memory: int | None) -> bool:
    """Tell whether the weights, as far as the mesh divides them, leave a fifth of a device's memory.

    Weights that are whole on each device may leave less: a plan tells whether it is enough.

    Args:
        cost: What a step costs.
        mesh: Sizes of `dp`, `sp` and `tp`.
        memory: Bytes of each device; None where they are unknown, which is taken for enough.
    """
    most = 0.8 if cost.rules.weights else 1.0
    return memory is None or cost.weights / cost.weight_shards(mesh) < most * memory


def step_seconds(cost: StepCost, mesh: MeshSizes, chip: Card | Chip | Machine) -> float:
    """Return the seconds of one step, by the model.

    Args:
        cost: What a step costs.
        mesh: Sizes of `dp`, `sp` and `tp`.
        chip: What each device is: its speed and its links.
    """
    work, (dp, sp, tp) = cost.forward, mesh
    parts, forwards = sp * tp, (2 if cost.guided else 1) / dp
    others = sum(work.flops.values()) - work.scores
    padding = ceil(work.heads / tp) * tp / work.heads  # for heads that do not divide evenly
    compute = (work.scores * padding / ATTENTION + others / PRODUCTS) / parts / chip.flops
    gathered = cost.network * (parts - 1) / parts if cost.rules.gathered else 0
    share = BYTES * work.layers * work.tokens / parts * work.width  # a device's share of one of q, k, v, output
    traded = 4 * share * padding * _traded(tp, chip)
    passed = 2 * share * (sp - 1)
    merged = (TURNED if chip.torus else MERGED) * share * (sp - 1) / chip.bandwidth
    if cost.ring and chip.torus and tp == 1:
        passed, merged = 0 if hides_ring(work.tokens, sp) else passed, 0
    sent = gathered / _rate(parts, chip) + traded / _rate(tp, chip) + passed / _rate(sp, chip)
    return forwards * (compute + sent + merged)


def _traded(devices: int, chip: Card | Chip | Machine) -> float:
    """Return how many times its own share each link carries where all devices exchange theirs by heads."""
    if devices == 1:
        return 0.0
    return devices / 4 if chip.torus else (devices - 1) / devices


def _rate(devices: int, chip: Card | Chip | Machine) -> float:
    """Return the bytes a second that a device sends to others of a group; a ring of a torus has two directions."""
    return chip.link * (2 if chip.torus and devices > 2 else 1)


def hides_ring(tokens: int, devices: int) -> bool:
    """Tell whether TPUs that pass the keys of a sequence round attend for longer than they send.

    Args:
        tokens: Tokens of the sequence.
        devices: Devices that pass its keys round.
    """
    return tokens >= RING_TOKENS * devices
