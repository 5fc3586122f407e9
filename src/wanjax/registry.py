# SPDX-License-Identifier: Apache-2.0
"""The registered families of models, and the lookup of checkpoints by name, hub id, folder or file."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from wanjax.checkpoints.converted import open_converted, open_stored
from wanjax.checkpoints.files import SUFFIXES, main_dtype
from wanjax.checkpoints.hub import HUB_FILE, INDEX, check_no_address, checked_file_bytes, locate_file
from wanjax.checkpoints.layout import Layout
from wanjax.checkpoints.lora import trained_attention
from wanjax.checkpoints.lora_source import NOISE_LEVELS, Lora
from wanjax.checkpoints.network_kinds import NetworkKind
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import MANIFEST, Source, folder_of, open_diffusers, read_json
from wanjax.checkpoints.unsupported import check_no_lora, describe_without_transformer
from wanjax.checkpoints.weight_changes import Note, with_loras, with_zeros
from wanjax.errors import WanjaxError, WanjaxWarning, repr_short, unknown_model
from wanjax.figures import pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.metadata import CONFIG
from wanjax.pipelines.caching.cache_tables import checkpoint_key, measured_file, merge_tables
from wanjax.pipelines.cogvideox import FAMILY as COGVIDEOX
from wanjax.pipelines.distillation import TASK, Distillation, find_distillation, model_name_in
from wanjax.pipelines.family import UNSTATED_LICENCE, Family, Preset, TrainingDomain, family_of, named_sizes
from wanjax.pipelines.hunyuanvideo import FAMILY as HUNYUANVIDEO
from wanjax.pipelines.model import VideoModel, with_attention, with_scheduler
from wanjax.pipelines.settings import Settings, parse_size, schema
from wanjax.pipelines.wan import FAMILY as WAN
from wanjax.schedulers import Scheduler
from wanjax.stores.paths import RemotePath, is_url, missing_file, parse_path

FAMILIES = [
    WAN,
    COGVIDEOX,
    HUNYUANVIDEO,
]
FREE_LICENCE = "Apache-2.0"
SomeDescription = TypeVar("SomeDescription", bound="ModelDescription")
Loras = str | Path | Lora | Sequence[str | Path | Lora]


def register(family: Family) -> None:
    """Add a family of models, and the inputs of its presets.

    Args:
        family: The family.

    Raises:
        WanjaxError: A preset or a pipeline of the family has a registered name, or an input has the name of a setting
            or of an input of another kind.
    """
    if not isinstance(family, Family):
        advice = (
            "wanjax.load loads a model by its name" if isinstance(family, str) else "docs/families.md describes one"
        )
        raise WanjaxError(f"register takes a Family, got {repr_short(family)}: {advice}")
    registered = {*presets(), *(name for other in FAMILIES for name in other.pipelines)}
    if clashing_names := [
        name for name in (*(preset.name for preset in family.presets), *family.pipelines) if name in registered
    ]:
        raise WanjaxError(f"the family {family.name} has the name {clashing_names[0]}, which is registered already")
    inputs = [spec for preset in family.presets if preset.model for spec in preset.model.spec.inputs]
    for spec in inputs:
        if spec.name in schema(Settings) or INPUT_SPECS.get(spec.name, spec).kind != spec.kind:
            raise WanjaxError(
                f"the family {family.name} has an input {spec.name}, already the name of another setting or input"
            )
    for spec in inputs:
        INPUT_SPECS.setdefault(spec.name, spec._replace(required=False))
    FAMILIES.append(family)


def presets() -> dict[str, Preset]:
    """Return the published checkpoints of all families, by name."""
    return {preset.name: preset for family in FAMILIES for preset in family.presets}


def kinds() -> list[NetworkKind]:
    """Return the kinds of networks of all families, without duplicates."""
    return list(dict.fromkeys(kind for family in FAMILIES for kind in family.networks))


def layouts() -> list[Layout]:
    """Return the checkpoint layouts of all families, except diffusers' layout."""
    return [layout for family in FAMILIES for layout in family.layouts]


@dataclass(frozen=True)
class ModelDescription:
    """A model without its weights.

    Args:
        family: The model's family.
        preset: The model's preset; None if the model is not published.
        model: The model's `VideoModel`.
        settings: The model's default settings.
        distillation: How the model's weights were distilled, or None.
        distilled_name: The file name that shows the distillation; "" if the preset states the distillation.
    """

    family: Family
    preset: Preset | None
    model: Any
    settings: Settings
    distillation: Distillation | None = None
    distilled_name: str = ""

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The sizes (height, width) of the published model; empty without a preset."""
        return self.preset.sizes if self.preset else ()

    @property
    def param_dtype(self) -> str | None:
        """The dtype of the weights in memory; None keeps the dtype in which each network is stored."""
        return self.preset.param_dtype if self.preset else None

    @property
    def has_quantized_weights(self) -> bool:
        """Whether the weights are stored with 8 bits, so that no option changes the precision."""
        return False


@dataclass(frozen=True)
class Checkpoint(ModelDescription):
    """A model with the source of its weights.

    Args:
        source: The source from which the weights are read.
        loras: LoRAs to merge.
        attention: The requested attention, or the attention that a LoRA was trained with.
    """

    source: Source = field(kw_only=True)
    loras: tuple[Lora, ...] = ()
    attention: AttentionConfig | None = None

    @property
    def has_quantized_weights(self) -> bool:
        return self.source.has_quantized_weights


def open_for_loading(model: str | Path, revision: str | None, note: Note | None) -> Checkpoint:
    """Open a checkpoint for loading. Check its files and the free disk space, and report its licence before a download.

    Raises:
        WanjaxError: The disk has no room for the download, or a file is missing or truncated.
    """
    preset = find_preset(str(model))
    # a single file is downloaded as a whole
    file_bytes = checked_file_bytes(preset.source, revision=revision) if preset else 0
    if file_bytes:
        _notify_of_licence(preset, note)
    checkpoint = inspect_checkpoint(model, revision)
    storage = checkpoint.source.storage
    storage.check_room()
    if storage.download_bytes and not file_bytes:
        _notify_of_licence(checkpoint.preset, note)
    check_complete(checkpoint.source)
    if (
        preset is None
        and (sentence := describe_distillation(str(model), checkpoint))
        and (note or checkpoint.distillation is None)
    ):
        _notify(sentence, note, stack_level=5)
    for sentence in checkpoint.source.notes:
        _notify(sentence, note, stack_level=5)
    return checkpoint


def _notify(sentence: str, note: Note | None, *, stack_level: int) -> None:
    """Pass a sentence to `note`. Without a `note`, warn with the sentence.

    The warning points to the caller of `load`, which is `stack_level` frames up.
    """
    note(sentence) if note else warnings.warn(sentence, WanjaxWarning, stacklevel=stack_level)


def describe_distillation(model: str, checkpoint: "Checkpoint") -> str | None:
    """Return a note about a model's distillation. If it is unknown whether a file's model is distilled, the note states
    this. Return None for other models."""
    if checkpoint.distillation is not None:
        return checkpoint.distillation.note(model, checkpoint.settings, checkpoint.model.scheduler)
    if (
        checkpoint.preset is None
        or not os.path.isfile(checkpoint.source.root)
        or TASK.search(model_name_in(checkpoint.source.name_hint))
    ):
        return None
    settings, denoiser_config = checkpoint.settings, _denoiser_config(checkpoint.model)
    distilled_models = (preset.model for preset in checkpoint.family.presets if preset.distillation and preset.model)
    if denoiser_config not in map(_denoiser_config, distilled_models):
        return None
    return (
        f"the name of {model} does not show whether it is distilled: using {pluralize(settings.steps, 'step')} and "
        f"guidance {settings.guidance_scale:g}; for a distilled model set its steps, and a guidance scale of 1"
    )


def _denoiser_config(model: VideoModel) -> tuple[Any, ...]:
    """Return the names and the config of a model's denoisers."""
    return model.spec.denoisers, model.spec.networks[model.spec.denoisers[0]]


def _notify_of_licence(preset: Preset | None, note: Note | None) -> None:
    if preset and preset.licence == UNSTATED_LICENCE:
        repositories = ", ".join("/".join(Lora.parse(lora).file.split("/")[:2]) for lora in preset.loras)
        _notify(f"the LoRA of {preset.name} has no licence in its repository, {repositories}", note, stack_level=6)
    elif preset and preset.licence != FREE_LICENCE:
        repository = "/".join(preset.source.split("/")[:2])
        sentence = (
            f"the weights of {preset.name} have the licence {preset.licence}: its text is in {repository} on the hub"
        )
        _notify(sentence, note, stack_level=6)


def inspect_checkpoint(
    model: str | Path, revision: str | None = None, *, reads_encoder_configs: bool = False
) -> Checkpoint:
    """Find a checkpoint and read its configs.

    Args:
        model: A preset's name, or any name that `open_source` accepts.
        revision: The revision on the hub; None is the newest.
        reads_encoder_configs: Whether to also read the configs of text and image encoders, which may download a file.

    Raises:
        WanjaxError: No checkpoint is found, or its configs contradict each other.
    """
    return read_configs(model, *find_checkpoint(model, revision), reads_encoder_configs=reads_encoder_configs)


def read_configs(
    model: str | Path, source: Source, preset: Preset | None, *, reads_encoder_configs: bool = False
) -> Checkpoint:
    """Read the configs of a source from `find_checkpoint`, as `inspect_checkpoint` does."""
    family = family_of(source, FAMILIES)
    video_model = _with_cache_tables(
        _with_scheduler(family.read_model(source, reads_encoder_configs), preset), family, preset, source
    )
    settings = replace(family.default_settings(source, video_model, preset), precision=source.precision)
    if preset is None:
        settings = replace(settings, model=str(model))
    checkpoint = Checkpoint(family, preset, video_model, settings, preset and preset.distillation, source=source)
    name = model_name_in(source.name_hint)
    distillation = find_distillation(name, family.distillations)
    if distillation is None or checkpoint.distillation is not None:
        return checkpoint
    checkpoint = _apply_distillation(checkpoint, distillation, name)
    # a checkpoint's stored settings may be older than the LoRA that is merged into the checkpoint
    if source.manifest is not None:
        return checkpoint
    return replace(checkpoint, settings=checkpoint.settings.updated(read_json(source.root / CONFIG, missing={})))


def find_checkpoint(model: str | Path, revision: str | None = None) -> tuple[Source, Preset | None]:
    """Return the source of a checkpoint, and its preset or None.

    `model` is a preset's name, or any name that `open_source` accepts. Raises WanjaxError if no checkpoint is found.
    """
    preset = find_preset(str(model))
    if preset is None and not os.path.exists(model) and "/" not in str(model):
        raise WanjaxError(unknown_model(str(model), presets()))
    source = open_source(preset.source if preset else model, revision)
    if preset is None and (preset := find_preset(source.published_name)):  # a converted copy of a published checkpoint
        preset = replace(preset, defaults=replace(preset.defaults, model=str(model)))
    return source, preset


def open_source(name: str | Path, revision: str | None = None) -> Source:
    """Open a checkpoint: a folder, a file, a Hugging Face repository, or OWNER/NAME/FILE on the hub.

    The checkpoint has the layout of diffusers or of a family. A checkpoint in a store must have the layout that `wanjax
    convert` writes. Raises WanjaxError if no checkpoint is found, or if its layout is unknown.
    """
    check_no_address(name)
    path = parse_path(name)
    if isinstance(path, RemotePath):
        return open_stored(path, revision)
    name = path if is_url(name) else name
    if revision is not None and os.path.exists(path):
        raise WanjaxError(f"{path} is a local path and has no revision {revision}: give a hub id, or no revision")
    if os.path.isfile(path):
        return _open_file(path)
    if path.suffix in SUFFIXES and HUB_FILE.fullmatch(str(name)):
        return _open_file(locate_file(name, companions=companion_files(str(path)), revision=revision))
    if path.suffix in SUFFIXES and not os.path.exists(path):
        raise WanjaxError(missing_file(path, "give an existing file, or OWNER/NAME/FILE of the hub"))
    if os.path.isfile(path / MANIFEST):
        return open_converted(name, path)
    folder, commit = folder_of(name, revision, [marker for layout in layouts() for marker in layout.markers])
    if not (folder / INDEX).is_file():
        for layout in layouts():
            if layout.is_folder(folder):
                return layout.open(name, folder, commit)
    return open_diffusers(name, folder, commit)


def _open_file(path: Path) -> Source:
    for layout in layouts():
        if (source := layout.open_file(path)) is not None:
            return source
    unsupported_models = {name: tensors for family in FAMILIES for name, tensors in family.unsupported_models.items()}
    names = open_tensors(path).specs
    check_no_lora(path, names)
    raise WanjaxError(f"{path} {describe_without_transformer(names, unsupported_models)}")


def companion_files(path: str) -> list[str]:
    """List possible paths of other files that belong to a checkpoint's file, such as the other expert's file.

    The paths are relative to the file's folder.
    """
    return [other for layout in layouts() for other in layout.companion_files(path)]


def find_preset(name: str) -> Preset | None:
    """Return the preset with this name or hub id. The owner in the id is optional."""
    by_name = presets()
    has_no_owner = "/" not in name and not os.path.exists(name)
    for preset in by_name.values():
        if name in preset.sources or (has_no_owner and name in preset.repository_names):
            return preset
    return by_name.get(name)


def find_preset_of_converted(folder: str) -> Preset | None:
    """Return the preset whose checkpoint `wanjax convert` wrote to a folder, or None for other folders."""
    path = parse_path(folder)
    if isinstance(path, RemotePath) or not os.path.isfile(path / MANIFEST):
        return None
    return find_preset(open_converted(folder, path).published_name)


def domain_of(model: str) -> TrainingDomain | None:
    """Return the training domain of a small model, or None for a model whose training data cannot be listed.

    Args:
        model: The name of the model, or the folder of a copy that `wanjax convert` wrote.
    """
    preset = presets().get(model) or find_preset_of_converted(model)
    return preset and preset.domain


def model_description(model: str) -> ModelDescription:
    """Describe a model without its weights. For a preset, nothing is downloaded."""
    preset = find_preset(model)
    if preset is not None and preset.model is not None:
        family = family_with(preset)
        video_model = _with_cache_tables(_with_scheduler(preset.model, preset), family, preset)
        return ModelDescription(family, preset, video_model, preset.defaults, preset.distillation)
    return inspect_checkpoint(model, reads_encoder_configs=True)


def stored_dtypes(description: ModelDescription) -> dict[str, str]:
    """Return the dtype of most stored floats of each network, by component.

    Nothing is downloaded, so a network without weights on this machine is left out.
    """
    preset = description.preset
    if isinstance(description, Checkpoint):
        source = description.source
    elif preset is not None and os.path.exists(preset.source):
        source = open_source(preset.source)
    else:
        return {}
    dtypes: dict[str, str] = {}
    for name in description.model.spec.networks if source.revision is None else ():
        with suppress(WanjaxError):  # the weights are missing
            floats = [
                spec for spec in source[name].weights().specs.values() if jnp.issubdtype(spec.dtype, jnp.floating)
            ]
            if (dtype := main_dtype(floats)) is not None:
                dtypes[name] = dtype
    return dtypes


def find_size(model: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (height, width) of a model's video with these settings.

    The setting `size` may be a name such as 720p.
    """
    description = model_description(model)
    return resolve_size(description.model, description.settings, description.sizes, settings).size


def describe(model: str) -> dict[str, Any]:
    """Describe a model as JSON: its inputs, sizes, memory and defaults. It downloads no more than `model_description`.

    - `parameters`: the number of parameters of the transformer, or of each of two transformers
    - `networks`: the bytes of each network's weights on devices; `memory` is their sum
    - `full_precision`: the projections that are never quantized; None if the model cannot be quantized
    - `tasks`: a description of the inputs from which a video can be made
    - `takes`: the names of the pictures and clips that the model can use; `needs` has the required ones
    - `about`, `source`, `ids` and `licence`: only for published checkpoints; `ids` are other repositories on the hub
      with the same model
    """
    description = model_description(model)
    preset, video_model, defaults = description.preset, description.model, description.settings
    network_infos = {name: description.family.network_of(config) for name, config in video_model.spec.networks.items()}
    itemsize = {"bfloat16": 2, "float32": 4}[preset.param_dtype if preset else defaults.dtype]
    networks = {
        name: (4 if network.float32 else itemsize) * network.parameters for name, network in network_infos.items()
    }
    published_info: dict[str, Any] = {}
    if preset:
        ids = [] if preset.bundled else list(preset.sources)
        published_info = {"about": preset.about, "source": preset.source, "ids": ids, "licence": preset.licence}
    sizes = named_sizes(video_model, defaults, description.sizes)
    return {
        "name": defaults.model,
        **published_info,
        "task": video_model.spec.task,
        "tasks": video_model.spec.tasks,
        "takes": list(video_model.spec.input_names),
        "needs": list(video_model.spec.required_inputs),
        "sizes": {name: f"{width}x{height}" for name, (height, width) in sizes.items()},
        "grid": video_model.spec.size_multiple,
        "frames_step": video_model.vae.temporal_factor,
        "parameters": network_infos["transformer"].parameters,
        "memory": sum(networks.values()),
        "networks": networks,
        "full_precision": description.family.unquantized_projections(video_model),
        "defaults": {name: value for name, value in defaults.to_json().items() if name not in ("model", "prompt")},
    }


def family_with(preset: Preset) -> Family:
    """Return the family of a preset."""
    return next(family for family in FAMILIES if preset in family.presets)


def _with_scheduler(model: VideoModel, preset: Preset | None) -> VideoModel:
    """Return the model with the scheduler of its preset. If the preset has none, return the model unchanged."""
    if preset is None or preset.scheduler is None:
        return model
    return replace(model, scheduler=preset.scheduler)


def _with_cache_tables(
    model: VideoModel, family: Family, preset: Preset | None, source: Source | None = None
) -> VideoModel:
    """Return the model with the tables for its step caches.

    If the user measured tables for the checkpoint, they replace the published tables.
    """
    key = preset.name if preset else checkpoint_key(source) if source else ""
    published = (family.tables, preset.name) if preset else (None, None)
    return replace(model, tables=merge_tables([(measured_file(key), None), published]))


def tables_key(model: str | Path) -> str:
    """Return the key under which measured step-cache tables of a checkpoint are saved."""
    source, preset = find_checkpoint(model)
    return preset.name if preset else checkpoint_key(source)


def check_complete(source: Source) -> None:
    """Raise WanjaxError if a file of a network or tokenizer is missing or truncated."""
    components, loader_names = source.components, {name for family in FAMILIES for name in family.loaders}
    classes = {word for kind in kinds() for word in kind.classes}
    networks = [name for name, component in components.items() if component.kind in classes]
    source.check(networks, [name for name in components if name in loader_names])


def first_lora_attention(loras: Iterable[Lora]) -> AttentionConfig | None:
    """Return the attention of the first merged LoRA that was trained with sparse attention, or None."""
    return next(filter(None, (trained_attention(lora.path) for lora in loras if lora.strength)), None)


def _apply_distillation(
    description: SomeDescription, distillation: Distillation, distilled_name: str
) -> SomeDescription:
    """Return a model with the settings and the solver of a distillation."""
    solver = distillation.solver(needs_image=bool(description.model.spec.required_inputs))
    return replace(
        description,
        settings=distillation.apply_to(description.settings),
        model=replace(description.model, scheduler=solver) if solver else description.model,
        distillation=distillation,
        distilled_name=distilled_name,
    )


def apply_distilled_loras(description: SomeDescription, loras: Sequence[Lora], note: Note | None) -> SomeDescription:
    """Return a model with the settings and the solver of its distilled LoRAs. Distilled LoRAs are recognised by name.

    If one LoRA is distilled for few steps, and another only to need no guidance, the settings of the first LoRA are
    used. The settings do not change if the model is already distilled, or if only one of two experts has a distilled
    LoRA. `note` is called with a sentence about the new settings, or with the reason why the settings do not change.
    Without `note`, the sentence is a warning.
    """
    distillations, experts = description.family.distillations, NOISE_LEVELS[: len(description.model.spec.denoisers)]
    distilled_loras = [
        (lora, candidate)
        for lora in loras
        if lora.strength > 0 and (candidate := find_distillation(model_name_in(lora.file), distillations))
    ]
    if not distilled_loras:
        return description
    distilled_loras = [pair for pair in distilled_loras if pair[1].steps] or distilled_loras
    lora, distillation = distilled_loras[0]
    loras_by_expert = [
        [lora for lora, _ in distilled_loras if len(experts) == 1 or lora.expert in (None, expert)]
        for expert in experts
    ]
    repeated = next((group for group in loras_by_expert if len(group) > 1), [])
    settings = description.settings
    unchanged_text = (
        f"{settings.model} keeps {pluralize(settings.steps, 'step')} and guidance {settings.guidance_scale:g}"
    )
    if description.distillation is not None:
        sentence = f"{lora.label} is distilled, but so is {settings.model} itself: {unchanged_text}"
    elif not all(loras_by_expert):
        sentence = f"{lora.label} is distilled, but the other expert has no distilled LoRA: {unchanged_text}"
    else:
        description = _apply_distillation(description, distillation, model_name_in(lora.file))
        sentence = distillation.note(lora.label, description.settings, description.model.scheduler)
        if repeated:
            sentence += (
                f"; {' and '.join(lora.label for lora in repeated)} are merged together, which may be too strong"
            )
    _notify(sentence, note, stack_level=6)
    return description


def apply_options(
    checkpoint: Checkpoint,
    loras: tuple[Lora, ...],
    note: Note | None,
    *,
    attention: AttentionConfig | None = None,
    scheduler: str | Scheduler | None = None,
) -> Checkpoint:
    """Apply the options of `load` to a checkpoint.

    Args:
        checkpoint: The checkpoint.
        loras: LoRAs to merge after the LoRAs of the preset. Distilled LoRAs change the settings
            (`apply_distilled_loras`).
        note: Called with sentences for the user; None issues warnings.
        attention: The attention; None is the attention that a LoRA was trained with, or the default. If neither the
            checkpoint nor a LoRA has the projection of sparse-linear attention, the projection is initialised with
            zeros, with a warning.
        scheduler: The scheduler; None is the checkpoint's scheduler.

    Raises:
        WanjaxError: The scheduler and the checkpoint's scheduler are of different kinds.
    """
    checkpoint = apply_distilled_loras(checkpoint, loras, note)
    lora_attention, model = first_lora_attention(loras), checkpoint.settings.model
    attention = attention or lora_attention
    video_model = with_attention(checkpoint.model, attention or AUTO, model)
    if video_model != checkpoint.model:
        config_entries = {name: video_model.spec.config_entries for name in video_model.spec.denoisers}
        checkpoint = replace(
            checkpoint, source=with_zeros(checkpoint.source, config_entries, checkpoint.family.networks)
        )
        if lora_attention is None:
            sentence = f"{model} was not trained with {attention}: its projection is initialised with zeros"
            warnings.warn(sentence, WanjaxWarning, stacklevel=4)  # the warning points to the caller of `load`
    if scheduler is not None:
        video_model = with_scheduler(video_model, scheduler)
    all_loras = [*(Lora.parse(lora) for lora in (checkpoint.preset.loras if checkpoint.preset else ())), *loras]
    source = (
        with_loras(checkpoint.source, all_loras, checkpoint.family.networks, note) if all_loras else checkpoint.source
    )
    return replace(checkpoint, model=video_model, source=source, loras=loras, attention=attention)


def resolve_size(
    model: VideoModel, defaults: Settings, published: Sequence[tuple[int, int]], settings: Mapping[str, Any]
) -> Settings:
    """Return the defaults updated with `settings`. The setting `size` may be the name of one of the model's sizes."""
    if settings.get("size") is not None:
        settings = {**settings, **parse_size(settings["size"], named_sizes(model, defaults, published))}
    return defaults.updated(settings)


def models_that_fit(memory: int) -> list[str]:
    """Return the names of up to three published models of different sizes that fit in memory.

    A model fits if the weights of its largest network fit. `memory` is in bytes. Sizes are numbers of parameters,
    rounded to a tenth of a billion. Only the first model of each size is returned.
    """
    by_size: dict[tuple[int, int], str] = {}
    for preset in presets().values():
        if (largest := _largest_network_bytes(preset)) <= memory:
            by_size.setdefault((round(largest, -8), round(preset.transformer_parameters, -8)), preset.name)
    return [by_size[size] for size in sorted(by_size)[-3:]]


def _largest_network_bytes(preset: Preset) -> int:
    """Return the bytes of the weights of a published model's largest network, a transformer or a text encoder."""
    networks = preset.model.spec.networks if preset.model else {}
    encoders = [
        family_with(preset).network_of(config) for name, config in networks.items() if name.startswith("text_encoder")
    ]
    counts = [preset.transformer_parameters, *(encoder.parameters for encoder in encoders)]
    return jnp.dtype(preset.param_dtype).itemsize * max(counts)
