# SPDX-License-Identifier: Apache-2.0
"""The numbers of torch's generator, and latents from a seed against diffusers with this generator, float32."""

from functools import wraps
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    CogVideoXVideoToVideoPipeline,
    FlowMatchLCMScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import wanjax
from tests.parity import cogvideox_references, hunyuan_references
from tests.parity.references import MAX_LATENT_ERROR, emphasise_mlps, randomise, relative_l2, small_components
from tests.support.quick import quick
from wanjax.pipelines.torch_noise import TorchGenerator
from wanjax.schedulers import name_of

pytestmark = pytest.mark.usefixtures("cached_programs")

PROMPT, NEGATIVE, SEED = "a red circle moving right", "a blue cat", 2**40 + 11
RANDOM = np.random.default_rng(0)
PICTURES = RANDOM.integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)
SIZES: dict[str, Any] = {
    "num_attention_heads": 3, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 48,
    "freq_dim": 64, "ffn_dim": 160, "num_layers": 2,
}  # fmt: skip
WAN: dict[str, Any] = {"size": (32, 48), "frames": 9, "steps": 4, "guidance_scale": 4.0, "flow_shift": 3.0}
COGVIDEOX: dict[str, Any] = {"size": (32, 48), "steps": 6, "guidance_scale": 6.0}


DTYPES = [(torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)]
ROUNDING = 5e-7  # the largest difference of logarithms and cosines between NumPy and torch, in float32


def compare(result: np.ndarray, expected_latents: torch.Tensor) -> None:
    """Compare numbers. In 16 bits they are equal, except for a few close to the middle of two values."""
    result_float32, expected_float32 = result.astype(np.float32), expected_latents.float().numpy()
    difference = np.abs(result_float32 - expected_float32)
    print(f"numbers {difference.max():.1e}")
    if result.dtype == np.float32:
        assert difference.max() <= ROUNDING
    else:
        assert (difference > 0).mean() <= 1e-4 or (difference > 0).sum() <= 1
        assert (difference <= float(ml_dtypes.finfo(result.dtype).eps) * np.abs(expected_float32)).all()


@pytest.mark.parametrize(("torch_dtype", "dtype"), DTYPES, ids=["float32", "bfloat16", "float16"])
def test_the_numbers_equal_those_of_torch(torch_dtype, dtype):
    """Compare two arrays for each of 40 shapes and seeds, some of fewer than sixteen numbers."""
    random = np.random.default_rng(0)
    shapes = [(count,) for count in (1, 2, 3, 7, 15, 16, 17, 31, 32, 33)]
    shapes += [(1, 4, *random.integers(1, 12, 3).tolist()) for _ in range(20)]
    shapes += [(1, 16, *random.integers(1, 40, 3).tolist()) for _ in range(10)]
    seeds = [0, 42, 2**31 + 5, 2**32 - 1, 2**40 + 7, *random.integers(0, 2**63, 35).tolist()]
    for shape, seed in zip(shapes, seeds, strict=True):
        generator, reference = TorchGenerator(seed), torch.Generator().manual_seed(seed)
        for _ in range(2):
            compare(generator.normal(shape, dtype), torch.randn(shape, generator=reference, dtype=torch_dtype))


@pytest.mark.parametrize(("torch_dtype", "dtype"), DTYPES, ids=["float32", "bfloat16", "float16"])
def test_small_arrays_between_large_ones_equal_those_of_torch(torch_dtype, dtype):
    """After a small array of odd size, the next small array begins with the unused number of the last pair."""
    generator, reference = TorchGenerator(7), torch.Generator().manual_seed(7)
    for count in (5, 17, 3, 16, 1, 40, 4, 15):
        compare(generator.normal((count,), dtype), torch.randn(count, generator=reference, dtype=torch_dtype))


def images(pictures: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(picture) for picture in pictures]


@torch.no_grad()
def expected_latents(pipe: Any, generator: Any, **arguments: Any) -> np.ndarray:
    """Return diffusers' latents after the last step."""
    latents: list[Any] = []
    step = pipe.scheduler.step

    @wraps(step)  # a pipeline reads its signature
    def recording_step(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        latents.append(result[0])
        return result

    pipe.scheduler.step = recording_step
    pipe.set_progress_bar_config(disable=True)
    pipe(**{"prompt": PROMPT, "negative_prompt": NEGATIVE, "generator": generator, "output_type": "latent"} | arguments)
    return latents[-1].numpy()


def reference_settings(size: tuple[int, int], steps: int, guidance_scale: float, **settings: Any) -> dict[str, Any]:
    frames = {"num_frames": settings["frames"]} if "frames" in settings else {}
    height, width = size
    return {"height": height, "width": width, "num_inference_steps": steps, "guidance_scale": guidance_scale, **frames}


def make_latents(
    folder: Path, *, pictures: dict[str, Any] | None = None, resize: str = "stretch", **settings: Any
) -> np.ndarray:
    """Return the latents after the last step, with the frames that the pipeline later removes."""
    pipe = wanjax.load(folder)
    settings = {"seed": SEED, "rng": "torch", "follow": "diffusers"} | settings
    inputs = pictures | {"resize": resize} if pictures else {}
    encoded = pipe.encode(PROMPT, NEGATIVE, **inputs, **settings)
    latents: list[np.ndarray] = []
    pipe.denoise(encoded, callback=lambda step: latents.append(np.asarray(step.latents)), **settings)
    return latents[-1]


def compare_latents(latents: np.ndarray, expected: np.ndarray) -> None:
    error = relative_l2(latents, expected)
    print(f"latents {error:.1e}")
    assert error <= MAX_LATENT_ERROR


def generator(seed: int = SEED) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def transformer(seed: int = 1, **sizes: Any) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    network = WanTransformer3DModel(**SIZES | sizes).eval()
    randomise(network, seed)
    emphasise_mlps(network)
    return network


def clip() -> dict[str, Any]:
    """Return Wan 2.1's vision tower and its processor."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=40, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7,
        hidden_act="gelu",
    )  # fmt: skip
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return {"image_encoder": CLIPVisionModelWithProjection(config).eval(), "image_processor": processor}


def experts(**sizes: Any) -> dict[str, Any]:
    return {"transformer": transformer(**sizes), "transformer_2": transformer(2, **sizes)}


def vae_of_5b() -> AutoencoderKLWan:
    torch.manual_seed(0)
    network = AutoencoderKLWan(
        base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 2.0, 1.0],
        is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16,
    ).eval()  # fmt: skip
    randomise(network, 1)
    return network


WAN_TASKS = {
    "2.1 text": lambda: (WanPipeline, {"transformer": transformer()}, {}),
    "2.1 picture": lambda: (
        WanImageToVideoPipeline,
        {"transformer": transformer(in_channels=12, image_dim=40, added_kv_proj_dim=96), **clip()},
        {"image": PICTURES[0]},
    ),
    "2.2 text": lambda: (WanPipeline, {**experts(), "boundary_ratio": 0.875}, {}),
    "2.2 picture": lambda: (
        WanImageToVideoPipeline,
        {**experts(in_channels=12), "boundary_ratio": 0.9},
        {"image": PICTURES[0]},
    ),
    "2.2 5B text": lambda: (
        WanPipeline,
        {"transformer": transformer(), "vae": vae_of_5b(), "expand_timesteps": True},
        {},
    ),
    "2.2 5B picture": lambda: (
        WanImageToVideoPipeline,
        {"transformer": transformer(), "vae": vae_of_5b(), "expand_timesteps": True},
        {"image": PICTURES[0]},
    ),
    "2.1 clip": lambda: (WanVideoToVideoPipeline, {"transformer": transformer()}, {"video": PICTURES}),
}


# the noise does not depend on experts; the 5B model and models of pictures have their own parity tests of a pipeline
@pytest.mark.parametrize("task", quick(["2.1 text", "2.1 clip"], WAN_TASKS))
def test_wan_equals_diffusers(tmp_path, task):
    kind, networks, pictures = WAN_TASKS[task]()
    components, size = small_components(tmp_path / "tokenizer") | networks, (32, 64) if "5B" in task else (32, 48)
    if kind is WanVideoToVideoPipeline or "5B" in task:  # the published checkpoint is of the text pipeline
        WanPipeline(**components).save_pretrained(tmp_path / "checkpoint")
        reference = kind.from_pretrained(tmp_path / "checkpoint")
    else:
        reference = kind(**components)
        reference.save_pretrained(tmp_path / "checkpoint")
    settings = WAN | {"size": size} | ({"strength": 0.6} if "video" in pictures else {})
    options: dict[str, Any] = {
        name: images(x) if name == "video" else Image.fromarray(x) for name, x in pictures.items()
    }
    options |= reference_settings(**settings)
    if "video" in pictures:
        del options["num_frames"]
        options["strength"] = settings["strength"]
    expected = expected_latents(reference, generator(), **options)
    compare_latents(make_latents(tmp_path / "checkpoint", pictures=pictures, **settings), expected)


def test_vace_equals_diffusers(tmp_path):
    """Two reference pictures add two frames to the noise."""
    torch.manual_seed(0)
    network = WanVACETransformer3DModel(**SIZES, vace_layers=[0], vace_in_channels=2 * 4 + 64).eval()
    randomise(network, 1)
    reference = WanVACEPipeline(transformer=network, **small_components(tmp_path / "tokenizer"))
    reference.save_pretrained(tmp_path / "checkpoint")
    options = {"video": images(PICTURES), "reference_images": images(PICTURES[1::-1])}
    expected = expected_latents(reference, generator(), **options, **reference_settings(**WAN))
    pictures = {"video": PICTURES, "references": [*PICTURES[:2]]}
    compare_latents(make_latents(tmp_path / "checkpoint", pictures=pictures, **WAN), expected)


def test_steps_that_add_noise_equal_those_of_diffusers(tmp_path):
    """WanPipeline passes no generator to its scheduler, so the reference uses the global generator of torch."""
    components = small_components(tmp_path / "tokenizer") | {"scheduler": FlowMatchLCMScheduler(shift=3.0)}
    reference = WanPipeline(transformer=transformer(), **components)
    reference.save_pretrained(tmp_path / "checkpoint")
    assert name_of(wanjax.load(tmp_path / "checkpoint").scheduler) == "consistency"
    settings = WAN | {"guidance_scale": 1.0}
    torch.manual_seed(SEED)
    expected = expected_latents(reference, None, **reference_settings(**settings))
    compare_latents(make_latents(tmp_path / "checkpoint", **settings), expected)


def test_several_videos_equal_those_of_diffusers(tmp_path):
    """In diffusers, each video of a prompt has a separate generator."""
    reference = WanPipeline(transformer=transformer(), **small_components(tmp_path / "tokenizer"))
    reference.save_pretrained(tmp_path / "checkpoint")
    generators = [generator(seed) for seed in (3, 4)]
    expected = expected_latents(reference, generators, num_videos_per_prompt=2, **reference_settings(**WAN))
    for seed, latents in zip((3, 4), expected, strict=True):
        compare_latents(make_latents(tmp_path / "checkpoint", seed=seed, **WAN), latents[None])


@pytest.mark.parametrize(
    ("name", "solver", "frames", "pictures"),
    [
        pytest.param("cogvideox1.5-5b", "ddim", 13, {}, marks=pytest.mark.slow),
        ("cogvideox1.5-5b", "dpm", 9, {}),  # with a frame that is removed at the end
        pytest.param("cogvideox-2b", "dpm", 9, {}, marks=pytest.mark.slow),  # below, with any number of steps
        pytest.param("cogvideox1.5-5b-i2v", "ddim", 9, {"image": PICTURES[0]}, marks=pytest.mark.slow),
        ("cogvideox1.5-5b-i2v", "dpm", 9, {"image": PICTURES[0]}),
        pytest.param("cogvideox-5b-i2v", "dpm", 9, {"image": PICTURES[0]}, marks=pytest.mark.slow),
        ("cogvideox-2b", "dpm", 9, {"video": PICTURES}),
        pytest.param("cogvideox-2b", "ddim", 9, {"video": PICTURES}, marks=pytest.mark.slow),
    ],
)
def test_cogvideox_equals_diffusers(tmp_path, name, solver, frames, pictures):
    """The noise for a picture or clip is generated first; frames precede channels in the noise of a video."""
    reference = cogvideox_references.reference(name, solver, tmp_path)
    settings = COGVIDEOX | {"frames": frames}
    options: dict[str, Any] = {"max_sequence_length": 12, **reference_settings(**settings)}
    if "video" in pictures:
        reference = CogVideoXVideoToVideoPipeline(**reference.components)
        del options["num_frames"]
        options |= {"video": images(PICTURES), "strength": 0.6}
        settings |= {"strength": 0.6}
    elif pictures:
        options["image"] = Image.fromarray(PICTURES[0])
    expected = expected_latents(reference, generator(), **options).swapaxes(1, 2)
    compare_latents(make_latents(tmp_path / "checkpoint", pictures=pictures, **settings), expected)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_any_number_of_steps_equals_diffusers(tmp_path, steps):
    """The reference generates noise twice in a step, but once in the first step and a last step without noise."""
    reference = cogvideox_references.reference("cogvideox-2b", "dpm", tmp_path)
    settings = COGVIDEOX | {"frames": 9, "steps": steps}
    expected = expected_latents(
        reference, generator(), max_sequence_length=12, **reference_settings(**settings)
    ).swapaxes(1, 2)
    compare_latents(make_latents(tmp_path / "checkpoint", **settings), expected)


@pytest.mark.parametrize("image", [None, pytest.param(PICTURES[0], marks=pytest.mark.slow)], ids=["text", "picture"])
def test_hunyuanvideo_equals_diffusers(tmp_path, image):
    reference = (hunyuan_references.text_to_video if image is None else hunyuan_references.image_to_video)(tmp_path)
    settings: dict[str, Any] = {"steps": 3, "frames": 5, "size": (48, 64)}
    options: dict[str, Any] = {"num_frames": 5, "num_inference_steps": 3}
    options |= {"height": 48, "width": 64} if image is None else {"image": Image.fromarray(image)}
    expected = expected_latents(reference, generator(), **options)
    if image is not None:
        settings["size"] = tuple(16 * cells for cells in expected.shape[3:])
    pictures = {} if image is None else {"image": image}
    compare_latents(make_latents(tmp_path / "checkpoint", pictures=pictures, resize="crop", **settings), expected)
