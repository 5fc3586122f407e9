# SPDX-License-Identifier: Apache-2.0
"""LoRA files with the keys and shapes of published files: each change matches a weight of the published network.

The numbers of changes are those of the publishers' own files; each has its source.
"""

import re
from functools import partial

import pytest

from tests.support.published import hollow_file
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax import registry
from wanjax.checkpoints.lora import LoraFile
from wanjax.converters.name_map import NameMap
from wanjax.errors import WanjaxError

T2V, I2V, SMALL, EXPERTS = "wan2.1-t2v-14b", "wan2.1-i2v-14b-480p", "wan2.1-t2v-1.3b", "wan2.2-t2v-a14b"
VIDEO, COG = "hunyuanvideo1.5-720p-t2v", ("cogvideox-2b", "cogvideox-5b", "cogvideox1.5-5b-i2v")
DOWN, UP, A, B = ".lora_down.weight", ".lora_up.weight", ".lora_A.weight", ".lora_B.weight"
ATTENTION = r"self_attn\.[qkvo]|cross_attn\.(?:[qkvo]|k_img|v_img)|ffn\.[02]"  # Wan's projections, by its authors
PUBLISHED_BYTES = 739_472_104  # of lightx2v's I2V 14B 480P cfg-step-distill LoRA of rank 64, from its page


def network(name):
    preset = registry.find_preset(name)
    assert preset is not None
    return registry.family_with(preset).network_of(preset.model.spec.networks["transformer"])


def diffusers_shapes(name):
    """Return the shapes of a network's tensors by the names of diffusers."""
    return {key: spec.shape for key, spec in network(name).specs.items()}


def shapes_by_original_names(name):
    """Return the shapes of a network's tensors by the authors' names, with q, k and v fused in some modules."""
    names, result = network(name).kind.lora_names or NameMap([]), {}
    for key, shape in diffusers_shapes(name).items():
        fused_name = names.to_authors(re.sub(r"\.to_[qkv]\.", ".to_qkv.", key))
        if names.to_authors(key) or not fused_name:
            result[names.to_authors(key) or key] = shape
        else:
            result[fused_name] = (3 * shape[0], *shape[1:])
    return result


def factors(modules, down=A, up=B, *, prefix="", rank=32, alpha=False, underscores=False):
    """Return the shapes of a LoRA's tensors of modules, given the shapes of their weights."""
    result = {}
    for module, (rows, *dimensions) in modules.items():
        key = prefix + (module.replace(".", "_") if underscores else module)
        result |= {f"{key}{down}": (rank, *dimensions), f"{key}{up}": (rows, rank, *[1] * (len(dimensions) - 1))}
        result |= {f"{key}.alpha": ()} if alpha else {}
    return result


kohya_factors = partial(factors, down=DOWN, up=UP, prefix="lora_unet_", underscores=True, alpha=True)


def linear(shapes, pattern=r".*"):
    """Return the modules whose name matches and whose weight is a matrix."""
    each = ((key.removesuffix(".weight"), shape) for key, shape in shapes.items() if key.endswith(".weight"))
    return {key: shape for key, shape in each if len(shape) == 2 and re.fullmatch(pattern, key)}


def blocks(name):
    return linear(shapes_by_original_names(name), rf"blocks\.\d+\.(?:{ATTENTION})")


def matches_of(path, name, tensors, dtypes=None):
    result = network(name)
    file = hollow_file(path / "lora.safetensors", tensors, dtypes=dtypes)
    return LoraFile(file, result.specs, result.kind.lora_names or NameMap([])).matches


def distilled_shapes(name, *, modulation, head=True):
    """Return the tensors of a change of all weights: products of matrices, differences of all others.

    modulation: `diff_m` as lightx2v's, `diff` as Kijai's extractions; None where there is none.
    """
    result = {}
    for key, shape in shapes_by_original_names(name).items():
        module, _, leaf = key.rpartition(".")
        name_of_module = f"diffusion_model.{module}"
        if leaf == "weight" and len(shape) == 2 and (head or not key.startswith("head.")):
            result |= factors({name_of_module: shape}, DOWN, UP, rank=64)
        elif leaf in ("weight", "bias"):
            result[name_of_module + {"weight": ".diff", "bias": ".diff_b"}[leaf]] = shape
        elif modulation:
            result[{"diff_m": f"{name_of_module}.diff_m", "diff": f"diffusion_model.{key}.diff"}[modulation]] = shape
    return result


@pytest.mark.parametrize("modulation", ["diff_m", "diff"])
@pytest.mark.parametrize(("name", "count"), [(T2V, 1095), (I2V, 1303), (SMALL, 825)])
def test_a_distilled_lora_of_all_weights_is_merged_completely(name, count, modulation, tmp_path):
    """ModelTC/LightX2V lora_loader.py; Kijai/WanVideo_comfy, whose extractions have `blocks.N.modulation.diff`."""
    matches = matches_of(tmp_path, name, distilled_shapes(name, modulation=modulation))
    assert (matches.num_matched, matches.unmatched) == (count, ())


def test_the_published_file_size_follows_from_these_names(tmp_path):
    tensors = dict(sorted(distilled_shapes(I2V, modulation=None, head=False).items()))  # as safetensors writes them
    assert matches_of(tmp_path, I2V, tensors).unmatched == ()
    assert len(tensors) == 1749
    assert (tmp_path / "lora.safetensors").stat().st_size == PUBLISHED_BYTES


@pytest.mark.parametrize(("dtype", "size"), [("F16", 630_695_648), ("BF16", 630_697_104)])
def test_the_published_size_of_kijais_extractions_follows_from_these_names(dtype, size, tmp_path):
    """Wan_2_2_I2V_A14B_{HIGH,LOW}_lightx2v_4step_lora_260412_rank_64_fp16, and HIGH of v1030 in bfloat16.

    All weights change but the modulation and the first convolution's.
    """
    model = "wan2.2-i2v-a14b"
    tensors = dict(sorted(distilled_shapes(model, modulation=None).items()))
    del tensors["diffusion_model.patch_embedding.diff"]
    matches = matches_of(tmp_path, model, tensors, dict.fromkeys(tensors, dtype))
    assert (matches.num_matched, matches.unmatched) == (1095 - 42, ())
    assert (tmp_path / "lora.safetensors").stat().st_size == size


@pytest.mark.parametrize(
    ("name", "prefix", "rank", "dtype", "size"),
    [
        (T2V, "", 128, "BF16", 1_226_922_392),
        (T2V, "base_model.model.", 128, "F32", 2_453_769_728),
        ("wan2.2-ti2v-5b", "base_model.model.", 128, "F32", 1_289_824_400),
        ("wan2.2-ti2v-5b", "base_model.model.", 64, "F32", 644_949_288),
    ],
)
def test_longlive_plug_changes_the_matrices_of_all_blocks(name, prefix, rank, dtype, size, tmp_path):
    """The published files have these tensors, and metadata of less than 400 bytes; another prefix adds thousands."""
    tensors = factors(blocks(name), prefix=prefix, rank=rank)
    matches = matches_of(tmp_path, name, tensors, dict.fromkeys(tensors, dtype))
    assert (matches.num_matched, matches.unmatched) == ({T2V: 400}.get(name, 300), ())
    assert 0 < size - (tmp_path / "lora.safetensors").stat().st_size < 400


@pytest.mark.parametrize("name", [T2V, EXPERTS, "wan2.2-i2v-a14b"])
def test_lightning_s_alphas_are_integers(name, tmp_path):
    tensors = factors(blocks(name), DOWN, UP, prefix="diffusion_model.", rank=64, alpha=True)
    dtypes = {key: "I64" for key in tensors if key.endswith(".alpha")}
    matches = matches_of(tmp_path, name, tensors, dtypes=dtypes)
    assert (matches.num_matched, matches.unmatched) == (400, ())


def test_a_bias_of_a_single_layer_is_merged(tmp_path):
    """AccVideo's has `time_projection.1.diff_b` beside its products."""
    tensors = factors(blocks(T2V), DOWN, UP, prefix="diffusion_model.", rank=64)
    matches = matches_of(tmp_path, T2V, tensors | {"diffusion_model.time_projection.1.diff_b": (30720,)})
    assert (matches.num_matched, matches.unmatched) == (401, ())


@pytest.mark.parametrize(
    ("source", "target", "matched", "total"),
    [(I2V, T2V, 1094, 1303), (T2V, I2V, 1094, 1095), (T2V, "wan2.1-vace-14b", 1095, 1095), (T2V, EXPERTS, 1095, 1095)],
)
def test_a_lora_of_a_relative_is_merged_where_it_fits(source, target, matched, total, tmp_path):
    matches = matches_of(tmp_path, target, distilled_shapes(source, modulation="diff_m"))
    assert (matches.num_matched, matches.num_matched + len(matches.unmatched)) == (matched, total)


@pytest.mark.parametrize(("source", "target"), [(T2V, SMALL), (SMALL, T2V)])
def test_a_lora_of_another_size_is_refused_by_its_shapes(source, target, tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words("[5120, 5120] [1536, 1536]")):
        matches_of(tmp_path, target, distilled_shapes(source, modulation="diff_m"))


SPELLINGS = {
    "musubi-tuner, kohya": ("lora_unet_", DOWN, UP, True, True),
    "VideoX-Fun": ("lora_unet__", DOWN, UP, True, True),
    "kohya, with PEFT's factors": ("lora_unet_", A, B, True, True),
    "LyCORIS": ("lycoris_", DOWN, UP, True, True),
    "OneTrainer": ("lora_transformer_", DOWN, UP, True, True),
    "diffusion-pipe, ai-toolkit": ("diffusion_model.", A, B, False, False),
    "ComfyUI, all in one": ("model.diffusion_model.", A, B, False, False),
    "diffusers": ("transformer.", A, B, False, False),
    "LightX2V's loader, unet": ("unet.", DOWN, UP, True, False),
    "LightX2V's loader, model": ("model.", DOWN, UP, True, False),
    "DiffSynth-Studio": ("pipe.dit.", A, B, False, False),
    "DiffSynth-Studio, PEFT": ("", ".lora_A.default.weight", ".lora_B.default.weight", False, False),
    "PEFT": ("base_model.model.", A, B, False, False),
    "PEFT of a part": ("base_model.model.dit.", A, B, False, False),
    "an adapter's name": ("", ".lora_A.lightx2v_t1.weight", ".lora_B.lightx2v_t1.weight", False, False),
    "a parallel module": ("module.", A, B, False, False),
    "a compiled module": ("_orig_mod.", A, B, False, False),
    "Self-Forcing": ("generator.model.", A, B, False, False),
    "Mochi's": ("diffusion_model.", ".lora_A", ".lora_B", False, False),
    "old diffusers": ("", "_lora.down.weight", "_lora.up.weight", False, False),
    "transformers": ("", ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", False, False),
    "diffusers, lora.down": ("transformer.", ".lora.down.weight", ".lora.up.weight", False, False),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_read_completely(spelling, tmp_path):
    prefix, down, up, alpha, underscores = SPELLINGS[spelling]
    matches = matches_of(
        tmp_path, SMALL, factors(blocks(SMALL), down, up, prefix=prefix, alpha=alpha, underscores=underscores)
    )
    assert (matches.num_matched, matches.unmatched) == (300, ())


def test_the_part_for_a_text_encoder_is_reported_and_skipped(tmp_path):
    text = {"encoder_block_0_layer_0_SelfAttention_q": (4096, 4096)}
    tensors = kohya_factors(blocks(SMALL))
    matches = matches_of(tmp_path, SMALL, tensors | factors(text, DOWN, UP, prefix="lora_te_", alpha=True))
    assert (matches.num_matched, len(matches.unmatched)) == (300, 1)


PROJECTIONS = r"blocks\.\d+\.(?:attn[12]\.(?:to_[qkv]|to_out\.0)|ffn\.net\.(?:0\.proj|2))"


@pytest.mark.parametrize(
    ("prefix", "underscores"),
    [
        ("transformer.", False),
        ("", False),
        ("diffusion_model.", False),
        ("lora_unet_", True),
        ("lora_transformer_", True),
    ],
)
def test_the_names_of_diffusers_are_read_for_wan(prefix, underscores, tmp_path):
    matches = matches_of(
        tmp_path,
        SMALL,
        factors(linear(diffusers_shapes(SMALL), PROJECTIONS), prefix=prefix, underscores=underscores),
    )
    assert (matches.num_matched, matches.unmatched) == (300, ())


RENAMED = [  # musubi-tuner's convert_hunyuan_video_1_5_lora_to_comfy.py
    *((f"{x}_mlp.fc1", f"{x}_mlp.0") for x in ("img", "txt")),
    *((f"{x}_mlp.fc2", f"{x}_mlp.2") for x in ("img", "txt")),
    *((f"{x}_mod.linear", f"{x}_mod.lin") for x in ("img", "txt")),
]


def comfy(modules):
    """Return HunyuanVideo's modules as ComfyUI names them, with q, k and v as one."""
    result = {}
    for module, (rows, *dimensions) in modules.items():
        name, three = re.subn(r"_attn_[qkv]$", "_attn.qkv", module)
        name = name.replace("_attn_proj", "_attn.proj")
        for author_name, comfy_name in RENAMED:
            name = name.replace(author_name, comfy_name)
        result[name] = (rows * (3 if three else 1), *dimensions)
    return result


HUNYUAN = {
    "authors": (781, lambda: factors(linear(shapes_by_original_names(VIDEO)), prefix="base_model.model.")),
    "musubi-tuner": (
        756,
        lambda: kohya_factors(linear(shapes_by_original_names(VIDEO), r"double_blocks\..*")),
    ),
    "musubi-tuner's for ComfyUI": (
        540,
        lambda: kohya_factors(comfy(linear(shapes_by_original_names(VIDEO), r"double_blocks\..*")), rank=96),
    ),
    "ComfyUI": (
        565,
        lambda: factors(comfy(linear(shapes_by_original_names(VIDEO))), DOWN, UP, prefix="diffusion_model."),
    ),
    "diffusers": (785, lambda: factors(linear(diffusers_shapes(VIDEO)), prefix="transformer.")),
    "diffusers by kohya": (
        756,
        lambda: kohya_factors(linear(diffusers_shapes(VIDEO), r"transformer_blocks\..*")),
    ),
}


@pytest.mark.parametrize("spelling", quick(["authors", "ComfyUI"], HUNYUAN))
def test_loras_of_hunyuanvideo_are_read_completely(spelling, tmp_path):
    count, tensors = HUNYUAN[spelling]
    matches = matches_of(tmp_path, VIDEO, tensors())
    assert (matches.num_matched, matches.unmatched) == (count, ())


COGVIDEOX = {
    "diffusers": ("transformer.", A, B, False),
    "finetrainers": ("", A, B, False),
    "PEFT": ("base_model.model.", A, B, False),
    "PEFT's own names": ("", ".lora_A.default.weight", ".lora_B.default.weight", False),
    "VideoX-Fun": ("lora_unet__", DOWN, UP, True),
}


@pytest.mark.parametrize("spelling", COGVIDEOX)
@pytest.mark.parametrize("name", quick([COG[1]], COG))
def test_loras_of_cogvideox_are_read_completely(name, spelling, tmp_path):
    prefix, down, up, underscores = COGVIDEOX[spelling]
    modules = linear(diffusers_shapes(name), r"transformer_blocks\.\d+\.attn1\.(?:to_[qkv]|to_out\.0)")
    matches = matches_of(tmp_path, name, factors(modules, down, up, prefix=prefix, underscores=underscores, rank=64))
    assert (matches.num_matched, matches.unmatched) == (len(modules), ())
    assert len(modules) == 4 * {"cogvideox-2b": 30}.get(name, 42)


@pytest.mark.parametrize("kind", ["LoKr", "LoHa"])
def test_a_lokr_or_loha_by_musubi_tuner_and_ai_toolkit_is_read_completely(kind, tmp_path):
    """Keys of networks/lokr.py and loha.py, before and after convert_lora.py, and those of ai-toolkit."""
    for prefix, underscores in (("lora_unet_", True), ("diffusion_model.", False), ("lycoris_", True)):
        tensors = {}
        for module, (rows, columns) in blocks(SMALL).items():
            key = prefix + (module.replace(".", "_") if underscores else module)
            lokr = {"lokr_w1": (8, 8), "lokr_w2_a": (rows // 8, 4), "lokr_w2_b": (4, columns // 8)}
            loha = {f"hada_w{i}_{x}": shape for i in (1, 2) for x, shape in (("a", (rows, 4)), ("b", (4, columns)))}
            each = {"LoKr": lokr, "LoHa": loha}[kind] | {"alpha": ()}
            tensors |= {f"{key}.{role}": shape for role, shape in each.items()}
        matches = matches_of(tmp_path, SMALL, tensors)
        assert (matches.num_matched, matches.unmatched) == (300, ())
