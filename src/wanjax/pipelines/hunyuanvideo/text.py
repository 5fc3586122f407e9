# SPDX-License-Identifier: Apache-2.0
"""Prompts for HunyuanVideo-1.5's two text encoders: a chat for the language model, and quoted words for the glyphs'.

Follows diffusers' pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py, and the chat template of Qwen2.5-VL.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation

TEMPLATE_TOKENS = 108
"""The number of tokens before the prompt; their features are dropped."""
TEXT_LENGTH = 1000
"""The number of tokens of a prompt that the transformer reads, padding and the end of the chat included."""
GLYPH_LENGTH = 256
"""The number of bytes of quoted text that the transformer reads, padding and the end token included."""
SYSTEM = (" " * 9).join(  # the model was trained with these runs of spaces
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects:",
        "1. The main content and theme of the video.",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
        "4. background environment, light, style and atmosphere.",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
START = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
END = "<|im_end|>\n<|im_start|>assistant\n"
Tokenizing = Any  # a tokenizer of the checkpoint, or of a plan, which has none
QUOTED = re.compile(r'"([^"\n]*)"|“([^”\n]*)”')


def chat(prompt: str) -> str:
    """Return the chat in which a user gives the prompt and the assistant is to answer."""
    return START + (_sound(prompt) or " ") + END


def glyph_text(prompt: str) -> str | None:
    """Return the texts in quotation marks that a video is to show, each once and in order; None if there are none."""
    texts = dict.fromkeys(straight or curly for straight, curly in QUOTED.findall(_sound(prompt)))
    return "".join(f'Text "{text}". ' for text in texts) if texts else None


def tokenize_chats(tokenizer: Tokenizing, prompts: Sequence[str]) -> TokenBatch:
    """Return the tokens of each prompt's chat; a truncation counts and names those of the prompt alone."""
    batch = tokenizer.tokenize([chat(prompt) for prompt in prompts], TEMPLATE_TOKENS + TEXT_LENGTH)
    closing = len(tokenizer.backend.encode(END).ids)
    return replace(batch, truncated=tuple(_of_prompt(cut, closing) for cut in batch.truncated))


def tokenize_glyphs(tokenizer: Tokenizing, prompts: Sequence[str]) -> TokenBatch:
    """Return the tokens of each prompt's quoted texts; a prompt without any has no real token."""
    texts = [glyph_text(prompt) for prompt in prompts]
    batch = tokenizer.tokenize([text or "" for text in texts], GLYPH_LENGTH)
    mask = batch.mask & np.array([text is not None for text in texts])[:, None]
    truncated = tuple(cut and replace(cut, name="quoted text") for cut in batch.truncated)
    return TokenBatch(np.where(mask, batch.ids, np.int32(tokenizer.pad_id)), mask, truncated)


def _sound(prompt: str) -> str:
    """Return the prompt with halves of characters, which UTF-8 cannot spell, replaced."""
    return prompt.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _of_prompt(cut: Truncation | None, closing: int) -> Truncation | None:
    """Return the truncation of a prompt, given that of its chat, whose last `closing` tokens are not its own."""
    end = END.strip()
    if cut is None or end.endswith(cut.cut):
        return None
    return Truncation(cut.tokens - TEMPLATE_TOKENS - closing, TEXT_LENGTH, cut.cut.removesuffix(end).strip())
