# SPDX-License-Identifier: Apache-2.0
"""The layout of Wan's authors, and single files such as ComfyUI's.

Neither has a scheduler config, so its values come from the authors' code. Other missing components come from the
diffusers repository of the same model.
"""

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from wanjax.checkpoints.files import SUFFIXES, SafetensorsFolder, check_names
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
from wanjax.checkpoints.sources import Source, Storage, check_small_files, read_json
from wanjax.converters.configs import read_config
from wanjax.converters.wan import animate, pose
from wanjax.converters.wan.animate import TRANSFORMER_CLASS as ANIMATE_CLASS
from wanjax.converters.wan.diffusers import transformer_config
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import ANIMATE_14B, TransformerConfig
from wanjax.pipelines.distillation import find_distillation, model_name_in
from wanjax.pipelines.family import Preset
from wanjax.pipelines.text.gguf_tokenizer import write_tokenizer
from wanjax.pipelines.wan import recognise
from wanjax.pipelines.wan.checkpoints import ANIMATE_PIPELINE, CAUSAL_PIPELINES, POSE_PIPELINE
from wanjax.pipelines.wan.presets import ANIMATE_PRESETS, DISTILLATIONS, FUN_PRESETS, find_fallback, find_published
from wanjax.schedulers import UNIPC_SHIFT
from wanjax.stores.paths import missing_file

TRANSFORMER_CLASS = re.compile(r"(?:Vace)?Wan\w*")  # in a transformer's config.json
FOLDERS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
SHARD_INDEX = "diffusion_pytorch_model.safetensors.index.json"
TRANSFORMER_FILES = (
    *("config.json", "diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.index.json"),
    *("block_*.safetensors", "non_block.safetensors"),  # the shards of LightX2V, which have an index
)
TOKENIZER = "google/umt5-xxl"
FILES = {
    "vae": ("Wan2.?_VAE.safetensors", "Wan2.?_VAE.pth"),
    "text_encoder": ("models_t5_*.safetensors", "models_t5_*.pth", "umt5*.gguf"),
    "image_encoder": ("models_clip_*.safetensors", "models_clip_*.pth"),
}
PATTERNS = (
    *TRANSFORMER_FILES,
    *(f"{folder}/{name}" for folder in FOLDERS.values() for name in TRANSFORMER_FILES),
    *(name for names in FILES.values() for name in names),
    f"{TOKENIZER}/*.json",
)
# words in the name of a text encoder's file, in the folder of a transformer's file
ENCODER_NAME = re.compile(r"umt5", re.IGNORECASE)
HIGH_TO_LOW = {"high": "low", "High": "Low", "HIGH": "LOW"}  # in the file names of the high-noise and low-noise experts
OTHER_EXPERT_WORD = HIGH_TO_LOW | {low: high for high, low in HIGH_TO_LOW.items()}
EXPERT_WORD = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(OTHER_EXPERT_WORD)})(?=[Nn]oise|[^A-Za-z0-9])")
EXPERT_PAIRS = {
    "Wan2.2-I2V-A14B-high-rCM4.0-merged.pt": "Wan2.2-I2V-A14B-low-rCM1.0-merged.pt"
}  # the two experts' files, as in Wan.md of NVlabs/rcm
EXPERT_PAIRS |= {low: high for high, low in EXPERT_PAIRS.items()}
# a word in the name of a file that is only a part of a model
NOISE_WORD = re.compile(r"(high|low)[ _-]?noise", re.IGNORECASE)
DATE = re.compile(r"_\d{4,8}(?=\.\w+$)")  # a date at the end of a file name; the two experts may have different dates
UNSUPPORTED_INPUTS = {  # the extra inputs of models by other people, by a word in the model's name
    r"\bati\b": "the trajectories of ATI",
    r"\bwan[\d-]*move\b": "the tracks of WanMove",
    r"\bphantom\b": "the reference pictures of Phantom",
}
ANIMATE = re.compile(r"\banimate-?2\b")  # Animate's tensors have the same shapes as an image-to-video model's
DISTILLED_ANIMATE = re.compile(r"\bdistill(?:ed|ation)?\b")
EULER_CONFIG: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
DPM_CONFIG: dict[str, Any] = {
    "_class_name": "DPMSolverMultistepScheduler",
    UNIPC_SHIFT: 5.0,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
"""The schedulers of Animate 2's distilled weights and of its other weights, as diffusers has them."""
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


def open_folder(name: str | Path, root: Path, revision: str | None = None) -> Source:
    """Open a folder or hub repository in the layout of Wan's authors. Components are downloaded at first use."""
    storage, folders, has_experts = (
        Storage(str(name), root, revision, PATTERNS),
        _transformer_folders(root),
        _has_experts(root),
    )

    @cache
    def find(component: str) -> RecognisedComponent | None:
        if component in FOLDERS:
            if (folder := folders.get(component)) is None:
                return None
            folder_name = FOLDERS[component] if has_experts else ""
            storage.download([f"{folder_name}/{file}".lstrip("/") for file in TRANSFORMER_FILES])
            config = read_json(folder / "config.json", missing={})
            return recognise.component("transformer", SafetensorsFolder(folder), config)
        file = find_file(component)
        return None if file is None else recognise.component(component, open_tensors(file))

    def find_file(component: str) -> Path | None:
        storage.download(FILES.get(component, ()))
        for pattern in FILES.get(component, ()):
            if matches := sorted(path for path in root.iterdir() if fnmatchcase(path.name, pattern)):
                return matches[0]
        return None

    @cache
    def tokenizer_files(component: str) -> Sequence[Path] | None:
        folder = root / TOKENIZER
        if component == "tokenizer":
            storage.download([f"{TOKENIZER}/*.json"])
            if folder.is_dir():
                return sorted(path for path in folder.iterdir() if path.is_file())
            encoder = find_file("text_encoder")
            return None if encoder is None else write_tokenizer(encoder, storage)
        return None

    def has_component(component: str) -> bool:
        if not storage.hub_files:
            if has_tokenizer := component == "tokenizer" and (root / TOKENIZER).is_dir():
                check_small_files(root / TOKENIZER)
            return has_tokenizer or tokenizer_files(component) is not None or find(component) is not None
        if component in FOLDERS:
            folder = FOLDERS[component] if has_experts else "."
            check_names(f"{storage.name}/{folder}", file_names_in_folder(folder, storage.hub_files))
            return True
        if component == "tokenizer":
            return bool(file_names_in_folder(TOKENIZER, storage.hub_files))
        names, patterns = file_names_in_folder(".", storage.hub_files), FILES.get(component, ())
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    source = _source(
        storage, find, "transformer_2" in folders, storage.name_hint, files=tokenizer_files, has_component=has_component
    )
    if "transformer_2" not in folders:
        _check_has_pair(source["transformer"].config(), root, _other_expert_paths(root))
    return source


def open_file(path: Path) -> Source | None:
    """Open a file with the transformer or several components, and the file of the other expert, if there is one.

    Return None for a file without components of Wan. Raises WanjaxError if the name or the shapes show that there are
    two experts, and the other expert's file is missing.
    """
    reader = open_tensors(path)
    if not (components := recognise.components(reader)):
        return None
    if "transformer" not in components:
        raise needs_transformer(path, components, "Wan")
    other_expert_file = _other_expert_file(path, components["transformer"].json)
    components = _with_other_expert(components, path, other_expert_file)
    encoder = None if "text_encoder" in components else find_encoder(path.parent, ENCODER_NAME)
    if encoder is not None:
        components["text_encoder"] = recognise.component("text_encoder", open_tensors(encoder))
    companions = [file for file in (other_expert_file, encoder) if file is not None]
    storage = Storage(str(path), path, companions=companions)
    name_hint = storage.name_hint
    if recognise.is_generator(reader) and find_distillation(model_name_in(name_hint), DISTILLATIONS) is None:
        name_hint = recognise.CAUSVID_NAME  # CausVid publishes generators without EMA weights

    @cache
    def tokenizer_files(component: str) -> Sequence[Path] | None:
        return write_tokenizer(encoder, storage) if component == "tokenizer" and encoder else None

    def has_component(component: str) -> bool:
        return component in components or tokenizer_files(component) is not None

    return _source(
        storage,
        components.get,
        "transformer_2" in components,
        name_hint,
        files=tokenizer_files,
        has_component=has_component,
        notes=[f"the text encoder is {encoder.name}, which is in the same folder"] if encoder else [],
    )


def _source(
    storage: Storage,
    find: Callable[[str], RecognisedComponent | None],
    has_experts: bool,
    name_hint: str,
    *,
    notes: Sequence[str] = (),
    **options: Any,
) -> Source:
    """Return a checkpoint of Wan's networks; `options` are further arguments of `make_source`."""
    model_name, recognised_transformer = model_name_in(name_hint), find("transformer")
    if recognised_transformer is None:
        raise needs_transformer(storage.name, (), "Wan")
    is_animate = recognised_transformer.json["_class_name"] == ANIMATE_CLASS
    if is_animate or ANIMATE.search(model_name):
        transformer = recognised_transformer if is_animate else recognise.as_animate(recognised_transformer)
        return _animate_source(storage, transformer, find, name_hint, **options)
    transformer, config = recognised_transformer.json, _config(recognised_transformer.json)
    notes = [
        f"{storage.name} is loaded as a model of its shape, and {inputs} are not supported"
        for pattern, inputs in UNSUPPORTED_INPUTS.items()
        if re.search(pattern, model_name)
    ] + list(notes)
    if not has_experts and find_published(config, True, model_name) and not find_published(config, False, model_name):
        notes.append(f"{storage.name} has one transformer, but models of its shape have two: it runs all steps")
    preset, fallback_repo = (
        _published_preset(transformer, has_experts, name_hint),
        find_fallback(config, has_experts, name_hint),
    )
    published_name = preset.source if preset else storage.name
    return make_source(
        storage,
        _model_index(transformer, has_experts, name_hint),
        find,
        configs={"scheduler": _scheduler_config(transformer, has_experts)},
        published_name=published_name,
        name_hint=name_hint,
        # other people publish a transformer alone, or in the authors' layout
        fallback_repo=fallback_repo.source if fallback_repo else published_name,
        notes=notes,
        **options,
    )


def _animate_source(
    storage: Storage,
    transformer: RecognisedComponent,
    find: Callable[[str], RecognisedComponent | None],
    name_hint: str,
    **options: Any,
) -> Source:
    """Return a checkpoint of Wan Animate 2. The name shows whether the weights were distilled."""
    config = read_config("the transformer's config.json", transformer.json, animate.transformer_config)
    is_distilled = DISTILLED_ANIMATE.search(model_name_in(name_hint)) is not None
    published = ANIMATE_PRESETS[is_distilled]
    classes = CLASSES | IMAGE_CLASSES | {"transformer": ("diffusers", ANIMATE_CLASS)}
    scheduler = EULER_CONFIG if is_distilled else DPM_CONFIG
    return make_source(
        storage,
        model_index(ANIMATE_PIPELINE, classes | {"scheduler": ("diffusers", scheduler["_class_name"])}),
        lambda component: transformer if component == "transformer" else find(component),
        configs={"scheduler": scheduler},
        published_name=published.source if config == ANIMATE_14B else storage.name,
        name_hint=name_hint,
        fallback_repo=published.source if find_fallback(config, False, "") else storage.name,
        **options,
    )


def _is_folder(folder: Path) -> bool:
    """Return True if a folder has the authors' layout. Only its config or index files must be present."""
    return _is_transformer(folder / FOLDERS["transformer"] if _has_experts(folder) else folder)


def other_expert(path: str) -> tuple[str, ...]:
    """List possible paths of the other expert's file, relative to the folder of a file.

    Swap `high` and `low` in the file's name, or look the name up in `EXPERT_PAIRS`. If the folder's name has one of
    these words too, as in `HighNoise`, swap the words in the folder's name too. Return an empty list for a file that is
    not an expert.
    """
    name = PurePath(path).name
    if PurePath(path).suffix not in SUFFIXES:
        return ()
    names = [EXPERT_PAIRS[name]] if name in EXPERT_PAIRS else []
    if not names and (parts := _split_expert_name(name)):
        prefix, expert, suffix = parts
        other_name = prefix + OTHER_EXPERT_WORD[expert] + suffix
        names = [other_name, DATE.sub("", other_name)]
    folder = _other_folder(path)
    other_paths = [f"../{folder}/{other_name}" for other_name in (names or [name])] if folder else []
    return tuple(dict.fromkeys([*names, *other_paths]))


def _other_folder(path: str | Path) -> str | None:
    """Return the name of the other expert's folder, if the name of the file's folder has `high` or `low`."""
    parts = _split_expert_name(PurePath(path).parent.name)
    return parts and parts[0] + OTHER_EXPERT_WORD[parts[1]] + parts[2]


def _split_expert_name(name: str) -> tuple[str, str, str] | None:
    """Split the file name of an expert into the part before `high` or `low`, that word, and the part after it."""
    match = EXPERT_WORD.search(name)
    return (name[: match.start()], match[0], name[match.end() :]) if match else None


def _is_high(path: Path) -> bool:
    """Return True if the name of a file or folder, or of its parent folder, says that it is the high-noise expert."""
    match = EXPERT_WORD.search(path.name) or EXPERT_WORD.search(path.parent.name)
    return match is not None and match[0] in HIGH_TO_LOW


def _other_expert_paths(path: Path, folder: str | None = None) -> list[Path]:
    """List the files or folders that may be the other expert: neighbours of `path`, or files in the neighbouring
    `folder`.

    The swapped name is the name of `path` with `high` in place of `low`, or `low` in place of `high`. If a neighbour
    has exactly the swapped name, return only this neighbour. Otherwise, return the neighbours whose name differs from
    the swapped name only by additional characters at the end of one of them, for example a date. If there are none,
    return the neighbours whose name equals the swapped name up to the word `noise`.
    """
    if not (parts := _split_expert_name(path.name)):
        return []
    path = path if folder is None else path.parents[1] / folder / path.name
    prefix, expert, suffix = parts
    other_prefix, stem_end = prefix + OTHER_EXPERT_WORD[expert], suffix.removesuffix(path.suffix)
    for name in (EXPERT_PAIRS.get(path.name), other_prefix + suffix):
        if name and os.path.lexists(exact_path := path.with_name(name)):
            return [exact_path]
    noise_word = re.match(r"[ _-]?noise", suffix, re.IGNORECASE)
    noise_prefix = noise_word and other_prefix + noise_word[0]
    matching, same_noise = [], []
    for neighbour in sorted(path.parent.glob(f"{glob.escape(other_prefix)}*")):
        if neighbour.suffix == path.suffix and neighbour.is_dir() == path.is_dir():
            neighbour_end = neighbour.name.removeprefix(other_prefix).removesuffix(neighbour.suffix)
            matching += [neighbour] * (neighbour_end.startswith(stem_end) or stem_end.startswith(neighbour_end))
            same_noise += [neighbour] * bool(noise_prefix and neighbour.name.startswith(noise_prefix))
    return matching or same_noise


def _other_expert_file(path: Path, transformer: Mapping[str, Any]) -> Path | None:
    """Find the file of the other expert, beside a transformer's file or in the folder for the other expert.

    Returns None for a transformer that is not an expert. Raises WanjaxError if the other file is missing.
    """
    other_files = _other_expert_paths(path)
    if not other_files and (folder := _other_folder(path.absolute())):
        same_name = path.absolute().parents[1] / folder / path.name
        other_files = [same_name] if same_name.is_file() else _other_expert_paths(path.absolute(), folder)
    if len(other_files) != 1:
        _check_has_pair(transformer, path, other_files)
        return None
    if not other_files[0].is_file():
        raise WanjaxError(missing_file(other_files[0]))
    return other_files[0]


def _with_other_expert(
    components: dict[str, RecognisedComponent], path: Path, other_file: Path | None
) -> dict[str, RecognisedComponent]:
    """Add the components of the other expert's file to the components of a file that holds a transformer."""
    other_components = recognise.components(open_tensors(other_file)) if other_file else {}
    if "transformer" not in other_components:
        return components
    high, low = (components, other_components) if _is_high(path) else (other_components, components)
    return low | high | {"transformer_2": low["transformer"]}


def _check_has_pair(transformer: Mapping[str, Any], path: Path, other_paths: Sequence[Path]) -> None:
    """Raise WanjaxError if the name and shapes show an expert, but the number of other experts next to it is not
    one."""
    if not (parts := _split_expert_name(path.name)) or not _published_preset(transformer, has_experts=True):
        return
    if NOISE_WORD.search(path.name) or not _published_preset(transformer, has_experts=False):
        expected = parts[0] + OTHER_EXPERT_WORD[parts[1]] + parts[2]
        advice = (
            f"keep only one of {' and '.join(x.name for x in other_paths)}"
            if other_paths
            else "put it next to this one"
        )
        raise WanjaxError(f"{path} is one of two experts, and {expected}, the other, is missing: {advice}")


def _transformer_folders(root: Path) -> dict[str, Path]:
    """List the transformers' folders, with the high-noise expert first. Both folders are inside the root, or one is the
    root and the other is next to it."""
    if _has_experts(root):
        return {name: root / folder for name, folder in FOLDERS.items()}
    other_folders = [other for other in _other_expert_paths(root) if other.is_dir() and _is_transformer(other)]
    if len(other_folders) != 1:
        return {"transformer": root}
    high, low = (root, other_folders[0]) if _is_high(root) else (other_folders[0], root)
    return {"transformer": high, "transformer_2": low}


def _is_transformer(folder: Path) -> bool:
    """Return True if a folder holds a transformer, by its config.json or, without a config.json, by its index of
    shards."""
    if (config := folder / "config.json").is_file():
        return TRANSFORMER_CLASS.fullmatch(str(read_json(config).get("_class_name"))) is not None
    weight_map = read_json(folder / SHARD_INDEX, missing={}).get("weight_map")
    return isinstance(weight_map, dict) and any(
        prefix + name in weight_map
        for prefix in recognise.PREFIXES["transformer"]
        for name in recognise.IDENTIFYING_KEYS["transformer"]
    )


def _has_experts(folder: Path) -> bool:
    return (folder / FOLDERS["transformer"]).is_dir()


def _model_index(transformer: Mapping[str, Any], has_experts: bool, name_hint: str) -> dict[str, Any]:
    """Build the model_index.json that diffusers would write."""
    takes_image = transformer["in_channels"] != transformer["out_channels"]
    is_vace = transformer["_class_name"] == "WanVACETransformer3DModel"
    pipeline = "WanVACEPipeline" if is_vace else "WanImageToVideoPipeline" if takes_image else "WanPipeline"
    if transformer["_class_name"] == "CausalWanTransformer3DModel":
        pipeline = CAUSAL_PIPELINES[0]
    if transformer["_class_name"] == pose.TRANSFORMER_CLASS:
        pipeline = POSE_PIPELINE
    if _published_preset(transformer, has_experts, name_hint) in FUN_PRESETS:
        pipeline = "WanFunInpaintPipeline"
    classes = dict(CLASSES) | {"transformer": ("diffusers", transformer["_class_name"])}
    if has_experts:
        classes["transformer_2"] = classes["transformer"]
    if transformer["image_dim"] is not None:
        classes |= IMAGE_CLASSES
    index = model_index(pipeline, classes)
    if has_experts:  # wan/configs/wan_{t2v,i2v}_A14B.py of the official code
        index["boundary_ratio"] = 0.9 if takes_image else 0.875
    if transformer["in_channels"] == 48:
        index["expand_timesteps"] = True
    return index


def _scheduler_config(transformer: Mapping[str, Any], has_experts: bool) -> dict[str, Any]:
    """Build the scheduler_config.json, with the default shift of the official command line."""
    if transformer["_class_name"] == "CausalWanTransformer3DModel":  # utils/wan_wrapper.py of guandeh17/Self-Forcing
        return {"_class_name": "SelfForcingFlowMatchScheduler", "shift": 5.0, "sigma_min": 0.0, "extra_one_step": True}
    takes_image = transformer["in_channels"] != transformer["out_channels"]
    has_large_shift = transformer["pos_embed_seq_len"] or transformer["_class_name"] == "WanVACETransformer3DModel"
    return {
        "_class_name": "UniPCMultistepScheduler",
        UNIPC_SHIFT: 16.0 if has_large_shift else 12.0 if has_experts and not takes_image else 5.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }


def _config(transformer: Mapping[str, Any]) -> TransformerConfig:
    follows_poses = transformer["_class_name"] == pose.TRANSFORMER_CLASS
    read = pose.transformer_config if follows_poses else transformer_config
    return read_config("the transformer's config.json", transformer, read)


def _published_preset(transformer: Mapping[str, Any], has_experts: bool, name_hint: str = "") -> Preset | None:
    """Find the published model with this transformer config. Return None if no published model has it. The name
    `name_hint` selects one of several models with the same config.
    """
    return find_published(_config(transformer), has_experts, name_hint)


LAYOUT = Layout(
    markers=("config.json", f"{FOLDERS['transformer']}/config.json"),
    is_folder=_is_folder,
    open=open_folder,
    open_file=open_file,
    companion_files=other_expert,
)
