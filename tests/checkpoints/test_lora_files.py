# SPDX-License-Identifier: Apache-2.0
"""LoRA files: their changes by the formula, the report of what was merged, and refused files."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.harm import unchecked
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints import lora_scales
from wanjax.checkpoints.files import Spec, Tensors, save_safetensors
from wanjax.checkpoints.lora import LoraFile, MergedLoraReader
from wanjax.checkpoints.lora_scales import PEFT_METADATA
from wanjax.checkpoints.lora_source import PEFT_CONFIG, Lora
from wanjax.converters.wan.original import TRANSFORMER
from wanjax.errors import WanjaxError

SHAPES = {
    "blocks.0.attn1.to_q.weight": (6, 4),
    "blocks.0.attn1.to_q.bias": (6,),
    "blocks.0.attn1.norm_q.weight": (6,),
    "blocks.0.norm2.weight": (4,),
    "blocks.0.norm2.bias": (4,),
    "blocks.0.scale_shift_table": (1, 6, 4),
    "patch_embedding.weight": (4, 3, 1, 2, 2),
    "scale_shift_table": (1, 2, 4),
}


def random(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def checkpoint(dtype=np.float32):
    return Tensors({key: random(i, *shape, dtype=dtype) for i, (key, shape) in enumerate(SHAPES.items())})


BASE = checkpoint()
SPECS = BASE.specs
Q = "diffusion_model.blocks.0.self_attn.q"
ZEROS = np.zeros((6, 4), np.float32)
DOWN, UP = random(7, 2, 4), random(8, 6, 2)
PAIR = {f"{Q}.lora_down.weight": DOWN, f"{Q}.lora_up.weight": UP}


@pytest.fixture
def open_lora(tmp_path):
    """Write tensors as a LoRA file and open it."""

    def write(tensors, metadata=None, name="lora.safetensors"):
        with unchecked():
            save_safetensors(tmp_path / name, tensors, metadata)
        return LoraFile(tmp_path / name, SPECS, TRANSFORMER)

    return write


def refusal(write, tensors, **options):
    with pytest.raises(WanjaxError) as caught:
        write(tensors, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_factors_with_alpha_are_added_in_float32(dtype, open_lora):
    pair = {key: value.astype(dtype) for key, value in PAIR.items()}
    base = checkpoint(dtype)
    merged = MergedLoraReader(base, [(open_lora(pair | {f"{Q}.alpha": np.array(3, dtype)}), 0.5)])
    down, up = (pair[f"{Q}.lora_{side}.weight"].astype(np.float64) for side in ("down", "up"))
    key = "blocks.0.attn1.to_q.weight"
    expected = base.read(key).astype(np.float64) + 0.5 * 3 / 2 * up @ down
    np.testing.assert_allclose(merged.read(key), expected, rtol=1e-6, atol=1e-6)
    assert merged.specs[key] == Spec((6, 4), np.dtype(np.float32))
    unchanged = "blocks.0.norm2.bias"
    assert merged.read(unchanged) is base.read(unchanged)
    assert merged.specs[unchanged] == base.specs[unchanged]


def test_differences_of_weights_biases_and_modulations_are_added(open_lora):
    changes = {
        "diffusion_model.blocks.0.self_attn.q.diff_b": "blocks.0.attn1.to_q.bias",
        "diffusion_model.blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
        "diffusion_model.blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "diffusion_model.blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
        "diffusion_model.blocks.0.diff_m": "blocks.0.scale_shift_table",
        "diffusion_model.patch_embedding.diff": "patch_embedding.weight",
        "diffusion_model.head.diff_m": "scale_shift_table",
    }
    tensors = {key: random(i, *SHAPES[target]) for i, (key, target) in enumerate(changes.items())}
    merged = MergedLoraReader(BASE, [(open_lora(tensors), -2.0)])
    for key, target in changes.items():
        np.testing.assert_allclose(merged.read(target), BASE.read(target) - 2 * tensors[key], rtol=1e-6)


@pytest.mark.parametrize("up_shape", [(4, 2), (4, 2, 1, 1, 1)])
def test_factors_of_a_convolution_are_multiplied(up_shape, open_lora):
    down, up = random(1, 2, 3, 1, 2, 2), random(2, *up_shape)
    names = ("patch_embedding.lora_A.weight", "patch_embedding.lora_B.weight")
    merged = MergedLoraReader(BASE, [(open_lora(dict(zip(names, (down, up), strict=True))), 1.0)])
    expected = BASE.read("patch_embedding.weight") + np.einsum("or,rcthw->octhw", up.reshape(4, 2), down)
    np.testing.assert_allclose(merged.read("patch_embedding.weight"), expected, rtol=1e-5)


NAMES = {
    "diffusers": "transformer.blocks.0.attn1.to_q.lora_A.weight",
    "PEFT": "base_model.model.blocks.0.attn1.to_q.lora_A.default.weight",
    "the authors": "blocks.0.self_attn.q.lora_A.weight",
    "ComfyUI": "diffusion_model.blocks.0.self_attn.q.lora_down.weight",
    "ComfyUI, all in one": "model.diffusion_model.blocks.0.self_attn.q.lora.down.weight",
    "kohya": "lora_unet_blocks_0_self_attn_q.lora_down.weight",
    "kohya by the names of diffusers": "lora_unet_blocks_0_attn1_to_q.lora_down.weight",
}


@pytest.mark.parametrize("down", NAMES.values(), ids=NAMES)
def test_every_naming_of_modules_is_read(down, open_lora):
    up = down.replace("lora_A", "lora_B").replace("down", "up")
    file = open_lora({down: DOWN, up: UP})
    assert (file.matches.num_matched, file.matches.unmatched) == (1, ())
    np.testing.assert_allclose(file.change("blocks.0.attn1.to_q.weight", 1.0, ZEROS), UP @ DOWN, rtol=1e-6)


def test_q_k_and_v_in_one_module_are_split(tmp_path):
    """Each of q, k and v gets a third of the rows. A norm is never split."""
    specs = {f"attn.{name}_{x}.weight": Spec((6, 4), np.dtype(np.float32)) for name in ("to", "add") for x in "qkv"}
    specs |= {f"attn.norm_{x}.weight": Spec((6,), np.dtype(np.float32)) for x in "qk"}
    up, diff = random(9, 18, 2), random(10, 18, 4)
    tensors = {"attn.to_qkv.lora_down.weight": DOWN, "attn.to_qkv.lora_up.weight": up, "attn.add_qkv.diff": diff}
    save_safetensors(tmp_path / "fused.safetensors", tensors | {"attn.norm_qkv.diff": np.ones(18, np.float32)})
    file = LoraFile(tmp_path / "fused.safetensors", specs, TRANSFORMER)
    assert (file.matches.num_matched, file.matches.unmatched) == (2, ("attn.norm_qkv.weight",))
    for i, x in enumerate("qkv"):
        rows = slice(6 * i, 6 * i + 6)
        np.testing.assert_allclose(file.change(f"attn.to_{x}.weight", 2.0, ZEROS), 2 * up[rows] @ DOWN, rtol=1e-6)
        np.testing.assert_array_equal(file.change(f"attn.add_{x}.weight", 1.0, ZEROS), diff[rows])


@pytest.mark.parametrize(("rows", "sizes"), [(17, (6, 6, 6)), (6, (6, 6, 6)), (14, (6, 4, 4))])
def test_q_k_and_v_in_one_module_of_wrong_rows_are_refused(rows, sizes, tmp_path):
    specs = {f"to_{x}.weight": Spec((n, 4), np.dtype(np.float32)) for x, n in zip("qkv", sizes, strict=True)}
    save_safetensors(tmp_path / "fused.safetensors", {"to_qkv.diff": random(0, rows, 4)})
    with pytest.raises(WanjaxError, match=line_with_words(f"to_qkv.weight [{rows}, 4]")):
        LoraFile(tmp_path / "fused.safetensors", specs, TRANSFORMER)


def test_a_strength_of_0_changes_nothing(open_lora):
    merged = MergedLoraReader(BASE, [(open_lora(PAIR), 0.0), (open_lora(PAIR, name="other.safetensors"), -0.0)])
    assert list(merged.specs) == list(SHAPES)
    for key in SHAPES:
        assert merged.read(key) is BASE.read(key)
        assert merged.specs[key] == BASE.specs[key]


def test_several_files_are_added_and_the_checkpoint_is_not_changed(open_lora):
    before = BASE.read("blocks.0.attn1.to_q.weight").copy()
    files = [(open_lora(PAIR), 1.0), (open_lora(PAIR, name="b.safetensors"), 2.0)]
    merged = MergedLoraReader(BASE, files).read("blocks.0.attn1.to_q.weight")
    np.testing.assert_allclose(merged, before + 3 * UP @ DOWN, rtol=1e-5)
    np.testing.assert_array_equal(BASE.read("blocks.0.attn1.to_q.weight"), before)


PEFT_PAIR = {f"transformer.blocks.0.attn1.to_q.lora_{x}.weight": y for x, y in (("A", DOWN), ("B", UP))}


@pytest.mark.parametrize(
    "pattern", ["to_q", "attn1.to_q", "^blocks.0.attn1.to_q", r"blocks\.\d+\..*to_(q|k)", "(?!blocks.1).*q", "(\\w)+"]
)
def test_peft_may_set_alpha_by_module(pattern, open_lora):
    patterns = {"k": 1, "lin.*": 2, pattern: 5, ".*": 3}
    config = {"transformer.lora_alpha": 8, "transformer.alpha_pattern": patterns, "text_encoder.lora_alpha": 9}
    file = open_lora(PEFT_PAIR, {PEFT_METADATA: json.dumps(config)})
    np.testing.assert_allclose(file.change("blocks.0.attn1.to_q.weight", 1.0, ZEROS), 5 / 2 * UP @ DOWN, rtol=1e-6)
    assert has_line_with_words(str(file.matches), "'k' 'lin.*' '.*'")
    assert repr(pattern) not in str(file.matches)


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        ({"lora_alpha": "16"}, 8),
        ({"lora_alpha": "16.0", "r": "2", "use_rslora": "True"}, 16 / 2**0.5),
        ({"transformer.lora_alpha": "3", "transformer.r": "2", "text_encoder.lora_alpha": "7"}, 1.5),
        ({"lora_alpha": "4", "alpha_pattern": '{"q": 1}'}, 0.5),
        ({"lora_config": '{"r": 2, "lora_alpha": 1}'}, 0.5),
        ({"lora_config": '{"prompt": "a cat"}', "network_alpha": "4"}, 2),
        ({"network_alpha": "1.0", "ss_network_alpha": "5"}, 0.5),
        ({"ss_network_alpha": "8.0", "ss_network_dim": "2"}, 4),
        ({"ss_network_alpha": "None"}, 1),
        ({PEFT_METADATA: '{"r": 2}'}, 4),  # 8 is PEFT's default alpha
        ({PEFT_METADATA: '{"r": 9, "rank_pattern": {"q": 2}, "lora_alpha": 3}', "lora_alpha": "8"}, 1.5),
        ({PEFT_METADATA: '{"text_encoder.lora_alpha": 8}'}, 1),
    ],
)
def test_alpha_may_be_in_the_metadata(metadata, scale, open_lora):
    file = open_lora(PAIR, metadata)
    np.testing.assert_allclose(file.change("blocks.0.attn1.to_q.weight", 1.0, ZEROS), scale * UP @ DOWN, rtol=1e-6)
    with_alpha = open_lora(
        PAIR | {f"{Q}.alpha": np.array([[3]], np.int64)}, metadata
    )  # replaces the alpha in the metadata
    np.testing.assert_allclose(with_alpha.change("blocks.0.attn1.to_q.weight", 1.0, ZEROS), 1.5 * UP @ DOWN, rtol=1e-6)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "style.safetensors"])
def test_peft_s_config_may_be_in_the_same_folder(name, open_lora, tmp_path):
    (tmp_path / PEFT_CONFIG).write_text('{"r": 2, "lora_alpha": 6, "alpha_pattern": {"^blocks": 1}}')
    pair = {f"base_model.model.dit.{key.removeprefix('transformer.')}": x for key, x in PEFT_PAIR.items()}
    path = tmp_path / name
    save_safetensors(path, pair)
    specs = {f"dit.{key}": spec for key, spec in SPECS.items()}  # `^` matches the beginning of PEFT's name of a module
    change = LoraFile(path, specs, TRANSFORMER).change("dit.blocks.0.attn1.to_q.weight", 1.0, ZEROS)
    np.testing.assert_allclose(change, 3 * UP @ DOWN, rtol=1e-6)
    without_config = open_lora(PAIR, name="other.safetensors")  # not a file of PEFT
    np.testing.assert_allclose(without_config.change("blocks.0.attn1.to_q.weight", 1.0, ZEROS), UP @ DOWN, rtol=1e-6)


def test_unmatched_tensors_are_reported(open_lora):
    extra = {
        "lora_te_text_model.lora_down.weight": DOWN,
        "lora_te_text_model.lora_up.weight": UP,
    }
    message = str(open_lora(PAIR | extra).matches)
    assert has_line_with_words(message, "1 2 merged model skipped lora_te_text_model.weight")
    assert str(open_lora(PAIR).matches).endswith("lora.safetensors: 1 of 1 change merged")
    patch = {"diffusion_model.patch_embedding.diff": np.ones((4, 36, 1, 2, 2), np.float32)}
    message = str(open_lora(PAIR | patch).matches)
    assert has_line_with_words(message, "patch_embedding.weight [4, 36, 1, 2, 2] [4, 3, 1, 2, 2]")


def test_half_of_a_file_s_changes_are_enough(open_lora):
    assert open_lora(PAIR | {"double_blocks.0.diff": DOWN}).matches.num_matched == 1


UNKNOWN_CHANGES = {f"double_blocks.{i}.diff": DOWN for i in range(9)}
TENSORS = [  # tensors that cannot be merged, and the words of the message
    ({}, "0 of 0 changes merged"),
    ({"double_blocks.0.diff": DOWN}, "skipped double_blocks.0.weight"),
    ({f"{Q}.weight": random(0, 6, 4)}, f"skipped {Q}.weight"),
    ({f"{Q}.alpha": np.float32(1)}, f"skipped {Q}.alpha"),
    ({f"{Q}.lora_up.weight": UP}, f"{Q}.lora_up.weight"),
    ({f"{Q}.lora_down.weight": DOWN}, f"{Q}.lora_down.weight"),
    (PAIR | {f"{Q}.lora_A.weight": DOWN}, f"{Q}.lora_down.weight {Q}.lora_A.weight keep"),
    (PAIR | {f"{Q}.dora_scale": UP}, f"{Q}.dora_scale"),
    ({f"{Q}.hada_w1_a": UP}, f"{Q}.hada_w1_a LoHa"),
    ({f"{Q}.diff": np.ones((6, 4), np.int8)}, "int8 floating dtype"),
    (PAIR | {f"{Q}.alpha": np.ones(2, np.float32)}, f"{Q}.alpha [2] one number"),
    (PAIR | {f"{Q}.alpha": np.array(True)}, f"{Q}.alpha bool one number"),
    ({f"{Q}.lora_down.weight": DOWN, f"{Q}.lora_up.weight": DOWN}, "[] [6, 4]"),
    ({f"{Q}.lora_down.weight": DOWN[0], f"{Q}.lora_up.weight": UP}, "[] [6, 4]"),
    ({f"{Q}.lora_down.weight": np.float32(1), f"{Q}.lora_up.weight": UP}, "of shape []"),
    (PAIR | {f"{Q}.diff": random(9, 6, 4)}, "both"),
    (PAIR | {f"{Q}.lora_B.bias": random(9, 6), f"{Q}.diff_b": random(10, 6)}, "both"),
    (PAIR | dict(list(UNKNOWN_CHANGES.items())[:2]), "1 of 3 changes LoRA model"),
    (PAIR | UNKNOWN_CHANGES, "1 of 10 changes LoRA model"),
]
ENDLESS_PATTERN = "(?:[a-z]|[a-y]|[0-9._]|.)*?[A-Z]"
HOSTILE = ("(a+)+$", "(.*)*x", r"((\w+)\.?)+!", r"([^.]{2,}\.)*x", "(", "x" * 501, "a{9}{9}", r"\2(", "(?P<a")
CONFIGS = [
    *("{", "[]", '{"lora_alpha": "8"}', '{"alpha_pattern": 3}', '{"lora_alpha": NaN}', '{"lora_alpha": null}'),
    *('{"alpha_pattern": {"q": "1"}, "lora_alpha": 1}', '{"r": 3}', '{"use_dora": true}'),
    '{"init_lora_weights": "pissa_niter_4", "lora_alpha": 2}',
]
CONFIGURED = [  # tensors of PEFT, their config, and the words of the message
    *((PAIR, config, "config PEFT lora.safetensors") for config in CONFIGS),
    (
        {key.replace("self_attn.q", "attn1.to.q"): x for key, x in PAIR.items()},
        '{"r": 2, "rank_pattern": {"q": 4}}',
        "config PEFT lora.safetensors",
    ),
    (
        PEFT_PAIR,
        json.dumps({"lora_alpha": 1, "alpha_pattern": {ENDLESS_PATTERN: 2}}),
        f"lora.safetensors {ENDLESS_PATTERN}",
    ),
    *(
        (PEFT_PAIR, json.dumps({"lora_alpha": 4, table: {pattern: 2}}), f"lora.safetensors {table}")
        for table in ("alpha_pattern", "rank_pattern")
        for pattern in HOSTILE
    ),
]


@pytest.mark.parametrize(
    ("tensors", "config", "words"), [*((tensors, None, words) for tensors, words in TENSORS), *CONFIGURED]
)
def test_a_file_that_cannot_be_merged_is_refused(tensors, config, words, open_lora, monkeypatch):
    monkeypatch.setattr(lora_scales, "PATTERN_SECONDS", 0.05)
    metadata = {PEFT_METADATA: config} if config else None
    assert has_line_with_words(
        refusal(open_lora, {key: np.asarray(x) for key, x in tensors.items()}, metadata=metadata), words
    )


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("a.safetensors", Lora("a.safetensors")),
        ("a.safetensors:0.8", Lora("a.safetensors", 0.8)),
        ("a.safetensors:-1e-1", Lora("a.safetensors", -0.1)),
        ("high=a.safetensors:0.8", Lora("a.safetensors", 0.8, "high")),
        ("low=a.safetensors", Lora("a.safetensors", 1.0, "low")),
        ("C:/loras/a.safetensors", Lora("C:/loras/a.safetensors")),
        ("C:/loras/a.safetensors:2", Lora("C:/loras/a.safetensors", 2.0)),
        ("higher=a.safetensors", Lora("higher=a.safetensors")),
        ("owner/name/a=b.safetensors", Lora("owner/name/a=b.safetensors")),
    ],
)
def test_file_strength_and_expert_are_parsed(text, lora):
    assert Lora.parse(text) == lora
    assert Lora.parse(str(lora)) == lora


@given(st.floats(-10, 10), st.sampled_from([None, "high", "low"]))
def test_a_written_lora_is_parsed_again(strength, expert):
    lora = Lora("a.safetensors", strength, expert)
    assert Lora.parse(str(lora)) == lora


ARGUMENTS = [
    *((Lora.parse, (text,), "file") for text in ("", ":0.8", "high=", "high=:1")),
    *((Lora.parse, (f"a.safetensors:{number}",), "-10 10") for number in ("nan", "inf", "1000", "-10.1")),
    (Lora.parse, ("a.safetensors:abc",), "strength a.safetensors 'abc'"),
    (Lora.parse, ("high=owner/name/a.safetensors:0,8",), "strength owner/name/a.safetensors '0,8'"),
    (Lora, ("a", 1.0, "middle"), "expert 'middle' high low"),
]


@pytest.mark.parametrize(("call", "arguments", "words"), ARGUMENTS)
def test_invalid_lora_arguments_are_refused(call, arguments, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        call(*arguments)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", [f"{Q}.lora_down.weight", f"{Q}.lora_up.weight", f"{Q}.alpha", f"{Q}.diff_b"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_numbers_that_are_not_finite_are_refused_by_name(bad, key, dtype, open_lora):
    tensors = PAIR | {f"{Q}.alpha": np.array(2.0, np.float32), f"{Q}.diff_b": np.zeros(6, np.float32)}
    damaged = np.array(tensors[key], dtype)
    damaged.flat[-1] = bad

    def merged():
        reader = MergedLoraReader(BASE, [(open_lora(tensors | {key: damaged}), 0.5)])
        return [reader.read(name) for name in reader.specs]

    with pytest.raises(WanjaxError, match=line_with_words(f"lora.safetensors {key} finite")):
        merged()
