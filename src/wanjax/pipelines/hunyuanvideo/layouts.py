# SPDX-License-Identifier: Apache-2.0
"""The layout of HunyuanVideo 1.5's authors, and single files such as ComfyUI's.

The authors' folder holds a transformer for each published model, and encoders that a user adds to it, as their
checkpoints-download.md says. The scheduler's and the guider's configs are those of the same model in the layout of
diffusers, from which missing components come too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import finalize

from wanjax.checkpoints.descaled import Descaled
from wanjax.checkpoints.files import SafetensorsFolder
from wanjax.checkpoints.hub import names_in
from wanjax.checkpoints.layouts import Component, Layout, RecognisedSource, model_index, needs_transformer
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import check_small, read_json
from wanjax.converters.configs import read_config
from wanjax.converters.hunyuanvideo.diffusers import transformer_config
from wanjax.errors import WanjaxError
from wanjax.pipelines.family import Preset
from wanjax.pipelines.hunyuanvideo import recognise
from wanjax.pipelines.hunyuanvideo.model import IMAGE_TO_VIDEO, HunyuanVideoModel
from wanjax.pipelines.hunyuanvideo.presets import PRESETS
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH
from wanjax.pipelines.text.byt5 import ByT5Tokenizer
from wanjax.stores.own import own_folder

KIND = "HunyuanVideo_1_5_DiffusionTransformer"  # the class in the authors' config.json
MODELS = {preset.name.partition("-")[2].replace("-", "_"): preset for preset in PRESETS}
"""The presets by the names of the authors' folders, such as `480p_t2v`."""
LINES = re.compile(r"(?<!\d)(?:(\d{3,4})p|(480|720|1080))(?![a-z\d])")  # of a model's frames, in its name
TASK = re.compile(r"(?<![a-z])(t2v|i2v|sr)(?![a-z])")
FEW_STEPS = "480p_i2v_step_distilled"  # the only one that is told the next timestep
NEXT_TIMESTEP = ("time_r_in.", "time_embed.timestep_embedder_r.")
TRANSFORMERS = "transformer"
PLACES = {  # of the other components in the authors' folder
    "vae": "vae",
    "text_encoder": "text_encoder/llm",
    "tokenizer": "text_encoder/llm",
    "text_encoder_2": "text_encoder/Glyph-SDXL-v2/checkpoints",
    "tokenizer_2": "text_encoder/Glyph-SDXL-v2/assets",
    "image_encoder": "vision_encoder/siglip/image_encoder",
    "feature_extractor": "vision_encoder/siglip/feature_extractor",
}
BYT5 = "text_encoder/byt5-small"  # its tokenizer; its weights are not used
GLYPH_FILE, COLOURS, FONTS = "byt5_model.pt", "color_idx.json", "multilingual_10-lang_idx.json"
MORE = ("tokenizer_config.json", "vocab.json", "merges.txt")  # beside tokenizer.json
CLASSES = {
    "guider": ("diffusers", "ClassifierFreeGuidance"),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "tokenizer_2": ("transformers", "ByT5Tokenizer"),
    "transformer": ("diffusers", "HunyuanVideo15Transformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLHunyuanVideo15"),
}
IMAGE_CLASSES = {
    "feature_extractor": ("transformers", "SiglipImageProcessor"),
    "image_encoder": ("transformers", "SiglipVisionModel"),
}


class _HunyuanVideoSource(RecognisedSource):
    """A source of HunyuanVideo's networks. Its model is known by its name: the tensors of most have the same shapes."""

    model: Preset
    """The published model that the transformer is, or is derived from."""

    @property
    def repository(self) -> str | None:
        found, published = self.component("transformer"), self.model.architecture
        assert found is not None
        assert isinstance(published, HunyuanVideoModel)
        config = read_config("the transformer's config.json", found.json, transformer_config)
        return self.model.source if config == published.transformer else None

    @property
    def lender(self) -> str:
        """The model's repository, or that of one that is the same but for the transformer's weights.

        That of its own name where the transformer has other shapes, for which nothing is known.
        """
        if self.repository is None:
            return self.origin
        alike = [self.model, *(x for x in PRESETS if x.architecture == self.model.architecture)]
        return next(x.source for x in alike if x.source.count("/") == 1)

    @property
    def configs(self) -> Mapping[str, dict[str, Any]]:
        settings, architecture = self.model.defaults, self.model.architecture
        assert isinstance(architecture, HunyuanVideoModel)
        scheduler = {"num_train_timesteps": 1000, "shift": architecture.spec.schedule_options(settings)["shift"]}
        return {
            "scheduler": {"_class_name": CLASSES["scheduler"][1], **scheduler},
            "guider": {"_class_name": CLASSES["guider"][1], "guidance_scale": settings.guidance_scale},
        }


class OriginalSource(_HunyuanVideoSource):
    """A folder or hub repository in the authors' layout, or one of its transformers' folders.

    Raises WanjaxError where it holds several transformers, or none that is supported.
    """

    def __init__(self, name: str | Path, folder: Path, revision: str | None = None):
        root = folder.absolute()
        self._folder = root if _is_transformer(root) else _only_one(str(name), _transformers(root))
        own = self._folder.parent.name == TRANSFORMERS
        super().__init__(name, self._folder.parents[1] if own else self._folder, revision)
        self.model = _model(_told(self._folder), self._folder)
        self.index = _index(self.model)

    @staticmethod
    def is_at(folder: Path) -> bool:
        """Tells whether a folder has this layout; the files that identify layouts are enough."""
        return _is_transformer(folder) or bool(_transformers(folder))

    @property
    def patterns(self) -> Sequence[str]:
        return [self._transformers_own, *(f"{PLACES[name]}/*" for name in self.components if name in PLACES)]

    @property
    def _transformers_own(self) -> str:
        """The pattern of the transformer's files."""
        return (self._folder / "*").relative_to(self.root).as_posix()

    def find(self, name: str) -> Component | None:
        if name == "transformer":
            self.fetched([self._transformers_own])
            folder = self._folder
            return recognise.component(name, SafetensorsFolder(folder), read_json(folder / "config.json"))
        folder = self._place(name)
        if folder is None:
            return None
        match name:
            case "vae":
                given = read_json(folder / "config.json", missing={})
                return recognise.component(name, SafetensorsFolder(folder), given)
            case "text_encoder":
                return recognise.language_model(SafetensorsFolder(folder), read_json(folder / "config.json"))
            case "text_encoder_2":
                return recognise.glyph_encoder(open_tensors(folder / GLYPH_FILE))
            case "image_encoder":
                return Component(read_json(folder / "config.json"), Descaled(SafetensorsFolder(folder)))
            case _:
                return None

    def files(self, component: str) -> Sequence[Path]:
        folder = self._place(component)
        match component:
            case "tokenizer" if folder:
                return [folder / "tokenizer.json", *(path for path in map(folder.joinpath, MORE) if path.is_file())]
            case "tokenizer_2" if folder:
                return [self._glyph_tokenizer]
            case "feature_extractor" if folder:
                return [folder / "preprocessor_config.json"]
        return super().files(component)

    def holds(self, component: str) -> bool:
        if component in self.configs:
            return True
        if self.listed:
            return component == "transformer" or bool(names_in(PLACES[component], self.listed))
        if self.component(component) is not None:
            return True
        if (place := self._place(component)) is not None:
            check_small(place)
        return place is not None

    @cached_property
    def _glyph_tokenizer(self) -> Path:
        """A tokenizer_config.json of ByT5's tokenizer with Glyph-SDXL-v2's colours and fonts, which has none."""
        base = ByT5Tokenizer.load(self.fetched([f"{BYT5}/*"]) / BYT5, length=GLYPH_LENGTH)
        assets = self.root / PLACES["tokenizer_2"]
        names = recognise.glyph_tokens(read_json(assets / COLOURS), read_json(assets / FONTS))
        kept = ExitStack()
        finalize(self, kept.close)
        path = kept.enter_context(own_folder()) / "tokenizer_config.json"
        path.write_text(json.dumps(base.with_tokens(names).config), encoding="utf-8")
        return path

    def _place(self, component: str) -> Path | None:
        """Returns the folder of a component other than the transformer; None where it is missing."""
        if component not in PLACES:
            return None
        folder = self.fetched([f"{PLACES[component]}/*"]) / PLACES[component]
        return folder if folder.is_dir() else None


class FileSource(_HunyuanVideoSource):
    """A single file that holds the transformer, and may hold the autoencoder."""

    def __init__(self, path: Path, model: Preset, components: Mapping[str, Component]):
        super().__init__(path, path, known=components)  # a file, so no files lie beside the components
        self.model, self.index = model, _index(model)

    @classmethod
    def at(cls, path: Path) -> "FileSource | None":
        """Returns the source of a file; None for one that holds no component of HunyuanVideo 1.5.

        Raises WanjaxError where nothing tells which of the published models it is.
        """
        parts = recognise.parts(open_tensors(path))
        if not parts:
            return None
        if "transformer" not in parts:
            raise needs_transformer(path, parts, "HunyuanVideo")
        few = any(key.startswith(NEXT_TIMESTEP) for key in parts["transformer"].specs)
        named = _named(path.name) or _named(path.parent.name) or (FEW_STEPS if few else _named(f"{path.name}_t2v"))
        model = _model(named, path)
        given = {"ideal_resolution": str(named).partition("_")[0]}
        return cls(path, model, {name: recognise.component(name, part, given) for name, part in parts.items()})


def _is_transformer(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("_class_name") == KIND


def _transformers(root: Path) -> list[Path]:
    """Returns the folders of the transformers in the authors' folder."""
    return sorted(file.parent for file in root.glob(f"{TRANSFORMERS}/*/config.json") if _is_transformer(file.parent))


def _only_one(name: str, folders: Sequence[Path]) -> Path:
    """Returns the only folder of a supported transformer, or of any; raises WanjaxError if there are several."""
    supported = [folder for folder in folders if _told(folder) in MODELS]
    if len(supported) > 1:
        one = f"{name}/{TRANSFORMERS}/{supported[0].name}"
        one += "" if Path(name).expanduser().exists() else "/diffusion_pytorch_model.safetensors"
        listed = ", ".join(folder.name for folder in supported)
        raise WanjaxError(f"{name} holds the transformers {listed}: name one of them, such as {one}")
    return [*supported, *folders][0]


def _named(text: str) -> str | None:
    """Returns the model that the name of a file or folder tells, as the authors call it, such as `480p_t2v_distilled`.

    Others put the task first, leave out the `p`, or have `cfg_distilled`. None for a name without lines or a task.
    """
    text = text.lower().replace("-", "_")
    lines, task = LINES.search(text), TASK.search(text)
    if lines is None or task is None:
        return None
    ends = [end for end in ("_step_distilled", "_distilled") if end in text][:1]
    ends += [end for end in ("_sparse",) if end in text]
    return f"{lines[1] or lines[2]}p_{task[1]}{''.join(ends)}"


def _told(folder: Path) -> str | None:
    """Returns the model that a transformer's folder is, by its name or, if that tells none, by its config.json.

    Raises WanjaxError where the two contradict each other.
    """
    named, config = _named(folder.name), read_json(folder / "config.json")
    told = [str(config[entry]) for entry in ("ideal_resolution", "ideal_task") if config.get(entry)]
    if named is None:
        return "_".join(told) + ("_step_distilled" if config.get("use_meanflow") else "") or None
    if not set(told) <= set(named.split("_")):
        raise WanjaxError(
            f"{folder} is named {named}, but its config.json says {' '.join(told)}: one of the two is wrong"
        )
    return named


def _model(named: str | None, path: Path) -> Preset:
    """Returns the published model of this name; raises WanjaxError where it is unknown or not supported."""
    known = ", ".join(MODELS)
    if named is None:
        raise WanjaxError(f"{path} does not tell which model it is: a name that holds one of {known} does")
    if named not in MODELS:
        raise WanjaxError(f"{path} is {named}, which is not supported: {known} are")
    return MODELS[named]


def _index(model: Preset) -> dict[str, Any]:
    """Returns the model_index.json that diffusers would write."""
    assert isinstance(model.architecture, HunyuanVideoModel)
    pictured = model.architecture.pictured
    classes = CLASSES | (IMAGE_CLASSES if pictured else {})
    kind = IMAGE_TO_VIDEO if pictured else "HunyuanVideo15Pipeline"
    return model_index(kind, classes)


LAYOUT = Layout(
    markers=("config.json", f"{TRANSFORMERS}/*/config.json"),
    is_folder=OriginalSource.is_at,
    open=OriginalSource,
    open_file=FileSource.at,
)
