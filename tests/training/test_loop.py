# SPDX-License-Identifier: Apache-2.0
"""The loop of a training by itself: what is in memory when it resumes, and what an interrupted step leaves."""

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


def test_a_resumed_training_holds_one_state(tmp_path):
    with trainer(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path) as first:
        first.run(2, draw)
    again = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    with trainer(again, tmp_path) as second:
        ours, theirs = (jax.tree.leaves(x.state) for x in (second, first))
        assert all(np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))
        assert all(x.is_deleted() for x in jax.tree.leaves(nnx.state(again)))


def test_the_mean_of_the_weights_moves_to_them_by_its_share(tmp_path):
    network = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    before = np.asarray(network.kernel[...])
    with trainer(network, tmp_path) as training:
        training.run(1, draw)
        after, mean = (np.asarray(training.state[name].kernel[...]) for name in ("weights", "ema"))
        np.testing.assert_allclose(mean, 0.9 * before + 0.1 * after, rtol=1e-6)
        assert np.abs(after - before).max() > 5e-3
        np.testing.assert_array_equal(training.network().kernel[...], mean)


def test_accumulated_gradients_make_the_step_of_the_full_batch(tmp_path):
    def trained(parts):
        network, folder = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path / str(parts)
        with closing(Trainer(network, loss, optax.sgd(1e-1), folder, 0, grad_accum_steps=parts)) as training:
            training.run(1, lambda step, generator: generator.normal(size=(4, 3)).astype(np.float32))
            return np.asarray(training.network().kernel[...])

    np.testing.assert_allclose(trained(2), trained(1), rtol=1e-5)


def test_an_interrupted_step_is_not_saved(tmp_path, monkeypatch):
    """The state's buffers went into the step, so that the training resumes from the last saved one."""
    with trainer(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path) as first:
        first.run(1, draw)
        call = first._call

        def interrupted(program, *arguments):
            taken = call(program, *arguments)
            if arguments[-1] == 2:  # the step's number
                raise KeyboardInterrupt
            return taken

        monkeypatch.setattr(first, "_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run(3, draw)
    with trainer(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), tmp_path) as second:
        assert second.step == 1
        second.run(3, draw)
