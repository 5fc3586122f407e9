# SPDX-License-Identifier: Apache-2.0
"""Turn the graph of a workflow into the settings of a video."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wanjax.checkpoints.lora_keys import HIGH, LOW
from wanjax.errors import COMFY_SOLVERS, WanjaxError
from wanjax.figures import join_with_and, pluralize
from wanjax.media.inputs import INPUT_SPECS, VIDEO
from wanjax.pipelines.settings import COMFY, COMFY_SCHEDULES, TORCH
from wanjax.workflows.composition import ComposedInputs, read_composed_inputs
from wanjax.workflows.evaluate import MediaSize, Reader
from wanjax.workflows.families import (
    FUNCTIONS,
    OTHER_NODES,
    OTHER_OUTPUTS,
    PICTURE_OUTPUTS,
    SERVICES,
    SUPPORTED_WORKFLOWS,
    VIDEO_OUTPUTS,
    ancestors,
    default_shift,
    is_component_of,
    model_of,
    other_model_of,
    sorted_by_id,
)
from wanjax.workflows.graph import Graph, Node, Output, short_text
from wanjax.workflows.segments import join_segments
from wanjax.workflows.values import (
    Batch,
    File,
    Latents,
    Pictures,
    SampledLatents,
    Steps,
    Unknown,
    VideoOutput,
    base_name,
)

# a text in brackets, to which ComfyUI gives a weight, or the name of an embedding's file
SPECIAL_TEXT = re.compile(r"(?<!\\)\((?:[^()\\]|\\.)+\)|\bembedding:\S+")
SAME_SOLVERS = ("euler",)  # solvers whose videos are the same in wanjax and in ComfyUI
CLASSIFIER_FREE = "none"  # classifier-free guidance, the default rule
ZERO_STAR = "cfg-zero"  # a guidance rule that needs a guidance scale above 1
MIN_DENOISE = 0.01  # the minimum in ComfyUI's nodes
FRAMES_PER_LATENT = 4  # the temporal factor of all supported models
COMPONENTS = {"text_encoders": "text encoder", "clip_vision": "vision encoder", "vae": "VAE", "checkpoints": "networks"}
"""The components, other than the denoiser, in each kind of file."""
LOADERS = ("unet_name", "ckpt_name")  # the inputs with the files of denoisers


@dataclass(frozen=True)
class Missing:
    """A value that a workflow does not determine. The sentence says why, and which option to give."""

    sentence: str

    def __call__(self) -> Any:
        """Raise the sentence as an error."""
        raise WanjaxError(self.sentence)


@dataclass(frozen=True)
class LoraUse:
    """A LoRA of a workflow: its file, its strength, and the expert that it changes (None for all)."""

    file: File
    strength: float
    expert: str | None = None


@dataclass(frozen=True)
class Workflow:
    """A workflow, converted to the parts of a request.

    Args:
        model: The published model; None if the names of its files do not identify it.
        files: The files of the denoisers: one, or the experts at high and low noise.
        loras: The LoRAs.
        settings: Settings of the video by name. A value may be `Missing`.
        scheduler: The solver, or `Missing`.
        inputs: Pictures and clips by input. A value is a list of files, or `Missing`.
        other_files: Files with encoders and the VAE of the model, which wanjax reads from the model's own repository.
        is_tiled: Whether frames are decoded in tiles.
        notes: Sentences about differences from ComfyUI.
        addresses: URLs of files by name.
    """

    model: str | None
    files: tuple[File, ...]
    loras: tuple[LoraUse, ...]
    settings: Mapping[str, Any]
    scheduler: Any
    inputs: Mapping[str, Any]
    other_files: tuple[File, ...] = ()
    is_tiled: bool = False
    notes: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)


def read_workflow(
    graph: Graph, measure: Callable[[File], MediaSize | None] = lambda file: None, *, steps: int | None = None
) -> Workflow:
    """Convert a workflow to the request for its video.

    Args:
        graph: The workflow's graph.
        measure: Returns the size of a picture or clip, or None if the file is missing.
        steps: The number of steps to use if the workflow's number is not known.

    Raises:
        WanjaxError: The workflow makes no video, or has a node that wanjax cannot replace. The sentence names the node,
            and says what is left of the workflow without it.
    """
    outputs = [node for node in sorted_by_id(graph) if node.type in VIDEO_OUTPUTS]
    outputs = outputs or [
        node for node in sorted_by_id(graph) if node.type in PICTURE_OUTPUTS and _is_video(graph, node)
    ]
    if len(outputs) > 1:
        outputs.sort(key=lambda output: -_segment_count(graph, output))  # the longest video first
    if not outputs:
        raise WanjaxError(_without_video(graph))
    errors: list[WanjaxError] = []
    for output in outputs:
        try:
            workflow = _read_output(graph, output, measure, steps)
        except RecursionError:
            errors.append(WanjaxError(f"the workflow has too many nodes in a row before {output}: make it shorter"))
        except WanjaxError as error:
            errors.append(error)
        else:
            other_outputs = [str(other) for other in outputs if other is not output]
            note = f"{output} is read, and not {', '.join(other_outputs[:4])}"
            return (
                replace(workflow, notes=(*workflow.notes, note, *map(str, errors[:1]))) if other_outputs else workflow
            )
    raise errors[0]


def _is_video(graph: Graph, output: Node) -> bool:
    """Return True if the graph before an output of pictures has a node that sets the shape of a video."""
    return any("length" in node.inputs and node.type in FUNCTIONS for node in ancestors(graph, output))


def _segment_count(graph: Graph, output: Node) -> int:
    return sum("continue_motion" in node.inputs for node in ancestors(graph, output))


def _without_video(graph: Graph) -> str:
    """Return the error for a workflow without a video, with its product."""
    nodes = sorted_by_id(graph)
    if service := _service(nodes):
        return service
    for pattern, product in OTHER_OUTPUTS:
        for node in nodes:
            if re.search(pattern, node.type):
                return f"the workflow makes {product} with {node}, not a video: {SUPPORTED_WORKFLOWS}"
    return f"the workflow has no node that saves a video, such as SaveVideo: {SUPPORTED_WORKFLOWS}"


def _service(nodes: Sequence[Node]) -> str | None:
    """Return the message that a node calls a paid service, or None."""
    for node in nodes:
        if SERVICES.search(node.type):
            problem = f"{node} calls a paid service, which wanjax does not support"
            return f"{problem}: {SUPPORTED_WORKFLOWS}, on your own devices"
    return None


def _read_output(
    graph: Graph, output: Node, measure: Callable[[File], MediaSize | None], steps: int | None
) -> Workflow:
    nodes = ancestors(graph, output)
    if service := _service(nodes):
        raise WanjaxError(service)
    workflow, problem = None, _other_model(nodes)
    if problem is None:
        reader = Reader(graph, FUNCTIONS, measure)
        try:
            workflow = _workflow(reader, reader.output(Output(output.id, 0)), steps)
        except WanjaxError:
            if not reader.problems:
                raise
        if workflow is not None and not reader.problems:
            return workflow
        problem = reader.problems[0]
    if not _samplers(nodes):
        raise WanjaxError(
            f"{problem.node} {problem.reason}, and no node of the workflow samples a video: {SUPPORTED_WORKFLOWS}"
        )
    raise WanjaxError(f"{problem.node} {problem.reason}: {_describe_remainder(problem.node, nodes, workflow)}")


def _other_model(nodes: Sequence[Node]) -> Unknown | None:
    """Return the first node of an unsupported model."""
    for node in nodes:
        if (model := OTHER_NODES.get(node.type)) is not None:
            return Unknown(node, f"belongs to {model}, whose workflows wanjax does not read")
    for node in nodes:
        for name in LOADERS:
            file = node.inputs.get(name)
            if (
                isinstance(file, str)
                and model_of(base_name(file)) is None
                and (model := other_model_of(base_name(file)))
            ):
                return Unknown(
                    node, f"loads {short_text(base_name(file))} of {model}, whose workflows wanjax does not read"
                )
    return None


def _describe_remainder(without: Node, nodes: Sequence[Node], workflow: Workflow | None) -> str:
    """Describe the video that remains if a node is removed from a workflow."""
    models = [
        short_text(base_name(value))
        for node in nodes
        if node is not without
        for name, value in node.inputs.items()
        if name in LOADERS and isinstance(value, str)
    ]
    if workflow is not None:
        size = f"{workflow.settings.get('width')}x{workflow.settings.get('height')}"
        parts = [size, pluralize(workflow.settings["frames"], "frame")] if _has_known_shape(workflow.settings) else []
        parts += [pluralize(workflow.settings["steps"], "step")] if isinstance(workflow.settings["steps"], int) else []
        name = workflow.model or short_text(base_name(workflow.files[0].name))
        return f"without it the workflow is a video of {name}" + "".join(f", {part}" for part in parts)
    remaining = [*dict.fromkeys(models)][:2] + [str(node) for node in _samplers(nodes) if node is not without][:1]
    return (
        f"without it {join_with_and(remaining)} are left"
        if len(remaining) > 1
        else f"without it {(remaining or ['nothing'])[0]} is left"
    )


def _samplers(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if "Sampler" in node.type and "Select" not in node.type]


def _has_known_shape(settings: Mapping[str, Any]) -> bool:
    return all(isinstance(settings.get(name), int) for name in ("width", "height", "frames"))


def _workflow(reader: Reader, video_output: Any, steps: int | None) -> Workflow:
    """Return the request for a video with these pictures and frame rate."""
    video_output = reader.require(video_output, VideoOutput)
    pictures = video_output and video_output.pictures
    if isinstance(pictures, Batch):
        pictures = join_segments(pictures)
    if video_output is None or pictures is None or pictures.latents is None:
        node = video_output.node if video_output else None
        raise WanjaxError(
            f"{node or 'the output'} saves pictures that no model of the workflow makes: {SUPPORTED_WORKFLOWS}"
        )
    samplings = _samplings(pictures.latents, steps)
    first, last = samplings[0], samplings[-1]
    files = tuple(dict.fromkeys(sampling.guider.model.file for sampling in samplings))
    model = model_of(base_name(files[0].name))
    notes = [note for sampling in samplings for note in (*sampling.guider.model.notes, *sampling.guider.positive.notes)]
    _check_frames(first.latents, pictures, notes)
    settings = _text_settings(samplings, notes)
    settings |= _shape_settings(first.latents, video_output, notes)
    settings |= _step_settings(samplings, notes)
    settings |= _shift_settings(samplings, model)
    settings |= _guidance_settings(samplings, settings["negative_prompt"], notes)
    settings["seed"] = _known_or_missing(first.noise.seed, "--seed")
    settings["rng"] = TORCH
    composed = _composed_inputs(first)
    notes += composed.notes
    attached = {**composed.settings, **first.guider.positive.settings}
    settings |= {name: _known_or_missing(value, f"--{name.replace('_', '-')}") for name, value in attached.items()}
    inputs = _inputs(composed.inputs, first.latents, notes)
    inputs |= {name: Missing(sentence) for name, sentence in composed.missing.items()}
    components = _component_files(first, pictures)
    notes += [
        f"{file.node} loads {short_text(base_name(file.name))}, and wanjax uses the {COMPONENTS[file.kind]} of the "
        "model's own repository, from which it may differ"
        for file in components
        if not is_component_of(model, base_name(file.name))
    ]
    return Workflow(
        model=model,
        files=files,
        loras=_loras(samplings),
        settings={name: value for name, value in settings.items() if value is not None},
        scheduler=_solver(last, notes),
        inputs=inputs,
        other_files=tuple(file for file in components if is_component_of(model, base_name(file.name))),
        is_tiled=pictures.is_tiled,
        notes=tuple(dict.fromkeys(notes)),
        addresses=reader.graph.addresses,
    )


def _check_frames(latents: Any, pictures: Pictures, notes: list[str]) -> None:
    """Raise WanjaxError if a workflow saves a segment without the previous segment. Note frames that the workflow does
    not save."""
    assert isinstance(latents, Latents)
    if latents.segment is not None and latents.segment.previous is not None:
        raise WanjaxError(
            f"{latents.node} continues the frames of {latents.segment.previous.node}, and they are not saved together: "
            "join both by ImageBatch in ComfyUI, and save again"
        )
    if pictures.skipped:
        raise WanjaxError(
            f"a node leaves out the first {pluralize(pictures.skipped, 'frame')} of {pictures.node}, and wanjax saves "
            "all: bypass it in ComfyUI, and save again"
        )
    frames = latents.shape.frames
    if isinstance(pictures.frames, int) and isinstance(frames, int) and pictures.frames < frames:
        notes.append(
            f"only {pictures.frames} frames of {pictures.node} are saved in the workflow: wanjax saves all {frames}"
        )


def _samplings(latents: Any, steps: int | None) -> list[SampledLatents]:
    """Return the sampling nodes in the order of their steps. `steps` replaces an unknown number of steps.
    Raises WanjaxError for a chain that wanjax cannot run."""
    samplings: list[SampledLatents] = []
    while isinstance(latents, SampledLatents):
        samplings.insert(0, latents)
        latents = latents.latents
    if not samplings:
        raise WanjaxError(f"{latents.node} makes latents that no node samples: {SUPPORTED_WORKFLOWS}")
    if len(samplings) > 2:
        raise WanjaxError(
            f"{samplings[2].node} samples a third time, and a model has two experts at most: without it "
            f"{samplings[0].node} and {samplings[1].node} are left"
        )
    if steps is not None:
        samplings = [_with_steps(sampling, steps) for sampling in samplings]
    for sampling in samplings:
        _check_sampling(sampling)
    if len(samplings) == 2:
        _check_experts(*samplings)
    return samplings


def _with_steps(sampling: SampledLatents, steps: int) -> SampledLatents:
    """Replace the number of steps of one sampling if this number is unknown."""
    return (
        replace(sampling, steps=replace(sampling.steps, count=steps))
        if isinstance(sampling.steps.count, Unknown)
        else sampling
    )


def _check_sampling(sampling: SampledLatents) -> None:
    """Raise WanjaxError for an unknown number in one sampling."""
    if isinstance(count := sampling.steps.count, Unknown):
        raise WanjaxError(f"{count.node} {count.reason}: give --steps")
    for value in (sampling.steps.start, sampling.steps.end, sampling.steps.denoise):
        if isinstance(value, Unknown):
            raise WanjaxError(f"{value.node} {value.reason}: the steps of {sampling.node} are unknown without it")


def _check_experts(high: SampledLatents, low: SampledLatents) -> None:
    """Raise WanjaxError unless two nodes sample one after the other, as the two experts of a model."""
    problem = None
    if high.guider.model.file.name == low.guider.model.file.name:
        problem = f"samples again with the same model, {short_text(base_name(low.guider.model.file.name))}"
    elif (high.steps.count, high.steps.schedule) != (low.steps.count, low.steps.schedule):
        problem = f"has another schedule than {high.node}"
    elif _end_step(high.steps) != low.steps.start or (high.is_finished and high.node.type == "KSamplerAdvanced"):
        problem = f"does not begin where {high.node} ends"
    elif low.noise.seed is not None:
        problem = f"adds noise to what {high.node} has made"
    elif high.sampler != low.sampler:
        problem = f"has another solver than {high.node}"
    elif high.guider.model.shift != low.guider.model.shift:
        problem = f"has another shift than {high.node}"
    elif high.guider.model.settings != low.guider.model.settings:
        problem = f"has another guidance rule than {high.node}"
    if problem:
        raise WanjaxError(f"{low.node} {problem}, which wanjax does not support: without it {high.node} is left")


def _end_step(steps: Steps) -> int:
    return steps.count if steps.end is None else min(steps.end, steps.count)


def _known_or_missing(value: Any, option: str) -> Any:
    """Return a value. For an unknown value, return a `Missing` with the option to give."""
    if not isinstance(value, Unknown):
        return value
    folder = " or --inputs FOLDER" if value.is_missing_file else ""
    return Missing(f"{value.node} {value.reason}: give {option}{folder}")


def _text_settings(samplings: Sequence[SampledLatents], notes: list[str]) -> dict[str, Any]:
    """Return the prompts."""
    first, last = samplings[0].guider, samplings[-1].guider
    prompt = _known_or_missing(first.positive.text, "a prompt")
    if prompt is None:
        raise WanjaxError(f"{first.positive.node} removes the prompt: {SUPPORTED_WORKFLOWS}")
    negative = first.negative and first.negative.text
    for condition in (first.positive, first.negative):
        if condition and isinstance(condition.text, str) and (special := SPECIAL_TEXT.search(condition.text)):
            notes.append(
                f"{condition.node} has {short_text(special[0])} in its prompt, which ComfyUI reads as a weight or an "
                "embedding: wanjax passes it to the text encoder as it is"
            )
    if (last.positive.text, last.negative and last.negative.text) != (first.positive.text, negative):
        raise WanjaxError(
            f"{samplings[-1].node} has another prompt than {samplings[0].node}, which wanjax does not support: "
            f"without it {samplings[0].node} is left"
        )
    if negative is None and any(sampling.guider.scale != 1 for sampling in samplings):
        notes.append("the workflow replaces the negative prompt by zeros: wanjax uses an empty negative prompt")
    return {"prompt": prompt, "negative_prompt": _known_or_missing(negative or "", "--negative-prompt")}


def _guidance_settings(samplings: Sequence[SampledLatents], negative: Any, notes: list[str]) -> dict[str, Any]:
    """Return the guidance rule, and the negative prompt of a rule that has one."""
    settings, is_guided = (
        dict(samplings[0].guider.model.settings),
        any(sampling.guider.scale != 1 for sampling in samplings),
    )
    if not is_guided and str(settings.get("guidance_rule")).startswith(ZERO_STAR):
        del settings["guidance_rule"]  # without guidance the rule has no effect
    if skip := settings.pop("skip", None):
        rule = settings.get("guidance_rule", CLASSIFIER_FREE)
        settings["guidance_rule"] = f"{rule}{',' if ':' in rule else ':'}{skip}"
    if is_guided and settings.get("negative_prompt", negative) != negative:
        notes.append(
            "guidance and attention (nag) have different negative prompts in the workflow: wanjax uses the one of nag"
        )
    return settings


def _shape_settings(latents: Any, video_output: VideoOutput, notes: list[str]) -> dict[str, Any]:
    """Return the size, the number of frames and the frame rate."""
    assert isinstance(latents, Latents)
    shape = latents.shape
    if isinstance(shape.count, int) and shape.count != 1:
        notes.append(f"{latents.node} makes {shape.count} videos at once: give --count for several")
    settings = {
        "width": _known_or_missing(shape.width, "--width"),
        "height": _known_or_missing(shape.height, "--height"),
        "frames": _known_or_missing(shape.frames, "--frames"),
    }
    if isinstance(shape.frames, int) and (shape.frames - 1) % FRAMES_PER_LATENT:
        settings["frames"] = max(1, (shape.frames - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1)
        notes.append(f"{latents.node} asks for {shape.frames} frames, but ComfyUI makes {settings['frames']}")
    if isinstance(fps := video_output.fps, Unknown):
        notes.append(f"{fps.node} {fps.reason}: the frames per second are the model's own, unless --fps is given")
    elif fps is not None:
        settings["fps"] = max(1, round(fps))
        if settings["fps"] != fps:
            notes.append(
                f"{video_output.node} has {fps:g} frames per second: wanjax writes {settings['fps']}, a whole number"
            )
    return settings


def _step_settings(samplings: Sequence[SampledLatents], notes: list[str]) -> dict[str, Any]:
    """Return the steps, the guidance scales, and the step at which the second expert takes over."""
    first, last = samplings[0], samplings[-1]
    steps, has_clip = first.steps, VIDEO.name in getattr(first.latents, "inputs", {})
    if (first.steps.start and not has_clip) or _end_step(last.steps) < last.steps.count:
        raise WanjaxError(
            f"{last.node if first.steps.start == 0 else first.node} runs only the steps from {first.steps.start} to "
            f"{_end_step(last.steps)} of {steps.count}, which wanjax does not support: without it nothing is left"
        )
    if steps.denoise != 1 and not (has_clip and MIN_DENOISE <= steps.denoise < 1):
        raise WanjaxError(
            f"{first.node} has a denoise of {steps.denoise:g} but no video to start from: set denoise to 1"
        )
    if first.noise.seed is None:
        raise WanjaxError(
            f"{first.node} starts without noise, which wanjax does not support: without it nothing is left"
        )
    settings: dict[str, Any] = {
        "steps": steps.count,
        "guidance_scale": _known_or_missing(first.guider.scale, "--guidance-scale"),
    }
    if has_clip:
        total = int(steps.count / steps.denoise)
        settings |= {"steps": total, "strength": _strength(total, steps.count - steps.start)}
    if len(samplings) == 2:
        settings["guidance_scale_2"] = _known_or_missing(last.guider.scale, "--guidance-scale-2")
        settings["boundary_step"] = settings["steps"] - steps.count + _end_step(first.steps)
    if isinstance(steps.schedule, Unknown) or steps.schedule not in COMFY_SCHEDULES:
        name = steps.schedule.node if isinstance(steps.schedule, Unknown) else short_text(steps.schedule)
        notes.append(f"{first.node} has the schedule {name}: wanjax uses the noise levels of the schedule simple")
        return settings | {"sigmas": COMFY}
    return settings | {"sigmas": COMFY_SCHEDULES[steps.schedule]}


def _strength(steps: int, run: int) -> float:
    """Return the strength with which the last `run` of `steps` steps run. The strength is rounded up, because wanjax
    rounds the number of steps down."""
    return math.ceil(run / max(1, steps) * 1e6) / 1e6


def _shift_settings(samplings: Sequence[SampledLatents], model: str | None) -> dict[str, Any]:
    """Return the shift. If the noise levels come from a separate model node, the shift of that node counts."""
    schedule = samplings[0].steps.model
    shift = schedule.shift if schedule is not None else samplings[0].guider.model.shift
    return {"flow_shift": default_shift(model or "") if shift is None else _known_or_missing(shift, "--flow-shift")}


def _solver(sampling: SampledLatents, notes: list[str]) -> Any:
    name = sampling.sampler.name
    if isinstance(name, Unknown) or name not in COMFY_SOLVERS:
        name = name.node if isinstance(name, Unknown) else short_text(name)
        return Missing(f"{sampling.node} has the solver {name}: give --scheduler euler, unipc or dpm++ in its place")
    if name == "lcm":
        notes.append(f"{sampling.node} has the solver lcm: its steps are the same, and its later noise differs")
    elif name not in SAME_SOLVERS:
        notes.append(
            f"{sampling.node} has the solver {name}: wanjax uses {COMFY_SOLVERS[name]}, which is close but not the same"
        )
    return COMFY_SOLVERS[name]


def _loras(samplings: Sequence[SampledLatents]) -> tuple[LoraUse, ...]:
    """Return the LoRAs. A LoRA of both experts is listed once."""
    per_sampling = [[(file.name, strength) for file, strength in sampling.guider.model.loras] for sampling in samplings]
    if len(samplings) == 1 or per_sampling[0] == per_sampling[1]:
        return tuple(LoraUse(file, strength) for file, strength in samplings[0].guider.model.loras)
    return tuple(
        LoraUse(file, strength, expert)
        for expert, sampling in zip((HIGH, LOW), samplings, strict=True)
        for file, strength in sampling.guider.model.loras
    )


def _composed_inputs(sampling: SampledLatents) -> ComposedInputs:
    """Return the pictures and clips of one sampling by input, with the settings of those that wanjax can compose."""
    assert isinstance(sampling.latents, Latents)
    composed = read_composed_inputs(
        {**sampling.guider.positive.inputs, **sampling.latents.inputs}, sampling.latents.shape.frames
    )
    settings = {
        name: value if isinstance(value, Unknown) else ",".join(map(str, value))
        for name, value in composed.settings.items()
    }
    return replace(composed, settings=settings)


def _inputs(values: Mapping[str, Any], latents: Any, notes: list[str]) -> dict[str, Any]:
    """Return the files of pictures and clips by input. For pictures that nodes compose, return a `Missing`."""
    frames = latents.shape.frames
    for value in values.values():
        if isinstance(value, Pictures) and value.is_loaded and value.frames not in (None, 1, frames):
            count = "another number of" if isinstance(value.frames, Unknown) else f"{value.frames:,}"
            notes.append(
                f"{value.node} takes {count} frames of a clip: wanjax reads the clip up to the length of the video"
            )
    return {name: _input(name, value) for name, value in values.items() if name in INPUT_SPECS}


def _input(name: str, value: Any) -> Any:
    if isinstance(value, Pictures) and value.is_loaded:
        return [value.file] if INPUT_SPECS[name].kind == "images" else value.file
    node, spec = value.node if isinstance(value, Unknown | Pictures) else None, INPUT_SPECS[name]
    if isinstance(value, Unknown) and value.reason != Unknown.reason:
        return Missing(f"{node} {value.reason}: give {spec.noun} by {spec.option} FILE")
    return Missing(
        f"{node or 'a node'} composes {spec.noun} when it runs, which wanjax does not support: "
        f"save the result in ComfyUI, and give it by {spec.option} FILE"
    )


def _component_files(sampling: SampledLatents, pictures: Pictures) -> tuple[File, ...]:
    """Return the encoders and the VAE that a workflow loads."""
    encoder = sampling.guider.positive.encoder
    vision = sampling.guider.positive.inputs.get("vision")
    files = [*(encoder.files if encoder else ()), vision and vision.file, pictures.decoder and pictures.decoder.file]
    checkpoint = sampling.guider.model.file.name  # skipped: a file with several networks is read as a whole
    return tuple(file for file in files if file and file.name != checkpoint)
