# SPDX-License-Identifier: Apache-2.0
"""Published GGUF files are read: text encoders with llama.cpp's names, and experts in two folders."""

import io
import re
import shutil

import numpy as np
import pytest
import sentencepiece
from gguf import MODEL_ARCH
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from tests.parity import hunyuan_authors
from tests.support import tiny
from tests.support.ggufs import as_llama_cpp, write_gguf
from tests.support.published import text_encoder_keys
from tests.support.words import has_line_with_words
from wanjax import loading, registry
from wanjax.checkpoints import hub
from wanjax.checkpoints import layout as checkpoint_layout
from wanjax.checkpoints.files import SafetensorsFolder, content_digest, save_safetensors
from wanjax.checkpoints.network_kinds import network
from wanjax.cli.remake import check_files
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.models.t5 import T5Config
from wanjax.pipelines.hunyuanvideo.networks import NETWORKS as HUNYUAN_NETWORKS
from wanjax.pipelines.text.tokenizer import Tokenizer
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import companion_files, open_source
from wanjax.workflows.files import check_pair

UMT5 = T5Config(
    vocab_size=384, width=64, heads=2, head_dim=32, mlp_dim=96, layers=2, buckets=32, max_distance=128, eps=1e-6,
    shared_bias=False,
)  # fmt: skip
SENTENCES = [
    "a red circle moves to the right of the screen", "two cats play the piano in the rain", "Ein Hund läuft am Strand",
    "the camera follows a train through the mountains", "sunset over the sea, slow motion", "一只猫在弹钢琴",
]  # fmt: skip
HIGH, LOW = (f"{x}Noise/Wan2.2-T2V-A14B-{x}Noise-Q4_K_M.gguf" for x in ("High", "Low"))
QWEN = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip


def random_tensors(shapes):
    random = np.random.default_rng(0)
    return {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


@pytest.fixture(scope="module")
def spm():
    """Train a small SentencePiece model with UMT5's settings, and return its processor."""
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(SENTENCES * 20), model_writer=stream, vocab_size=320, byte_fallback=True,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, user_defined_symbols=["<extra_id_1>", "<extra_id_0>"],
        minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())


def tokenizer_fields(spm):
    """Return the fields that llama.cpp's converter writes for a T5 tokenizer, padded to the rows of the embedding."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore

    model = ModelProto.FromString(spm.serialized_model_proto())
    pieces = [(piece.piece, piece.score, int(piece.type)) for piece in model.pieces]
    pieces += [(f"[PAD{i}]", -10000.0, 5) for i in range(len(pieces), UMT5.vocab_size)]
    tokens, scores, kinds = (list(column) for column in zip(*pieces, strict=True))
    parts = {"model": "t5", "pre": "default", "tokens": tokens, "scores": scores, "token_type": kinds}
    parts |= {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0}
    parts |= {"precompiled_charsmap": model.normalizer_spec.precompiled_charsmap}
    return {f"tokenizer.ggml.{name}": value for name, value in parts.items()}


def write_umt5(path, fields=None):
    """Write a UMT5 in the layout of `city96/umt5-xxl-encoder-gguf`; return the weights by transformers' names."""
    tensors, numbers = as_llama_cpp(MODEL_ARCH.T5ENCODER, UMT5.layers, random_tensors(text_encoder_keys(UMT5)))
    assert {"token_embd.weight", "enc.blk.1.attn_rel_b.weight", "enc.output_norm.weight"} <= tensors.keys()
    write_gguf(path, tensors, fields, arch="t5encoder")
    return numbers


@pytest.fixture(scope="module")
def diffusers(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("diffusers"))


@pytest.fixture(autouse=True)
def use_local_fallback(diffusers, monkeypatch):
    """Take missing components from a local checkpoint instead of the hub."""
    monkeypatch.setattr(checkpoint_layout, "open_fallback", lambda *_: open_source(diffusers))


def write_transformer(folder, path, offset=0.0):
    """Write the transformer of a folder as a GGUF file by the authors' names."""
    weights = SafetensorsFolder(folder / "transformer")
    numbers = {key: np.asarray(weights.read(key), np.float32) + np.float32(offset) for key in weights.specs}
    write_gguf(path, {original.TRANSFORMER.to_authors(key): x for key, x in numbers.items()})


def test_umt5_beside_a_transformer_is_used(diffusers, spm, tmp_path):
    """Compare every weight of the text encoder and every token of the tokenizer."""
    write_transformer(diffusers, tmp_path / "wan2.1-t2v-14b-Q4_K_M.gguf")
    numbers = write_umt5(tmp_path / "umt5-xxl-encoder-Q8_0.gguf", tokenizer_fields(spm))
    source = open_source(tmp_path / "wan2.1-t2v-14b-Q4_K_M.gguf")
    assert source.missing_components == ["vae"]
    assert has_line_with_words(source.notes[0], "umt5-xxl-encoder-Q8_0.gguf folder")
    encoder, weights = source["text_encoder"], source["text_encoder"].weights()
    assert network(source, "text_encoder", NETWORKS).config == UMT5
    assert weights.specs.keys() == numbers.keys()
    for key, x in numbers.items():
        np.testing.assert_array_equal(weights.read(key), x)
    assert network(source, "text_encoder", NETWORKS).specs.keys() == numbers.keys()
    assert encoder.config()["model_type"] == "umt5"
    files = source["tokenizer"].files()
    tokenizer = Tokenizer.load(files[0].parent, length=40)
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (0, UMT5.vocab_size)
    texts = [*SENTENCES, "ｆｕｌｌ　ｗｉｄｔｈ cat", "rain", "pianos and mountain trains"]
    batch = tokenizer.tokenize(texts)
    for text, ids, mask in zip(texts, batch.ids, batch.mask, strict=True):
        np.testing.assert_array_equal(ids[mask], [*spm.encode(text), 1], err_msg=text)
    assert tokenizer.tokenize(["a <extra_id_0> cat"]).ids[0, 1] == spm.piece_to_id("<extra_id_0>")


def test_the_metadata_has_the_digest_of_the_text_encoder(diffusers, spm, tmp_path):
    model, encoder = tmp_path / "wan-Q8_0.gguf", tmp_path / "umt5-xxl-encoder-Q8_0.gguf"
    write_transformer(diffusers, model)
    write_umt5(encoder, tokenizer_fields(spm))
    pipe = loading.load(model, note=print)
    metadata = pipe.metadata(pipe.settings(prompt="a cat", size=(32, 32), frames=5), {})
    assert metadata["digests"] == {str(path): content_digest(path) for path in (model, encoder)}
    check_files(metadata, ["model"])
    write_umt5(encoder)
    with pytest.raises(WanjaxError, match=re.escape(encoder.name)):
        check_files(metadata, ["model"])


@pytest.mark.parametrize("missing", ["model", "tokens", "precompiled_charsmap"])
def test_an_incomplete_tokenizer_comes_from_the_repository(missing, diffusers, spm, tmp_path):
    write_transformer(diffusers, tmp_path / "wan.gguf")
    fields = {key: x for key, x in tokenizer_fields(spm).items() if key != f"tokenizer.ggml.{missing}"}
    write_umt5(tmp_path / "umt5.gguf", fields)
    source = open_source(tmp_path / "wan.gguf")
    assert source.missing_components == ["tokenizer", "vae"]
    assert source["tokenizer"].files()[0].parent == diffusers / "tokenizer"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": ["a"]}, "umt5.gguf damaged tokenizer"),
        ({"token_type": [1] * UMT5.vocab_size}, "umt5.gguf <unk>"),
        ({"padding_token_id": 1000}, "umt5.gguf tokenizer"),
        ({"precompiled_charsmap": b"abc"}, "umt5.gguf tokenizer"),
    ],
)
def test_a_damaged_tokenizer_is_refused(change, words, diffusers, spm, tmp_path):
    write_transformer(diffusers, tmp_path / "wan.gguf")
    changed_fields = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    write_umt5(tmp_path / "umt5.gguf", tokenizer_fields(spm) | changed_fields)
    with pytest.raises(WanjaxError) as caught:
        open_source(tmp_path / "wan.gguf")["tokenizer"].files()
    assert has_line_with_words(str(caught.value), words)
    assert "\n" not in str(caught.value)


def test_several_text_encoders_are_refused(diffusers, tmp_path):
    write_transformer(diffusers, tmp_path / "wan.gguf")
    for kind in ("Q4_K_M", "Q8_0"):
        write_umt5(tmp_path / f"umt5-xxl-encoder-{kind}.gguf")
    with pytest.raises(WanjaxError) as caught:
        open_source(tmp_path / "wan.gguf")
    assert has_line_with_words(str(caught.value), "umt5-xxl-encoder-Q4_K_M.gguf umt5-xxl-encoder-Q8_0.gguf")


def test_umt5_in_the_authors_folder_is_used(diffusers, spm, tmp_path):
    weights = SafetensorsFolder(diffusers / "transformer")
    tensors = {original.TRANSFORMER.to_authors(key): weights.read(key) for key in weights.specs}
    save_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", tensors)
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel", "model_type": "t2v"}')
    numbers = write_umt5(tmp_path / "umt5-xxl-encoder-Q8_0.gguf", tokenizer_fields(spm))
    source = open_source(tmp_path)
    np.testing.assert_array_equal(source["text_encoder"].weights().read("shared.weight"), numbers["shared.weight"])
    assert source.missing_components == ["vae"]
    assert [file.name for file in source["tokenizer"].files()] == ["tokenizer.json", "tokenizer_config.json"]


def test_a_file_with_only_a_text_encoder_is_refused(tmp_path):
    write_umt5(tmp_path / "umt5-xxl-encoder-Q8_0.gguf")
    with pytest.raises(WanjaxError, match="contains only the text_encoder of Wan"):
        open_source(tmp_path / "umt5-xxl-encoder-Q8_0.gguf")


@pytest.mark.parametrize("opened", [HIGH, LOW])
def test_experts_in_two_folders_are_found(opened, diffusers, tmp_path):
    """The folders are those of `QuantStack/Wan2.2-T2V-A14B-GGUF`, with files of other types beside them."""
    for path, offset in ((HIGH, 0), (LOW, 1), (LOW.replace("Q4_K_M", "Q8_0"), 2)):
        write_transformer(diffusers, tmp_path / path, offset)
    source = open_source(tmp_path / opened)
    high, low = (source[name].weights() for name in ("transformer", "transformer_2"))
    np.testing.assert_array_equal(low.read("proj_out.bias"), high.read("proj_out.bias") + 1)
    assert [x.relative_to(tmp_path).as_posix() for x in source.storage.companions] == [{HIGH: LOW, LOW: HIGH}[opened]]


def test_experts_of_one_name_in_two_folders_are_found(diffusers, tmp_path):
    for folder, offset in (("high_noise", 0), ("low_noise", 1)):
        write_transformer(diffusers, tmp_path / folder / "model-Q8_0.gguf", offset)
    source = open_source(tmp_path / "low_noise/model-Q8_0.gguf")
    high, low = (source[name].weights() for name in ("transformer", "transformer_2"))
    np.testing.assert_array_equal(low.read("proj_out.bias"), high.read("proj_out.bias") + 1)


def test_the_metadata_has_the_digests_of_two_folders(diffusers, tmp_path):
    for path in (HIGH, LOW):
        write_transformer(diffusers, tmp_path / path)
    pipe = loading.load(tmp_path / HIGH)
    metadata = pipe.metadata(pipe.settings(prompt="a cat", size=(32, 32), frames=5), {})
    assert metadata["digests"] == {str(tmp_path / path): content_digest(tmp_path / path) for path in (HIGH, LOW)}
    write_transformer(diffusers, tmp_path / LOW, 1)
    with pytest.raises(WanjaxError, match="LowNoise"):
        check_files(metadata, ["model"])


def test_the_other_folder_of_a_repository_is_downloaded(diffusers, tmp_path, monkeypatch):
    for path in (HIGH, LOW):
        write_transformer(diffusers, tmp_path / path)
    patterns = []

    def download(repository, names, *, revision=None, quiet=False):
        patterns.append((repository, list(names)))
        return tmp_path

    monkeypatch.setattr(hub, "download", download)
    source = open_source(f"QuantStack/Wan2.2-T2V-A14B-GGUF/{HIGH}")
    assert "transformer_2" in source.components
    [(repository, names)] = patterns
    assert repository == "QuantStack/Wan2.2-T2V-A14B-GGUF"
    assert names[0] == HIGH
    assert LOW in names
    assert not any(name.startswith("..") for name in names)


def test_nothing_outside_a_repository_is_downloaded(diffusers, tmp_path, monkeypatch):
    write_transformer(diffusers, tmp_path / "wan.gguf")
    patterns = []
    monkeypatch.setattr(hub, "download", lambda _, names, **options: patterns.extend(names) or tmp_path)
    assert companion_files("owner/Wan-HighNoise-GGUF/wan.gguf") == ["../Wan-LowNoise-GGUF/wan.gguf"]
    registry.open_source("owner/Wan-HighNoise-GGUF/wan.gguf")
    assert patterns == ["wan.gguf"]


def test_a_workflow_may_name_the_files_of_two_folders():
    check_pair(f"/m/{HIGH}", f"/m/{LOW}", companion_files)
    check_pair(f"owner/name/{HIGH}", f"owner/name/{LOW}", companion_files)
    with pytest.raises(WanjaxError):
        check_pair(f"/m/{HIGH}", f"/n/{LOW}", companion_files)


def write_qwen(path, **changes):
    """Write a Qwen2.5-VL in llama.cpp's layout; return the weights of its language model by transformers' names."""
    config = Qwen2_5_VLTextConfig(**QWEN)
    shapes = {key: tuple(x.shape) for key, x in Qwen2_5_VLTextModel(config).state_dict().items()}
    prefixed = {f"model.{key}": x for key, x in random_tensors(shapes).items()}
    tensors, numbers = as_llama_cpp(MODEL_ARCH.QWEN2VL, config.num_hidden_layers, prefixed)
    assert {"token_embd.weight", "blk.3.attn_k.bias", "blk.0.attn_output.weight"} <= tensors.keys()
    tensors["output.weight"] = np.ones((96, 64), np.float32)
    fields = {
        "block_count": 4, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5,
    }  # fmt: skip
    options = {f"qwen2vl.{name}": value for name, value in (fields | changes).items() if value is not None}
    write_gguf(path, tensors, options, arch="qwen2vl")
    return {key.removeprefix("model."): x for key, x in numbers.items()}


def assert_is_qwen(source, numbers):
    kind = network(source, "text_encoder", HUNYUAN_NETWORKS)
    expected = {"vocab_size": 96, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_dim": 96, "theta": 5e5}
    assert {name: getattr(kind.config, name) for name in expected} == expected
    assert kind.config.eps == pytest.approx(1e-5)
    weights = source["text_encoder"].weights()
    assert weights.specs.keys() == numbers.keys()
    for key, x in numbers.items():
        np.testing.assert_array_equal(weights.read(key), x)
    assert kind.specs.keys() <= numbers.keys()


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    """Return a checkpoint of HunyuanVideo in the layout of diffusers, and in the authors' layout."""
    return hunyuan_authors.write_both_layouts(tmp_path_factory.mktemp("hunyuan"))


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    """Return the tensors of a transformer with heads of the published size, because a single file has no config."""
    sizes = {"num_attention_heads": 1, "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56], "target_size": 640}
    folder = tiny.tiny_hunyuan_checkpoint(tmp_path_factory.mktemp("wide"), **sizes)
    return hunyuan_authors.tensors_of(folder / "transformer")


def test_qwen_beside_a_transformer_is_used(hunyuan, transformer, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_layout, "open_fallback", lambda *_: open_source(hunyuan[0]))
    path = tmp_path / "hunyuanvideo1.5_720p_t2v.safetensors"
    save_safetensors(path, transformer)
    numbers = write_qwen(tmp_path / "Qwen2.5-VL-7B-Instruct-Q8_0.gguf")
    write_gguf(tmp_path / "mmproj-Qwen2.5-VL-7B-Instruct-F16.gguf", {"v.x": np.ones(3, np.float32)}, arch="clip")
    source = open_source(path)
    assert source.missing_components == ["text_encoder_2", "tokenizer", "tokenizer_2", "vae"]
    assert has_line_with_words(source.notes[0], "Qwen2.5-VL-7B-Instruct-Q8_0.gguf folder")
    assert_is_qwen(source, numbers)


def test_qwen_in_the_authors_folder_is_used(hunyuan, tmp_path):
    folder = shutil.copytree(hunyuan[1], tmp_path / "ckpts")
    for file in (folder / "text_encoder/llm").glob("*.safetensors*"):
        file.unlink()
    numbers = write_qwen(folder / "text_encoder/llm/Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf")
    assert_is_qwen(open_source(folder), numbers)


@pytest.mark.parametrize(
    ("arch", "missing", "words"),
    [("qwen2vl", "rope.freq_base", "qwen2vl.rope.freq_base"), ("llama", None, "'llama' 'qwen2vl'")],
)
def test_another_language_model_is_refused(arch, missing, words, transformer, tmp_path):
    path = tmp_path / "hunyuanvideo1.5_720p_t2v.safetensors"
    save_safetensors(path, transformer)
    write_qwen(tmp_path / "qwen2.5-vl-7b.gguf", **({missing: None} if missing else {}))
    if arch != "qwen2vl":
        write_gguf(tmp_path / "qwen2.5-vl-7b.gguf", {"token_embd.weight": np.ones((4, 4), np.float32)}, arch=arch)
    with pytest.raises(WanjaxError) as caught:
        open_source(path)
    assert has_line_with_words(str(caught.value), words)
