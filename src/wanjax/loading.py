# SPDX-License-Identifier: Apache-2.0
"""Loading: a checkpoint that the registry finds, as a pipeline whose networks are loaded at first use."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from wanjax.checkpoints import manifest
from wanjax.checkpoints.files import main_dtype
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.network_kinds import Network, network
from wanjax.checkpoints.sources import Source
from wanjax.checkpoints.weight_changes import Note
from wanjax.compile_cache.cache import set_cache_folder
from wanjax.errors import WanjaxError, repr_short
from wanjax.figures import in_bytes
from wanjax.kernels.admitted import admit_kernels
from wanjax.kernels.attention import AUTO, AttentionConfig, choose
from wanjax.kernels.compiler_options import SAFE, check_set
from wanjax.layers.placement import with_shardings
from wanjax.media.metadata import DIGESTS
from wanjax.pipelines import memory
from wanjax.pipelines.components import DECODER, Components, MakeRoom
from wanjax.pipelines.keywords import knows_keywords
from wanjax.pipelines.mesh_sizes import AutoMesh, MeshSizes, parse_mesh
from wanjax.pipelines.meshes import auto_mesh, step_cost
from wanjax.pipelines.model import with_attention
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.progress import loading
from wanjax.pipelines.settings import Settings, schema
from wanjax.pipelines.tiny_decoder import DecoderFile
from wanjax.pipelines.tracing import NoProcessor, NoTokenizer
from wanjax.pipelines.validation import dtype_name
from wanjax.pipelines.video_metadata import described, digest_of
from wanjax.registry import (
    Checkpoint,
    Loras,
    Outline,
    companion_files,
    models_that_fit,
    open_for_loading,
    presets,
    with_options,
    with_size,
)
from wanjax.schedulers import Scheduler
from wanjax.sharding import (
    Partitioner,
    all_devices,
    find_rules,
    local_devices,
    make_mesh,
    platform,
)

HALF = "they fit in bfloat16, by wanjax.load(..., param_dtype='bfloat16') or `wanjax convert --dtype bfloat16`"
Progress = Callable[[str, int, int], Any]


@knows_keywords
def load(
    model: str | Path = "nano",
    *,
    dtype: DTypeLike | None = None,
    vae_dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    attention: str | AttentionConfig | None = None,
    revision: str | None = None,
    mesh: Mesh | MeshSizes | AutoMesh | str | None = None,
    video: Mapping[str, Any] | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE,
    lora: Loras = (),
    decoder: str | Path | None = None,
    scheduler: str | Scheduler | None = None,
    offload: bool | None = None,
    verify: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Pipeline:
    """Load a checkpoint as a pipeline. Each network is loaded at its first use.

    Args:
        model: A known name, a Hugging Face id, a folder or a file.
        dtype: The dtype in which networks compute, bfloat16 or float32, by name or as JAX's. None is float32 on a CPU,
            which has no fast bfloat16, and `param_dtype` elsewhere.
        vae_dtype: The dtype in which the autoencoder computes, bfloat16 or float32; its weights stay in float32. None
            is float32 on a CPU, and elsewhere the authors' own.
        param_dtype: The dtype of the weights in memory, bfloat16 or float32. None is bfloat16 for published
            checkpoints, and the stored dtype for others.
        attention: The transformer's attention: a name, "radial:0.2", "sla:top=0.15", or an `AttentionConfig`. None is
            the one that the model or a LoRA was trained with, else a choice by platform and shape. A missing projection
            of "sla" begins with zeros.
        revision: The revision on the hub; None is the newest.
        mesh: A mesh of `wanjax.make_mesh`, a text such as "dp=2,sp=1,tp=4", or "auto", which uses as many devices as
            help. None is one device on a CPU, and "auto" elsewhere.
        video: Settings of the videos to come, for which "auto" chooses the mesh; None is the model's defaults.
        rules: How weights are sharded: "fsdp", "tp" or "replicated".
        compiler: The set of compiler options on TPUs, "safe" or "fast". A refused option is left out with a warning.
        lora: FILE or FILE:STRENGTH, or several, merged into the transformer as it is read. FILE may be OWNER/NAME/FILE
            on the hub. For two experts, `high=FILE` and `low=FILE` name one of them.
        decoder: A file of TAEHV for the model's latents, to decode with in place of the VAE: quicker, and less exact.
        scheduler: "unipc", "euler" or another value of `wanjax.schedulers`; None is the checkpoint's own.
        offload: Whether to free each network after its stage. None frees those beside which the next would not fit.
        verify: Whether to compare a wanjax checkpoint with its checksums first, as `wanjax convert --verify` does.
        progress: Receives (component, bytes read, bytes in all). None shows them with the stage that reads.
        note: Receives sentences on merged LoRAs, and on the licence of weights to be downloaded. None warns instead.

    Returns:
        The pipeline. Call it with a prompt for a video.

    Raises:
        WanjaxError: The checkpoint, a LoRA, the decoder or the scheduler cannot be found or does not fit, or the mesh
            or a dtype is impossible.
        UnsupportedError: The named attention cannot be used here.
    """
    if not isinstance(model, str | Path):
        raise WanjaxError(f"model is {repr_short(model)}: give a name such as 'nano', a hub id, a folder or a file")
    if offload is not None and not isinstance(offload, bool):
        raise WanjaxError(f"offload is given as {repr_short(offload)}: give True, False or None")
    attention = None if attention is None else AttentionConfig.of(attention)
    check_set(compiler)
    dtype, vae_dtype = dtype_name(dtype), dtype_name(vae_dtype, "vae_dtype")
    param_dtype = dtype_name(param_dtype, "param_dtype")
    set_cache_folder()
    checkpoint = open_for_loading(model, revision, note)
    if verify:
        manifest.verify(checkpoint.source, progress or (lambda at, done, total: None))
    checkpoint = with_options(checkpoint, _listed(lora), note, attention=attention, scheduler=scheduler)
    admit_kernels(*_rare_kernels(checkpoint.model.spec.attention(checkpoint.attention or AUTO)))
    tiny = None if decoder is None else DecoderFile.in_place_of(checkpoint.model.vae, decoder)
    options = LoadOptions(
        dtype, vae_dtype, param_dtype, checkpoint.attention, mesh, video, rules, compiler, offload, progress, tiny
    )
    return _pipeline(checkpoint, options)


def _rare_kernels(attention: AttentionConfig) -> list[str]:
    """Return the kernels of a model's attention that are not tried for every model."""
    uses = {"sparse_linear_tpu": attention.sparse is not None, "flash_tpu_radial": attention.radial}
    return [name for name, is_used in uses.items() if is_used]


class LoadOptions(NamedTuple):
    """The arguments of `load` that shape the pipeline."""

    dtype: str | None
    vae_dtype: str | None
    param_dtype: str | None
    attention: AttentionConfig | None
    mesh: Mesh | MeshSizes | AutoMesh | str | None
    video: Mapping[str, Any] | None
    rules: str
    compiler: str
    offload: bool | None
    progress: Progress | None
    decoder: DecoderFile | None


def _listed(loras: Loras) -> tuple[Lora, ...]:
    """Parse LoRAs to values."""
    several = loras if isinstance(loras, Sequence) and not isinstance(loras, str) else [loras]
    for lora in several:
        if not isinstance(lora, str | Path | Lora):
            raise WanjaxError(
                f"a LoRA is given as {repr_short(lora)}: give the name of a file, such as 'style.safetensors:0.8'"
            )
    return tuple((lora if isinstance(lora, Lora) else Lora.parse(str(lora))).named() for lora in several)


def _pipeline(checkpoint: Checkpoint, options: LoadOptions) -> Pipeline:
    """Return the pipeline of a checkpoint, whose components are loaded at first use."""
    param_dtype = options.param_dtype or checkpoint.param_dtype
    names = ("size", *schema(type(checkpoint.settings)))
    for name in sorted((options.video or {}).keys() - set(names)):
        raise unknown_keyword(name, names)
    video = with_size(checkpoint.model, checkpoint.settings, checkpoint.sizes, options.video or {})
    partitioner = _partitioner(checkpoint, options, video)
    slow = "float32" if platform() == "cpu" else None
    options = options._replace(dtype=options.dtype or slow or param_dtype, param_dtype=param_dtype)
    sizes = _sizes(checkpoint, options, partitioner)
    settings = replace(
        checkpoint.settings,
        dtype=options.dtype or _stored_dtype(checkpoint.source, "transformer"),
        vae_dtype=options.vae_dtype or slow or checkpoint.settings.vae_dtype,
    )
    checkpoint = replace(checkpoint, settings=settings)
    _check_attention(options.attention or AUTO, checkpoint)
    loaders = _loaders(checkpoint, options, partitioner)
    networks = [name for name in loaders if name not in checkpoint.family.loaders]
    shapes = {name: partial(_abstract, checkpoint, name, options, partitioner) for name in networks}
    extra = _decoder(options.decoder, partitioner)
    components = Components(
        {**loaders, **extra[0]},
        _recorded_options(checkpoint, options, partitioner),
        options.offload,
        sizes,
        checkpoint.source,
        checkpoint.family.networks,
        {**shapes, **extra[1]},
    )
    return Pipeline(components, checkpoint.model, settings, partitioner, options.compiler, checkpoint.sizes)


def _decoder(decoder: DecoderFile | None, partitioner: Partitioner) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the loader and the shapes of a decoder in place of the autoencoder, by its name; nothing without one."""
    if decoder is None:
        return {}, {}

    def load(make_room: MakeRoom) -> nnx.Module:
        make_room(decoder.shapes(partitioner))
        return decoder.load(partitioner)

    return {DECODER: load}, {DECODER: partial(decoder.shapes, partitioner)}


def _sizes(checkpoint: Checkpoint, options: LoadOptions, partitioner: Partitioner) -> dict[str, int]:
    """Return the bytes of the weights of each network whose shapes are known, as `bytes_needed` counts them.

    Weights that are kept as they are stored are counted in bfloat16, because reading their dtype may need a download.
    The autoencoder, which is small, is left out. Raises WanjaxError where a network is larger than the memory.
    """
    sizes: dict[str, int] = {}
    outline = replace(checkpoint, settings=replace(checkpoint.settings, dtype=options.dtype or "bfloat16"))
    for name, net in _networks(checkpoint).items():
        if not net.float32:
            shapes = _shapes(outline, name, net, options.param_dtype or "bfloat16", options.attention, partitioner)
            check_memory(checkpoint.settings.model, name, shapes)
            sizes[name] = memory.bytes_needed(shapes)
    return sizes


def check_memory(model: str, component: str, network: nnx.Module) -> None:
    """Raise WanjaxError, with what to do, where the weights of a network are larger than a device's whole memory.

    The network may be given as shapes. Nothing is refused where the memory is unknown.
    """
    device = local_devices()[0]
    needed, available = memory.bytes_needed(network), memory.total_memory(device)
    if available is None or needed <= available:
        return
    weights = jax.tree.leaves(nnx.state(network))
    remedies = []
    if all(x.dtype.itemsize == 4 for x in weights) and needed <= 2 * available:
        remedies.append(HALF)
    if device.platform != "cpu":
        devices = math.ceil(sum(x.size * x.dtype.itemsize for x in weights) / available)
        remedies.append(f"use a mesh whose sp · tp is {devices} or more")
    if names := models_that_fit(available):
        remedies.append(f"use {' or '.join(names)}, which fit")
    dtypes = " and ".join(sorted({str(x.dtype) for x in weights}))
    where = "this machine" if device.platform == "cpu" else f"each {device.device_kind}"
    raise WanjaxError(
        f"the {component} of {model} needs {in_bytes(needed)} of memory for its weights in {dtypes} where {where} has "
        f"{in_bytes(available)}: {'; or '.join(remedies) or 'use more memory'}"
    )


def _networks(checkpoint: Checkpoint) -> dict[str, Network]:
    """Return the networks of a checkpoint whose configs are known without a download."""
    outline = checkpoint.preset.model.spec.networks if checkpoint.preset and checkpoint.preset.model else {}
    configs, networks = {**outline, **checkpoint.model.spec.networks}, {}
    for name, component in checkpoint.source.components.items():
        if name in configs:
            networks[name] = checkpoint.family.network_of(configs[name])
        elif name not in checkpoint.family.loaders and component.at_hand:
            with suppress(WanjaxError):  # it is told when the network is loaded, if it is
                networks[name] = network(checkpoint.source, name, checkpoint.family.networks)
    return networks


def _recorded_options(checkpoint: Checkpoint, options: LoadOptions, partitioner: Partitioner) -> dict[str, Any]:
    """Return the options of loading that shape a video, for its metadata; without those left to the model."""
    facts = {
        "attention": options.attention,
        "param_dtype": options.param_dtype,
        "revision": checkpoint.source.revision,
    }
    facts |= {"compiler": None if options.compiler == SAFE else options.compiler}
    if options.mesh is not None and partitioner.single_device:  # which one device without a mesh may not be elsewhere
        facts |= {"mesh": str(partitioner), "rules": partitioner.rules_name}
    facts |= {DECODER: options.decoder and described(options.decoder.file)}
    loras = [str(replace(lora, file=described(lora.file))) for lora in checkpoint.loras]
    return {
        name: value
        for name, value in (facts | {"lora": loras, DIGESTS: _digests(checkpoint, options)}).items()
        if value
    }


def _digests(checkpoint: Checkpoint, options: LoadOptions) -> dict[str, str]:
    """Return the digests of a checkpoint that may be replaced, of LoRAs and of a decoder, by their recorded names."""
    source, name = checkpoint.source, checkpoint.settings.model
    read = {described(lora.file): lora.path for lora in source.loras}
    if source.revision is None and name not in presets():
        path, root = Path(name).expanduser(), source.root
        read |= {str(path): root} | {str(path.with_name(x)): root.with_name(x) for x in companion_files(path.name)}
    if options.decoder is not None:
        read[described(options.decoder.file)] = options.decoder.file
    return {name: digest for name, path in read.items() if (digest := digest_of(path)) is not None}


def _check_attention(attention: AttentionConfig, outline: Outline) -> None:
    """Raise UnsupportedError, before weights are read, where the named attention cannot be used here."""
    work = outline.model.cost(outline.settings)
    some = jax.ShapeDtypeStruct((1, 256, work.heads, work.width // work.heads), outline.settings.dtype)
    choose(some, some, some, implementation=attention)


def _partitioner(checkpoint: Checkpoint, options: LoadOptions, video: Settings) -> Partitioner:
    """Return the mesh and its rules. "auto" chooses a mesh for a video of these settings."""
    mesh, rules = options.mesh, find_rules(options.rules)
    devices = all_devices()
    if mesh is None and platform() != "cpu" and len(devices) > 1:
        mesh = AutoMesh()
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    if isinstance(mesh, AutoMesh):
        how = {"attention": options.attention or AUTO, "rules": rules, "offload": options.offload}
        how |= {"param_dtype": options.param_dtype or checkpoint.param_dtype}
        chosen = auto_mesh(step_cost(checkpoint.family, checkpoint.model, video, **how), devices, mesh.sp)
        mesh = make_mesh(*chosen, devices=devices[: math.prod(chosen)])
    elif isinstance(mesh, MeshSizes):
        mesh = make_mesh(*mesh)
    elif not isinstance(mesh, Mesh | None):
        raise WanjaxError(f"the mesh is given as {repr_short(mesh)}: give wanjax.make_mesh(dp=2, tp=4) or 'auto'")
    return Partitioner(make_mesh(devices=local_devices()[:1]) if mesh is None else mesh, rules)


def _loaders(
    checkpoint: Checkpoint, options: LoadOptions, partitioner: Partitioner
) -> Mapping[str, Callable[[MakeRoom], Any]]:
    """Return a function for each component that the checkpoint lists, which loads it."""
    source, loaders = checkpoint.source, checkpoint.family.loaders

    def load(name: str, make_room: MakeRoom) -> Any:
        if name in loaders:
            return loaders[name](source[name].files()[0].parent)
        read = network(checkpoint.source, name, checkpoint.family.networks)
        shapes = _abstract(checkpoint, name, options, partitioner)
        check_memory(checkpoint.settings.model, name, shapes)
        make_room(shapes)
        report = partial(options.progress or loading, name)
        return source[name].load(shapes, read.rules, ignore=read.unused, progress=report)

    return {name: partial(load, name) for name in source.components if name != "scheduler"}


def _abstract(checkpoint: Checkpoint, name: str, options: LoadOptions, partitioner: Partitioner) -> nnx.Module:
    """Return a network of a checkpoint as shapes with shardings, as it will be loaded."""
    read = network(checkpoint.source, name, checkpoint.family.networks)
    param_dtype = "float32" if read.float32 else options.param_dtype or _stored_dtype(checkpoint.source, name)
    return _shapes(checkpoint, name, read, param_dtype, options.attention, partitioner)


def abstract_pipeline(
    outline: Outline,
    partitioner: Partitioner,
    *,
    param_dtype: str | None = None,
    attention: AttentionConfig = AUTO,
    compiler: str = SAFE,
    offload: bool | None = None,
    decoder: DecoderFile | None = None,
) -> Pipeline:
    """Return the pipeline of an outline, whose networks are shapes: for plans, which load and download nothing.

    The networks compute in the settings' dtype, and prompts have the length that the family gives.

    Args:
        outline: The model without its weights.
        partitioner: The mesh and its rules; the mesh may be abstract.
        param_dtype: As in `load`.
        attention: As in `load`.
        compiler: As in `load`.
        offload: As in `load`.
        decoder: As in `load`.
    """
    outline = replace(outline, model=with_attention(outline.model, attention, outline.settings.model))
    family, preset, model, settings = outline.family, outline.preset, outline.model, outline.settings
    weights_dtype = param_dtype or (preset.param_dtype if preset and preset.model else settings.dtype)

    def make(name: str) -> nnx.Module:
        net = family.network_of(model.spec.networks[name])
        return _shapes(outline, name, net, weights_dtype, attention, partitioner)

    shapes = {name: partial(make, name) for name in model.spec.networks}
    others: dict[str, Any] = {name: NoTokenizer(*sizes) for name, sizes in family.prompt(model).items()}
    if (seen := model.spec.networks.get("image_encoder")) is not None:
        others |= {name: NoProcessor(seen.image_size) for name in family.loaders if name not in others}
    shapes |= _decoder(decoder, partitioner)[1]
    loaders = {name: (lambda room, x=x: x) for name, x in others.items()} | {name: lambda room: None for name in shapes}
    components = Components(loaders, offload=offload, shapes=shapes, kinds=family.networks)
    return Pipeline(components, model, settings, partitioner, compiler, outline.sizes)


def _shapes(
    outline: Outline,
    name: str,
    net: Network,
    param_dtype: str,
    attention: AttentionConfig | None,
    partitioner: Partitioner,
) -> nnx.Module:
    """Return a network as shapes with shardings; `param_dtype` is the dtype of its weights unless it is in float32."""
    settings, options = outline.settings, {}
    if name in outline.model.spec.denoisers:
        options = {"attention": attention or AUTO}
    dtype = settings.dtype
    if net.float32:
        dtype, param_dtype = settings.vae_dtype if name == "vae" else "float32", "float32"
    return with_shardings(net.abstract(dtype=dtype, param_dtype=param_dtype, **options), partitioner)


def _stored_dtype(source: Source, name: str) -> str:
    """Return the dtype of most of a network's bytes if it is bfloat16 or float32, else float32."""
    dtype = main_dtype(source[name].weights().specs.values())
    return dtype if dtype in ("bfloat16", "float32") else "float32"
