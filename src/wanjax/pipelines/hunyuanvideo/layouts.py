# SPDX-License-Identifier: Apache-2.0
"""The layout of HunyuanVideo 1.5's authors, and single files such as ComfyUI's.

The authors' folder holds a transformer for each published model. Users add the encoders themselves, as described in
checkpoints-download.md of the official repository. The configs of the scheduler and the guider come from the diffusers
repository of the same model. Missing components come from this repository too.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import SafetensorsFolder
from wanjax.checkpoints.gguf_file import GgufFile
from wanjax.checkpoints.hub import file_names_in_folder
from wanjax.checkpoints.layout import (
    Layout,
    RecognisedComponent,
    find_encoder,
    make_source,
    model_index,
    needs_transformer,
)
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import Source, Storage, check_small_files, classes_in, read_json
from wanjax.converters.configs import read_config
from wanjax.converters.hunyuanvideo.diffusers import transformer_config
from wanjax.errors import WanjaxError
from wanjax.pipelines.family import Preset
from wanjax.pipelines.hunyuanvideo import recognise
from wanjax.pipelines.hunyuanvideo.model import IMAGE_TO_VIDEO, HunyuanVideoModel
from wanjax.pipelines.hunyuanvideo.presets import PRESETS
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH
from wanjax.pipelines.text.byt5 import ByT5Tokenizer
from wanjax.stores.temporary import temp_dir

TRANSFORMER_CLASS = "HunyuanVideo_1_5_DiffusionTransformer"  # the class in the authors' config.json
MODELS = {preset.name.partition("-")[2].replace("-", "_"): preset for preset in PRESETS}
"""The presets by the names of the authors' folders, such as `480p_t2v`."""
RESOLUTION = re.compile(r"(?<!\d)(?:(\d{3,4})p|(480|720|1080))(?![a-z\d])")  # the resolution in the name of a model
TASK = re.compile(r"(?<![a-z])(t2v|i2v|sr)(?![a-z])")
STEP_DISTILLED = "480p_i2v_step_distilled"  # the only model that embeds the next timestep
NEXT_TIMESTEP_PREFIXES = ("time_r_in.", "time_embed.timestep_embedder_r.")
TRANSFORMERS_FOLDER = "transformer"
COMPONENT_FOLDERS = {  # the folder of each other component
    "vae": "vae",
    "text_encoder": "text_encoder/llm",
    "tokenizer": "text_encoder/llm",
    "text_encoder_2": "text_encoder/Glyph-SDXL-v2/checkpoints",
    "tokenizer_2": "text_encoder/Glyph-SDXL-v2/assets",
    "image_encoder": "vision_encoder/siglip/image_encoder",
    "feature_extractor": "vision_encoder/siglip/feature_extractor",
}
ENCODER_NAME = re.compile(r"^qwen2\.?5-?vl.*\.gguf$", re.IGNORECASE)  # a file of Qwen2.5-VL
BYT5 = "text_encoder/byt5-small"  # the folder of ByT5's tokenizer; ByT5's own weights are not used
GLYPH_FILE, COLOURS, FONTS = "byt5_model.pt", "color_idx.json", "multilingual_10-lang_idx.json"
OPTIONAL_TOKENIZER_FILES = ("tokenizer_config.json", "vocab.json", "merges.txt")  # files beside tokenizer.json
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


def open_folder(name: str | Path, folder: Path, revision: str | None = None) -> Source:
    """Open a folder or hub repository in the authors' layout, or the folder of one of its transformers.

    Raises WanjaxError if the folder holds several transformers, or no supported transformer.
    """
    folder = folder.absolute()
    transformer_folder = (
        folder if _is_transformer(folder) else _select_transformer(str(name), _transformer_folders(folder))
    )
    root = (
        transformer_folder.parents[1] if transformer_folder.parent.name == TRANSFORMERS_FOLDER else transformer_folder
    )
    model, transformer_pattern = (
        _find_preset(_model_name(transformer_folder), transformer_folder),
        (transformer_folder / "*").relative_to(root).as_posix(),
    )
    index = _model_index(model)
    patterns = [
        transformer_pattern,
        *(f"{COMPONENT_FOLDERS[component]}/*" for component in classes_in(index) if component in COMPONENT_FOLDERS),
    ]
    storage = Storage(str(name), root, revision, patterns)

    def component_folder(component: str) -> Path | None:
        """Find the folder of a component other than the transformer; return None if it is missing."""
        if component not in COMPONENT_FOLDERS:
            return None
        folder = storage.download([f"{COMPONENT_FOLDERS[component]}/*"]) / COMPONENT_FOLDERS[component]
        return folder if folder.is_dir() else None

    @cache
    def find(component: str) -> RecognisedComponent | None:
        if component == "transformer":
            storage.download([transformer_pattern])
            return recognise.component(
                component, SafetensorsFolder(transformer_folder), read_json(transformer_folder / "config.json")
            )
        folder = component_folder(component)
        if folder is None:
            return None
        match component:
            case "vae":
                config = read_json(folder / "config.json", missing={})
                return recognise.component(component, SafetensorsFolder(folder), config)
            case "text_encoder" if encoder := find_encoder(folder, ENCODER_NAME):
                return recognise.gguf_language_model(GgufFile(encoder))
            case "text_encoder":
                return recognise.language_model(SafetensorsFolder(folder), read_json(folder / "config.json"))
            case "text_encoder_2":
                return recognise.glyph_encoder(open_tensors(folder / GLYPH_FILE))
            case "image_encoder":
                return RecognisedComponent(
                    read_json(folder / "config.json"), DequantizedReader(SafetensorsFolder(folder))
                )
            case _:
                return None

    @cache
    def glyph_tokenizer() -> Path:
        """Write a tokenizer_config.json for ByT5's tokenizer with the colours and fonts of Glyph-SDXL-v2."""
        base = ByT5Tokenizer.load(storage.download([f"{BYT5}/*"]) / BYT5, length=GLYPH_LENGTH)
        assets = root / COMPONENT_FOLDERS["tokenizer_2"]
        names = recognise.glyph_tokens(read_json(assets / COLOURS), read_json(assets / FONTS))
        folders = ExitStack()
        finalize(storage, folders.close)
        path = folders.enter_context(temp_dir()) / "tokenizer_config.json"
        path.write_text(json.dumps(base.with_tokens(names).config), encoding="utf-8")
        return path

    def tokenizer_files(component: str) -> Sequence[Path] | None:
        folder = component_folder(component)
        match component:
            case "tokenizer" if folder:
                return [
                    folder / "tokenizer.json",
                    *(path for path in map(folder.joinpath, OPTIONAL_TOKENIZER_FILES) if path.is_file()),
                ]
            case "tokenizer_2" if folder:
                return [glyph_tokenizer()]
            case "feature_extractor" if folder:
                return [folder / "preprocessor_config.json"]
        return None

    def has_component(component: str) -> bool:
        if storage.hub_files:
            return component == "transformer" or bool(
                file_names_in_folder(COMPONENT_FOLDERS[component], storage.hub_files)
            )
        if find(component) is not None:
            return True
        if (folder := component_folder(component)) is not None:
            check_small_files(folder)
        return folder is not None

    return _source(storage, model, find, files=tokenizer_files, has_component=has_component)


def open_file(path: Path) -> Source | None:
    """Open a file that holds the transformer, and may hold the autoencoder.

    Return None for a file without components of HunyuanVideo 1.5. Raises WanjaxError if neither the name nor the
    tensors tell which published model it is.
    """
    readers = recognise.component_readers(open_tensors(path))
    if not readers:
        return None
    if "transformer" not in readers:
        raise needs_transformer(path, readers, "HunyuanVideo")
    has_next_timestep = any(key.startswith(NEXT_TIMESTEP_PREFIXES) for key in readers["transformer"].specs)
    model_name = (
        _parse_model_name(path.name)
        or _parse_model_name(path.parent.name)
        or (STEP_DISTILLED if has_next_timestep else _parse_model_name(f"{path.name}_t2v"))
    )
    entries = {"ideal_resolution": str(model_name).partition("_")[0]}
    model = _find_preset(model_name, path)
    components = {name: recognise.component(name, reader, entries) for name, reader in readers.items()}
    encoder = find_encoder(path.parent, ENCODER_NAME)
    if encoder is not None:
        components["text_encoder"] = recognise.gguf_language_model(GgufFile(encoder))
    storage = Storage(str(path), path, companions=[encoder] if encoder else [])
    notes = [f"the text encoder is {encoder.name}, which is in the same folder"] if encoder else []
    return _source(storage, model, components.get, notes=notes)


def _source(
    storage: Storage, model: Preset, find: Callable[[str], RecognisedComponent | None], **options: Any
) -> Source:
    """Return a checkpoint of the networks of a published model, or of a model that is derived from it.

    The tensors of most models have the same shapes, so the shapes do not identify the model. `options` are further
    arguments of `make_source`.
    """
    settings, published_model, transformer = model.defaults, model.model, find("transformer")
    assert transformer is not None
    assert isinstance(published_model, HunyuanVideoModel)
    published_name = fallback_repo = storage.name  # the name says nothing about a transformer with other shapes
    if (
        read_config("the transformer's config.json", transformer.json, transformer_config)
        == published_model.transformer
    ):
        same_config = [model, *(preset for preset in PRESETS if preset.model == published_model)]
        published_name, fallback_repo = model.source, next(x.source for x in same_config if x.source.count("/") == 1)
    scheduler = {"num_train_timesteps": 1000, "shift": published_model.spec.schedule_options(settings)["shift"]}
    configs = {
        "scheduler": {"_class_name": CLASSES["scheduler"][1], **scheduler},
        "guider": {"_class_name": CLASSES["guider"][1], "guidance_scale": settings.guidance_scale},
    }
    name_hint = storage.name_hint
    return make_source(
        storage,
        _model_index(model),
        find,
        configs=configs,
        published_name=published_name,
        name_hint=name_hint,
        fallback_repo=fallback_repo,
        **options,
    )


def _is_folder(folder: Path) -> bool:
    """Return True if a folder has the authors' layout. Only the config files must be present."""
    return _is_transformer(folder) or bool(_transformer_folders(folder))


def _is_transformer(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("_class_name") == TRANSFORMER_CLASS


def _transformer_folders(root: Path) -> list[Path]:
    """List the folders of transformers inside the authors' folder."""
    return sorted(
        file.parent for file in root.glob(f"{TRANSFORMERS_FOLDER}/*/config.json") if _is_transformer(file.parent)
    )


def _select_transformer(name: str, folders: Sequence[Path]) -> Path:
    """Return the only folder with a supported transformer; raise WanjaxError if there are several.

    If no transformer is supported, return the first folder; a later check rejects it.
    """
    supported = [folder for folder in folders if _model_name(folder) in MODELS]
    if len(supported) > 1:
        example = f"{name}/{TRANSFORMERS_FOLDER}/{supported[0].name}"
        example += "" if Path(name).expanduser().exists() else "/diffusion_pytorch_model.safetensors"
        names = ", ".join(folder.name for folder in supported)
        raise WanjaxError(f"{name} holds the transformers {names}: give the path of one of them, such as {example}")
    return [*supported, *folders][0]


def _parse_model_name(text: str) -> str | None:
    """Parse a file or folder name into the authors' name of a published model, such as `480p_t2v_distilled`.

    Names by other people may start with the task, omit the `p`, or have `cfg_distilled`. Return None if the name has no
    resolution or no task.
    """
    text = text.lower().replace("-", "_")
    resolution, task = RESOLUTION.search(text), TASK.search(text)
    if resolution is None or task is None:
        return None
    suffixes = [suffix for suffix in ("_step_distilled", "_distilled") if suffix in text][:1]
    suffixes += [suffix for suffix in ("_sparse",) if suffix in text]
    return f"{resolution[1] or resolution[2]}p_{task[1]}{''.join(suffixes)}"


def _model_name(folder: Path) -> str | None:
    """Find the name of a transformer's model in its folder's name or, if that is unclear, in its config.json.

    Raises WanjaxError if the two contradict each other.
    """
    model_name, config = _parse_model_name(folder.name), read_json(folder / "config.json")
    config_parts = [str(config[entry]) for entry in ("ideal_resolution", "ideal_task") if config.get(entry)]
    if model_name is None:
        return "_".join(config_parts) + ("_step_distilled" if config.get("use_meanflow") else "") or None
    if not set(config_parts) <= set(model_name.split("_")):
        raise WanjaxError(
            f"{folder} is named {model_name}, but its config.json says {' '.join(config_parts)}: correct one of the two"
        )
    return model_name


def _find_preset(model_name: str | None, path: Path) -> Preset:
    """Return the published model of this name; raise WanjaxError if it is unknown or not supported."""
    known_names = ", ".join(MODELS)
    if model_name is None:
        raise WanjaxError(
            f"the name of {path} does not say which model it is: rename it to contain one of {known_names}"
        )
    if model_name not in MODELS:
        raise WanjaxError(f"{path} is {model_name}, which is not supported: give one of {known_names}")
    return MODELS[model_name]


def _model_index(model: Preset) -> dict[str, Any]:
    """Build the model_index.json that diffusers would write."""
    assert isinstance(model.model, HunyuanVideoModel)
    takes_image = model.model.starts_from_image
    classes = CLASSES | (IMAGE_CLASSES if takes_image else {})
    pipeline_class = IMAGE_TO_VIDEO if takes_image else "HunyuanVideo15Pipeline"
    return model_index(pipeline_class, classes)


LAYOUT = Layout(
    markers=("config.json", f"{TRANSFORMERS_FOLDER}/*/config.json"),
    is_folder=_is_folder,
    open=open_folder,
    open_file=open_file,
)
