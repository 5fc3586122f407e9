# SPDX-License-Identifier: Apache-2.0
"""LoRA, LoHa, LoKr and DoRA of matrices and convolutions, merged as the formulas in float64 say."""

import json

import ml_dtypes
import numpy as np
import pytest

from tests.support.harm import unchecked
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import Spec, Tensors, save_safetensors
from wanjax.checkpoints.lora import LoraFile, MergedLoraReader
from wanjax.checkpoints.lora_keys import parse_key
from wanjax.checkpoints.lora_scales import PEFT_METADATA
from wanjax.converters.name_map import NameMap
from wanjax.errors import WanjaxError

SHAPES = {
    "linear.weight": (12, 20),
    "linear.bias": (12,),
    "square.weight": (12, 12),
    "kernel.weight": (12, 20, 1, 2, 2),
    **{f"attn.to_{x}.weight": (4, 20) for x in "qkv"},
    "table": (1, 6, 4),
    "block.table": (1, 2, 4),
}
RANK = 3


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


BASE = {key: random(i, *shape) for i, (key, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def open_lora(tmp_path):
    """Write tensors as a LoRA file and open it."""

    def write(tensors, metadata=None):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"  # earlier files are still in use
        with unchecked():
            save_safetensors(path, {key: np.asarray(x) for key, x in tensors.items()}, metadata)
        return LoraFile(path, Tensors(BASE).specs, NameMap([]))

    return write


def merged(file, strength=1.0):
    reader = MergedLoraReader(Tensors(BASE), [(file, strength)])
    return {key: reader.read(key) for key in reader.specs}


def lora(rows, columns, kernel=(), core=False):
    """Return the factors of a change of this shape, and the change in float64."""
    if core:
        down, up = random(1, RANK, columns, *[1] * len(kernel)), random(2, rows, RANK, *[1] * len(kernel))
        mid = random(3, RANK, RANK, *kernel)
        change = np.einsum("pi,ij...,jr->pr...", *map(to_float64, (up.reshape(rows, -1), mid, down.reshape(RANK, -1))))
        return {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": mid}, change
    down, up = random(1, RANK, columns, *kernel), random(2, rows, RANK, *[1] * len(kernel))
    change = np.einsum("pi,ir...->pr...", to_float64(up.reshape(rows, RANK)), to_float64(down))
    return {"lora_up.weight": up, "lora_down.weight": down}, change


def loha(rows, columns, kernel=(), core=False):
    tensors, change = {}, np.ones((rows, columns, *kernel))
    for i in (1, 2):
        if core:
            a, b, t = random(i, RANK, rows), random(i + 2, RANK, columns), random(i + 4, RANK, RANK, *kernel)
            change *= np.einsum("ij...,ip,jr->pr...", *map(to_float64, (t, a, b)))
            tensors |= {f"hada_w{i}_a": a, f"hada_w{i}_b": b, f"hada_t{i}": t}
        else:
            a, b = random(i, rows, RANK), random(i + 2, RANK, columns * int(np.prod(kernel, dtype=int)))
            change *= (to_float64(a) @ to_float64(b)).reshape(change.shape)
            tensors |= {f"hada_w{i}_a": a, f"hada_w{i}_b": b}
    return tensors, change


def lokr(rows, columns, kernel=(), core=False, unfactored=(True, False)):
    small, tensors, halves = (2, 4), {}, []
    large, flat = (rows // small[0], columns // small[1]), int(np.prod(kernel, dtype=int))
    for i, (high, across), is_whole in ((1, small, unfactored[0]), (2, large, unfactored[1])):
        inner = kernel if i == 2 else ()
        if is_whole:
            tensors[f"lokr_w{i}"] = random(i, high, across, *inner)
            halves.append(to_float64(tensors[f"lokr_w{i}"]))
        elif core and i == 2:
            a, b, t = random(i, RANK, high), random(i + 2, RANK, across), random(i + 4, RANK, RANK, *inner)
            tensors |= {"lokr_w2_a": a, "lokr_w2_b": b, "lokr_t2": t}
            halves.append(np.einsum("ij...,ip,jr->pr...", *map(to_float64, (t, a, b))))
        else:
            a, b = random(i, high, RANK), random(i + 2, RANK, across * (flat if i == 2 else 1))
            tensors |= {f"lokr_w{i}_a": a, f"lokr_w{i}_b": b}
            halves.append((to_float64(a) @ to_float64(b)).reshape(high, across, *inner))
    first = halves[0].reshape(*small, *[1] * len(kernel))
    return tensors, np.kron(first, halves[1])


def to_float64(x):
    return x.astype(np.float64)


KINDS = {
    "LoRA": (lora, {}),
    "LoHa": (loha, {}),
    "LoKr of a whole matrix and factors": (lokr, {}),
    "LoKr of factors": (lokr, {"unfactored": (False, False)}),
    "LoKr of factors and a whole matrix": (lokr, {"unfactored": (False, True)}),
}


def assert_near(result, expected):
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["linear", "kernel", "kernel with a core"])
def test_a_change_follows_its_formula(module, kind, open_lora):
    write, options = KINDS[kind]
    name, _, core = module.partition(" with a ")
    rows, columns, *kernel = SHAPES[f"{name}.weight"]
    tensors, change = write(rows, columns, tuple(kernel), core=bool(core), **options)
    file = open_lora({f"{name}.{key}": x for key, x in tensors.items()} | {f"{name}.alpha": np.float32(1.5)})
    assert (file.matches.num_matched, file.matches.is_partial) == (1, False)
    assert_near(merged(file, -0.7)[f"{name}.weight"], BASE[f"{name}.weight"] - 0.7 * 1.5 / RANK * change)


def test_unfactored_matrices_of_lokr_have_no_rank(open_lora):
    """The alpha of LyCORIS, musubi-tuner and ai-toolkit has no effect here; the config of PEFT has."""
    tensors, change = lokr(12, 20, unfactored=(True, True))
    tensors = {f"linear.{key}": x for key, x in tensors.items()}
    file = open_lora(tensors | {"linear.alpha": np.float32(1e10)})
    assert_near(merged(file)["linear.weight"], BASE["linear.weight"] + change)
    config = {"peft_type": "LOKR", "r": 4, "alpha": 6, "rank_pattern": {"lin.*": 12}}
    file = open_lora(tensors, {PEFT_METADATA: json.dumps(config)})
    assert_near(merged(file)["linear.weight"], BASE["linear.weight"] + 6 / 12 * change)


@pytest.mark.parametrize("kind", ["LoHa", "LoRA", "LoKr of factors and a whole matrix"])
def test_q_k_and_v_in_one_module_are_split_by_rows(kind, open_lora):
    write, options = KINDS[kind]
    tensors, change = write(12, 20, **options)
    magnitude = np.abs(random(9, 12, 1))
    file = open_lora({f"attn.to_qkv.{key}": x for key, x in tensors.items()})
    dora = open_lora({f"attn.to_qkv.{key}": x for key, x in (tensors | {"dora_scale": magnitude}).items()})
    base = np.concatenate([to_float64(BASE[f"attn.to_{x}.weight"]) for x in "qkv"])
    for each, expected in ((file, base + change), (dora, with_norms(base + change, magnitude, 1))):
        result = merged(each)
        assert_near(np.concatenate([result[f"attn.to_{x}.weight"] for x in "qkv"]), expected)
    columns = {f"attn.to_qkv.{key}": x for key, x in (tensors | {"dora_scale": random(9, 1, 20)}).items()}
    with pytest.raises(WanjaxError, match=line_with_words("attn.to_qkv.dora_scale columns")):
        open_lora(columns)


def with_norms(x, magnitude, *axes):
    """Scale a weight so that its norms over these axes are `magnitude`."""
    return x * magnitude / np.sqrt((x**2).sum(axes, keepdims=True))


@pytest.mark.parametrize("strength", [1.0, 0.4, -1.0])
@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr of a whole matrix and factors"])
@pytest.mark.parametrize(
    ("module", "key", "shape", "axes"),
    [
        ("linear", "dora_scale", (12, 1), (1,)),  # LyCORIS' by default, and kohya's
        ("linear", "dora_scale", (1, 20), (0,)),  # LyCORIS' without wd_on_out
        ("square", "dora_scale", (1, 12), (0,)),
        ("square", "dora_scale", (12, 1), (1,)),
        ("kernel", "dora_scale", (12, 1, 1, 1, 1), (1, 2, 3, 4)),
        ("kernel", "dora_scale", (1, 20, 1, 1, 1), (0, 2, 3, 4)),
        ("linear", "lora_magnitude_vector", (12,), (1,)),
        ("square", "lora_magnitude_vector.default.weight", (12,), (1,)),
        ("kernel", "lora_magnitude_vector.weight", (1, 12, 1, 1, 1), (1, 2, 3, 4)),
        ("linear", "magnitude", (12,), (1,)),  # ai-toolkit's
    ],
)
def test_dora_scales_the_changed_weight_to_its_norms(module, key, shape, axes, kind, strength, open_lora):
    """A strength interpolates between the weight and the scaled weight, as in ComfyUI."""
    write, options = KINDS[kind]
    name = f"{module}.weight"
    tensors, change = write(SHAPES[name][0], SHAPES[name][1], SHAPES[name][2:], **options)
    norms = np.abs(random(9, *shape))
    file = open_lora({f"{module}.{role}": x for role, x in (tensors | {key: norms}).items()})
    base = to_float64(BASE[name])
    rows = [-1 if axis not in axes else 1 for axis in range(base.ndim)]
    expected = with_norms(base + change, to_float64(norms).reshape(rows), *axes)
    assert_near(merged(file, strength)[name], base + strength * (expected - base))


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["DoRA", "LoKr"])
def test_a_weight_of_8_bits_is_dequantized_before_it_is_changed(kind, dtype, open_lora):
    """The norms of DoRA are those of the dequantized weight."""
    numbers = np.random.default_rng(7).integers(-127, 128, (12, 20)).astype(dtype)
    scale = np.linspace(0.01, 0.2, 12, dtype=np.float32)[:, None]
    base = DequantizedReader(Tensors({"linear.weight": numbers, "linear.weight_scale": scale}))
    weight = numbers.astype(np.float64) * scale
    if kind == "DoRA":
        tensors, change = lora(12, 20)
        norms = np.abs(random(9, 12, 1))
        tensors["dora_scale"] = norms
        expected = with_norms(weight + change, to_float64(norms), 1)
    else:
        tensors, change = lokr(12, 20)
        expected = weight + change
    file = open_lora({f"linear.{role}": x for role, x in tensors.items()})
    merged = MergedLoraReader(base, [(file, 0.6)])
    assert merged.specs.keys() == {"linear.weight"}
    assert_near(merged.read("linear.weight"), weight + 0.6 * (expected - weight))


def test_a_row_of_zeros_stays_zeros(open_lora):
    tensors, _ = lora(12, 20)
    tensors["lora_up.weight"][:] = 0
    file = open_lora(
        {f"linear.{role}": x for role, x in (tensors | {"dora_scale": np.ones((12, 1), np.float32)}).items()}
    )
    base = BASE | {"linear.weight": np.zeros((12, 20), np.float32)}
    assert not MergedLoraReader(Tensors(base), [(file, 1.0)]).read("linear.weight").any()


def test_the_changes_of_several_files_do_not_depend_on_their_order(open_lora):
    tensors, _ = lora(12, 20)
    tensors = {f"linear.{role}": x for role, x in tensors.items()}
    dora = open_lora(tensors | {"linear.dora_scale": np.ones((12, 1), np.float32)})
    difference = open_lora(tensors)
    files = [(dora, 0.5), (difference, 2.0)]
    forward, backward = (MergedLoraReader(Tensors(BASE), each).read("linear.weight") for each in (files, files[::-1]))
    np.testing.assert_allclose(forward, backward, rtol=1e-6, atol=1e-6)
    separate_changes = sum(
        MergedLoraReader(Tensors(BASE), [each]).read("linear.weight") - BASE["linear.weight"] for each in files
    )
    np.testing.assert_allclose(forward, BASE["linear.weight"] + separate_changes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("diffusion_model.table.diff", "table"),
        ("lora_unet_table.diff", "table"),
        ("block.table.diff", "block.table"),
        ("lora_unet_block_table.diff", "block.table"),
        ("linear.bias.diff", "linear.bias"),
        ("linear.weight.diff", "linear.weight"),
        ("linear.w_norm", "linear.weight"),  # norms in LyCORIS
        ("linear.b_norm", "linear.bias"),
        ("linear.diff_b", "linear.bias"),
    ],
)
def test_any_tensor_may_have_a_difference(key, changed, open_lora):
    difference = random(9, *SHAPES[changed])
    file = open_lora({key: difference, f"{key.rpartition('.')[0]}.alpha": np.float32(8)})
    assert (file.matches.num_matched, file.matches.is_partial) == (1, False)  # alpha does not scale a difference
    assert_near(merged(file, 0.5)[changed], BASE[changed] + 0.5 * difference)


def test_full_tensors_of_peft_replace_those_of_the_network(open_lora):
    """PEFT stores biases and `modules_to_save` in full. In other files, a full tensor is not a change."""
    values = {"base_layer.bias": "linear.bias", "weight": "linear.weight"}
    tensors = {f"base_model.model.linear.{role}": random(9, *SHAPES[key]) for role, key in values.items()}
    tensors["base_model.model.table"] = random(9, *SHAPES["table"])
    file = open_lora(tensors)
    assert (file.matches.num_matched, file.matches.is_partial) == (3, False)
    result = merged(file, 0.25)
    for key in ("linear.bias", "linear.weight", "table"):
        assert_near(result[key], 0.75 * BASE[key] + 0.25 * random(9, *SHAPES[key]))
    with pytest.raises(WanjaxError, match=line_with_words("0 of 2 linear.weight")):
        open_lora({key: BASE[key] for key in ("linear.weight", "table")})


HADA = {f"linear.{role}": x for role, x in loha(12, 20)[0].items()}
KRON = {f"linear.{role}": x for role, x in lokr(12, 20)[0].items()}
PAIR = {f"linear.{role}": x for role, x in lora(12, 20)[0].items()}


ADALORA = {"linear.lora_E": random(0, RANK, 1)}
TENSORS = [  # tensors that give no change, and the words of the message
    (HADA | {"linear.hada_w2_a": None}, "linear.hada_w1_a LoHa complete"),
    (HADA | {"linear.hada_w2_b": random(0, RANK, 8)}, "[] [12, 20]"),
    (HADA | {"linear.hada_w1_b": random(0, 4, 20)}, "[] [12, 20]"),
    (HADA | {"linear.hada_t1": random(0, RANK, RANK)}, "[] [12, 20]"),
    (HADA | {"linear.hada_w1_a": np.full((12, RANK), np.nan, np.float32)}, "linear.hada_w1_a finite"),
    (HADA | {"linear.alpha": np.float32(3e38)}, "linear.hada_w1_a finite"),
    (HADA | KRON, "linear.hada_w1_a linear.lokr_w1 one"),
    (HADA | PAIR, "linear.hada_w1_a linear.lora_up.weight one"),
    (KRON | {"linear.lokr_w1": None}, "linear.lokr_w2_a LoKr complete"),
    (KRON | {"linear.lokr_w1": random(0, 2, 4, 1)}, "[] [12, 20]"),
    (KRON | {"linear.lokr_w1": random(0, 20000, 400)}, "[120000, 2000] [12, 20]"),
    (KRON | {"linear.lokr_w1": random(0, 8)}, "[] [12, 20]"),
    (KRON | {"linear.lokr_w1_a": random(0, 2, 1)}, "linear.lokr_w1 linear.lokr_w1_a LoKr"),
    (KRON | {"linear.lokr_w2_b": random(0, 5, 5)}, "[] [12, 20]"),
    (KRON | {"linear.lokr_w2_a": np.float32(1)}, "[] [12, 20]"),
    (KRON | {"linear.lokr_w1": np.ones((2, 4), np.int8)}, "linear.lokr_w1 int8 floating"),
    (PAIR | {"linear.lora_mid.weight": random(0, RANK)}, "[] [12, 20]"),
    (PAIR | {"linear.lora_up.weight": np.full((12, RANK), 3e38, np.float32)}, "linear.lora_up.weight finite"),
    (PAIR | {"linear.dora_scale": random(0, 13, 1)}, "linear.dora_scale [13, 1] [12, 20]"),
    (PAIR | {"linear.dora_scale": random(0)}, "linear.dora_scale [] [12, 20]"),
    (PAIR | {"linear.lora_magnitude_vector": random(0, 20)}, "linear.lora_magnitude_vector [20] [12, 20]"),
    (PAIR | {"linear.dora_scale": np.full((12, 1), np.inf, np.float32)}, "linear.dora_scale finite"),
    (PAIR | {"linear.dora_scale": np.ones((12, 1)), "linear.magnitude": np.ones(12)}, "linear.magnitude one"),
    ({"linear.dora_scale": random(0, 12, 1)}, "linear.dora_scale factors"),
    (PAIR | {"linear.lora_E": random(0, RANK, 1)}, "linear.lora_E AdaLoRA adapter_config.json"),
    (PAIR | {"transformer.linear.diff": random(0, 12, 20)}, "linear.lora_up.weight transformer.linear.diff one"),
    ({"linear.diff": random(0, 12, 20), "linear.weight.diff": random(0, 12, 20)}, "linear.weight.diff one"),
    (PAIR | {"linear.lora_diag": random(0, RANK)}, "linear.lora_diag KaSA"),
    ({"linear.oft_blocks": random(0, 2, 2, 2)}, "linear.oft_blocks oft"),
    ({"linear.hira_A": random(0, 2, 2)}, "linear.hira_A hira"),
    ({"linear.ia3_l": random(0, 2, 2)}, "linear.ia3_l IA3"),
    (PAIR | {"linear.reshape_weight": random(0, 2)}, "linear.reshape_weight shape"),
]
CONFIGS = [  # configs of PEFT with another formula
    ({"peft_type": "VERA"}, "VERA"),
    ({"peft_type": ["LORA"]}, "peft_type"),
    ({"use_bdlora": True}, "use_bdlora"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"),
    ({"use_dora": True, "r": RANK}, "use_dora linear.lora_up.weight magnitude"),
    ({"peft_type": "ADALORA", "init_r": 0}, "init_r 0"),
    ({"peft_type": "ADALORA", "lora_alpha": "8"}, "'8' lora_alpha"),
]


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        *((tensors, None, words) for tensors, words in TENSORS),
        *((PAIR | (ADALORA if x.get("peft_type") == "ADALORA" else {}), x, words) for x, words in CONFIGS),
    ],
)
def test_a_file_without_a_change_is_refused(tensors, config, words, open_lora):
    metadata = [{PEFT_METADATA: json.dumps(config)}] if config else []
    with pytest.raises(WanjaxError) as caught:
        merged(open_lora({key: x for key, x in tensors.items() if x is not None}, *metadata), 2.0)
    assert has_line_with_words(str(caught.value), words)
    assert "\n" not in str(caught.value)


def test_a_module_named_like_a_wrapper_is_recognised(tmp_path):
    specs = {"module.to_q.weight": Spec((12, 20), np.dtype(np.float32))}
    tensors, change = lora(12, 20)
    save_safetensors(tmp_path / "a.safetensors", {f"transformer.module.to_q.{role}": x for role, x in tensors.items()})
    file = LoraFile(tmp_path / "a.safetensors", specs, NameMap([]))
    assert_near(file.change("module.to_q.weight", 1.0, np.zeros((12, 20), np.float32)), change)


def test_a_key_of_many_wrappers_needs_little_memory():
    """Each removed prefix leaves a copy of the rest, so a long chain would take gigabytes."""
    part = parse_key("model." * 100_000 + "linear.lora_A.weight", {"linear"})
    assert part is not None
    assert part.module not in {"linear"}
    usual = parse_key("base_model.model.model.diffusion_model.linear.lora_A.weight", {"linear"})
    assert usual is not None
    assert usual.module == "linear"
