# SPDX-License-Identifier: Apache-2.0
"""The families of models, and the checkpoint that a name, a hub id, a folder or a file means."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from wanjax.checkpoints.converted import MANIFEST, open_converted, open_stored
from wanjax.checkpoints.files import SUFFIXES
from wanjax.checkpoints.hub import HUB_FILE, INDEX, check_file, locate_file
from wanjax.checkpoints.layout import Layout
from wanjax.checkpoints.lora import trained_attention
from wanjax.checkpoints.lora_source import NOISE_LEVELS, Lora
from wanjax.checkpoints.network_kinds import NetworkKind
from wanjax.checkpoints.readers import open_tensors
from wanjax.checkpoints.sources import Source, folder_of, open_diffusers, read_json
from wanjax.checkpoints.unsupported import without_transformer
from wanjax.checkpoints.weight_changes import Note, with_loras, with_zeros
from wanjax.errors import WanjaxError, WanjaxWarning, unknown_model
from wanjax.figures import quantity
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.media.inputs import INPUTS
from wanjax.media.metadata import CONFIG
from wanjax.pipelines.caching.cache_tables import checkpoint_key, measured_file, merge_tables
from wanjax.pipelines.cogvideox import FAMILY as COGVIDEOX
from wanjax.pipelines.distillation import TASK, Distillation, find_distillation, model_name_in
from wanjax.pipelines.family import Family, Preset, family_of, named_sizes
from wanjax.pipelines.hunyuanvideo import FAMILY as HUNYUANVIDEO
from wanjax.pipelines.model import VideoModel, with_attention, with_scheduler
from wanjax.pipelines.settings import Settings, schema, sides
from wanjax.pipelines.wan import FAMILY as WAN
from wanjax.schedulers import Scheduler
from wanjax.stores.paths import RemotePath, is_url, parse_path

FAMILIES = [
    WAN,
    COGVIDEOX,
    HUNYUANVIDEO,
]
FREE = "Apache-2.0"
SomeOutline = TypeVar("SomeOutline", bound="Outline")
Loras = str | Path | Lora | Sequence[str | Path | Lora]


def register(family: Family) -> None:
    """Add a family of models, and the inputs of its presets.

    Args:
        family: The family.

    Raises:
        WanjaxError: A name of its presets or pipelines is known, or that of an input means another kind or a setting.
    """
    taken = {*presets(), *(name for other in FAMILIES for name in other.pipelines)}
    if clashing := [name for name in (*(p.name for p in family.presets), *family.pipelines) if name in taken]:
        raise WanjaxError(f"the family {family.name} brings {clashing[0]}, which is known already")
    inputs = [one for preset in family.presets if preset.model for one in preset.model.spec.inputs]
    for one in inputs:
        if one.name in schema(Settings) or INPUTS.get(one.name, one).kind != one.kind:
            raise WanjaxError(f"the family {family.name} brings the input {one.name}, which is known as another thing")
    for one in inputs:
        INPUTS.setdefault(one.name, one._replace(required=False))
    FAMILIES.append(family)


def presets() -> dict[str, Preset]:
    """Return the published checkpoints of all families, by name."""
    return {preset.name: preset for family in FAMILIES for preset in family.presets}


def kinds() -> list[NetworkKind]:
    """Return the kinds of networks of all families, each once."""
    return list(dict.fromkeys(kind for family in FAMILIES for kind in family.networks))


def layouts() -> list[Layout]:
    """Return the layouts of all families' checkpoints other than that of diffusers."""
    return [layout for family in FAMILIES for layout in family.layouts]


@dataclass(frozen=True)
class Outline:
    """A model without its weights: its family, its preset if it is a published one, its `VideoModel` and settings.

    `distillation` is that of its weights, and `distilled_name` the name that told it; "" where no name was needed.
    """

    family: Family
    preset: Preset | None
    model: Any
    settings: Settings
    distillation: Distillation | None = None
    distilled_name: str = ""

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The (height, width) of the sizes that it was published for; none of a model that is not known."""
        return self.preset.sizes if self.preset else ()

    @property
    def param_dtype(self) -> str | None:
        """The dtype in which weights are kept; None for the dtype in which each network is stored."""
        return self.preset.param_dtype if self.preset else None


@dataclass(frozen=True)
class Checkpoint(Outline):
    """A model with its source, and the choices of its loading.

    `attention` is the one that was chosen, or that the first LoRA with one was trained with.
    """

    source: Source = field(kw_only=True)
    loras: tuple[Lora, ...] = ()
    attention: AttentionConfig | None = None


def open_for_loading(model: str | Path, revision: str | None, note: Note | None) -> Checkpoint:
    """Open a checkpoint for loading: check its files and the disk's room, and note a licence before a download.

    Raises:
        WanjaxError: The disk has no room for the download, or a file is missing or cut off.
    """
    preset = find_preset(str(model))
    opened = check_file(preset.source, revision=revision) if preset else 0  # a single file is downloaded to be examined
    if opened:
        _notify_of_licence(preset, note)
    checkpoint = inspect_checkpoint(model, revision)
    awaited = checkpoint.source.storage.check_room()
    if awaited and not opened:
        _notify_of_licence(checkpoint.preset, note)
    check_complete(checkpoint.source)
    if preset is None and (sentence := few_steps(str(model), checkpoint)) and (note or checkpoint.distillation is None):
        _notify(sentence, note, 5)
    for sentence in checkpoint.source.notes:
        _notify(sentence, note, 5)
    return checkpoint


def _notify(sentence: str, note: Note | None, level: int) -> None:
    """Pass a sentence to `note`; without one, warn where `load` was called, so many calls away."""
    note(sentence) if note else warnings.warn(sentence, WanjaxWarning, stacklevel=level)


def few_steps(model: str, checkpoint: "Checkpoint") -> str | None:
    """Return a sentence on a model that is distilled by its name, or on a file whose name does not say."""
    if checkpoint.distillation is not None:
        return checkpoint.distillation.sentence(model, checkpoint.settings, checkpoint.model.scheduler)
    if (
        checkpoint.preset is None
        or not os.path.isfile(checkpoint.source.root)
        or TASK.search(model_name_in(checkpoint.source.known_as))
    ):
        return None
    settings, shape = checkpoint.settings, _shape(checkpoint.model)
    few = (x.model for x in checkpoint.family.presets if x.distillation and x.model)
    if shape not in map(_shape, few):
        return None
    return (
        f"the name of {model} does not tell whether it is distilled: it takes {quantity(settings.steps, 'step')} with "
        f"guidance {settings.guidance_scale:g}; for one of few steps give their number, and a guidance scale of 1"
    )


def _shape(model: VideoModel) -> tuple[Any, ...]:
    """Return the names and the config of a model's denoisers, which their tensors determine."""
    return model.spec.denoisers, model.spec.networks[model.spec.denoisers[0]]


def _notify_of_licence(preset: Preset | None, note: Note | None) -> None:
    if preset and preset.licence != FREE:
        repository = "/".join(preset.source.split("/")[:2])
        sentence = (
            f"the weights of {preset.name} are under the {preset.licence}, whose text {repository} on the hub has"
        )
        _notify(sentence, note, 6)


def inspect_checkpoint(model: str | Path, revision: str | None = None, *, encoders: bool = False) -> Checkpoint:
    """Find a checkpoint and read its configs.

    Args:
        model: A known name, or any that `open_source` accepts.
        revision: The revision on the hub; None is the newest.
        encoders: Whether to read the configs of text and image encoders too, which may download a file.

    Raises:
        WanjaxError: No checkpoint is found, or its configs contradict each other.
    """
    return read_configs(model, *find_checkpoint(model, revision), encoders=encoders)


def read_configs(model: str | Path, source: Source, preset: Preset | None, *, encoders: bool = False) -> Checkpoint:
    """Read the configs of a source from `find_checkpoint`, as `inspect_checkpoint` does."""
    family = family_of(source, FAMILIES)
    video_model = _with_cache_tables(
        _with_scheduler(family.read_model(source, encoders), preset), family, preset, source
    )
    settings = family.settings(source, video_model, preset)
    if preset is None:
        settings = replace(settings, model=str(model))
    checkpoint = Checkpoint(family, preset, video_model, settings, preset and preset.distillation, source=source)
    name = model_name_in(source.known_as)
    distillation = find_distillation(name, family.distillations)
    if distillation is None or checkpoint.distillation is not None:
        return checkpoint
    checkpoint = _with_sampler(checkpoint, distillation, name)
    if source.manifest is not None:  # whose own settings may be those of the weights before a LoRA was merged
        return checkpoint
    return replace(checkpoint, settings=checkpoint.settings.updated(read_json(source.root / CONFIG, missing={})))


def find_checkpoint(model: str | Path, revision: str | None = None) -> tuple[Source, Preset | None]:
    """Return the source of a checkpoint, and its preset where it is a published one.

    `model` is a known name, or any name that `open_source` accepts. Raises WanjaxError where no checkpoint is found.
    """
    preset = find_preset(str(model))
    if preset is None and not os.path.exists(model) and "/" not in str(model):
        raise WanjaxError(unknown_model(str(model), presets()))
    source = open_source(preset.source if preset else model, revision)
    if preset is None and (preset := find_preset(source.origin)):  # a converted checkpoint of a published one
        preset = replace(preset, defaults=replace(preset.defaults, model=str(model)))
    return source, preset


def open_source(name: str | Path, revision: str | None = None) -> Source:
    """Open the checkpoint of this name: a folder, a file, a Hugging Face repository, or OWNER/NAME/FILE on the hub.

    Its layout is that of diffusers or of a family; in a store, that of `wanjax convert`. Raises WanjaxError where no
    checkpoint is found, or its layout is unknown.
    """
    path = parse_path(name)
    if isinstance(path, RemotePath):
        return open_stored(path, revision)
    name = path if is_url(name) else name
    if revision is not None and os.path.exists(path):
        raise WanjaxError(f"{path} is not on the hub: it has no revision {revision}")
    if os.path.isfile(path):
        return _open_file(path)
    if path.suffix in SUFFIXES and HUB_FILE.fullmatch(str(name)):
        return _open_file(locate_file(name, companions=companion_files(path.name), revision=revision))
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
    relatives = {name: tensors for family in FAMILIES for name, tensors in family.relatives.items()}
    raise WanjaxError(f"{path} {without_transformer(open_tensors(path).specs, relatives)}")


def companion_files(name: str) -> list[str]:
    """Return the names of files that belong to a checkpoint's file of this name, such as the other of two experts."""
    return [other for layout in layouts() for other in layout.beside(name)]


def find_preset(name: str) -> Preset | None:
    """Return the preset of this name, or the one that is this repository, whose owner may be left out."""
    by_name = presets()
    bare = "/" not in name and not os.path.exists(name)
    for preset in by_name.values():
        if name in preset.sources or (bare and name in preset.bare_names):
            return preset
    return by_name.get(name)


def outline(model: str) -> Outline:
    """Return a model without its weights; download nothing for a preset."""
    preset = find_preset(model)
    if preset is not None and preset.model is not None:
        family = family_with(preset)
        video_model = _with_cache_tables(_with_scheduler(preset.model, preset), family, preset)
        return Outline(family, preset, video_model, preset.defaults, preset.distillation)
    return inspect_checkpoint(model, encoders=True)


def size_of(model: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (height, width) that settings mean for a model, of which `size` may be a name."""
    model_outline = outline(model)
    return with_size(model_outline.model, model_outline.settings, model_outline.sizes, settings).size


def describe(model: str) -> dict[str, Any]:
    """Return what a model takes, makes and needs, as JSON; download as `outline`.

    `parameters` are those of the transformer, or of each of two. `networks` are the bytes of each network's weights as
    they are kept on devices, and `memory` is their sum. `tasks` tells what a video can be made from, in words. `takes`
    names the pictures and clips that the model can use,
    and `needs` those without which it makes no video. `about`, `source`, `ids` and `licence` are known of published
    checkpoints alone; `ids` are the repositories on the hub by which the model is known too.
    """
    model_outline = outline(model)
    preset, video_model, defaults = model_outline.preset, model_outline.model, model_outline.settings
    nets = {name: model_outline.family.network_of(config) for name, config in video_model.spec.networks.items()}
    item = {"bfloat16": 2, "float32": 4}[preset.param_dtype if preset else defaults.dtype]
    networks = {name: (4 if network.float32 else item) * network.parameters for name, network in nets.items()}
    card: dict[str, Any] = {}
    if preset:
        ids = [] if preset.shipped else list(preset.sources)
        card = {"about": preset.about, "source": preset.source, "ids": ids, "licence": preset.licence}
    sizes = named_sizes(video_model, defaults, model_outline.sizes)
    return {
        "name": defaults.model,
        **card,
        "task": video_model.spec.task,
        "tasks": video_model.spec.tasks,
        "takes": list(video_model.spec.takes),
        "needs": list(video_model.spec.needs),
        "sizes": {name: f"{width}x{height}" for name, (height, width) in sizes.items()},
        "grid": video_model.spec.size_multiple,
        "frames_step": video_model.vae.temporal_factor,
        "parameters": nets["transformer"].parameters,
        "memory": sum(networks.values()),
        "networks": networks,
        "defaults": {k: v for k, v in defaults.to_json().items() if k not in ("model", "prompt")},
    }


def family_with(preset: Preset) -> Family:
    """Return the family that has this preset."""
    return next(family for family in FAMILIES if preset in family.presets)


def _with_scheduler(model: VideoModel, preset: Preset | None) -> VideoModel:
    """Return the model with the preset's own scheduler, if it has one."""
    if preset is None or preset.scheduler is None:
        return model
    return replace(model, scheduler=preset.scheduler)


def _with_cache_tables(
    model: VideoModel, family: Family, preset: Preset | None, source: Source | None = None
) -> VideoModel:
    """Return the model with the checkpoint's tables for step caches, the user's own first."""
    key = preset.name if preset else checkpoint_key(source) if source else ""
    published = (family.tables, preset.name) if preset else (None, None)
    return replace(model, tables=merge_tables([(measured_file(key), None), published]))


def tables_key(model: str | Path) -> str:
    """Return the name by which the tables measured of a checkpoint are kept."""
    source, preset = find_checkpoint(model)
    return preset.name if preset else checkpoint_key(source)


def check_complete(source: Source) -> None:
    """Raise WanjaxError if a listed file of a network or tokenizer is missing or cut off."""
    listed, loaded = source.components, {name for family in FAMILIES for name in family.loaders}
    classes = {word for kind in kinds() for word in kind.classes}
    networks = [name for name, component in listed.items() if component.kind in classes]
    source.check(networks, [name for name in listed if name in loaded])


def attention_of(loras: Iterable[Lora]) -> AttentionConfig | None:
    """Return the attention of the first merged LoRA that was trained with one; None if none was."""
    return next(filter(None, (trained_attention(lora.path) for lora in loras if lora.strength)), None)


def _with_sampler(outline: SomeOutline, distillation: Distillation, distilled_name: str) -> SomeOutline:
    """Return a model with the settings and the solver of the distillation that a name says."""
    solver = distillation.solver(needs_image=bool(outline.model.spec.needs))
    return replace(
        outline,
        settings=distillation.applied(outline.settings),
        model=replace(outline.model, scheduler=solver) if solver else outline.model,
        distillation=distillation,
        distilled_name=distilled_name,
    )


def with_distillation(outline: SomeOutline, loras: Sequence[Lora], note: Note | None) -> SomeOutline:
    """Return a model with the settings and the solver of distilled LoRAs, by their names.

    `note` receives a sentence on them, or why they do not go together; None warns. They have no effect on a model that
    is distilled already, nor where one of two experts has none.
    """
    distillations, experts = outline.family.distillations, NOISE_LEVELS[: len(outline.model.spec.denoisers)]
    pairs = [
        (x, each) for x in loras if x.strength > 0 and (each := find_distillation(model_name_in(x.file), distillations))
    ]
    if not pairs:
        return outline
    lora, distillation = pairs[0]
    merged = [[x for x, _ in pairs if len(experts) == 1 or x.expert in (None, expert)] for expert in experts]
    several = next((some for some in merged if len(some) > 1), [])
    settings = outline.settings
    unchanged = (
        f"the {quantity(settings.steps, 'step')} and the guidance {settings.guidance_scale:g} of {settings.model} stay"
    )
    if outline.distillation is not None:
        sentence = f"{lora.label} is distilled, and {settings.model} is already: {unchanged}"
    elif not all(merged):
        sentence = f"{lora.label} is distilled, and the other expert has no such LoRA: {unchanged}"
    else:
        outline = _with_sampler(outline, distillation, model_name_in(lora.file))
        sentence = distillation.sentence(lora.label, outline.settings, outline.model.scheduler)
        if several:
            sentence += f"; {' and '.join(x.label for x in several)} are merged together, which may be too much"
    _notify(sentence, note, 6)
    return outline


def with_options(
    checkpoint: Checkpoint,
    loras: tuple[Lora, ...],
    note: Note | None,
    *,
    attention: AttentionConfig | None = None,
    scheduler: str | Scheduler | None = None,
) -> Checkpoint:
    """Return a checkpoint with LoRAs merged in, the preset's own and others, and with an attention and a scheduler.

    Distilled LoRAs bring their settings (`with_distillation`). A projection of sparse-linear attention that neither the
    checkpoint nor a LoRA holds begins with zeros, of which a warning tells.

    Raises:
        WanjaxError: The scheduler is of another kind than the checkpoint's.
    """
    checkpoint = with_distillation(checkpoint, loras, note)
    learned, model = attention_of(loras), checkpoint.settings.model
    attention = attention or learned
    video_model = with_attention(checkpoint.model, attention or AUTO, model)
    if video_model != checkpoint.model:
        entries = {name: video_model.spec.config_entries for name in video_model.spec.denoisers}
        checkpoint = replace(checkpoint, source=with_zeros(checkpoint.source, entries, checkpoint.family.networks))
        if learned is None:
            sentence = f"{model} was not trained with {attention}, whose projection begins with zeros"
            warnings.warn(sentence, WanjaxWarning, stacklevel=4)  # past `load` and its decorator
    if scheduler is not None:
        video_model = with_scheduler(video_model, scheduler)
    merged = [*(Lora.parse(lora) for lora in (checkpoint.preset.loras if checkpoint.preset else ())), *loras]
    source = with_loras(checkpoint.source, merged, checkpoint.family.networks, note) if merged else checkpoint.source
    return replace(checkpoint, model=video_model, source=source, loras=loras, attention=attention)


def with_size(
    model: VideoModel, defaults: Settings, published: Sequence[tuple[int, int]], settings: Mapping[str, Any]
) -> Settings:
    """Return the defaults with other settings, of which `size` may be the name of one of the model's sizes."""
    if settings.get("size") is not None:
        settings = {**settings, **sides(settings["size"], named_sizes(model, defaults, published))}
    return defaults.updated(settings)


def models_that_fit(memory: int) -> list[str]:
    """Return the names of at most three published models, of different sizes, whose largest networks fit in memory.

    `memory` is in bytes. Of models of about one size, to a tenth of a billion, the first is named.
    """
    by_size: dict[tuple[int, int], str] = {}
    for preset in presets().values():
        if (largest := _largest(preset)) <= memory:
            by_size.setdefault((round(largest, -8), round(preset.transformer_parameters, -8)), preset.name)
    return [by_size[size] for size in sorted(by_size)[-3:]]


def _largest(preset: Preset) -> int:
    """Return the bytes of the weights of a published model's largest network: a transformer, or a text encoder."""
    networks = preset.model.spec.networks if preset.model else {}
    encoders = [family_with(preset).network_of(x) for name, x in networks.items() if name.startswith("text_encoder")]
    counts = [preset.transformer_parameters, *(encoder.parameters for encoder in encoders)]
    return jnp.dtype(preset.param_dtype).itemsize * max(counts)
