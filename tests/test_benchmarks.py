# SPDX-License-Identifier: Apache-2.0
"""The benchmarks can be imported and print help; their quick parts work."""

import json
import subprocess
import sys
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from benchmarks import card, convert, synthetic
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.network_kinds import read_network
from wanjax.registry import kinds, presets

FOLDER = Path(__file__).parents[1] / "benchmarks"
COMMANDS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_benchmark_prints_its_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        import_module(f"benchmarks.{name}").main()
    assert end.value.code == 0
    assert f"usage: {name}" in capsys.readouterr().out.lower()


def test_the_benchmarks_are_listed():
    assert {"against_diffusers", "attention", "convert", "memory", "quality"} <= set(COMMANDS)


def test_psnr_and_ssim_of_frames_are_correct():
    """PSNR and SSIM of random pictures; the reference of SSIM is its definition on one window."""
    from benchmarks.quality import psnr, ssim

    rng = np.random.default_rng(0)
    first = rng.integers(0, 255, (1, 11, 11, 3), np.uint8)
    second = np.clip(first.astype(int) + rng.integers(-30, 30, first.shape), 0, 255).astype(np.uint8)
    assert psnr(first, first) == 100
    assert ssim(first, first) == pytest.approx(1)
    assert psnr(first, first ^ 1) == pytest.approx(48.1308, abs=1e-3)
    gaussian = np.exp(-((np.arange(11) - 5) ** 2) / 4.5)
    window = (np.outer(gaussian, gaussian) / np.outer(gaussian, gaussian).sum())[:, :, None]
    x, y = first[0].astype(float), second[0].astype(float)
    (a, b), c1, c2 = ((window * x).sum((0, 1)), (window * y).sum((0, 1))), 6.5025, 58.5225
    va, vb, ab = ((window * p).sum((0, 1)) - q for p, q in ((x * x, a * a), (y * y, b * b), (x * y, a * b)))
    expected = (2 * a * b + c1) * (2 * ab + c2) / ((a * a + b * b + c1) * (va + vb + c2))
    assert ssim(first, second) == pytest.approx(expected.mean(), abs=1e-9)


def test_lpips_agrees_with_torch(tmp_path):
    """On random weights, against the same network in torch."""
    torch = pytest.importorskip("torch")
    from benchmarks.lpips import LAYERS, POOLED_LAYERS, SCALE, SHIFT, lpips

    rng, widths = np.random.default_rng(0), [3, 64, 192, 384, 256, 256]
    sizes = dict(zip(LAYERS, (11, 5, 3, 3, 3), strict=True))
    weights = {}
    for number, (layer, size) in enumerate(sizes.items()):
        shape = (widths[number + 1], widths[number], size, size)
        weights[f"features.{layer}.weight"] = rng.normal(0, (shape[1] * size**2) ** -0.5, shape).astype(np.float32)
        weights[f"features.{layer}.bias"] = rng.normal(0, 0.1, shape[0]).astype(np.float32)
        weights[f"lin{number}.model.1.weight"] = rng.random((1, shape[0], 1, 1), np.float32)
    save_safetensors(tmp_path / "lpips.safetensors", weights)
    first, second = (rng.integers(0, 255, (2, 64, 64, 3), np.uint8) for _ in range(2))

    def features(frames):
        x, result = torch.tensor((frames.astype(np.float32) / 127.5 - 1 - SHIFT) / SCALE).permute(0, 3, 1, 2), []
        for layer, (stride, padding) in LAYERS.items():
            if layer in POOLED_LAYERS:
                x = torch.nn.functional.max_pool2d(x, 3, 2)
            kernel, bias = (torch.tensor(weights[f"features.{layer}.{name}"]) for name in ("weight", "bias"))
            x = torch.nn.functional.conv2d(x, kernel, bias, stride, padding).relu()
            result.append(x / (x.norm(dim=1, keepdim=True) + 1e-10))
        return result

    heads = [torch.tensor(weights[f"lin{i}.model.1.weight"]) for i in range(5)]
    pairs = zip(features(first), features(second), heads, strict=True)
    expected = sum(float(torch.nn.functional.conv2d((x - y) ** 2, head).mean()) for x, y, head in pairs)
    assert lpips(first, second, tmp_path / "lpips.safetensors") == pytest.approx(expected, rel=1e-5)
    assert lpips(first, first, tmp_path / "lpips.safetensors") == 0


CHECKPOINTS = [tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint]
SMALL_TEXT = {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_heads": 2}
SMALL = {
    "wan": {
        "TEXT": SMALL_TEXT,
        "TRANSFORMER": {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32},
        "VAE": {"base_dim": 8, "num_res_blocks": 1},
    },
    "cogvideox": {
        "TEXT": SMALL_TEXT,
        "TRANSFORMER": {"num_attention_heads": 2, "attention_head_dim": 16},
        "VAE": {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1},
    },
    "hunyuanvideo": {
        "TEXT": {
            "vocab_size": 100, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
        },
        "TRANSFORMER": {
            "num_attention_heads": 2, "attention_head_dim": 16, "mlp_ratio": 2.0, "rope_axes_dim": (4, 6, 6),
            "text_embed_dim": 24, "text_embed_2_dim": 16, "image_embed_dim": 16, "num_refiner_layers": 1,
        },
        "VAE": {"block_out_channels": (8, 16, 16, 32, 32), "layers_per_block": 1},
        "VIDEO": {"height": 32, "width": 32, "frames": 5},
        "PROMPTS": {"long": 200},
    },
}  # fmt: skip


STAGES = [(family, stage) for family in SMALL for stage in import_module(f"benchmarks.comparison.{family}").STAGES]


@pytest.mark.parametrize(("family", "stage"), quick([("wan", "step")], STAGES))
def test_both_libraries_compute_the_same_values(family, stage, monkeypatch):
    module, cases = (import_module(f"benchmarks.comparison.{name}") for name in (family, "cases"))
    for name, entries in SMALL[family].items():
        for key, value in entries.items():
            monkeypatch.setitem(getattr(module, name), key, value)
    results = [cases.measure(case, 1) for case in module.STAGES[stage](cases.Sizes(2, 32, 32, 9))]
    assert len(results) >= 1
    for result in results:
        print(result)
        assert result.relative_error <= 2e-5
        assert result.ratio == pytest.approx(result.theirs / result.ours)


@pytest.mark.parametrize("model", quick(list(synthetic.MODELS)[:1], synthetic.MODELS))
def test_synthetic_checkpoints_have_the_sizes_of_their_presets(model):
    video_model = presets()[model].model
    assert video_model is not None
    output = synthetic.build_checkpoint(model)
    for name, (network, _) in output.networks.items():
        result = read_network(output.index[name][1], synthetic.config_of(network), kinds())
        assert result.config == video_model.spec.networks[name]
        stored = {
            id(x): x.numel()
            for key, x in network.named_parameters()
            if not any(fnmatch(key, pattern) for pattern in result.unused)
        }
        assert sum(stored.values()) == result.parameters


@pytest.mark.parametrize("checkpoint", quick([tiny_checkpoint], CHECKPOINTS))
def test_a_conversion_is_compared_bit_for_bit(checkpoint, tmp_path):
    source, target = checkpoint(tmp_path / "source"), tmp_path / "target"
    figures = {part: convert.PARTS[part](source, target) for part in ("convert", "verify", "compare")}
    files = [file for file in source.rglob("*.safetensors")]
    assert figures["compare"]["tensors"] == sum(len(load_safetensors(file)) for file in files)
    tensors = {name: np.array(x) for name, x in load_safetensors(files[0]).items()}
    next(iter(tensors.values())).view(np.uint8).flat[0] ^= 1
    save_safetensors(files[0], tensors)
    with pytest.raises(AssertionError):
        convert.compare(source, target)


def test_a_card_times_attention_in_each_implementation():
    figures = list(card.attention(small=True))
    assert {figure.library for figure in figures} == {"wanjax, reference", "wanjax, chunked"}
    assert len({figure.what for figure in figures}) == 1
    assert all(figure.seconds and figure.seconds > 0 for figure in figures)
    [torch_figure] = card.torch_attention(small=True)
    assert torch_figure.what == figures[0].what
    table = "\n".join(
        card.report_lines("a card", {"checks": [{"name": "nano", "outcome": "right"}]}, [*figures, torch_figure])
    )
    assert table.count("| attention, ") == 3
    assert "wrong: none" in table


def test_a_part_that_fails_or_times_out_reports_why(monkeypatch):
    assert [figure.note for figure in card.run_part("attention", True, 1.0)] == ["left out: no time was left"]
    monkeypatch.setattr(card, "MIN_PART_SECONDS", 0.0)
    [stopped] = card.run_part("attention", True, 0.1)
    assert "stopped" in stopped.note
    [failed] = [card.time_program("a step", "wanjax", lambda: 1 // 0)]
    assert failed.note == "integer division or modulo by zero"


@pytest.mark.slow
def test_a_card_reports_all_parts(tmp_path):
    command = [sys.executable, "-m", "benchmarks.card", "--small", "--out", str(tmp_path)]
    table = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True).stdout
    assert table.count("| torch |") == 5
    report = json.loads((tmp_path / "card-cpu.json").read_text())
    assert report["selftest"]["passed"]
    assert all(figure["seconds"] for figure in report["figures"])
