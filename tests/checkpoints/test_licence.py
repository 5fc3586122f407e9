# SPDX-License-Identifier: Apache-2.0
"""A licence with conditions is printed before the weights under it are downloaded."""

from dataclasses import replace

import pytest

import wanjax
from tests.support.families import registered
from tests.support.hub import ID
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with, line_with_words
from wanjax import registry
from wanjax.errors import WanjaxError


@pytest.mark.usefixtures("online")
def test_the_licence_of_a_single_file_is_printed_before_its_download(server, tmp_path):
    """The file is downloaded to be examined, and so before anything else."""
    name, tiny = "part/model.safetensors", tiny_checkpoint(tmp_path / "tiny")
    [weights] = (tiny / "transformer").glob("*.safetensors")
    server.files = {name: weights.read_bytes()}
    like = registry.presets()["wan2.1-t2v-1.3b-causvid"]
    bound, messages = replace(like, name="bound", source=f"{ID}/{name}", model=None), []

    def note(sentence):
        messages.append((sentence, [file for file, _ in server.downloads]))

    with registered(presets=(bound,)):
        for _ in range(2):
            with pytest.raises(WanjaxError, match="contains no"):  # the tiny model is that of no repository
                wanjax.load("bound", note=note)
    [(licence, downloads_before)] = messages
    assert has_line_with(licence, f"bound CC-BY-NC-4.0 {ID}")
    assert name not in downloads_before
    assert name in [file for file, _ in server.downloads]


@pytest.mark.usefixtures("online")
def test_the_licence_is_printed_only_before_the_first_download(server, tmp_path):
    tiny = tiny_checkpoint(tmp_path / "tiny")
    server.files = {str(path.relative_to(tiny)): path.read_bytes() for path in tiny.rglob("*") if path.is_file()}
    like = replace(registry.presets()["wan2.1-t2v-1.3b"], source=ID, model=None)
    presets = (replace(like, name="free"), replace(like, name="bound", licence="licence of its own"))
    messages: list[str] = []
    with registered(presets=presets):
        wanjax.load("free", note=messages.append)
        assert messages == []
        pipe = wanjax.load("bound", note=messages.append)
        [licence] = messages
        assert has_line_with(licence, f"bound licence of its own {ID}")
        with pytest.warns(UserWarning, match=line_with_words("bound licence of its own")):
            wanjax.load("bound")
        for component in ("tokenizer", "text_encoder", "transformer", "vae"):
            pipe.components.get(component)
        wanjax.load("bound", note=messages.append)
        assert len(messages) == 1
