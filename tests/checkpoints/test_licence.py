# SPDX-License-Identifier: Apache-2.0
"""A licence with conditions is printed before its weights are downloaded."""

from dataclasses import replace

import pytest

import wanjax
from tests.support.families import registered
from tests.support.hub import ID
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax import registry
from wanjax.errors import WanjaxError


@pytest.mark.usefixtures("online")
def test_the_licence_of_a_single_file_is_printed_before_its_download(server, tmp_path):
    """The file itself is downloaded to inspect it, so the licence is printed before that."""
    name, tiny = "part/model.safetensors", tiny_checkpoint(tmp_path / "tiny")
    [weights] = (tiny / "transformer").glob("*.safetensors")
    server.files = {name: weights.read_bytes()}
    preset = registry.presets()["wan2.1-t2v-1.3b-causvid"]
    restricted, messages = replace(preset, name="restricted", source=f"{ID}/{name}", model=None), []

    def note(message):
        messages.append((message, [file for file, _ in server.downloads]))

    with registered(presets=(restricted,)):
        for _ in range(2):
            with pytest.raises(
                WanjaxError, match="contains no"
            ):  # no repository has the other components of the tiny model
                wanjax.load("restricted", note=note)
    [(licence, downloads_before)] = messages
    assert has_line_with_words(licence, f"restricted CC-BY-NC-4.0 {ID}")
    assert name not in downloads_before
    assert name in [file for file, _ in server.downloads]


@pytest.mark.usefixtures("online")
def test_the_licence_is_printed_only_before_the_first_download(server, tmp_path):
    tiny = tiny_checkpoint(tmp_path / "tiny")
    server.files = {str(path.relative_to(tiny)): path.read_bytes() for path in tiny.rglob("*") if path.is_file()}
    preset = replace(registry.presets()["wan2.1-t2v-1.3b"], source=ID, model=None)
    presets = (replace(preset, name="free"), replace(preset, name="restricted", licence="licence of its own"))
    messages: list[str] = []
    with registered(presets=presets):
        wanjax.load("free", note=messages.append)
        assert messages == []
        pipe = wanjax.load("restricted", note=messages.append)
        [licence] = messages
        assert has_line_with_words(licence, f"restricted licence of its own {ID}")
        with pytest.warns(UserWarning, match=line_with_words("restricted licence of its own")):
            wanjax.load("restricted")
        for component in ("tokenizer", "text_encoder", "transformer", "vae"):
            pipe.components.get(component)
        wanjax.load("restricted", note=messages.append)
        assert len(messages) == 1
