# SPDX-License-Identifier: Apache-2.0
"""Commands that load no weights recognise a converted checkpoint of a published model."""

import jax
import pytest

import wanjax
from tests.support.tiny import tiny_checkpoint
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import describe, find_size, model_description, open_source, presets
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh

PRESET = presets()["wan2.2-t2v-a14b"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("converted")
    source = open_source(tiny_checkpoint(folder / "source"))
    ConversionToWanjax(source, folder / "checkpoint", NETWORKS, published_name=PRESET.source).run()
    return str(folder / "checkpoint")


@pytest.mark.parametrize("size", ["480p", "720p"])
def test_the_sizes_by_name_are_those_of_the_published_model(converted, size):
    expected = find_size(PRESET.name, {"size": size})
    assert find_size(converted, {"size": size}) == expected
    planned = abstract_pipeline(
        model_description(converted), Partitioner(make_mesh(devices=jax.devices()[:1]), SHARDING_RULES["fsdp"])
    )
    assert planned.settings(size=size).size == expected
    assert wanjax.load(converted).settings(size=size).size == expected


def test_the_source_and_licence_of_the_published_model_are_printed(converted):
    entries = describe(converted)
    assert entries["name"] == converted
    assert (entries["source"], entries["licence"]) == (PRESET.source, PRESET.licence)
    assert "720p" in entries["sizes"]
