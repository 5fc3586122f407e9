# SPDX-License-Identifier: Apache-2.0
"""Video diffusion in pure JAX and Flax NNX."""

from flax import nnx

nnx.use_eager_sharding(False)  # modules carry logical axes and can be built without a mesh
