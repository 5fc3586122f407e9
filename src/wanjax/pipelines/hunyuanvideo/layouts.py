# SPDX-License-Identifier: Apache-2.0
"""The layout of HunyuanVideo 1.5's authors, and single files such as ComfyUI's.

The authors' folder holds a transformer for each published model, and encoders that a user adds to it, as their
checkpoints-download.md says. The scheduler's and the guider's configs are those of the same model in the layout of
diffusers, from which missing components come too.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

from wanjax.checkpoints.dequantized import Dequantized
from wanjax.checkpoints.files import SafetensorsFolder
from wanjax.checkpoints.hub import names_in
from wanjax.checkpoints.layout import Layout, RecognisedComponent, model_index, needs_transformer, recognised_source
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import Source, Storage, check_small, classes_in, read_json
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


def open_folder(name: str | Path, folder: Path, revision: str | None = None) -> Source:
    """Open a folder or hub repository in the authors' layout, or one of its transformers' folders.

    Raise WanjaxError where it holds several transformers, or none that is supported.
    """
    folder = folder.absolute()
    weights = folder if _is_transformer(folder) else _only_one(str(name), _transformers(folder))
    root = weights.parents[1] if weights.parent.name == TRANSFORMERS else weights
    model, transformer = _model(_model_name(weights), weights), (weights / "*").relative_to(root).as_posix()
    index = _index(model)
    patterns = [transformer, *(f"{PLACES[component]}/*" for component in classes_in(index) if component in PLACES)]
    storage = Storage(str(name), root, revision, patterns)

    def place(component: str) -> Path | None:
        """Return the folder of a component other than the transformer; None where it is missing."""
        if component not in PLACES:
            return None
        folder = storage.fetched([f"{PLACES[component]}/*"]) / PLACES[component]
        return folder if folder.is_dir() else None

    @cache
    def find(component: str) -> RecognisedComponent | None:
        if component == "transformer":
            storage.fetched([transformer])
            return recognise.component(component, SafetensorsFolder(weights), read_json(weights / "config.json"))
        folder = place(component)
        if folder is None:
            return None
        match component:
            case "vae":
                config = read_json(folder / "config.json", missing={})
                return recognise.component(component, SafetensorsFolder(folder), config)
            case "text_encoder":
                return recognise.language_model(SafetensorsFolder(folder), read_json(folder / "config.json"))
            case "text_encoder_2":
                return recognise.glyph_encoder(open_tensors(folder / GLYPH_FILE))
            case "image_encoder":
                return RecognisedComponent(read_json(folder / "config.json"), Dequantized(SafetensorsFolder(folder)))
            case _:
                return None

    @cache
    def glyph_tokenizer() -> Path:
        """Write a tokenizer_config.json of ByT5's tokenizer with Glyph-SDXL-v2's colours and fonts, which has none."""
        base = ByT5Tokenizer.load(storage.fetched([f"{BYT5}/*"]) / BYT5, length=GLYPH_LENGTH)
        assets = root / PLACES["tokenizer_2"]
        names = recognise.glyph_tokens(read_json(assets / COLOURS), read_json(assets / FONTS))
        folders = ExitStack()
        finalize(storage, folders.close)
        path = folders.enter_context(temp_dir()) / "tokenizer_config.json"
        path.write_text(json.dumps(base.with_tokens(names).config), encoding="utf-8")
        return path

    def files(component: str) -> Sequence[Path] | None:
        folder = place(component)
        match component:
            case "tokenizer" if folder:
                return [folder / "tokenizer.json", *(path for path in map(folder.joinpath, MORE) if path.is_file())]
            case "tokenizer_2" if folder:
                return [glyph_tokenizer()]
            case "feature_extractor" if folder:
                return [folder / "preprocessor_config.json"]
        return None

    def held(component: str) -> bool:
        if storage.hub_files:
            return component == "transformer" or bool(names_in(PLACES[component], storage.hub_files))
        if find(component) is not None:
            return True
        if (folder := place(component)) is not None:
            check_small(folder)
        return folder is not None

    return _source(storage, model, find, files=files, held=held)


def open_file(path: Path) -> Source | None:
    """Open a file that holds the transformer, and may hold the autoencoder.

    Return None for one that holds no component of HunyuanVideo 1.5. Raise WanjaxError where nothing tells which of the
    published models it is.
    """
    parts = recognise.parts(open_tensors(path))
    if not parts:
        return None
    if "transformer" not in parts:
        raise needs_transformer(path, parts, "HunyuanVideo")
    few = any(key.startswith(NEXT_TIMESTEP) for key in parts["transformer"].specs)
    named = _named(path.name) or _named(path.parent.name) or (FEW_STEPS if few else _named(f"{path.name}_t2v"))
    entries = {"ideal_resolution": str(named).partition("_")[0]}
    model = _model(named, path)
    components = {name: recognise.component(name, part, entries) for name, part in parts.items()}
    return _source(Storage(str(path), path), model, components.get)


def _source(storage: Storage, model: Preset, find: Callable[[str], RecognisedComponent | None], **how: Any) -> Source:
    """Return a checkpoint of a published model's networks, or of one that is derived from it.

    The tensors of most models have the same shapes. `how` are further arguments of `recognised`.
    """
    settings, published, transformer = model.defaults, model.model, find("transformer")
    assert transformer is not None
    assert isinstance(published, HunyuanVideoModel)
    origin = fallback_repo = storage.name  # for a transformer of other shapes nothing is known
    if read_config("the transformer's config.json", transformer.json, transformer_config) == published.transformer:
        alike = [model, *(preset for preset in PRESETS if preset.model == published)]
        origin, fallback_repo = model.source, next(x.source for x in alike if x.source.count("/") == 1)
    scheduler = {"num_train_timesteps": 1000, "shift": published.spec.schedule_options(settings)["shift"]}
    configs = {
        "scheduler": {"_class_name": CLASSES["scheduler"][1], **scheduler},
        "guider": {"_class_name": CLASSES["guider"][1], "guidance_scale": settings.guidance_scale},
    }
    known_as = storage.known_as
    return recognised_source(
        storage,
        _index(model),
        find,
        configs=configs,
        origin=origin,
        known_as=known_as,
        fallback_repo=fallback_repo,
        **how,
    )


def _is_folder(folder: Path) -> bool:
    """Return whether a folder has the authors' layout; the files that identify layouts are enough."""
    return _is_transformer(folder) or bool(_transformers(folder))


def _is_transformer(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("_class_name") == KIND


def _transformers(root: Path) -> list[Path]:
    """Return the folders of the transformers in the authors' folder."""
    return sorted(file.parent for file in root.glob(f"{TRANSFORMERS}/*/config.json") if _is_transformer(file.parent))


def _only_one(name: str, folders: Sequence[Path]) -> Path:
    """Return the only folder of a supported transformer, or of any; raise WanjaxError if there are several."""
    supported = [folder for folder in folders if _model_name(folder) in MODELS]
    if len(supported) > 1:
        one = f"{name}/{TRANSFORMERS}/{supported[0].name}"
        one += "" if Path(name).expanduser().exists() else "/diffusion_pytorch_model.safetensors"
        listed = ", ".join(folder.name for folder in supported)
        raise WanjaxError(f"{name} holds the transformers {listed}: name one of them, such as {one}")
    return [*supported, *folders][0]


def _named(text: str) -> str | None:
    """Return the model that the name of a file or folder tells, as the authors call it, such as `480p_t2v_distilled`.

    Others put the task first, leave out the `p`, or have `cfg_distilled`. None for a name without lines or a task.
    """
    text = text.lower().replace("-", "_")
    lines, task = LINES.search(text), TASK.search(text)
    if lines is None or task is None:
        return None
    ends = [end for end in ("_step_distilled", "_distilled") if end in text][:1]
    ends += [end for end in ("_sparse",) if end in text]
    return f"{lines[1] or lines[2]}p_{task[1]}{''.join(ends)}"


def _model_name(folder: Path) -> str | None:
    """Return the model that a transformer's folder is, by its name or, if that tells none, by its config.json.

    Raises WanjaxError where the two contradict each other.
    """
    named, config = _named(folder.name), read_json(folder / "config.json")
    parts = [str(config[entry]) for entry in ("ideal_resolution", "ideal_task") if config.get(entry)]
    if named is None:
        return "_".join(parts) + ("_step_distilled" if config.get("use_meanflow") else "") or None
    if not set(parts) <= set(named.split("_")):
        raise WanjaxError(
            f"{folder} is named {named}, but its config.json says {' '.join(parts)}: one of the two is wrong"
        )
    return named


def _model(named: str | None, path: Path) -> Preset:
    """Return the published model of this name; raise WanjaxError where it is unknown or not supported."""
    names = ", ".join(MODELS)
    if named is None:
        raise WanjaxError(f"the name of {path} does not say which model it is: put one of {names} into it")
    if named not in MODELS:
        raise WanjaxError(f"{path} is {named}, which is not supported: give one of {names}")
    return MODELS[named]


def _index(model: Preset) -> dict[str, Any]:
    """Return the model_index.json that diffusers would write."""
    assert isinstance(model.model, HunyuanVideoModel)
    pictured = model.model.pictured
    classes = CLASSES | (IMAGE_CLASSES if pictured else {})
    kind = IMAGE_TO_VIDEO if pictured else "HunyuanVideo15Pipeline"
    return model_index(kind, classes)


LAYOUT = Layout(
    markers=("config.json", f"{TRANSFORMERS}/*/config.json"),
    is_folder=_is_folder,
    open=open_folder,
    open_file=open_file,
)
