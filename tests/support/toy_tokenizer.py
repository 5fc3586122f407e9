# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer of UMT5's kind, in the layout of transformers, and prompts that are hard to tokenize."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

WORDS = """
    ▁a ▁the ▁cat ▁red ▁circle ▁moving ▁right ▁left ▁on ▁piano ▁word ▁bl ue at ing er in on re an s ed fi
    色 调 艳丽 静态 过曝 ， ™
"""
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'\"-()&<>/;#"

AWKWARD_PROMPTS = [
    "a red circle moving right",
    "",
    " \t\n ",
    "  two  spaces,\ttabs\nand\u00a0no-break\u3000ideographic\u200bzero width  ",
    "fish &amp;amp; chips &lt;b&gt;bold&lt;/b&gt; &quot;caf&eacute;&quot; &#x1F600; &amp;#39;x&amp;#39; &nbsp; &bogus;"
    " & &lt;&#x1c;&#133;&#8232;&gt;",
    "ＦＵＬＬ　ｗｉｄｔｈ １２３ ｶﾀｶﾅ ﬁne ™ ½",
    "色调艳丽，过曝，静态，细节模糊不清，字幕，三条腿，背景人很多，倒着走",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 ☃ \U0001fae8",
    "schÃ¶n âœ” cafÃ© Ð¿Ñ€Ð¸Ð²ÐµÑ‚",  # UTF-8 decoded with the wrong encoding
    "e\u0301 versus \u00e9, \u0928\u093f, \u05e9\u05dc\u05d5\u05dd, \u0645\u0631\u062d\u0628\u0627",
    "“curly” ‘quotes’ — dashes… \u2028 line\x00 control\x1b[31m\x85 \ufeffbom \ud83d lone",
    "a prompt with </s> and <pad> and <unk> and <extra_id_0> inside",
    " ".join(["word"] * 598 + ["the", "end"]),
]


def save_tokenizer(folder: Path, **settings) -> Path:
    """Write tokenizer.json and tokenizer_config.json, with unknown characters spelled in bytes, as UMT5 does."""
    specials = ["<pad>", "</s>", "<unk>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(set(WORDS.split()) | set(CHARACTERS))
    vocabulary = [(name, 0.0) for name in specials] + [(piece, -8.0 + len(piece)) for piece in pieces]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=2, byte_fallback=True))
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 1000000000000000019884624838656,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder
