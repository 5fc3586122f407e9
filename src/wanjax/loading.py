# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint as a pipeline. The networks of the pipeline are loaded at their first use."""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from wanjax.errors import WanjaxError, WanjaxWarning, repr_short, user_stack_level
from wanjax.figures import format_bytes
from wanjax.kernels.admitted import admit_kernels
from wanjax.kernels.attention import AUTO, AttentionConfig, choose_implementation
from wanjax.kernels.compiler_options import SAFE_SET, check_option_set
from wanjax.layers.offload import AUTO_OFFLOAD, DEFAULT_BLOCKS, Offload
from wanjax.layers.placement import host_bytes, offloaded_bytes, with_shardings
from wanjax.layers.precision import UNQUANTIZED, Precision
from wanjax.media.metadata import DIGESTS_KEY
from wanjax.pipelines import memory
from wanjax.pipelines.components import DECODER, Components, MakeRoom
from wanjax.pipelines.decoder_files import DecoderFile, read_decoder
from wanjax.pipelines.keywords import check_keywords
from wanjax.pipelines.mesh_sizes import AutoMesh, MeshSizes, parse_mesh
from wanjax.pipelines.meshes import auto_mesh, step_cost
from wanjax.pipelines.model import with_attention
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.progress import loading
from wanjax.pipelines.settings import Settings, schema
from wanjax.pipelines.tracing import PlaceholderImageProcessor, PlaceholderTokenizer
from wanjax.pipelines.validation import check_function, dtype_name
from wanjax.pipelines.video_metadata import digest_of, source_to_json
from wanjax.registry import (
    Checkpoint,
    Loras,
    ModelDescription,
    apply_options,
    domain_of,
    models_that_fit,
    open_for_loading,
    presets,
    resolve_size,
)
from wanjax.schedulers import Scheduler
from wanjax.sharding import (
    Partitioner,
    all_devices,
    device_platform,
    find_sharding_rules,
    local_devices,
    make_mesh,
)

BFLOAT16_REMEDY = (
    "load them in bfloat16, with wanjax.load(..., param_dtype='bfloat16') or `wanjax convert --dtype bfloat16`"
)
WEIGHTS_OF_8_BITS = "int8-weights"  # the precision that messages recommend if there is too little memory
Progress = Callable[[str, int, int], Any]
SomeDescription = TypeVar("SomeDescription", bound=ModelDescription)


@check_keywords
def load(
    model: str | Path = "nano",
    *,
    dtype: DTypeLike | None = None,
    vae_dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    precision: str | Precision | None = None,
    attention: str | AttentionConfig | None = None,
    revision: str | None = None,
    mesh: Mesh | MeshSizes | AutoMesh | str | None = None,
    video: Mapping[str, Any] | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE_SET,
    lora: Loras = (),
    decoder: str | Path | None = None,
    scheduler: str | Scheduler | None = None,
    offload: str | Offload | None = None,
    verify: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Pipeline:
    """Load a checkpoint as a pipeline. Each network is loaded at its first use.

    Args:
        model: A preset's name, a Hugging Face id, a folder or a file.
        dtype: The dtype in which networks compute, bfloat16 or float32, as a name or a JAX dtype. None is float32 on a
            CPU, which has no fast bfloat16, and `param_dtype` elsewhere.
        vae_dtype: The dtype in which the autoencoder computes, bfloat16 or float32; its weights stay in float32. None
            is float32 on a CPU, and the model authors' dtype elsewhere.
        param_dtype: The dtype of the weights in memory, bfloat16 or float32. None is bfloat16 for published
            checkpoints, and the stored dtype for other checkpoints.
        precision: The format of the weights of the transformer's projections, and of their inputs. "int8" and "fp8"
            quantize weights and inputs to 8 bits, "int8-weights" and "fp8-weights" only weights, and "none" neither.
            Weights are quantized while they are read. None is the precision in which `wanjax convert` stored the
            weights, or else "none".
        attention: The transformer's attention: a name, "radial:0.2", "sla:top=0.15", or an `AttentionConfig`. None is
            the attention with which the model or a LoRA was trained. If that is unknown, the platform and the shape
            determine the attention. If the projection of "sla" is missing, it is initialised with zeros.
        revision: The revision on the hub; None is the newest.
        mesh: A mesh from `wanjax.make_mesh`, a string such as "dp=2,sp=1,tp=4", or "auto". "auto" uses as many devices
            as make a video faster. None is one device on a CPU, and "auto" elsewhere.
        video: Settings of the videos for which "auto" chooses the mesh; None is the model's defaults. With a mesh of
            given sizes they have no effect, and a warning says so.
        rules: How weights are sharded: "fsdp", "tp" or "replicated".
        compiler: The set of compiler options on TPUs, "safe" or "fast". An option that the compiler rejects is dropped
            with a warning.
        lora: FILE or FILE:STRENGTH, or a list of these, merged into the transformer while it is read. FILE may be
            OWNER/NAME/FILE on the hub. For a model of two experts, `high=FILE` or `low=FILE` selects one.
        decoder: A file with a decoder that replaces the VAE's decoder: TAEHV for the model's latents, or a smaller
            autoencoder of the same latents, such as LightVAE. Such a decoder is faster and less accurate.
        scheduler: "unipc", "euler" or another value of `wanjax.schedulers`; None is the checkpoint's own.
        offload: Which weights are moved out of the device's memory. "stages" frees each network after its stage, and
            "none" frees no network. "blocks" stores the blocks of all networks in the host's memory, with two blocks on
            the device. While one block computes, the next is copied. "blocks:N" has N blocks on the device. None frees
            networks only if the next network would not fit.
        verify: Whether to compare a wanjax checkpoint with its checksums first, as `wanjax convert --verify` does.
        progress: Called with (component, bytes read, total bytes). With None, the progress bar of the stage shows them.
        note: Called with sentences for the user, about merged LoRAs and about the licence of weights before a download.
            With None, the sentences are warnings.

    Returns:
        The pipeline. Call it with a prompt for a video.

    Raises:
        WanjaxError: The checkpoint, a LoRA, the decoder or the scheduler is missing or does not fit the model, or the
            mesh or a dtype is invalid.
        UnsupportedError: The attention cannot be used on this platform.
    """
    if not isinstance(model, str | Path):
        raise WanjaxError(f"model is {repr_short(model)}: give a name such as 'nano', a hub id, a folder or a file")
    offload = Offload.of(offload)
    check_function(progress, "progress", "a component", "the bytes read", "the bytes of all")
    check_function(note, "note", "a sentence")
    attention = None if attention is None else AttentionConfig.of(attention)
    check_option_set(compiler)
    dtype, vae_dtype = dtype_name(dtype), dtype_name(vae_dtype, "vae_dtype")
    param_dtype = dtype_name(param_dtype, "param_dtype")
    set_cache_folder()
    checkpoint = open_for_loading(model, revision, note)
    source = checkpoint.source
    checkpoint = apply_options(checkpoint, _parse_loras(lora), note, attention=attention, scheduler=scheduler)
    checkpoint = with_precision(checkpoint, precision)
    attention_config = checkpoint.model.spec.resolve_attention(checkpoint.attention or AUTO)
    admit_kernels(*_rare_kernels(attention_config, Precision.of(checkpoint.settings.precision)))
    decoder_file = None if decoder is None else read_decoder(decoder, checkpoint.model.vae, checkpoint.family)
    options = LoadOptions(
        dtype,
        vae_dtype,
        param_dtype,
        checkpoint.attention,
        mesh,
        video,
        rules,
        compiler,
        offload,
        progress,
        decoder_file,
    )
    pipe = _make_pipeline(checkpoint, options)
    if verify:  # the last check, because it reads all weights
        manifest.verify(source, progress or (lambda component, done, total: None))
    return pipe


def with_precision(description: SomeDescription, precision: str | Precision | None) -> SomeDescription:
    """Set the precision of a model.

    Args:
        description: The model, with the precision in which its weights are stored.
        precision: The precision, or None for the precision of the stored weights.

    Raises:
        WanjaxError: The precision is unknown, or the weights are stored in another precision.
        SettingError: The model does not offer the precision.
    """
    if precision is None:
        return description
    name, stored = Precision.of(precision).name, description.settings.precision
    if stored not in (UNQUANTIZED.name, name):
        raise WanjaxError(
            f"precision is given as {name}, and the weights of {description.settings.model} are stored as {stored}: "
            f"give the original checkpoint for precision {name}"
        )
    description.family.check_precision(description.model, settings := replace(description.settings, precision=name))
    return replace(description, settings=settings)


def _rare_kernels(attention: AttentionConfig, precision: Precision) -> list[str]:
    """Return the kernels that a model's attention and precision need, of those that are not tried for every model."""
    uses = {
        "sparse_linear_tpu": attention.sparse is not None,
        "flash_tpu_radial": attention.radial,
        "flash_tpu_int8": attention.qk is not None,
        "quantized_matmul": precision.activations is not None,
    }
    return [name for name, is_used in uses.items() if is_used]


class LoadOptions(NamedTuple):
    """The arguments of `load` that determine the pipeline."""

    dtype: str | None
    vae_dtype: str | None
    param_dtype: str | None
    attention: AttentionConfig | None
    mesh: Mesh | MeshSizes | AutoMesh | str | None
    video: Mapping[str, Any] | None
    rules: str
    compiler: str
    offload: Offload
    progress: Progress | None
    decoder: DecoderFile | None


def _parse_loras(loras: Loras) -> tuple[Lora, ...]:
    """Parse the argument `lora` of `load`."""
    entries = loras if isinstance(loras, Sequence) and not isinstance(loras, str) else [loras]
    for lora in entries:
        if not isinstance(lora, str | Path | Lora):
            raise WanjaxError(f"lora is {repr_short(lora)}: give the name of a file, such as 'style.safetensors:0.8'")
    return tuple((lora if isinstance(lora, Lora) else Lora.parse(str(lora))).resolve_folder() for lora in entries)


def _make_pipeline(checkpoint: Checkpoint, options: LoadOptions) -> Pipeline:
    """Build the pipeline of a checkpoint. Each component is loaded at its first use."""
    param_dtype = options.param_dtype or checkpoint.param_dtype
    if not isinstance(options.video, Mapping | None):
        example = "{'size': '832x480', 'frames': 81}"
        raise WanjaxError(f"video is {repr_short(options.video)}: give the settings of a video, such as {example}")
    names = ("size", *schema(type(checkpoint.settings)))
    for name in sorted((options.video or {}).keys() - set(names)):
        raise unknown_keyword(name, names)
    video = resolve_size(checkpoint.model, checkpoint.settings, checkpoint.sizes, options.video or {})
    partitioner = _make_partitioner(checkpoint, options, video)
    cpu_dtype = "float32" if device_platform() == "cpu" else None
    options = options._replace(dtype=options.dtype or cpu_dtype or param_dtype, param_dtype=param_dtype)
    sizes = _network_sizes(checkpoint, options, partitioner)
    settings = replace(
        checkpoint.settings,
        dtype=options.dtype or _stored_dtype(checkpoint.source, "transformer"),
        vae_dtype=options.vae_dtype or cpu_dtype or checkpoint.settings.vae_dtype,
    )
    checkpoint = replace(checkpoint, settings=settings)
    _check_attention(options.attention or AUTO, checkpoint)
    loaders = _make_loaders(checkpoint, options, partitioner)
    networks = [name for name in loaders if name not in checkpoint.family.loaders]
    abstract_networks = {name: partial(_abstract_network, checkpoint, name, options, partitioner) for name in networks}
    decoder_entries = _decoder(options.decoder, partitioner, settings.vae_dtype)
    components = Components(
        {**loaders, **decoder_entries[0]},
        _options_metadata(checkpoint, options, partitioner),
        options.offload,
        sizes,
        checkpoint.source,
        checkpoint.family.networks,
        {**abstract_networks, **decoder_entries[1]},
    )
    domain = domain_of(settings.model)
    return Pipeline(components, checkpoint.model, settings, partitioner, options.compiler, checkpoint.sizes, domain)


def _decoder(
    decoder: DecoderFile | None, partitioner: Partitioner, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two mappings from the decoder's component name: to its loading function, and to its abstract network.

    This is for a decoder that replaces the VAE's decoder. Without such a decoder, both mappings are empty.
    """
    if decoder is None:
        return {}, {}

    def load(make_room: MakeRoom) -> nnx.Module:
        make_room(decoder.shapes(partitioner, dtype))
        return decoder.load(partitioner, dtype)

    return {DECODER: load}, {DECODER: partial(decoder.shapes, partitioner, dtype)}


def _network_sizes(checkpoint: Checkpoint, options: LoadOptions, partitioner: Partitioner) -> dict[str, int]:
    """Return the bytes of the weights of each network with known shapes, as `bytes_needed` counts them.

    Weights that are loaded in their stored dtype count as bfloat16, because reading the stored dtype may need a
    download. Networks that stay in float32, such as the autoencoder, are excluded because they are small. Raises
    WanjaxError if a network is larger than the memory.
    """
    sizes: dict[str, int] = {}
    description = replace(checkpoint, settings=replace(checkpoint.settings, dtype=options.dtype or "bfloat16"))
    for name, network_info in _known_networks(checkpoint).items():
        if not network_info.float32:
            make = partial(
                _with_dtypes,
                name=name,
                network_info=network_info,
                param_dtype=options.param_dtype or "bfloat16",
                attention=options.attention,
                partitioner=partitioner,
            )
            shapes = make(description)
            check_memory(checkpoint.settings.model, name, shapes, _make_quantized(description, network_info, make))
            sizes[name] = memory.bytes_needed(shapes)
    return sizes


def _make_quantized(
    checkpoint: SomeDescription, network_info: Network, make: Callable[[SomeDescription], nnx.Module]
) -> Callable[[], nnx.Module] | None:
    """Return a function that makes a network with 8-bit weights, for `check_memory`.

    Args:
        checkpoint: The checkpoint.
        network_info: The network.
        make: A function that makes the network of a checkpoint as shapes.

    Returns:
        The function, or None if the network is already quantized or has no projections that may be quantized.
    """
    if network_info.kind.full_precision is None or Precision.of(checkpoint.settings.precision).quantizes:
        return None
    try:
        quantized = with_precision(checkpoint, WEIGHTS_OF_8_BITS)
    except WanjaxError:
        return None
    return lambda: make(quantized)


def check_memory(
    model: str, component: str, network: nnx.Module, quantized: Callable[[], nnx.Module] | None = None
) -> None:
    """Raise WanjaxError with remedies if the weights of a network exceed the total memory of a device or of the host.

    If the memory of a device is unknown, there is no check. The message has only remedies with which the network fits.

    Args:
        model: The name of the model.
        component: The name of the network.
        network: The network, or its shapes.
        quantized: Makes the same network with 8-bit weights, as shapes; None if there is no such network.
    """
    device = local_devices()[0]
    if device.platform != "cpu" and (on_host := host_bytes(network)) > (machine_bytes := memory.machine_memory()):
        fits_quantized = quantized is not None and host_bytes(quantized()) <= machine_bytes
        raise WanjaxError(
            f"the {component} of {model} needs {format_bytes(on_host)} of the host's memory for its offloaded blocks, "
            f"and this machine has {format_bytes(machine_bytes)}: use "
            f"{f'--precision {WEIGHTS_OF_8_BITS}, or ' if fits_quantized else ''}a machine with more memory"
        )
    needed_bytes, available_bytes = memory.bytes_needed(network), memory.total_memory(device)
    if available_bytes is None or needed_bytes <= available_bytes:
        return
    weights = jax.tree.leaves(nnx.state(network))
    remedies = []
    if all(weight.dtype.itemsize == 4 for weight in weights) and needed_bytes <= 2 * available_bytes:
        remedies.append(BFLOAT16_REMEDY)
    remedies += _remedies(network, quantized, available_bytes, is_cpu=device.platform == "cpu")
    if device.platform != "cpu":
        devices = math.ceil(sum(weight.size * weight.dtype.itemsize for weight in weights) / available_bytes)
        remedies.append(f"use a mesh whose sp · tp is {devices} or more")
    if fitting_models := models_that_fit(available_bytes):
        remedies.append(f"use {' or '.join(fitting_models)}, which fit")
    dtypes = " and ".join(sorted({str(weight.dtype) for weight in weights}))
    device_text = "this machine" if device.platform == "cpu" else f"each {device.device_kind}"
    raise WanjaxError(
        f"the {component} of {model} needs {format_bytes(needed_bytes)} of memory for its weights in {dtypes}, and "
        f"{device_text} has {format_bytes(available_bytes)}: {'; or '.join(remedies) or 'use more memory'}"
    )


def _remedies(
    network: nnx.Module, quantized: Callable[[], nnx.Module] | None, available_bytes: int, *, is_cpu: bool
) -> list[str]:
    """Return the remedies with which a network fits: 8-bit weights, and offloaded blocks. If neither remedy is enough,
    return both as one remedy, if the network then fits.

    Args:
        network: The network, or its shapes.
        quantized: As in `check_memory`.
        available_bytes: The memory of a device.
        is_cpu: Whether the device is a CPU, which uses the host's memory.
    """
    quantized_network = None if quantized is None else quantized()
    is_sharded = any(len(x.sharding.device_set) > 1 for x in jax.tree.leaves(nnx.state(network)) if x.sharding)

    def fits_offloaded(network: nnx.Module) -> bool:
        if is_cpu or is_sharded or host_bytes(network):
            return False
        on_device, on_host = offloaded_bytes(network, DEFAULT_BLOCKS)
        return on_host > 0 and on_device <= available_bytes and on_host <= memory.machine_memory()

    remedies = []
    if quantized_network is not None and memory.bytes_needed(quantized_network) <= available_bytes:
        remedies.append(f"quantize its weights to 8 bits, with --precision {WEIGHTS_OF_8_BITS}")
    if fits_offloaded(network):
        remedies.append("keep its blocks in the host's memory, with --offload blocks")
    if not remedies and quantized_network is not None and fits_offloaded(quantized_network):
        remedies.append(
            f"quantize its weights to 8 bits and keep its blocks in the host's memory, with --precision "
            f"{WEIGHTS_OF_8_BITS} --offload blocks"
        )
    return remedies


def _known_networks(checkpoint: Checkpoint) -> dict[str, Network]:
    """Return the networks of a checkpoint. Networks whose configs would need a download are not included."""
    preset_configs = checkpoint.preset.model.spec.networks if checkpoint.preset and checkpoint.preset.model else {}
    configs, networks = {**preset_configs, **checkpoint.model.spec.networks}, {}
    for name, component in checkpoint.source.components.items():
        if name in configs:
            networks[name] = checkpoint.family.network_of(configs[name])
        elif name not in checkpoint.family.loaders and component.is_config_available:
            with suppress(WanjaxError):  # the error is raised again when the network is loaded
                networks[name] = network(checkpoint.source, name, checkpoint.family.networks)
    return networks


def _options_metadata(checkpoint: Checkpoint, options: LoadOptions, partitioner: Partitioner) -> dict[str, Any]:
    """Return the options of `load` for the metadata of a video: those that were set and that affect the video."""
    entries = {
        "attention": options.attention,
        "param_dtype": options.param_dtype,
        "revision": checkpoint.source.revision,
    }
    entries |= {"compiler": None if options.compiler == SAFE_SET else options.compiler}
    # a mesh of one device is recorded, because on other machines the default may be several devices
    if options.mesh is not None and partitioner.is_single_device:
        entries |= {"mesh": str(partitioner), "rules": partitioner.rules_name}
    entries |= {DECODER: options.decoder and source_to_json(options.decoder.file)}
    loras = [str(replace(lora, file=source_to_json(lora.file))) for lora in checkpoint.loras]
    return {
        name: value
        for name, value in (entries | {"lora": loras, DIGESTS_KEY: _digests(checkpoint, options)}).items()
        if value
    }


def _digests(checkpoint: Checkpoint, options: LoadOptions) -> dict[str, str]:
    """Return the digests of the local checkpoint, LoRAs and decoder, by their paths in the metadata."""
    source, name = checkpoint.source, checkpoint.settings.model
    paths = {source_to_json(lora.file): lora.path for lora in source.loras}
    if source.revision is None and name not in presets():
        path, root = Path(name).expanduser(), source.root
        paths |= {str(path): root}
        for companion in source.storage.companions:
            relative = os.path.relpath(companion, root.parent)
            paths[os.path.normpath(path.parent / relative)] = companion
    if options.decoder is not None:
        paths[source_to_json(options.decoder.file)] = options.decoder.file
    return {name: digest for name, path in paths.items() if (digest := digest_of(path)) is not None}


def _check_attention(attention: AttentionConfig, description: ModelDescription) -> None:
    """Raise UnsupportedError if the attention cannot be used on this platform. Call this before weights are read."""
    cost = description.model.cost(description.settings)
    query_shape = jax.ShapeDtypeStruct(
        (1, 256, cost.num_heads, cost.width // cost.num_heads), description.settings.dtype
    )
    choose_implementation(query_shape, query_shape, query_shape, implementation=attention)


def _make_partitioner(checkpoint: Checkpoint, options: LoadOptions, video: Settings) -> Partitioner:
    """Return the mesh and its rules. "auto" chooses a mesh for a video with the settings `video`."""
    mesh, rules = options.mesh, find_sharding_rules(options.rules)
    devices = all_devices()
    if mesh is None and device_platform() != "cpu" and len(devices) > 1:
        mesh = AutoMesh()
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    if options.video and isinstance(mesh, Mesh | MeshSizes):
        message = "video has no effect without mesh='auto': give the settings of a video to pipe(prompt, ...)"
        warnings.warn(message, WanjaxWarning, stacklevel=user_stack_level())
    mesh = None if isinstance(mesh, AutoMesh) and options.offload.blocks else mesh
    if isinstance(mesh, AutoMesh):
        cost_options = {"attention": options.attention or AUTO, "rules": rules, "offload": options.offload}
        cost_options |= {"param_dtype": options.param_dtype or checkpoint.param_dtype}
        mesh_sizes = auto_mesh(step_cost(checkpoint.family, checkpoint.model, video, **cost_options), devices, mesh.sp)
        mesh = make_mesh(*mesh_sizes, devices=devices[: math.prod(mesh_sizes)])
    elif isinstance(mesh, MeshSizes):
        mesh = make_mesh(*mesh)
    elif not isinstance(mesh, Mesh | None):
        raise WanjaxError(f"mesh is {repr_short(mesh)}: give wanjax.make_mesh(dp=2, tp=4) or 'auto'")
    mesh = make_mesh(devices=local_devices()[:1]) if mesh is None else mesh
    options.offload.check_devices(mesh.size)
    return Partitioner(mesh, rules, num_device_blocks=options.offload.blocks)


def _make_loaders(
    checkpoint: Checkpoint, options: LoadOptions, partitioner: Partitioner
) -> Mapping[str, Callable[[MakeRoom], Any]]:
    """Return a loading function for each component of the checkpoint."""
    source, loaders = checkpoint.source, checkpoint.family.loaders

    def load(name: str, make_room: MakeRoom) -> Any:
        if name in loaders:
            return loaders[name](source[name].files()[0].parent)
        network_info = network(checkpoint.source, name, checkpoint.family.networks)
        abstract_network = _abstract_network(checkpoint, name, options, partitioner)
        check_memory(
            checkpoint.settings.model,
            name,
            abstract_network,
            _make_quantized(
                checkpoint, network_info, lambda quantized: _abstract_network(quantized, name, options, partitioner)
            ),
        )
        make_room(abstract_network)
        report_progress = partial(options.progress or loading, name)
        return source[name].load(
            abstract_network, network_info.rules, ignore=network_info.unused, progress=report_progress
        )

    return {name: partial(load, name) for name in source.components if name != "scheduler"}


def _abstract_network(checkpoint: Checkpoint, name: str, options: LoadOptions, partitioner: Partitioner) -> nnx.Module:
    """Return the abstract network, with dtypes and shardings, into which a component will be loaded."""
    network_info = network(checkpoint.source, name, checkpoint.family.networks)
    param_dtype = "float32" if network_info.float32 else options.param_dtype or _stored_dtype(checkpoint.source, name)
    return _with_dtypes(checkpoint, name, network_info, param_dtype, options.attention, partitioner)


def abstract_pipeline(
    description: ModelDescription,
    partitioner: Partitioner,
    *,
    param_dtype: str | None = None,
    attention: AttentionConfig = AUTO,
    compiler: str = SAFE_SET,
    offload: Offload = AUTO_OFFLOAD,
    decoder: DecoderFile | None = None,
) -> Pipeline:
    """Build a pipeline of abstract networks for a plan. Nothing is loaded or downloaded.

    The networks compute in the settings' dtype, and prompts are padded to the family's length.

    Args:
        description: The model without its weights.
        partitioner: The mesh and its rules; the mesh may be abstract.
        param_dtype: As in `load`.
        attention: As in `load`.
        compiler: As in `load`.
        offload: As in `load`.
        decoder: As in `load`.
    """
    description = replace(description, model=with_attention(description.model, attention, description.settings.model))
    family, preset, model, settings = description.family, description.preset, description.model, description.settings
    weights_dtype = param_dtype or (preset.param_dtype if preset and preset.model else settings.dtype)

    def make_network(name: str) -> nnx.Module:
        network_info = family.network_of(model.spec.networks[name])
        return _with_dtypes(description, name, network_info, weights_dtype, attention, partitioner)

    shapes = {name: partial(make_network, name) for name in model.spec.networks}
    processors: dict[str, Any] = {
        name: PlaceholderTokenizer(*sizes) for name, sizes in family.prompt_lengths(model).items()
    }
    if (image_encoder := model.spec.networks.get("image_encoder")) is not None:
        processors |= {
            name: PlaceholderImageProcessor(image_encoder.image_size)
            for name in family.loaders
            if name not in processors
        }
    shapes |= _decoder(decoder, partitioner, settings.vae_dtype)[1]
    loaders = {name: (lambda make_room, processor=processor: processor) for name, processor in processors.items()} | {
        name: lambda make_room: None for name in shapes
    }
    components = Components(loaders, offload=offload, shapes=shapes, kinds=family.networks)
    return Pipeline(components, model, settings, partitioner, compiler, description.sizes)


def _with_dtypes(
    description: ModelDescription,
    name: str,
    network_info: Network,
    param_dtype: str,
    attention: AttentionConfig | None,
    partitioner: Partitioner,
) -> nnx.Module:
    """Return an abstract network with shardings. The weights have `param_dtype`, unless the network stays in
    float32."""
    settings, options = description.settings, {}
    if name in description.model.spec.denoisers:
        options = {"attention": attention or AUTO}
    dtype = settings.dtype
    if network_info.float32:
        dtype, param_dtype = settings.vae_dtype if name == "vae" else "float32", "float32"
    precision = Precision.of(settings.precision)
    network = network_info.abstract(dtype=dtype, param_dtype=param_dtype, precision=precision, **options)
    return with_shardings(network, partitioner)


def _stored_dtype(source: Source, name: str) -> str:
    """Return the dtype of most of a network's stored weights. If it is neither bfloat16 nor float32, return float32."""
    dtype = main_dtype(source[name].weights().specs.values())
    return dtype if dtype in ("bfloat16", "float32") else "float32"
