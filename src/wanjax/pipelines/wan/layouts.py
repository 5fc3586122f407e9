# SPDX-License-Identifier: Apache-2.0
"""The layout of Wan's authors, and single files such as ComfyUI's.

These lack a scheduler's config, which is that of the authors' code. Other missing components come from the diffusers
repository of the same model.
"""

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from wanjax.checkpoints.files import SUFFIXES, SafetensorsFolder, check_names
from wanjax.checkpoints.hub import names_in
from wanjax.checkpoints.layout import Layout, RecognisedComponent, model_index, needs_transformer, recognised_source
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import Source, Storage, check_small, read_json
from wanjax.converters.configs import read_config
from wanjax.converters.wan.diffusers import transformer_config
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import TransformerConfig
from wanjax.pipelines.distillation import distilled_by, telling
from wanjax.pipelines.family import Preset
from wanjax.pipelines.wan import recognise
from wanjax.pipelines.wan.presets import DISTILLATIONS, FUN, fallback_of, published
from wanjax.pipelines.wan.tasks import CAUSAL_PIPELINES
from wanjax.schedulers import UNIPC_SHIFT
from wanjax.stores.paths import missing_file

KIND = re.compile(r"(?:Vace)?Wan\w*")  # the class in a transformer's config.json, of the authors or of others
FOLDERS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
SHARDS = "diffusion_pytorch_model.safetensors.index.json"
TRANSFORMER_FILES = (
    *("config.json", "diffusion_pytorch_model*.safetensors", "diffusion_pytorch_model*.index.json"),
    *("block_*.safetensors", "non_block.safetensors"),  # of LightX2V, with an index
)
TOKENIZER = "google/umt5-xxl"
FILES = {
    "vae": ("Wan2.?_VAE.safetensors", "Wan2.?_VAE.pth"),
    "text_encoder": ("models_t5_*.safetensors", "models_t5_*.pth"),
    "image_encoder": ("models_clip_*.safetensors", "models_clip_*.pth"),
}
PATTERNS = (
    *TRANSFORMER_FILES,
    *(f"{folder}/{name}" for folder in FOLDERS.values() for name in TRANSFORMER_FILES),
    *(name for names in FILES.values() for name in names),
    f"{TOKENIZER}/*.json",
)
HIGH = {"high": "low", "High": "Low", "HIGH": "LOW"}  # in the names of two experts' files, that at high noise first
OTHERS = HIGH | {low: high for high, low in HIGH.items()}
EXPERT = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(OTHERS)})(?=[Nn]oise|[^A-Za-z0-9])")
PAIRS = {"Wan2.2-I2V-A14B-high-rCM4.0-merged.pt": "Wan2.2-I2V-A14B-low-rCM1.0-merged.pt"}  # as Wan.md of NVlabs/rcm
PAIRS |= {low: high for high, low in PAIRS.items()}
NOISE = re.compile(r"(high|low)[ _-]?noise", re.IGNORECASE)  # in the name of what is no model of its own
DATE = re.compile(r"_\d{4,8}(?=\.\w+$)")  # at the end of a file's name: one of two experts may have been published anew
FURTHER = {  # of models of a published shape that others trained, by their names: what else these take
    r"\bati\b": "the trajectories of ATI",
    r"\bwan[\d-]*move\b": "the tracks of WanMove",
    r"\bphantom\b": "the reference pictures of Phantom",
}
ANIMATE = re.compile(r"\banimate-?2\b")  # which has the shape of image to video
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
    """Open a folder or hub repository in the layout of Wan's authors; a component is downloaded when first needed."""
    storage, folders, inside = Storage(str(name), root, revision, PATTERNS), _folders(root), _has_experts(root)

    @cache
    def find(component: str) -> RecognisedComponent | None:
        if component in FOLDERS:
            if (folder := folders.get(component)) is None:
                return None
            place = FOLDERS[component] if inside else ""
            storage.fetched([f"{place}/{file}".lstrip("/") for file in TRANSFORMER_FILES])
            config = read_json(folder / "config.json", missing={})
            return recognise.component("transformer", SafetensorsFolder(folder), config)
        storage.fetched(FILES.get(component, ()))
        for pattern in FILES.get(component, ()):
            if matches := sorted(path for path in root.iterdir() if fnmatchcase(path.name, pattern)):
                return recognise.component(component, open_tensors(matches[0]))
        return None

    def files(component: str) -> Sequence[Path] | None:
        folder = root / TOKENIZER
        if component == "tokenizer":
            storage.fetched([f"{TOKENIZER}/*.json"])
            if folder.is_dir():
                return sorted(path for path in folder.iterdir() if path.is_file())
        return None

    def held(component: str) -> bool:
        if not storage.hub_files:
            if there := component == "tokenizer" and (root / TOKENIZER).is_dir():
                check_small(root / TOKENIZER)
            return there or find(component) is not None
        if component in FOLDERS:
            folder = FOLDERS[component] if inside else "."
            check_names(f"{storage.name}/{folder}", names_in(folder, storage.hub_files))
            return True
        if component == "tokenizer":
            return bool(names_in(TOKENIZER, storage.hub_files))
        names, patterns = names_in(".", storage.hub_files), FILES.get(component, ())
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    source = _source(storage, find, "transformer_2" in folders, storage.known_as, files=files, held=held)
    if "transformer_2" not in folders:
        _check_alone(source["transformer"].config(), root, _others(root))
    return source


def open_file(path: Path) -> Source | None:
    """Open a file that holds the transformer or several components, and the other expert's beside it.

    Return None for one without components of Wan. Raise WanjaxError where the other is missing, and the name tells that
    this is an expert, or no published model has its shape alone.
    """
    reader, storage = open_tensors(path), Storage(str(path), path)
    if not (components := recognise.components(reader)):
        return None
    if "transformer" not in components:
        raise needs_transformer(path, components, "Wan")
    components, known_as = _with_other(components, path), storage.known_as
    if recognise.is_generator(reader) and distilled_by(telling(known_as), DISTILLATIONS) is None:
        known_as = recognise.CAUSVID  # which publishes such
    return _source(storage, components.get, "transformer_2" in components, known_as)


def _source(
    storage: Storage, find: Callable[[str], RecognisedComponent | None], experts: bool, known_as: str, **how: Any
) -> Source:
    """Return a checkpoint of Wan's networks; `how` are further arguments of `recognised`."""
    name, recognised_transformer = telling(known_as), find("transformer")
    if ANIMATE.search(name):
        raise WanjaxError(f"{storage.name} is Wan Animate 2 by its name, and {recognise.READ} are read")
    if recognised_transformer is None:
        raise needs_transformer(storage.name, (), "Wan")
    transformer, shape = recognised_transformer.json, _shape(recognised_transformer.json)
    notes = [
        f"{storage.name} is taken as its shape is, and {what} are not offered"
        for pattern, what in FURTHER.items()
        if re.search(pattern, name)
    ]
    if not experts and published(shape, True, name) and not published(shape, False, name):
        notes.append(f"{storage.name} is one transformer where the model of its shape has two: it takes all steps")
    preset, fallback_repo = _published(transformer, experts, known_as), fallback_of(shape, experts, known_as)
    origin = preset.source if preset else storage.name
    return recognised_source(
        storage,
        _index(transformer, experts, known_as),
        find,
        configs={"scheduler": _scheduler(transformer, experts)},
        origin=origin,
        known_as=known_as,
        fallback_repo=fallback_repo.source
        if fallback_repo
        else origin,  # others publish a transformer alone, or in the authors' layout
        notes=notes,
        **how,
    )


def _is_folder(folder: Path) -> bool:
    """Return whether a folder has the authors' layout; the files that identify layouts are enough."""
    return _is_transformer(folder / FOLDERS["transformer"] if _has_experts(folder) else folder)


def other_expert(name: str) -> tuple[str, ...]:
    """Return names of the file of the other of two experts, which differs in `high` or `low`; none for other files.

    Those of `PAIRS` differ otherwise.
    """
    if name in PAIRS:
        return (PAIRS[name],)
    if Path(name).suffix not in SUFFIXES or not (split := _split(name)):
        return ()
    before, expert, after = split
    other = before + OTHERS[expert] + after
    return tuple(dict.fromkeys((other, DATE.sub("", other))))


def _split(name: str) -> tuple[str, str, str] | None:
    """Return the parts of the name of one of two experts: what comes before `high` or `low`, that, and the rest."""
    expert = EXPERT.search(name)
    return (name[: expert.start()], expert[0], name[expert.end() :]) if expert else None


def _is_high(path: Path) -> bool:
    """Return whether a file or folder is of the expert at high noise, by its name."""
    expert = EXPERT.search(path.name)
    return expert is not None and expert[0] in HIGH


def _others(path: Path) -> list[Path]:
    """Return the files or folders beside one that may be the other of two experts: that of its name, if it is there.

    Else they are those whose names begin so, and go on alike up to the end of one of the two, such as a date; or, where
    there is none, those that go on at all after `noise`.
    """
    if not (split := _split(path.name)):
        return []
    before, expert, after = split
    begins, end = before + OTHERS[expert], after.removesuffix(path.suffix)
    for name in (PAIRS.get(path.name), begins + after):
        if name and os.path.lexists(exact := path.with_name(name)):
            return [exact]
    word = re.match(r"[ _-]?noise", after, re.IGNORECASE)
    noise = word and begins + word[0]
    alike, others = [], []
    for beside in sorted(path.parent.glob(f"{glob.escape(begins)}*")):
        if beside.suffix == path.suffix and beside.is_dir() == path.is_dir():
            tail = beside.name.removeprefix(begins).removesuffix(beside.suffix)
            alike += [beside] * (tail.startswith(end) or end.startswith(tail))
            others += [beside] * bool(noise and beside.name.startswith(noise))
    return alike or others


def _with_other(components: dict[str, RecognisedComponent], path: Path) -> dict[str, RecognisedComponent]:
    """Return the components of a file, and if it is an expert's those of the other's that holds a transformer."""
    others = _others(path)
    if len(others) != 1:
        _check_alone(components["transformer"].json, path, others)
        return components
    if not others[0].is_file():
        raise WanjaxError(missing_file(others[0]))
    other = recognise.components(open_tensors(others[0]))
    if "transformer" not in other:
        return components
    high, low = (components, other) if _is_high(path) else (other, components)
    return low | high | {"transformer_2": low["transformer"]}


def _check_alone(transformer: Mapping[str, Any], path: Path, others: Sequence[Path]) -> None:
    """Raise WanjaxError for one of two experts of which no single other is there, by its name and its shape."""
    if not (split := _split(path.name)) or not _published(transformer, experts=True):
        return
    if NOISE.search(path.name) or not _published(transformer, experts=False):
        right = split[0] + OTHERS[split[1]] + split[2]
        there = f", and {' and '.join(x.name for x in others)} are, of which one may stay" if others else ""
        raise WanjaxError(f"{path} is one of two experts: {right}, the other, is needed beside it{there}")


def _folders(root: Path) -> dict[str, Path]:
    """Return the folders of the transformers, that at high noise first: in the root, or itself and one beside it."""
    if _has_experts(root):
        return {name: root / folder for name, folder in FOLDERS.items()}
    others = [other for other in _others(root) if other.is_dir() and _is_transformer(other)]
    if len(others) != 1:
        return {"transformer": root}
    high, low = (root, others[0]) if _is_high(root) else (others[0], root)
    return {"transformer": high, "transformer_2": low}


def _is_transformer(folder: Path) -> bool:
    """Return whether a folder is that of a transformer, by its config.json or, without one, by its index of shards."""
    if (config := folder / "config.json").is_file():
        return KIND.fullmatch(str(read_json(config).get("_class_name"))) is not None
    listed = read_json(folder / SHARDS, missing={}).get("weight_map")
    telling = recognise.TELLING["transformer"]
    return isinstance(listed, dict) and any(
        prefix + name in listed for prefix in recognise.PREFIXES["transformer"] for name in telling
    )


def _has_experts(folder: Path) -> bool:
    return (folder / FOLDERS["transformer"]).is_dir()


def _index(transformer: Mapping[str, Any], experts: bool, known_as: str) -> dict[str, Any]:
    """Return the model_index.json that diffusers would write."""
    images = transformer["in_channels"] != transformer["out_channels"]
    controlled = transformer["_class_name"] == "WanVACETransformer3DModel"
    pipeline = "WanVACEPipeline" if controlled else "WanImageToVideoPipeline" if images else "WanPipeline"
    if transformer["_class_name"] == "CausalWanTransformer3DModel":
        pipeline = CAUSAL_PIPELINES[0]
    if _published(transformer, experts, known_as) in FUN:
        pipeline = "WanFunInpaintPipeline"
    classes = dict(CLASSES) | {"transformer": ("diffusers", transformer["_class_name"])}
    if experts:
        classes["transformer_2"] = classes["transformer"]
    if transformer["image_dim"] is not None:
        classes |= IMAGE_CLASSES
    index = model_index(pipeline, classes)
    if experts:  # wan/configs/wan_{t2v,i2v}_A14B.py of the official code
        index["boundary_ratio"] = 0.9 if images else 0.875
    if transformer["in_channels"] == 48:
        index["expand_timesteps"] = True
    return index


def _scheduler(transformer: Mapping[str, Any], experts: bool) -> dict[str, Any]:
    """Return the scheduler_config.json, with the default shift of the official code's command line."""
    if transformer["_class_name"] == "CausalWanTransformer3DModel":  # utils/wan_wrapper.py of guandeh17/Self-Forcing
        return {"_class_name": "SelfForcingFlowMatchScheduler", "shift": 5.0, "sigma_min": 0.0, "extra_one_step": True}
    images = transformer["in_channels"] != transformer["out_channels"]
    sixteen = transformer["pos_embed_seq_len"] or transformer["_class_name"] == "WanVACETransformer3DModel"
    return {
        "_class_name": "UniPCMultistepScheduler",
        UNIPC_SHIFT: 16.0 if sixteen else 12.0 if experts and not images else 5.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }


def _shape(transformer: Mapping[str, Any]) -> TransformerConfig:
    return read_config("the transformer's config.json", transformer, transformer_config)


def _published(transformer: Mapping[str, Any], experts: bool, known_as: str = "") -> Preset | None:
    """Return the published model whose transformer has this config.json, that of the name if there are several.

    None where there is none.
    """
    return published(_shape(transformer), experts, known_as)


LAYOUT = Layout(
    markers=("config.json", f"{FOLDERS['transformer']}/config.json"),
    is_folder=_is_folder,
    open=open_folder,
    open_file=open_file,
    beside=other_expert,
)
