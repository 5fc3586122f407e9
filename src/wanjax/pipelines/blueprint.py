# SPDX-License-Identifier: Apache-2.0
"""Programs of a pipeline for arguments that are shapes and shardings, to be compiled and priced but not run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from wanjax.checkpoints.networks import Network
from wanjax.compilation import Lowering, Program
from wanjax.kernels.compiler_options import SAFE
from wanjax.layers.conv import VIDEO
from wanjax.layers.placement import placed
from wanjax.pipelines.frames import decode_chunk, encode_chunk
from wanjax.pipelines.sampler import Denoiser, Inputs, State, take_step
from wanjax.pipelines.seeds import solver_keys
from wanjax.schedulers import one_step
from wanjax.sharding import Partitioner

Shapes = Any  # a tree of jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Blueprint:
    """The devices of a program, the dtype of its networks except those kept in float32, and the compiler's options.

    `compiler` names their set.
    """

    partitioner: Partitioner
    dtype: Any
    compiler: str = SAFE

    def array(
        self, shape: tuple[int, ...], dtype: DTypeLike, axes: Any = None, *, like: tuple[int, ...] | None = None
    ) -> jax.ShapeDtypeStruct:
        """Returns an array that is replicated or, given the logical names of its axes, sharded as an activation.

        `like` is a shape that decides the sharding in place of the array's own, for an axis that joins heads.
        """
        spec = PartitionSpec() if axes is None else self.partitioner.activation(axes, like or shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.partitioner.mesh, spec))

    def results(self, function: Callable, *arguments: Any, axes: Any = None) -> Shapes:
        """Returns the results of a function as shapes, all with the sharding of these axes."""
        mesh = self.partitioner.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh):  # the dtypes of some depend on the chip
            given = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda x: self.array(x.shape, x.dtype, axes), given)

    def network(self, network: Network, **options: Any) -> tuple[Any, Shapes]:
        """Returns a network's definition, and its weights as shapes with shardings."""
        dtype = jnp.float32 if network.float32 else self.dtype
        return nnx.split(placed(network.abstract(dtype=dtype, param_dtype=dtype, **options), self.partitioner))

    def lowering(self, program: Program, static: Any, *arguments: Shapes) -> Lowering:
        return program.lowering(self.partitioner, static, *arguments, compiler=self.compiler)

    def step(self, denoiser: Denoiser, schedule: Any, x: Shapes, inputs: Inputs, *, reuses: bool) -> Lowering:
        """Returns the program of a step of the sampler, or of one that reuses what another kept.

        Only the shapes of the schedule matter.
        """
        schedule = jax.tree.map(lambda x: self.array(x.shape, x.dtype), one_step(schedule, 0))
        keys = jax.eval_shape(partial(solver_keys, [0] * x.shape[0]))
        solver = self.results(denoiser.scheduler.init, schedule, x, keys)
        state, given = State(x, solver), (inputs, self.array((), jnp.float32), schedule)
        if reuses:
            whole = take_step.traceable(self.partitioner, denoiser)
            kept = self.results(lambda *x: whole(*x)[0].kept, state, *given, axes=denoiser.cache.axes)
            state = replace(state, kept=kept)
        return self.lowering(take_step, denoiser, state, *given)

    def decode(self, vae: Network, size: Sequence[int], at_once: Sequence[int], *, first: bool) -> Lowering:
        """Returns the program that decodes the first chunk of latents, or the one for every later chunk.

        `at_once` are the lengths of the two, as the config's `decoded_at_once` returns them.
        """
        config = vae.config
        cache = None if first else self._cache(vae, size, self.decode(vae, size, at_once, first=True))
        cells = (n // config.spatial_factor for n in size)
        z = self.array((1, at_once[0 if first else 1], *cells, config.latent_channels), jnp.float32)
        graphdef, weights = self.network(vae)
        return self.lowering(decode_chunk, (graphdef, jnp.dtype(jnp.uint8), config.patch), z, cache, weights)

    def encode(self, vae: Network, size: Sequence[int], at_once: Sequence[int], *, first: bool) -> Lowering:
        """Returns the program that encodes the first chunk of frames, or the one for every later chunk.

        `at_once` are the lengths of the two, as the config's `encoded_at_once` returns them.
        """
        config = vae.config
        cache = None if first else self._cache(vae, size, self.encode(vae, size, at_once, first=True))
        cells = (n // config.patch for n in size)
        x = self.array((1, at_once[0 if first else 1], *cells, config.cell_channels), jnp.float32)
        graphdef, weights = self.network(vae)
        return self.lowering(encode_chunk, graphdef, x, cache, weights)

    def _cache(self, vae: Network, size: Sequence[int], chunk: Lowering) -> Shapes:
        """Returns the cache that an autoencoder passes from chunk to chunk, as shapes with shardings."""
        height, width = (n // vae.config.spatial_factor for n in size)
        alike = replace(self, partitioner=replace(self.partitioner, coarsest=(height, width)))
        return alike.results(lambda *arguments: chunk.function(*arguments)[1], *chunk.arguments, axes=VIDEO)
