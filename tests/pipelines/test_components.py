# SPDX-License-Identifier: Apache-2.0
"""The components of a pipeline, by name, and the chunks of its autoencoder."""

import pytest

import wanjax
from tests.support.words import naming
from wanjax.errors import WanjaxError
from wanjax.pipelines.frames import chunk_count


def test_an_unknown_component_is_refused_with_the_names_of_the_others():
    pipe = wanjax.load("nano")
    with pytest.raises(WanjaxError, match=naming("'image_encoder' transformer")):
        _ = pipe.image_encoder


@pytest.mark.parametrize(
    ("count", "at_once", "chunks"), [(1, (1, 4), 1), (5, (1, 4), 2), (3, (1, 1), 3), (5, (3, 2), 2), (2, (3, 2), 1)]
)
def test_chunks_are_counted(count, at_once, chunks):
    assert chunk_count(count, at_once) == chunks
