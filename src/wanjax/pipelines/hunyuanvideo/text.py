# SPDX-License-Identifier: Apache-2.0
"""The inputs of HunyuanVideo-1.5's two text encoders: a chat with the prompt, and the text that the prompt quotes.

Follows diffusers' pipelines/hunyuan_video1_5/pipeline_hunyuan_video1_5.py, and the chat template of Qwen2.5-VL.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation

NUM_TEMPLATE_TOKENS = 108
"""The number of chat tokens before the prompt. The transformer does not get their features."""
TEXT_LENGTH = 1000
"""The number of prompt tokens that the transformer reads, including padding and the end of the chat."""
GLYPH_LENGTH = 256
"""The number of quoted-text bytes that the transformer reads, including padding and the end token."""
SYSTEM_MESSAGE = (" " * 9).join(  # the model was trained with these runs of spaces
    (
        "You are a helpful assistant. Describe the video by detailing the following aspects:",
        "1. The main content and theme of the video.",
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
        "4. background environment, light, style and atmosphere.",
        "5. camera angles, movements, and transitions used in the video.",
    )
)
TEMPLATE_START = f"<|im_start|>system\n{SYSTEM_MESSAGE}<|im_end|>\n<|im_start|>user\n"
TEMPLATE_END = "<|im_end|>\n<|im_start|>assistant\n"
AnyTokenizer = Any  # a checkpoint's tokenizer, or a placeholder in a plan
QUOTED = re.compile(r'"([^"\n]*)"|“([^”\n]*)”')


def chat(prompt: str) -> str:
    """Format a prompt as a chat: the user's message is the prompt, and the assistant's answer comes next."""
    return TEMPLATE_START + (_valid_unicode(prompt) or " ") + TEMPLATE_END


def glyph_text(prompt: str) -> str | None:
    """List the texts in quotation marks, which the video should show, each once and in order.

    Return None if the prompt quotes nothing.
    """
    texts = dict.fromkeys(straight or curly for straight, curly in QUOTED.findall(_valid_unicode(prompt)))
    return "".join(f'Text "{text}". ' for text in texts) if texts else None


def tokenize_chats(tokenizer: AnyTokenizer, prompts: Sequence[str]) -> TokenBatch:
    """Tokenize each prompt's chat. The reported truncation is the truncation of the prompt, not of the chat."""
    batch = tokenizer.tokenize([chat(prompt) for prompt in prompts], NUM_TEMPLATE_TOKENS + TEXT_LENGTH)
    end_tokens = len(tokenizer.backend.encode(TEMPLATE_END).ids)
    return replace(batch, truncated=tuple(_prompt_truncation(truncation, end_tokens) for truncation in batch.truncated))


def tokenize_glyphs(tokenizer: AnyTokenizer, prompts: Sequence[str]) -> TokenBatch:
    """Tokenize each prompt's quoted texts. For a prompt that quotes nothing, all tokens are padding."""
    texts = [glyph_text(prompt) for prompt in prompts]
    batch = tokenizer.tokenize([text or "" for text in texts], GLYPH_LENGTH)
    mask = batch.mask & np.array([text is not None for text in texts])[:, None]
    truncated = tuple(truncation and replace(truncation, name="quoted text") for truncation in batch.truncated)
    return TokenBatch(np.where(mask, batch.ids, np.int32(tokenizer.pad_id)), mask, truncated)


def _valid_unicode(prompt: str) -> str:
    """Replace the lone surrogates in a prompt, which UTF-8 cannot encode."""
    return prompt.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _prompt_truncation(truncation: Truncation | None, end_tokens: int) -> Truncation | None:
    """Convert the truncation of a chat to the truncation of its prompt. The chat has `end_tokens` tokens after the
    prompt."""
    end_text = TEMPLATE_END.strip()
    if truncation is None or end_text.endswith(truncation.cut):
        return None
    return Truncation(
        truncation.tokens - NUM_TEMPLATE_TOKENS - end_tokens, TEXT_LENGTH, truncation.cut.removesuffix(end_text).strip()
    )
