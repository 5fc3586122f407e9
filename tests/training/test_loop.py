# SPDX-License-Identifier: Apache-2.0
"""The training loop: memory when it resumes, the EMA, accumulated gradients, and interrupted steps."""

from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from wanjax.training.loop import Trainer


def loss(network, batch, key):
    return jnp.mean(jnp.square(network(batch))), {}


def draw(step, generator):
    return generator.normal(size=(2, 3)).astype(np.float32)


def trainer(network, folder):
    return closing(Trainer(network, loss, optax.adam(1e-2), folder, 0, ema_decay=0.9))


def test_a_resumed_training_has_only_one_state_in_memory(tmp_path):
    with trainer(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path) as first:
        first.run(2, draw)
    network = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    with trainer(network, tmp_path) as second:
        resumed_leaves, saved_leaves = (jax.tree.leaves(x.state) for x in (second, first))
        assert all(np.array_equal(x, y) for x, y in zip(resumed_leaves, saved_leaves, strict=True))
        assert all(x.is_deleted() for x in jax.tree.leaves(nnx.state(network)))


def test_the_ema_moves_towards_the_weights(tmp_path):
    network = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    initial = np.asarray(network.kernel[...])
    with trainer(network, tmp_path) as training:
        training.run(1, draw)
        trained, ema = (np.asarray(training.state[name].kernel[...]) for name in ("weights", "ema"))
        np.testing.assert_allclose(ema, 0.9 * initial + 0.1 * trained, rtol=1e-6)
        assert np.abs(trained - initial).max() > 5e-3
        np.testing.assert_array_equal(training.network().kernel[...], ema)


def test_accumulated_gradients_equal_those_of_the_full_batch(tmp_path):
    def train(parts):
        network, folder = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path / str(parts)
        with closing(Trainer(network, loss, optax.sgd(1e-1), folder, 0, grad_accum_steps=parts)) as training:
            training.run(1, lambda step, generator: generator.normal(size=(4, 3)).astype(np.float32))
            return np.asarray(training.network().kernel[...])

    np.testing.assert_allclose(train(2), train(1), rtol=1e-5)


def test_an_interrupted_step_is_not_saved(tmp_path, monkeypatch):
    """The interrupted step has consumed the state's buffers, so that the training resumes from the last saved state."""
    with trainer(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path) as first:
        first.run(1, draw)
        call = first._call

        def call_and_interrupt(program, *arguments):
            result = call(program, *arguments)
            if arguments[-1] == 2:  # the number of the step
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(first, "_call", call_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.run(3, draw)
    with trainer(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path) as second:
        assert second.step == 1
        second.run(3, draw)
