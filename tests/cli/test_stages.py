# SPDX-License-Identifier: Apache-2.0
"""The check of the first stage's files when the second stage of Wan reads them."""

import numpy as np
import pytest

from tests.support.small_wan import VIDEO, pipeline
from tests.support.words import line_with_words
from wanjax.checkpoints.files import save_safetensors
from wanjax.errors import WanjaxError
from wanjax.media.metadata import load_settings
from wanjax.media.stage_files import EMBEDDINGS_FILE, load_conditioning
from wanjax.pipelines.model import check_compatible, conditioning_from

EMBEDDINGS = np.zeros((1, 3, 8), np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"prompt_embeds": EMBEDDINGS}, "tensor 'negative_prompt_embeds' prompts prompt_embeds"),
        ({}, "tensor 'prompt_embeds' prompts"),
        (
            {"prompt_embeds": EMBEDDINGS[..., 0], "negative_prompt_embeds": EMBEDDINGS},
            "prompt_embeds nano float32 [1, 3]",
        ),
        (
            {"prompt_embeds": EMBEDDINGS.astype(np.int32), "negative_prompt_embeds": EMBEDDINGS},
            "prompt_embeds int32 [1, 3, 8] nano floats",
        ),
        (
            {"prompt_embeds": EMBEDDINGS, "negative_prompt_embeds": EMBEDDINGS[:, :2]},
            "negative_prompt_embeds [1, 2, 8] nano floats [1, 3, 8]",
        ),
    ],
)
def test_embeddings_of_a_wrong_shape_or_dtype_are_refused(tmp_path, tensors, message):
    save_safetensors(tmp_path / EMBEDDINGS_FILE, tensors)
    with pytest.raises(WanjaxError, match=line_with_words(message)):
        read_embeddings(tmp_path)


def test_the_message_for_a_damaged_stage_file_says_how_to_remake_it(tmp_path):
    (tmp_path / EMBEDDINGS_FILE).write_bytes(b"\x09\x00")
    with pytest.raises(
        WanjaxError, match=line_with_words(f"{EMBEDDINGS_FILE} `wanjax encode PROMPT --dir {tmp_path} --force`")
    ):
        load_conditioning(tmp_path, {})


def test_the_message_for_a_missing_folder_names_the_folder(tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words(f"folder {tmp_path / 'no'}: `wanjax encode PROMPT --dir")):
        load_settings(tmp_path / "no")


def read_embeddings(folder):
    """Return the embeddings that the second stage reads."""
    pipe = pipeline(4, None)
    conditioning = conditioning_from(pipe.model, load_conditioning(folder, {}))
    check_compatible(pipe.model, conditioning, VIDEO)
    return conditioning


def test_shorter_embeddings_of_older_scripts_give_a_warning(tmp_path):
    short = np.zeros((1, 226, 8), np.float32)
    save_safetensors(tmp_path / EMBEDDINGS_FILE, {"prompt_embeds": short, "negative_prompt_embeds": short})
    with pytest.warns(UserWarning, match=line_with_words("226 tokens 512")):
        assert read_embeddings(tmp_path).prompt_embeds.shape == short.shape
