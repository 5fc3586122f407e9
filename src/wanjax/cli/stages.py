# SPDX-License-Identifier: Apache-2.0
"""The commands `generate`, `encode`, `denoise` and `decode`.

A stage loads its networks, runs them, saves the result and frees them. A `VideoCommand` has what a command needs for
one video: the pipeline, the settings, the names of the files, and the observers that report and save.
"""

import os
import shlex
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from wanjax import registry
from wanjax.checkpoints.lora_source import Lora
from wanjax.cli.existing import CHECKED_EARLY, ExistingFile
from wanjax.cli.names import DEFAULT_FOLDER, unused_names, video_path
from wanjax.cli.options import on_command_line
from wanjax.cli.parsed import CommandOptions, PipelineOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.profile import StepProfile
from wanjax.cli.remake import check_files, check_loaded, version_note
from wanjax.cli.report import Report
from wanjax.cli.runs import LockedRun, create_run_folder, is_run_folder
from wanjax.errors import WanjaxError, WriteError
from wanjax.execution import EXECUTE, TracedProgram
from wanjax.figures import format_bytes, format_duration, format_number, join_with_and, pluralize
from wanjax.jobs.maker import write_frames
from wanjax.jobs.multihost import PeerGroup, is_first
from wanjax.jobs.notes import empty_prompt_notes
from wanjax.kernels.compiler_options import saved_option_set
from wanjax.layers.offload import AUTO_OFFLOAD, STAGES, Offload
from wanjax.loading import abstract_pipeline, load
from wanjax.media import stage_files
from wanjax.media import video as video_files
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.metadata import DIGESTS_KEY, file_digests, load_settings, load_stage_settings
from wanjax.media.pictures import Pictures
from wanjax.media.stage_files import LATENTS_FILE, VIDEO_FILE
from wanjax.media.video import FRAME_FILE
from wanjax.pipelines.denoiser import select_modality
from wanjax.pipelines.guidance import CLASSIFIER_FREE
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.model import Chunk, check_compatible, conditioning_from
from wanjax.pipelines.noise_inputs import INITIAL, checked_noise_inputs
from wanjax.pipelines.notes import guidance_notes, shape_notes, shift_notes, word_notes
from wanjax.pipelines.observers import Observer, Step, Switch
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.previews.previews import Previews
from wanjax.pipelines.request import ALTERNATIVES, SCHEDULER, PreparedRequest, VideoRequest
from wanjax.pipelines.resume import ResumeObserver
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import RANDOM_SEED, SEAM_SETTINGS, Settings, schema
from wanjax.pipelines.tracing import (
    check_decode_memory,
    check_denoise_memory,
    check_encode_memory,
    check_run_memory,
    trace_programs,
)
from wanjax.pipelines.validation import check_modalities, check_strength
from wanjax.pipelines.video_metadata import devices_of, paths_of
from wanjax.pipelines.windows import Seam, Window
from wanjax.pricing.roofline import CORE_FLOPS, cpu_machine, peak_flops
from wanjax.schedulers import name_of
from wanjax.sharding import ONE_DEVICE_PARTITIONER
from wanjax.signals import cleanup_on_exit
from wanjax.stores import paths
from wanjax.stores.paths import full_name
from wanjax.stores.writing import check_folder, check_free_space

MAX_NOTES = 8  # the maximum number of notes of one kind that are printed for a batch
LONG_RUN_SECONDS = 180.0  # on a CPU, an estimate is printed if denoising takes at least this many seconds
LARGE_BYTES = 2**30  # bytes; the size of larger weights is reported
MAX_TRACED_STEPS = 200  # a run with more steps is not traced before it starts, because tracing a step takes 1 to 2 ms
FIRST_FRAME = FRAME_FILE.format(0)
RESULT_FILES = {
    VIDEO_FILE: f"a finished video, {VIDEO_FILE}",
    FIRST_FRAME: f"the frames of a video, {FIRST_FRAME}",
}
"""Files in the folder of `generate` that took long to make. `generate` would replace them, or combine them with other
settings."""
KEEP_ADVICE = {
    True: "another --out",
    False: "another --dir",
}  # the key says whether --out names the file


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    original_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Run the three stages. `original_metadata` is the metadata of the video of --from, or None.

    If the user gives no folder, the video gets a new name. The stages' files are removed when the video is complete.
    If the folder of the user has the latents of this video, they are only decoded.
    """
    init_distributed(report, options.processes)
    existing_file = find_existing_video(command, request, options)
    if command.folder is not None and existing_file is None and not command.force:
        check_no_results(command.folder)
        if on_command_line("folder"):
            find_existing_stage(command, LATENTS_FILE, settings_before_load(request, options))
    with releasing_folder(
        VideoCommand(report, request, options, command, original_metadata=original_metadata)
    ) as video:
        if video.keep_existing_file(existing_file):
            return
        video.check_unfinished()
        video.print_settings()
        video.print_prompt_notes()
        video.check_writable(video.video_path, video.metadata)
        video.check_room()
        check_run_memory(video.pipe, video.settings, video.pictures, **video.run_options)
        if video.finds_latents():
            latents = stage_files.load_latents(video.folder, video.metadata)
            written = video.write_decoded(run := video.run(), run.frames([latents]))
        else:
            run = video.denoising_run()
            with video.compile_ahead():
                _, frames = next(iter(run))
                is_streamed = video.pipe.model.spec.is_chunked
                written = video.write_streamed(frames) if is_streamed else video.write_decoded(run, frames)
    report.table()
    video.print_made(written)


def encode(report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions) -> None:
    """Run the first stage, whose input is the request."""
    init_distributed(report, options.processes)
    folder = stage_folder(command)
    requested_settings, stored_settings = settings_before_load(request, options), _stored_settings(request, folder)
    existing_file = find_existing_stage(command, stage_files.EMBEDDINGS_FILE, requested_settings, **stored_settings)
    if existing_file is None and not command.force:
        check_no_results(folder, [FIRST_FRAME])
    with releasing_folder(VideoCommand(report, request, options, command)) as video:
        if video.keep_existing_file(existing_file, existing_file and existing_file.metadata):
            return
        video.print_prompt_notes()
        check_encode_memory(video.pipe, video.settings, video.pictures, tiling=video.run_options["tiling"])
        video.run(StageFileObserver(video, prints_files=True)).encode()
    report.table()
    if report.in_json:
        video.print_made(folder / stage_files.EMBEDDINGS_FILE)


def denoise(report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions) -> None:
    """Run the second stage, whose inputs are the first stage's files and the command's options."""
    init_distributed(report, options.processes)
    folder = stage_folder(command)
    stored_settings = load_stage_settings(folder)
    existing_file = find_existing_stage(
        command, LATENTS_FILE, settings_before_load(request, options), fps=stored_settings.get("fps")
    )
    tensors = {**stage_files.load_conditioning(folder, stored_settings), **stage_files.load_video_shape(folder)}
    follow = request.settings.get("follow")
    if follow not in (None, stored_settings.get("follow")) and any(stored_settings.get(name) for name in INPUT_SPECS):
        raise WanjaxError(
            f"the pictures were encoded with --follow {stored_settings.get('follow')}, and --follow is now {follow}: "
            f"run `wanjax encode` again with --follow {follow} --force, or change only the noise levels, with --sigmas"
        )
    with releasing_folder(VideoCommand(report, request, options, command, stored_settings, loads="lora")) as video:
        conditioning = video.checked_conditioning(tensors)
        if video.keep_existing_file(existing_file):
            return
        video.print_settings()
        video.check_room()
        check_denoise_memory(
            video.pipe, conditioning, video.settings, batch_guidance=video.run_options["batch_guidance"]
        )
        run = video.denoising_run(prints_files=True)
        report.enable_resume()
        with run.stage("denoise"):
            deque(run.latents(conditioning, video.settings, [video.settings.seed]), maxlen=0)
    report.table()
    if report.in_json:
        video.print_made(folder / stage_files.LATENTS_FILE)


def decode(report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions) -> None:
    """Run the third stage, whose inputs are the second stage's files."""
    init_distributed(report, options.processes)
    folder = stage_folder(command)
    stored_settings = load_stage_settings(folder)
    existing_file = find_existing_video(command, VideoRequest({}), PipelineOptions(), "another --out")
    latents = stage_files.load_latents(folder, stored_settings)
    with releasing_folder(VideoCommand(report, request, options, command, stored_settings, loads="decoder")) as video:
        video.check_latents(
            latents, shape_known=all(stored_settings.get(name) for name in ("frames", "height", "width"))
        )
        check_decode_memory(video.pipe, select_modality(latents).shape, tiling=video.run_options["tiling"])
        decoder = {name: video.metadata[name] for name in ("decoder",) if name in video.metadata}
        digests = file_digests(stored_settings) | file_digests(video.metadata)
        video.metadata |= (
            stored_settings | video.settings.to_json() | decoder
        )  # settings stored with the latents take precedence
        video.metadata |= {DIGESTS_KEY: digests} if digests else {}
        if video.keep_existing_file(existing_file):
            return
        video.check_writable(video.video_path, video.metadata)
        run = video.run()
        report.enable_resume()
        written = video.write_decoded(run, run.frames([latents]))
    report.table()
    video.print_made(written)


@contextmanager
def releasing_folder(video: "VideoCommand") -> Iterator["VideoCommand"]:
    """Yield the `VideoCommand` of a command. Release the video's folder at the end of the block, or when the process
    ends at once."""
    try:
        with cleanup_on_exit(video.release):
            yield video
    finally:
        video.release()


def stage_folder(command: CommandOptions) -> Path:
    """Return the folder of the stages."""
    assert command.folder is not None  # the option has a default
    return command.folder


def _stored_settings(request: VideoRequest, folder: Path) -> dict[str, Any]:
    """Read the model and the settings that a stage stored in a folder, and build a request from them."""
    try:
        stored_settings = load_settings(folder)
    except WanjaxError:
        return {}
    alternative_names = (
        side for alternative, others in ALTERNATIVES.items() if alternative in request.settings for side in others
    )
    return {
        name: stored_settings[name]
        for name in ("model", *request.settings, *alternative_names)
        if name in stored_settings
    }


def settings_before_load(request: VideoRequest, options: PipelineOptions) -> dict[str, Any]:
    """Return the settings of the video that are known before the model is loaded."""
    preset = registry.find_preset(str(options.model))
    return dict(request.settings) | ({"model": preset.name} if preset else {})


def find_existing_video(
    command: CommandOptions, request: VideoRequest, options: PipelineOptions, other: str = ""
) -> ExistingFile | None:
    """Find the video that a command would replace. Return None with --force, or if there is no such video.

    Raises WanjaxError if the file's metadata shows that it is the video of a different request.
    """
    file = command.out or (command.folder and str(command.folder / VIDEO_FILE))
    if file is None or command.force or not is_first():
        return None
    existing_file = ExistingFile.find(file, other or KEEP_ADVICE[command.out is not None])
    if existing_file is not None:
        existing_file.check_request(settings_before_load(request, options))
    return existing_file


def find_existing_stage(
    command: CommandOptions, name: str, requested_settings: Mapping[str, Any], **extra_metadata: Any
) -> ExistingFile | None:
    """Find the file of a stage that a command would replace. Return None with --force, or if there is no such file.

    Raises WanjaxError if the file's metadata shows that it differs from the result of this command. `extra_metadata`
    is metadata of the file that is stored elsewhere.
    """
    if command.force or not is_first():
        return None
    existing_file = ExistingFile.find(stage_folder(command) / name, KEEP_ADVICE[False], **extra_metadata)
    if existing_file is not None:
        existing_file.check_request(requested_settings)
    return existing_file


def check_no_results(folder: Path, names: Iterable[str] = RESULT_FILES) -> None:
    """Raise WanjaxError if a folder has one of these files of another video, because they took long to make."""
    existing_names = [name for name in names if is_first() and (folder / name).exists()]
    if existing_names:
        advice = f"give {KEEP_ADVICE[False]} to keep it, or --force to replace it"
        raise WanjaxError(f"{folder} contains {RESULT_FILES[existing_names[0]]}: {advice}")


class VideoCommand:
    """A pipeline, the settings of a video, and the names of its files."""

    def __init__(
        self,
        report: Report,
        request: VideoRequest,
        options: PipelineOptions,
        command: CommandOptions,
        previous_stage: Mapping[str, Any] | None = None,
        *,
        loads: str = "",
        original_metadata: Mapping[str, Any] | None = None,
        pipe: Pipeline | None = None,
    ):
        """Load a pipeline and complete the settings of a video.

        Args:
            report: The report of the run.
            request: The request of the video.
            options: The model and how it is loaded.
            command: The names of the video and its files.
            previous_stage: The metadata that the previous stage stored. The metadata supplies the settings that the
                request lacks.
            loads: The option for files that the stage loads in addition to the model. By default, the files are in
                `previous_stage`.
            original_metadata: The metadata of the video of --from, or None.
            pipe: The pipeline, or None if this must load it.

        Raises:
            WanjaxError: The request or an option is wrong. The error is raised before slow work starts.
        """
        inherited_settings = VideoRequest({})
        if previous_stage is not None:
            inherited_settings, options = _inherit_options(previous_stage, options, loads)
        complete_request = request.with_defaults(inherited_settings)
        self.report, self.run_options, self.original_metadata, self.profile = (
            report,
            options.run_options,
            original_metadata,
            command.profile,
        )
        self.is_seed_drawn = complete_request.settings.get("seed") == RANDOM_SEED
        if pipe is None:
            options = with_full_paths(options)
            reloads_networks = (
                complete_request.settings.get("windows", 1) > 1
                or "then" in complete_request.settings
                # a character follows a driving clip, in segments
                or {"image", "video"} <= complete_request.inputs.keys()
            )  # each network is used again by the next segment
            check_published(request, inherited_settings, options)
            pipe = load_pipeline(
                options,
                complete_request,
                offload=AUTO_OFFLOAD if reloads_networks else STAGES,
                progress=report.load,
                note=report.note,
            )
        self.pipe = pipe
        settings, pictures = (
            request.with_defaults(_without_missing_settings(inherited_settings, pipe.defaults)).settings,
            complete_request.inputs,
        )
        if previous_stage is None:
            self.pictures, self.settings = self.pipe.prepare(**pictures, **settings)
        else:  # the previous stage has already encoded the pictures
            self.pictures, self.settings = Pictures(), self.pipe.settings(**settings)
            self.pipe.check_memory(self.settings)
        self.starts_from_video = "video" in pictures and self.pipe.model.spec.starts_from_video
        if on_command_line("strength"):
            check_strength(
                self.settings, has_video="video" in pictures, starts_from_video=self.pipe.model.spec.starts_from_video
            )
        self.noise = (
            None if command.noise is None else self._load_noise(command.noise, len(pictures.get("references", ())))
        )
        if command.preview_decoder:
            self.pipe.preview_with(command.preview_decoder)
        self.metadata = self.pipe.metadata(self.settings, {**pictures, "noise": command.noise}, **self.run_options)
        if previous_stage is not None:
            conditioning = {str(path) for path in paths_of(previous_stage, INPUT_SPECS)}
            digests = {path: digest for path, digest in file_digests(previous_stage).items() if path in conditioning}
            self.metadata |= {DIGESTS_KEY: file_digests(self.metadata) | digests} if digests else {}
        if self.original_metadata:
            check_loaded(self.original_metadata, self.metadata)
        if self.profile:
            check_folder(self.profile)
            # puts scopes and line numbers into the cache's key: otherwise a trace could show the scopes of older code
            jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        self.run_folder: LockedRun | None = None  # a folder in the user's cache, which the user did not name
        self._force_options = ["--force"] if command.force else []
        self.is_new = False  # whether this command created the user's folder
        self.is_written = False
        self.folder, self.video_path = self._choose_paths(
            command.folder, command.out
        )  # last, after all checks, because it may create a folder
        shows_previews = command.preview or command.preview_decoder
        self.previews = Previews(self._preview_path(), on=report.console) if shows_previews else None

    def _choose_paths(self, folder: Path | None, out: str | None) -> tuple[Path, str]:
        """Choose the folder of the stages and the name of the video, and check that both can be written. A folder in
        the user's cache is locked.
        """
        if is_first():
            self.is_new = folder is not None and not folder.exists()
            video_files.prepare_output_path(
                out or str((folder or DEFAULT_FOLDER) / stage_files.VIDEO_FILE), self.settings.length
            )
        if folder is not None and not on_command_line("folder") and self._has_other_video(folder):
            folder = None
        if folder is not None:
            if is_first() and is_run_folder(folder):
                self.run_folder = LockedRun(folder)
            elif is_first():
                check_folder(folder)
            return folder, out or str(folder / stage_files.VIDEO_FILE)
        names = partial(unused_names, self.settings.prompt, self.settings.seed)
        if is_first():
            self.run_folder = create_run_folder(names)
        folder = self.run_folder.folder if self.run_folder else Path(next(names()))  # other processes write nothing
        return folder, out or str(video_path(folder.name))

    def _has_other_video(self, folder: Path) -> bool:
        """Return whether a folder in the user's cache has the steps of a video with other settings. Windows that
        extend that video are no difference."""
        if not is_run_folder(folder):
            return False
        names = CHECKED_EARLY if self.settings.windows > 1 else None
        try:
            ExistingFile(str(folder), load_settings(folder), KEEP_ADVICE[False]).check(self.metadata, names)
        except WanjaxError:
            return True
        return False

    def keep_existing_file(self, existing_file: ExistingFile | None, names: Collection[str] | None = None) -> bool:
        """Return whether the file to make already exists, so that it is kept. If the file exists, print its name.

        Raises WanjaxError if the existing file has different metadata. If `names` is given, only these entries are
        compared.
        """
        if existing_file is not None:
            existing_file.check(self.metadata, names)
        exists = self._first_says(existing_file is not None)
        if exists and existing_file is not None:
            self.report.note(f"{existing_file.file} already exists: give --force to make it again")
            if existing_file.file == self.video_path or self.report.in_json:
                self.print_made(paths.parse_path(existing_file.file))
        return exists

    def _first_says(self, value: bool) -> bool:
        """Return the value of the first process, which alone looks for files."""
        return PeerGroup().broadcast(value) if self.report.has_peers else value

    def finds_latents(self) -> bool:
        """Return whether the folder has the latents of this video. If it does, print that they are not made again.

        Raises WanjaxError if they are the latents of another video. With --force, latents are made again.
        """
        latents = None
        if is_first() and not self._force_options:
            latents = ExistingFile.find(self.folder / LATENTS_FILE, KEEP_ADVICE[False])
        if latents is not None:
            latents.check({name: value for name, value in self.metadata.items() if name != "fps"})
        if exists := self._first_says(latents is not None):
            self.report.note(f"{self.folder / LATENTS_FILE} already exists, and is only decoded")
        return exists

    def check_unfinished(self) -> None:
        """Raise WanjaxError if the folder, which the user named, contains steps of a video with other settings.

        Call this before the files of that video are replaced. The steps of windows are checked when they are read,
        because a stopped video may get more windows.
        """
        file = self.folder / stage_files.STATE_FILE
        if self.run_folder is not None or self._force_options or self.settings.windows > 1 or not file.is_file():
            return
        try:
            stored_settings = load_settings(self.folder)
        except WanjaxError:  # the steps are compared when they are read
            return
        ExistingFile(str(file), stored_settings, KEEP_ADVICE[False]).check(self.metadata)

    @property
    def is_kept(self) -> bool:
        """Whether the files of the stages are kept after the video is written, as in a folder that the user chose."""
        return self.run_folder is None or Path(self.video_path).absolute().parent == self.folder.absolute()

    def _preview_path(self) -> paths.AnyPath:
        """Choose the file of the previews. The previews are next to the stages' files, or next to the video if the
        stages' files are removed."""
        if self.is_kept:
            return self.folder / stage_files.PREVIEW_FILE
        video, suffix = paths.parse_path(self.video_path), f".{stage_files.PREVIEW_FILE}"
        stem = os.fsencode(Path(video.name).stem)[: video_files.max_name_bytes() - len(suffix)]
        return video.parent / f"{stem.decode(errors='ignore')}{suffix}"

    def release(self) -> None:
        """Unlock the folder of the run. Remove the folder if the video is written, or if this command created the
        folder and it is empty.
        """
        if self.run_folder:
            self.run_folder.close(is_complete=self.is_written and not self.is_kept)
            with suppress(OSError):  # the folder is not empty
                DEFAULT_FOLDER.rmdir()
        if self.is_new:
            with suppress(OSError):  # as above
                self.folder.rmdir()

    def _load_noise(self, file: str, references: int) -> Mapping[str, np.ndarray]:
        if self.pipe.model.spec.windowing.follows_clip:  # checked segment by segment
            return {INITIAL: np.asarray(stage_files.load_noise(file, (INITIAL,))[INITIAL])}
        expected_shapes = self.pipe.draws(self.settings, references)
        noise = stage_files.load_noise(file, tuple(expected_shapes))
        try:
            return checked_noise_inputs(noise, expected_shapes)
        except WanjaxError as error:
            raise WanjaxError(f"{file}: {error}") from error

    def check_latents(self, latents: Any, *, shape_known: bool) -> None:
        """Raise WanjaxError unless latents fit the model. With `shape_known`, they must also fit the size and length of
        the video."""
        file, settings = self.folder / stage_files.LATENTS_FILE, self.settings
        check_modalities(latents, self.pipe.model.spec.extra_modalities, settings.model)
        latents = select_modality(latents)
        channels, expected_channels = latents.shape[1], self.pipe.model.vae.latent_channels
        if channels != expected_channels:
            raise WanjaxError(
                f"{file} has {pluralize(channels, 'channel')}, but {settings.model} has {expected_channels}: give the "
                "model that made the file as --model"
            )
        if shape_known and latents.shape != (shape := self.pipe.model.spec.latent_shape(settings)):
            raise WanjaxError(
                f"{file} has latents {list(latents.shape)}, but a video of {settings.width}x{settings.height} and "
                f"{pluralize(settings.frames, 'frame')} has {list(shape)}: run "
                f"`wanjax denoise --dir {self.folder} --force` again"
            )

    def checked_conditioning(self, tensors: Mapping[str, Any]) -> Any:
        """Build the conditioning from its tensors. Raises WanjaxError if the conditioning does not fit the settings."""
        try:
            conditioning = conditioning_from(self.pipe.model, tensors)
            check_compatible(self.pipe.model, conditioning, self.settings)
        except WanjaxError as error:
            raise WanjaxError(f"{self.folder / stage_files.EMBEDDINGS_FILE}: {error}") from error
        return conditioning

    def print_settings(self, videos: Sequence[Settings] = ()) -> None:
        """Print the settings of the video, and notes on settings that may be unintended.

        For several `videos`, print the settings that all videos share, the names of settings that differ, and each note
        once.
        """
        chosen_settings, mesh = self.settings, self.pipe.partitioner
        seeds = list(dict.fromkeys(video.seed for video in videos))
        drawn_suffix = " (drawn)" if self.is_seed_drawn and not videos else ""
        descriptions = [_describe_settings(video) for video in videos or [chosen_settings]]
        shared_settings = {
            name: text for name, text in descriptions[0].items() if all(video[name] == text for video in descriptions)
        }
        seed = f"seed{'s' * (len(seeds) > 1)} {shorten_numbers(seeds or [chosen_settings.seed])}{drawn_suffix}"
        differing_names = join_with_and([name for name in descriptions[0] if name not in shared_settings])
        self.report.note(
            f"{chosen_settings.model}: {', '.join([*shared_settings.values(), seed, chosen_settings.dtype])}, "
            f"on {devices_of(mesh)}{f', mesh {mesh}, rules {mesh.rules_name}' if 'mesh' in self.metadata else ''}"
            f"{f'; the videos differ in {differing_names}' if differing_names else ''}"
        )
        if not differing_names and (sentence := estimate_note(self.pipe, chosen_settings, self.starts_from_video)):
            self.report.note(sentence)
        self._note(
            *(
                note
                for video in videos or [chosen_settings]
                for note in (
                    *guidance_notes(video),
                    *shift_notes(self.pipe.model, video, self.pipe.defaults.flow_shift),
                    *shape_notes(self.pipe.domain, video),
                )
            )
        )
        if self.original_metadata and (sentence := version_note(self.original_metadata, self.metadata)):
            self.report.note(f"note: {sentence}")
        if self.noise is not None:
            self.report.note(
                f"note: the initial noise is read from {self.metadata['noise']}, so the seed does not change it"
            )

    def run(self, *observers: Observer) -> Run:
        """Build the run of the video. `observers` are called before the observer that reports, which may stop the
        run."""
        request = PreparedRequest(self.settings, self.metadata)
        return Run(
            self.pipe,
            [request],
            self.pictures,
            noise=self.noise,
            observers=[*observers, ReportObserver(self)],
            **self.run_options,
        )

    def compile_ahead(self) -> AbstractContextManager[None]:
        """Compile the programs of later stages in the background while earlier stages run."""
        is_wanted = self.report.runs_alone and self.settings.steps <= MAX_TRACED_STEPS
        return EXECUTE.compile_ahead(self.traced_programs) if is_wanted else nullcontext()

    def traced_programs(self) -> list[TracedProgram]:
        """Trace the programs of the run without loading weights."""
        settings = replace(
            self.settings, windows=min(2, self.settings.windows)
        )  # all windows after the first use the same programs
        return [
            program.traced_program
            for program in trace_programs(self.pipe, settings, self.pictures, **self.run_options).programs
        ]

    def print_prompt_notes(self, videos: Sequence[Settings] = ()) -> None:
        """Print a note for each prompt that is empty, is too long, or has words that the model does not know."""
        settings, videos = self.settings, videos or [self.settings]
        prompts = list(dict.fromkeys(prompt for video_settings in videos for prompt in video_settings.prompts))
        self._note(*empty_prompt_notes(prompts), *word_notes(self.pipe.domain, settings.model, prompts))
        self._note(*self.pipe.truncation_notes(*videos))

    def _note(self, *notes: str) -> None:
        """Print each note once. Print at most `MAX_NOTES` notes, then the number of further notes."""
        unique_notes = list(dict.fromkeys(notes))
        for note in unique_notes[:MAX_NOTES]:
            self.report.note(f"note: {note}")
        if len(unique_notes) > MAX_NOTES:
            self.report.note(f"note: {len(unique_notes) - MAX_NOTES} more notes of this kind")

    def denoising_run(self, *, prints_files: bool = False) -> Run:
        """Build the run that denoises. The run saves its state so that it can be resumed, and shows previews and a
        profile if the user requested them. With `prints_files`, it prints the name of each file that it saves.
        """
        self.fit_previews()
        if self.in_windows:
            self.report.enable_resume(lambda: False)  # no steps are saved before the first window saves steps
        observers: list[Observer] = []
        if self.profile:
            observers.append(StepProfile(self.profile, self.pipe, self.settings, self.report.note))
        if not self.pipe.model.spec.is_chunked:
            file, report = self.folder / stage_files.STATE_FILE, self.report
            observers.append(
                ResumeObserver(
                    file,
                    self.pipe.partitioner,
                    self._report_resumed,
                    report.record_saved_steps,
                    self._check_other_steps,
                )
            )
        return self.run(
            *observers, WindowObserver(self) if self.in_windows else StageFileObserver(self, prints_files=prints_files)
        )

    @property
    def in_windows(self) -> bool:
        """True if the video is made window by window, each from encoding to decoding."""
        return self.pipe.model.spec.in_windows(self.settings)

    def fit_previews(self) -> None:
        """If previews are requested, fit the projection from latents to colours."""
        if self.previews:
            with self.report.stage("preview"):
                self.pipe.latent_preview()

    def _report_resumed(self, done: int, total: int) -> None:
        self.report.note(f"resumed after {done} of {pluralize(total, 'step')}")

    def _check_other_steps(self, steps: int) -> None:
        """Raise WanjaxError if the folder, which the user named, contains completed steps of other settings."""
        if steps and self.run_folder is None and not self._force_options:
            raise WanjaxError(
                f"{self.folder} contains {pluralize(steps, 'completed step')} of a video with other settings: give the "
                "settings of that video to resume it, another --dir to keep it, or --force to start again"
            )

    def write_decoded(self, run: Run, frames: Iterator[Any]) -> paths.AnyPath:
        """Write the video and return its path. Frames are decoded when the writer needs them."""
        with run.decode_stage(request := run.requests[0]):
            written = write_frames(self.video_path, frames, request)
        self.report.resume_command, self.is_written = None, True
        return written

    def write_streamed(self, frames: Iterator[Any]) -> paths.AnyPath:
        """Write the video chunk by chunk while it is being made, and return its path."""
        report, frame_rate, model = self.report, FrameRate(), self.pipe.model
        total = model.spec.latent_shape(self.settings)[2] // model.spec.chunk_frames

        def clips() -> Iterator[Any]:
            report.set_progress("chunk", 0, total)
            for done, clip in enumerate(frames, 1):
                yield clip
                frame_rate.add(len(clip))
                report.set_progress("chunk", done, total, suffix=str(frame_rate))

        with report.stage("stream"):
            written = write_frames(self.video_path, clips(), PreparedRequest(self.settings, self.metadata))
        report.note(f"{frame_rate}, for playback at {self.settings.fps}")
        report.resume_command, self.is_written = None, True
        return written

    def check_writable(self, video: str | paths.AnyPath, metadata: Mapping[str, Any]) -> None:
        """Before the video is made, raise WanjaxError if its file and metadata cannot be written."""
        if is_first():
            settings = self.settings
            video_files.write_trial_video(video, settings.length, settings.size, settings.fps, metadata)

    def check_room(self) -> None:
        """Raise WanjaxError if the folder of the stages has no room for the latents."""
        if is_first() and self.run_folder is None and not self.in_windows:
            # a latent needs at least the two bytes of bfloat16
            latents = 2 * prod(self.pipe.model.spec.latent_shape(self.settings))
            check_free_space(self.folder, latents, self.folder / LATENTS_FILE)

    def print_made(self, file: paths.AnyPath) -> None:
        """Print the file that the command made. Only the first process prints."""
        if is_first():
            folder_field = {} if self.run_folder else {"folder": str(self.folder.absolute())}
            self.report.print_result(file.absolute(), self.metadata, **folder_field, seconds=self.report.seconds)

    def save(self, resume_command: str, *steps: Callable[[], None], announcement: str | None = None) -> None:
        """Write the result of a stage and the settings, and set the command that resumes. Only the first process
        writes.

        If there is an `announcement`, it is printed with the command. If the folder in the user's cache cannot be
        written, for example because the disk is full, the run continues. Then the video is made, but the run cannot be
        resumed.
        """
        try:
            for step in steps if is_first() else ():
                step()
            if is_first():
                stage_files.save_settings(self.folder, self.metadata)
        except WriteError as error:
            if self.run_folder is None:
                raise
            self.report.note(f"note: {error}: this run cannot be resumed from its last stage")
            self.report.stop_if_interrupted()
        else:
            self.report.record_resume(resume_command, announcement)

    def command(self, stage: str) -> str:
        """Return the command that continues with a stage."""
        has_other_name = stage == "decode" and self.video_path != str(self.folder / stage_files.VIDEO_FILE)
        out_options = ["--out", self.video_path] if has_other_name else []
        return shlex.join(["wanjax", stage, "--dir", str(self.folder), *out_options, *self._force_options])

    def resume_command(self) -> str:
        """Return the command that makes the video of a stopped `generate`: the same command, if the user chose the
        folder and the command has the same prompt and seed again."""
        makes_other_video = self.is_seed_drawn or self.settings.original_prompt or "-" in sys.argv
        if self.run_folder or makes_other_video:
            return self.command_again()
        return shlex.join(["wanjax", *sys.argv[1:]])

    def command_again(self) -> str:
        """Return the command that makes the video from the files in the folder of the stages."""
        folder = str(self.folder)
        dir_options = [] if self.run_folder else ["--dir", folder]  # with --from, the default is the folder of that run
        return shlex.join(
            ["wanjax", "generate", "--from", folder, *dir_options, "--out", self.video_path, *self._force_options]
        )


def _describe_settings(settings: Settings) -> dict[str, str]:
    """Map the names of settings to the texts that are printed before a video is made."""
    guidance = " and ".join(f"{scale:g}" for scale in settings.guidance_scales)
    guidance += f" with {settings.guidance_rule}" if settings.guidance_rule != CLASSIFIER_FREE else ""
    return {
        "size": f"{settings.width}x{settings.height}",
        "length": f"{pluralize(settings.length, 'frame')} at {settings.fps} a second",
        "steps": pluralize(settings.steps, "step"),
        "guidance": f"guidance {guidance}",
    }


class ReportObserver(Observer):
    """Shows previews and the progress of a run. After Ctrl-C, it stops the run between two steps."""

    def __init__(self, video: VideoCommand):
        self.report, self.previews = video.report, video.previews

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.report.stage(name)

    def progressed(self, unit: str, done: int, total: int) -> None:
        self.report.set_progress(unit, done, total)

    def switched(self, switch: Switch) -> None:
        self.report.note(
            f"from step {switch.index + 1} of {switch.total} on, {switch.network} is used, "
            f"loaded in {format_duration(switch.seconds)}"
        )

    def stepped(self, step: Step) -> None:
        if self.previews:
            self.previews(step)
        if step.index + 1 < step.total:
            self.report.stop_if_interrupted()
        elif self.previews:
            self.previews.wait()


class StageFileObserver(Observer):
    """Writes the file of each stage. With `prints_files`, it prints their names."""

    def __init__(self, video: VideoCommand, *, prints_files: bool):
        self.video, self.prints_files = video, prints_files
        self._chunks: list[Any] = []

    def encoded(self, conditioning: Any) -> None:
        video, file = self.video, self.video.folder / stage_files.EMBEDDINGS_FILE
        tensors = {name: x for name, x in conditioning._asdict().items() if x is not None}
        save = partial(stage_files.save_conditioning, video.folder, tensors, video.metadata)
        video.save(
            video.command("denoise") if self.prints_files else video.resume_command(),
            save,
            announcement=f"the embeddings are in {file}" if self.prints_files else None,
        )

    def denoised(self, latents: Any, chunk: Chunk) -> None:
        self._chunks.append(latents if chunk.num_chunks == 1 else np.asarray(latents))
        if not chunk.is_last:
            return
        video, file = self.video, self.video.folder / stage_files.LATENTS_FILE
        all_latents = latents if chunk.num_chunks == 1 else np.concatenate(self._chunks, axis=2)
        save = partial(stage_files.save_latents, video.folder, all_latents, video.metadata)

        def remove_state() -> None:
            pass_files = video.folder.glob(f"{Path(stage_files.STATE_FILE).stem}_pass_*")
            for state in (video.folder / stage_files.STATE_FILE, *pass_files):
                state.unlink(missing_ok=True)

        video.save(
            video.command("decode"),
            save,
            remove_state,
            announcement=f"the latents are in {file}" if self.prints_files else None,
        )


class WindowObserver(Observer):
    """Prints the prompt of each window. Before the first step, it writes the settings, and gives the report the command
    that resumes. `ResumeObserver` saves the steps."""

    def __init__(self, video: VideoCommand):
        self.video = video

    def window(self, window: Window) -> None:
        position, settings = f"window {window.index + 1} of {window.count}", window.settings
        if settings.size != self.video.settings.size:  # the picture decides
            position = f"{position}, {settings.width}x{settings.height}"
        self.video.report.note(f"{position}: {window.settings.prompt}")

    def joined(self, seam: Seam) -> None:
        self.video.report.add_seam(seam)

    def resumed(self, start: Any) -> None:  # after `ResumeObserver`, which refuses steps of other settings
        self.video.save(self.video.resume_command())


def _inherit_options(
    stored_settings: Mapping[str, Any], options: PipelineOptions, loads: str
) -> tuple[VideoRequest, PipelineOptions]:
    """Turn the metadata of the previous stage into a request, and take missing options from the metadata.

    If the user gives a different model, the settings of the previous model are left out. `loads` is the option for
    files that this stage also takes from the metadata. Raises WanjaxError if a setting has a wrong type or value, or if
    a file has changed.
    """
    model = options.model or stored_settings.get("model")
    if not isinstance(model, str):
        raise WanjaxError(f"{stage_files.CONFIG} names no model: give --model")
    try:
        request = VideoRequest.from_metadata(
            stored_settings if model == stored_settings.get("model") else {**stored_settings, SCHEDULER.name: None}
        )
        dtypes = {name: stored_settings.get(name) for name in ("dtype", "vae_dtype")}
        dtypes |= {"precision": stored_settings.get("precision") if model == stored_settings.get("model") else None}
        dtypes = {name: value and schema(Settings)[name].read(value) for name, value in dtypes.items()}
    except WanjaxError as error:
        raise WanjaxError(f"{stage_files.CONFIG}: {error}") from error
    settings = {name: value for name, value in request.settings.items() if name not in SEAM_SETTINGS}
    request = replace(request, settings=settings)  # a stage makes one window
    recorded_names = [name for name in ("model", loads) if name and not getattr(options, name)]
    files = {"lora": _stored_loras, "decoder": _stored_decoder}
    inherited_settings = {name: files[name](stored_settings) for name in recorded_names if name in files}
    check_files(stored_settings, recorded_names)
    if options.lora:
        request = _without_replaced_defaults(request, options._replace(model=model))
    dtypes = {name: getattr(options, name) or value for name, value in dtypes.items()}
    revision = stored_settings.get("revision") if model == stored_settings.get("model") else None
    return request, options._replace(model=model, revision=revision, **dtypes, **inherited_settings)


def _without_replaced_defaults(stored_settings: VideoRequest, options: PipelineOptions) -> VideoRequest:
    """Remove those settings from a stage's settings that are defaults of the model and that a LoRA replaces."""
    options = with_full_paths(options)
    model = registry.model_description(str(options.model))
    with_loras = registry.apply_distilled_loras(model, loras_of(options), lambda sentence: None)
    if with_loras.distillation is model.distillation:
        return stored_settings
    defaults = model.settings.to_json()
    replaced_names = {name for name, value in with_loras.settings.to_json().items() if defaults.get(name) != value}
    settings = {
        name: value
        for name, value in stored_settings.settings.items()
        if not (name in replaced_names and defaults.get(name) == value)
    }
    solver = None if stored_settings.scheduler == name_of(model.model.scheduler) else stored_settings.scheduler
    return replace(stored_settings, settings=settings, scheduler=solver)


def shorten_numbers(numbers: Sequence[int]) -> str:
    """Format numbers as text. For a long list, show only the first numbers and the last number."""
    head = ", ".join(map(str, numbers[:5]))
    return head if len(numbers) <= 5 else f"{head} ... {numbers[-1]}"


def with_full_paths(options: PipelineOptions) -> PipelineOptions:
    """Replace file names in options by full paths, because a later stage or a worker may run in another folder."""
    model = options.model if options.model is None or options.model in registry.presets() else full_name(options.model)
    return options._replace(model=model, lora=tuple(loras_of(options)))


def loras_of(options: PipelineOptions) -> list[Lora]:
    """Parse the LoRAs of options, with full paths of their files."""
    loras = [(lora if isinstance(lora, Lora) else Lora.parse(lora)).resolve_folder() for lora in options.lora]
    paths_of_loras = [(lora, Path(lora.file).expanduser()) for lora in loras]
    return [replace(lora, file=str(path.absolute())) if path.is_file() else lora for lora, path in paths_of_loras]


def load_pipeline(
    options: PipelineOptions,
    request: VideoRequest,
    *,
    offload: Offload = AUTO_OFFLOAD,
    progress: Callable[[str, int, int], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Pipeline:
    """Load a pipeline for a request, in the process that uses the pipeline.

    Args:
        options: The model and how it is loaded.
        request: The request. The request may have the solver.
        offload: The offload, if the options do not set one.
        progress: As in `wanjax.load`.
        note: As in `wanjax.load`.
    """
    assert options.model is not None
    pipe = load(
        options.model,
        dtype=options.dtype,
        vae_dtype=options.vae_dtype,
        param_dtype=options.param_dtype,
        precision=options.precision,
        attention=options.attention,
        revision=options.revision,
        mesh=options.mesh,
        video=None if isinstance(options.mesh, MeshSizes) else request.settings,
        rules=options.rules,
        compiler=options.compiler or saved_option_set(),
        lora=options.lora,
        decoder=options.decoder,
        offload=offload.overridden_by(options.offload),
        verify=options.verify,
        progress=progress,
        note=note,
    )
    return pipe.with_solver(request.scheduler)


def published_pipeline(options: PipelineOptions) -> Pipeline | None:
    """Build the abstract pipeline of a published model, which checks settings before the model is downloaded. Return
    None for a model on this machine and for a model that is not published."""
    preset = registry.find_preset(str(options.model))
    if preset is None or preset.bundled or preset.model is None:
        return None
    description = registry.apply_distilled_loras(
        registry.model_description(preset.name), loras_of(options), lambda sentence: None
    )
    return abstract_pipeline(description, ONE_DEVICE_PARTITIONER)


def check_published(request: VideoRequest, stored_settings: VideoRequest, options: PipelineOptions) -> None:
    """Raise WanjaxError for settings that a published model does not support, before the model is downloaded.

    Settings that the previous stage `stored` are ignored if the model does not support them.
    """
    if (pipe := published_pipeline(options)) is None:
        return
    pipe = pipe.with_solver(request.scheduler or stored_settings.scheduler)
    settings = request.with_defaults(_without_missing_settings(stored_settings, pipe.defaults)).settings
    pipe.settings(**settings)


def _without_missing_settings(stored_settings: VideoRequest, defaults: Settings) -> VideoRequest:
    """Remove the settings of a stage that the model does not support."""
    names = defaults.to_json()
    return replace(
        stored_settings, settings={name: value for name, value in stored_settings.settings.items() if name in names}
    )


def _stored_loras(stored_settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the LoRAs that a stage stored. Raises WanjaxError unless the entry is a list of texts."""
    texts = stored_settings.get("lora", [])
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise WanjaxError(f"{stage_files.CONFIG} gives lora as {texts!r}: write a list such as ['a.safetensors:0.8']")
    return tuple(texts)


def _stored_decoder(stored_settings: Mapping[str, Any]) -> str | None:
    """Read the name of the decoder's file that a stage stored. Return None if the stage used the model's decoder."""
    file = stored_settings.get("decoder")
    if not isinstance(file, str | None):
        raise WanjaxError(f"{stage_files.CONFIG} gives decoder as {file!r}: write the name of a file")
    return file


class FrameRate:
    """Counts frames, and measures their rate from the end of the first chunk, because that chunk waits for
    compilation."""

    def __init__(self) -> None:
        self.frames = 0
        self._first_chunk: tuple[int, float] | None = None  # the frames until its end, and the time
        self._last = 0.0

    def add(self, frames: int) -> None:
        """Count complete frames."""
        self.frames += frames
        self._last = perf_counter()
        if self._first_chunk is None:
            self._first_chunk = self.frames, self._last

    def __str__(self) -> str:
        """Format the number of frames. From the second chunk on, add the rate."""
        if self._first_chunk is None or self.frames == self._first_chunk[0]:
            return pluralize(self.frames, "frame")
        frames, start = self._first_chunk
        return (
            f"{pluralize(self.frames, 'frame')}, "
            f"{format_number((self.frames - frames) / (self._last - start))} a second"
        )


def estimate_note(pipe: Pipeline, settings: Settings, starts_from_video: bool) -> str | None:
    """Write a sentence about the memory of large weights and the time of denoising. On accelerators this is the minimum
    time. On a CPU it is an estimate, if denoising takes minutes. Return None if there is nothing to say.

    `starts_from_video` says that denoising starts from a video and runs fewer steps.
    """
    parts = []
    if sizes := pipe.components.sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] >= LARGE_BYTES:
            parts.append(f"the weights of its {largest} take about {format_bytes(sizes[largest])} of memory")
    settings = pipe.model.spec.passes_of(settings)[0]  # only the first of several passes is counted
    steps = settings.steps_with_strength if starts_from_video else settings.steps
    if jax.devices()[0].platform == "cpu":
        if (seconds := compute_seconds(pipe, settings, steps, cpu_machine().flops)) >= LONG_RUN_SECONDS:
            rate = f"{CORE_FLOPS / 1e9:g} GFLOP/s a core"
            parts.append(f"denoising takes about {format_duration(seconds)}, estimated at {rate}")
    elif seconds := least_seconds(pipe, settings, steps, jax.devices()[0].device_kind):
        parts.append(
            f"denoising takes at least {format_duration(seconds)}, at the peak rate of {devices_of(pipe.partitioner)}"
        )
    return f"{settings.model}: {'; '.join(parts)}" if parts else None


def least_seconds(pipe: Pipeline, settings: Settings, steps: int, device_kind: str) -> float | None:
    """Estimate the seconds of steps on devices that compute at their peak rate. Return None if the peak is unknown."""
    peak = peak_flops(device_kind)
    return None if peak is None else compute_seconds(pipe, settings, steps, peak * pipe.partitioner.mesh.size)


def compute_seconds(pipe: Pipeline, settings: Settings, steps: int, rate: float) -> float:
    """Estimate the seconds of steps at a rate of all devices together, in FLOP/s.

    The estimate is a lower bound. It leaves out the second forward pass if only some guidance scales need it, steps
    that may reuse cached values, and sparse self-attention.
    """
    cost = pipe.model.cost(settings)
    flops = sum(cost.flops.values()) - (0 if pipe.attention.is_dense else cost.attention_flops)
    num_reused = min(steps - 1, sum(pipe.model.spec.reused_steps(settings)))
    forwards_if_reused = pipe.model.spec.cache_rule(settings).num_forwards
    num_forwards = (steps - num_reused) * (
        2 if min(settings.guidance_scales) > 1 else 1
    ) + num_reused * forwards_if_reused
    return num_forwards * flops / rate
