# SPDX-License-Identifier: Apache-2.0
"""The autoencoder of a pipeline decodes chunk by chunk."""

import numpy as np
import pytest

import wanjax
from wanjax.pipelines import model, run
from wanjax.pipelines.frames import chunk_count


@pytest.mark.parametrize(
    ("count", "chunk_lengths", "chunks"),
    [(1, (1, 4), 1), (5, (1, 4), 2), (3, (1, 1), 3), (5, (3, 2), 2), (2, (3, 2), 1)],
)
def test_chunks_are_counted(count, chunk_lengths, chunks):
    assert chunk_count(count, chunk_lengths) == chunks


def test_the_next_chunk_is_decoded_while_one_is_written(monkeypatch):
    events = []

    def decode(*_):
        for number in range(3):
            events.append(f"begun {number}")
            yield np.full((1, 2, 2, 3), number, np.uint8)

    monkeypatch.setattr(model, "decode_latents", decode)
    pipe = wanjax.load("nano")
    for chunk in run.Run(pipe, []).frames([np.zeros((1, 16, 5, 8, 8), np.float32)]):
        events.append(f"written {chunk[0, 0, 0, 0]}")
    assert events == ["begun 0", "begun 1", "written 0", "begun 2", "written 1", "written 2"]


def test_decoded_values_are_rounded_to_the_nearest_byte():
    pipe = wanjax.load("nano")
    shape = pipe.model.spec.latent_shape(pipe.defaults)
    latents = np.random.default_rng(0).normal(size=shape).astype(np.float32)[:, :, :1]
    exact, frames = pipe.decode(latents, np.float32), pipe.decode(latents)
    assert frames.dtype == np.uint8
    np.testing.assert_array_equal(frames, np.round(exact * np.float32(255)))
