# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as Wan's authors lay them out, and single files such as ComfyUI's, seen as sources like any other.

What a layout does not hold, such as a scheduler's config, is made up as the authors have it, or taken from the
repository in the layout of diffusers that holds the same model.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from wanjax.checkpoint import SafetensorsFolder
from wanjax.converters.readers import open_tensors
from wanjax.converters.recognise import Part, part, parts
from wanjax.errors import WanjaxError
from wanjax.hub import download, locate
from wanjax.sources import DiffusersSource, Source, Weights, read_json

KINDS = ("WanModel", "VaceWanModel")  # the classes in the authors' config.json
EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
TRANSFORMER_FILES = ("config.json", "diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.index.json")
FILES = {
    "vae": ("Wan2.?_VAE.safetensors", "Wan2.?_VAE.pth"),
    "text_encoder": ("models_t5_*.safetensors", "models_t5_*.pth"),
    "image_encoder": ("models_clip_*.safetensors", "models_clip_*.pth"),
}
TOKENIZER = "google/umt5-xxl"
REPOSITORIES = {  # by width, channels in and positions of image tokens, which only two models have at all
    (1536, 16, None): "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    (5120, 16, None): "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    (5120, 36, 257): "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    (5120, 36, 514): "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    (3072, 48, None): "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}
PAIRS = {16: "Wan-AI/Wan2.2-T2V-A14B-Diffusers", 36: "Wan-AI/Wan2.2-I2V-A14B-Diffusers"}  # by channels in
CONTROLLED = {1536: "Wan-AI/Wan2.1-VACE-1.3B-diffusers", 5120: "Wan-AI/Wan2.1-VACE-14B-diffusers"}  # by width
CLASSES = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5TokenizerFast"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}
IMAGE_CLASSES = {
    "image_encoder": ("transformers", "CLIPVisionModel"),
    "image_processor": ("transformers", "CLIPImageProcessor"),
}


class _Recognised(Source):
    """A source whose components are told by their tensors; what it lacks comes from the same model's repository."""

    def part(self, component: str) -> Part | None:
        """A component, if the layout holds it."""
        raise NotImplementedError

    @cached_property
    def _published(self) -> DiffusersSource:
        """The repository with the same model."""
        return DiffusersSource(self.origin)

    def _lending(self, component: str) -> DiffusersSource:
        """That repository, if there is one, for a component that the layout does not hold."""
        if self.origin == self.name:
            raise WanjaxError(
                f"{self.name} holds no {component}, and its transformer has the size of no published model, which "
                "would have one: a whole checkpoint is needed"
            )
        return self._published

    @property
    def origin(self) -> str:
        """The repository in the layout of diffusers that holds the same model, where one is known."""
        return _repository(self._transformer, "transformer_2" in self.index) or self.name

    @cached_property
    def _transformer(self) -> dict[str, Any]:
        found = self.part("transformer")
        if found is None:
            raise WanjaxError(f"{self.name} holds no transformer of Wan: a file or folder that has one is needed")
        return found.json

    def config(self, component: str) -> dict[str, Any]:
        if component == "scheduler":
            return _scheduler(self._transformer, "transformer_2" in self.index)
        found = self.part(component)
        return self._lending(component).config(component) if found is None else found.json

    def weights(self, component: str) -> Weights:
        found = self.part(component)
        return self._lending(component).weights(component) if found is None else found.weights

    def files(self, component: str) -> Sequence[Path]:
        own = component == "scheduler" or self.part(component) is not None
        return [] if own else self._lending(component).files(component)


class OriginalSource(_Recognised):
    """A folder, or a repository on the hub, as Wan's authors lay it out; a component is downloaded when needed."""

    def __init__(self, name: str | Path, revision: str | None = None):
        self.name = str(name)
        self.root = locate(name, revision=revision)
        self.revision = None if Path(name).expanduser().exists() else self.root.name  # as the hub's cache names it
        self._parts: dict[str, Part | None] = {}
        self.index = _index(self._transformer, experts=_has_experts(self.root))

    @staticmethod
    def is_at(folder: Path) -> bool:
        """Whether a folder, of which there may be no more than what tells layouts apart, has this layout."""
        config = folder / EXPERTS["transformer"] / "config.json" if _has_experts(folder) else folder / "config.json"
        return config.is_file() and read_json(config).get("_class_name") in KINDS

    def part(self, component: str) -> Part | None:
        if component not in self._parts:
            self._parts[component] = self._part(component)
        return self._parts[component]

    def _part(self, component: str) -> Part | None:
        if component in EXPERTS:
            folder = EXPERTS[component] if _has_experts(self.root) else ""
            root = self._fetched([f"{folder}/{name}".lstrip("/") for name in TRANSFORMER_FILES])
            return part("transformer", SafetensorsFolder(root / folder), read_json(root / folder / "config.json"))
        root = self._fetched(FILES.get(component, ()))
        for pattern in FILES.get(component, ()):
            if found := sorted(path for path in root.iterdir() if fnmatchcase(path.name, pattern)):
                return part(component, open_tensors(found[0]))
        return None

    def files(self, component: str) -> Sequence[Path]:
        if component == "tokenizer":
            folder = self._fetched([f"{TOKENIZER}/*.json"]) / TOKENIZER
            if folder.is_dir():
                return sorted(path for path in folder.iterdir() if path.is_file())
        return super().files(component)

    def _fetched(self, patterns: Sequence[str]) -> Path:
        """The folder with what is there of the files, downloaded if they have to be."""
        if self.revision is None or not patterns:
            return self.root
        return download(self.name, patterns, revision=self.revision)


class FileSource(_Recognised):
    """A single file, of the transformer or of several components."""

    def __init__(self, path: str | Path):
        path = Path(path).expanduser()
        self.name = str(path)
        self.root = path  # beside which lies what is not of it
        self._parts = parts(open_tensors(path))
        self.index = _index(self._transformer, experts=False)

    @property
    def lent(self) -> list[str]:
        """The components that the file does not hold, which the same model's repository gives."""
        own = {"scheduler", *self._parts}
        return [name for name, kind in self.index.items() if isinstance(kind, list) and name not in own]

    def part(self, component: str) -> Part | None:
        return self._parts.get(component)


def _has_experts(folder: Path) -> bool:
    return (folder / EXPERTS["transformer"]).is_dir()


def _index(transformer: Mapping[str, Any], experts: bool) -> dict[str, Any]:
    """The model_index.json that diffusers would write."""
    images = transformer["in_channels"] != transformer["out_channels"]
    controlled = transformer["_class_name"] == "WanVACETransformer3DModel"
    pipeline = "WanVACEPipeline" if controlled else "WanImageToVideoPipeline" if images else "WanPipeline"
    classes = dict(CLASSES) | {"transformer": ("diffusers", transformer["_class_name"])}
    if experts:
        classes["transformer_2"] = classes["transformer"]
    if transformer["image_dim"] is not None:
        classes |= IMAGE_CLASSES
    index: dict[str, Any] = {"_class_name": pipeline} | {name: list(kind) for name, kind in sorted(classes.items())}
    if experts:  # wan/configs/wan_{t2v,i2v}_A14B.py of the official code
        index["boundary_ratio"] = 0.9 if images else 0.875
    if transformer["in_channels"] == 48:
        index["expand_timesteps"] = True
    return index


def _scheduler(transformer: Mapping[str, Any], experts: bool) -> dict[str, Any]:
    """The scheduler_config.json, with the shift of the official code's command line."""
    images = transformer["in_channels"] != transformer["out_channels"]
    sixteen = transformer["pos_embed_seq_len"] or transformer["_class_name"] == "WanVACETransformer3DModel"
    return {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": 16.0 if sixteen else 12.0 if experts and not images else 5.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }


def _repository(transformer: Mapping[str, Any], experts: bool) -> str | None:
    """The repository with a transformer of these sizes, if there is one."""
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    channels, positions = transformer["in_channels"], transformer["pos_embed_seq_len"]
    if transformer["_class_name"] == "WanVACETransformer3DModel":
        return CONTROLLED.get(width)
    if experts:
        return PAIRS.get(channels)
    positions = positions or (257 if transformer["image_dim"] is not None else None)
    return REPOSITORIES.get((width, channels, positions))
