# SPDX-License-Identifier: Apache-2.0
"""The commands `generate`, `encode`, `denoise` and `decode`.

A stage loads its networks, runs, saves and frees them. A `VideoCommand` is one video on the command line: its pipeline,
its settings, the names of its files, and the observers that report and save.
"""

import shlex
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from wanjax.cli.existing import Existing
from wanjax.cli.names import VIDEOS, free_names, video_named
from wanjax.cli.options import is_typed
from wanjax.cli.parsed import CommandOptions, PipelineOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.profile import StepProfile
from wanjax.cli.remake import check_files, check_loaded, differences
from wanjax.cli.report import Report
from wanjax.cli.runs import HeldRun, create_run, is_run_folder
from wanjax.errors import WanjaxError, WriteError
from wanjax.execution import EXECUTE, Instance
from wanjax.figures import digits, duration, in_bytes, joined_by_and, quantity
from wanjax.jobs.maker import write_frames
from wanjax.jobs.multihost import PeerGroup, is_first
from wanjax.jobs.notes import guidance_notes, prompt_notes, shape_notes, texts_of, truncation_notes
from wanjax.kernels.compiler_options import saved_set
from wanjax.loading import abstract_pipeline, load
from wanjax.media import stage_files
from wanjax.media import video as video_files
from wanjax.media.inputs import INPUTS
from wanjax.media.metadata import DIGESTS, file_digests, load_settings, load_stage_settings
from wanjax.media.pictures import Pictures
from wanjax.media.stage_files import LATENTS, VIDEO
from wanjax.pipelines.denoiser import stream_of
from wanjax.pipelines.guidance import CLASSIFIER_FREE
from wanjax.pipelines.model import Chunk, check_fits, conditioning_from, with_scheduler
from wanjax.pipelines.noise_inputs import checked_noise_inputs
from wanjax.pipelines.observers import Observer, Step, Switch
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.previews.previews import Previews
from wanjax.pipelines.request import RIVALS, SCHEDULER, PreparedRequest, VideoRequest
from wanjax.pipelines.resume import ResumeObserver
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import DRAW, Settings, schema
from wanjax.pipelines.tracing import check_decoding, check_denoising, check_encoding, check_making, trace_programs
from wanjax.pipelines.validation import check_streams, check_strength
from wanjax.pipelines.video_metadata import devices_of, paths_of
from wanjax.pipelines.windows import Window
from wanjax.pricing.roofline import peak_flops
from wanjax.schedulers import name_of
from wanjax.sharding import ONE_DEVICE
from wanjax.signals import cleanup_on_exit
from wanjax.stores import paths
from wanjax.stores.paths import full_name
from wanjax.stores.writing import check_folder, check_room

MOST_NOTES = 8  # of a kind, on the rows of a batch
LARGE = 2**30  # bytes of weights that are worth a word
RECORDED_STEPS = 200  # of a run that is recorded before its first step; each takes a millisecond or two
WORK = {VIDEO: f"a finished video, {VIDEO}", LATENTS: f"the latents of a video, {LATENTS}"}
"""What `generate` would replace in its folder that took long to make."""
KEPT = {True: "another --out", False: "another --dir"}  # what keeps a file that is there, by whether --out names it


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    original_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Run the three stages; `original_metadata` is the metadata of the video that is made again, if one is.

    Without a folder the video has a name of its own, and the files of its stages go when it is made.
    """
    init_distributed(report, options.processes)
    existing = existing_video(command, request, options)
    if command.folder is not None and existing is None and not command.force:
        check_free(command.folder)
    with held(VideoCommand(report, request, options, command, original_metadata=original_metadata)) as video:
        if video.is_there(existing):
            return
        video.tell()
        video.tell_prompt()
        video.try_output(video.video, video.record)
        video.check_room()
        check_making(video.pipe, video.settings, video.pictures, **video.how)
        run = video.denoising()
        with video.ahead():
            _, frames = next(iter(run))
            written = video.streamed(frames) if video.pipe.model.spec.streams else video.decoded(run, frames)
    report.table()
    video.made(written)


def encode(report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions) -> None:
    """Run the first stage, from the command line alone."""
    init_distributed(report, options.processes)
    folder = stage_folder(command)
    requested, stored = requested_at_once(request, options), _stored_of(request, folder)
    existing = existing_stage(command, stage_files.EMBEDDINGS, requested, **stored)
    with held(VideoCommand(report, request, options, command)) as video:
        if video.is_there(existing, existing and existing.metadata):
            return
        video.tell_prompt()
        check_encoding(video.pipe, video.settings, video.pictures, tiling=video.how["tiling"])
        video.run(Saving(video, tells=True)).encode()
    report.table()
    if report.in_json:
        video.made(folder / stage_files.EMBEDDINGS)


def denoise(report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions) -> None:
    """Run the second stage, from the first stage's files and the options given now."""
    init_distributed(report, options.processes)
    folder = stage_folder(command)
    left = load_stage_settings(folder)
    existing = existing_stage(command, LATENTS, requested_at_once(request, options), fps=left.get("fps"))
    tensors = {**stage_files.load_conditioning(folder, left), **stage_files.load_video_shape(folder)}
    follow = request.settings.get("follow")
    if follow not in (None, left.get("follow")) and any(left.get(name) for name in INPUTS):
        raise WanjaxError(
            f"the pictures were encoded as {left.get('follow')} and --follow is {follow}: `wanjax encode` has "
            "to run again with it, or --sigmas would give the noise levels alone"
        )
    with held(VideoCommand(report, request, options, command, left, loads="lora")) as video:
        conditioning = video.checked(tensors)
        if video.is_there(existing):
            return
        video.tell()
        video.check_room()
        check_denoising(video.pipe, conditioning, video.settings, batch_guidance=video.how["batch_guidance"])
        run = video.denoising(tells=True)
        report.enable_resume()
        with run.stage("denoise"):
            deque(run.latents(conditioning, video.settings, [video.settings.seed]), maxlen=0)
    report.table()
    if report.in_json:
        video.made(folder / stage_files.LATENTS)


def decode(report: Report, request: VideoRequest, options: PipelineOptions, command: CommandOptions) -> None:
    """Run the third stage, from the second stage's files."""
    init_distributed(report, options.processes)
    folder = stage_folder(command)
    left = load_stage_settings(folder)
    existing = existing_video(command, VideoRequest({}), PipelineOptions(), "another --out")
    latents = stage_files.load_latents(folder, left)
    with held(VideoCommand(report, request, options, command, left, loads="decoder")) as video:
        video.check_latents(latents, shape_known=all(left.get(name) for name in ("frames", "height", "width")))
        check_decoding(video.pipe, stream_of(latents).shape, tiling=video.how["tiling"])
        decoder = {name: video.record[name] for name in ("decoder",) if name in video.record}
        digests = file_digests(left) | file_digests(video.record)
        video.record |= left | video.settings.to_json() | decoder  # the latents are as they were made
        video.record |= {DIGESTS: digests} if digests else {}
        if video.is_there(existing):
            return
        video.try_output(video.video, video.record)
        run = video.run()
        report.enable_resume()
        written = video.decoded(run, run.frames([latents]))
    report.table()
    video.made(written)


@contextmanager
def held(video: "VideoCommand") -> Iterator["VideoCommand"]:
    """Yield a video on the command line, and release its folder at the end, or where the process ends at once."""
    try:
        with cleanup_on_exit(video.release):
            yield video
    finally:
        video.release()


def stage_folder(command: CommandOptions) -> Path:
    """Return the folder of the stages."""
    assert command.folder is not None  # it has a default
    return command.folder


def _stored_of(request: VideoRequest, folder: Path) -> dict[str, Any]:
    """Return the model and the settings that are stored in a folder of stages, of those that a request decides."""
    try:
        stored = load_settings(folder)
    except WanjaxError:
        return {}
    sides = (side for one, others in RIVALS.items() if one in request.settings for side in others)
    return {name: stored[name] for name in ("model", *request.settings, *sides) if name in stored}


def requested_at_once(request: VideoRequest, options: PipelineOptions) -> dict[str, Any]:
    """Return what a command asks for, as far as it is known before the model is loaded."""
    preset = registry.find_preset(str(options.model))
    return dict(request.settings) | ({"model": preset.name} if preset else {})


def existing_video(
    command: CommandOptions, request: VideoRequest, options: PipelineOptions, other: str = ""
) -> Existing | None:
    """Return the video that a command would replace, None with --force or where there is none.

    Raises WanjaxError for one that is known not to be the same.
    """
    file = command.out or (command.folder and str(command.folder / VIDEO))
    if file is None or command.force or not is_first():
        return None
    existing = Existing.find(file, other or KEPT[command.out is not None])
    if existing is not None:
        existing.check_request(requested_at_once(request, options))
    return existing


def existing_stage(command: CommandOptions, name: str, requested: Mapping[str, Any], **more: Any) -> Existing | None:
    """Return the file of a stage that a command would replace, None with --force or where there is none.

    Raises WanjaxError for one that is known not to be the same. `more` is metadata of the file that it does not hold.
    """
    if command.force or not is_first():
        return None
    existing = Existing.find(stage_folder(command) / name, KEPT[False], **more)
    if existing is not None:
        existing.check_request(requested)
    return existing


def check_free(folder: Path) -> None:
    """Raise WanjaxError where a run of all stages would replace in a folder what took long to make."""
    taken = [name for name in WORK if (folder / name).exists()]
    if taken:
        decode = f"`{shlex.join(['wanjax', 'decode', '--dir', str(folder)])}` makes the video"
        ways = [*([decode] if taken == [LATENTS] else []), f"{KEPT[False]} keeps it", "--force replaces it"]
        raise WanjaxError(f"{folder} holds {WORK[taken[0]]}: {', '.join(ways)}")


class VideoCommand:
    """A pipeline, the settings of a video, and the names of its files."""

    def __init__(
        self,
        report: Report,
        request: VideoRequest,
        options: PipelineOptions,
        command: CommandOptions,
        left: Mapping[str, Any] | None = None,
        *,
        loads: str = "",
        original_metadata: Mapping[str, Any] | None = None,
        pipe: Pipeline | None = None,
    ):
        """Load a pipeline and complete the settings of a video.

        Args:
            report: Tells of the run.
            request: The video.
            options: The model.
            command: Where the video goes.
            left: The metadata that the previous stage left, for what neither the request nor the options say.
            loads: The option of files that the stage loads beside the model, and takes from what was left.
            original_metadata: The metadata of the video that is made again, if one is.
            pipe: The pipeline, where it is loaded already.

        Raises:
            WanjaxError: Anything is wrong, before any slow work begins.
        """
        before = VideoRequest({})
        if left is not None:
            before, options = _inherited(left, options, loads)
        whole = request.under(before)
        self.report, self.how, self.original_metadata, self.profile = (
            report,
            options.how,
            original_metadata,
            command.profile,
        )
        self.drawn = whole.settings.get("seed") == DRAW
        if pipe is None:
            options = located(options)
            again = whole.settings.get("windows", 1) > 1 or "then" in whole.settings  # then each network is used again
            check_published(request, before, options)
            pipe = loaded(options, whole, offload=None if again else True, progress=report.load, note=report.note)
        self.pipe = pipe
        settings, pictures = request.under(_of_model(before, pipe.defaults)).settings, whole.inputs
        if left is None:
            self.pictures, self.settings = self.pipe.prepare(**pictures, **settings)
        else:  # the previous stage has encoded the pictures
            self.pictures, self.settings = Pictures(), self.pipe.settings(**settings)
            self.pipe.check_memory(self.settings)
        self.from_video = "video" in pictures and self.pipe.model.spec.begins_from_video
        if is_typed("strength"):
            check_strength(
                self.settings, video="video" in pictures, starts_from_video=self.pipe.model.spec.begins_from_video
            )
        self.noise = None if command.noise is None else self._noise(command.noise, len(pictures.get("references", ())))
        if command.preview_decoder:
            self.pipe.preview_with(command.preview_decoder)
        self.record = self.pipe.metadata(self.settings, {**pictures, "noise": command.noise}, **self.how)
        if left is not None:
            conditioning = {str(path) for path in paths_of(left, INPUTS)}
            digests = {path: digest for path, digest in file_digests(left).items() if path in conditioning}
            self.record |= {DIGESTS: file_digests(self.record) | digests} if digests else {}
        if self.original_metadata:
            check_loaded(self.original_metadata, self.record)
        if self.profile:
            check_folder(self.profile)
            # scopes and lines count in the cache's key: a trace would otherwise show those of older code
            jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
        self.held: HeldRun | None = None  # the folder of a run, which is not the user's
        self._forced = ["--force"] if command.force else []
        self.is_new = False  # the user's folder, which this command made
        self.is_written = False
        self.folder, self.video = self._names(
            command.folder, command.out
        )  # after all that may be refused: it makes one
        looking = command.preview or command.preview_decoder
        self.previews = Previews(self._preview(), on=report.console) if looking else None

    def _names(self, folder: Path | None, out: str | None) -> tuple[Path, str]:
        """Return the folder of the stages and the video's name, after a check that they can be written.

        Takes the folder if it is a run's in the user's cache.
        """
        if is_first():
            self.is_new = folder is not None and not folder.exists()
            video_files.check_output(out or str((folder or VIDEOS) / stage_files.VIDEO), self.settings.length)
        if folder is not None:
            if is_first() and is_run_folder(folder):
                self.held = HeldRun(folder)
            elif is_first():
                check_folder(folder)
            return folder, out or str(folder / stage_files.VIDEO)
        names = partial(free_names, self.settings.prompt, self.settings.seed)
        if is_first():
            self.held = create_run(names)
        folder = self.held.folder if self.held else Path(next(names()))  # other processes write nothing
        return folder, out or str(video_named(folder.name))

    def is_there(self, existing: Existing | None, names: Collection[str] | None = None) -> bool:
        """Tell whether the file that is to be made is there already, and print it.

        Raises WanjaxError where another one is, by all of its metadata or by entries of these names.
        """
        if existing is not None:
            existing.check(self.record, names)
        there = existing is not None
        if self.report.has_peers:
            there = PeerGroup().broadcast(there)
        if there and existing is not None:
            self.report.note(f"{existing.file} is there already: --force makes it again")
            if existing.file == self.video or self.report.in_json:
                self.made(paths.parse_path(existing.file))
        return there

    @property
    def is_kept(self) -> bool:
        """Whether the files of the stages stay once the video is written, as those in a folder that the user chose."""
        return self.held is None or Path(self.video).absolute().parent == self.folder.absolute()

    def _preview(self) -> paths.AnyPath:
        """Return the name of the file of previews: beside the files of the stages, or the video if those go."""
        if self.is_kept:
            return self.folder / stage_files.PREVIEW
        video = paths.parse_path(self.video)
        return video.parent / f"{Path(video.name).stem}.{stage_files.PREVIEW}"

    def release(self) -> None:
        """Let go of a run's folder, and remove it if the video is written; remove an empty folder made here."""
        if self.held:
            self.held.close(done=self.is_written and not self.is_kept)
            with suppress(OSError):  # it holds something
                VIDEOS.rmdir()
        if self.is_new:
            with suppress(OSError):  # as above
                self.folder.rmdir()

    def _noise(self, file: str, references: int) -> Mapping[str, np.ndarray]:
        right = self.pipe.draws(self.settings, references)
        noise = stage_files.load_noise(file, tuple(right))
        try:
            return checked_noise_inputs(noise, right)
        except WanjaxError as error:
            raise WanjaxError(f"{file}: {error}") from error

    def check_latents(self, latents: Any, *, shape_known: bool) -> None:
        """Raise WanjaxError unless latents fit the settings, and its size and length where `shape_known`."""
        file, chosen = self.folder / stage_files.LATENTS, self.settings
        check_streams(latents, self.pipe.model.spec.latent_streams, chosen.model)
        latents = stream_of(latents)
        channels, right = latents.shape[1], self.pipe.model.vae.latent_channels
        if channels != right:
            raise WanjaxError(
                f"{file} has {quantity(channels, 'channel')} where {chosen.model} has {right}: it was made "
                "with another model"
            )
        if shape_known and latents.shape != (shape := self.pipe.model.spec.latent_shape(chosen)):
            raise WanjaxError(
                f"{file} has latents {list(latents.shape)} where a video of {chosen.width}x{chosen.height} and "
                f"{quantity(chosen.frames, 'frame')} has {list(shape)}: `wanjax denoise --dir {self.folder}` has "
                "to run again"
            )

    def checked(self, tensors: Mapping[str, Any]) -> Any:
        """Return the output of `encode` from its tensors; raise WanjaxError if it does not fit."""
        try:
            conditioning = conditioning_from(self.pipe.model, tensors)
            check_fits(self.pipe.model, conditioning, self.settings)
        except WanjaxError as error:
            raise WanjaxError(f"{self.folder / stage_files.EMBEDDINGS}: {error}") from error
        return conditioning

    def tell(self, videos: Sequence[Settings] = ()) -> None:
        """Print the settings of the video, and notes on settings that may be unintended.

        Of several `videos` it prints what they share, what they differ in, and each note once.
        """
        chosen, mesh = self.settings, self.pipe.partitioner
        seeds = list(dict.fromkeys(one.seed for one in videos))
        drawn = " (drawn)" if self.drawn and not videos else ""
        each = [_shown_parts(one) for one in videos or [chosen]]
        shared = {name: text for name, text in each[0].items() if all(one[name] == text for one in each)}
        seed = f"seed{'s' * (len(seeds) > 1)} {in_short(seeds or [chosen.seed])}{drawn}"
        differing = joined_by_and([name for name in each[0] if name not in shared])
        self.report.note(
            f"{chosen.model}: {', '.join([*shared.values(), seed, chosen.dtype])}, "
            f"on {devices_of(mesh)}{f', mesh {mesh}, rules {mesh.rules_name}' if 'mesh' in self.record else ''}"
            f"{f'; the videos differ in {differing}' if differing else ''}"
        )
        if not differing and (sentence := estimate(self.pipe, chosen, self.from_video)):
            self.report.note(sentence)
        self._note(*(note for one in videos or [chosen] for note in (*guidance_notes(one), *shape_notes(one))))
        if self.original_metadata and (sentence := differences(self.original_metadata, self.record)):
            self.report.note(f"note: {sentence}")
        if self.noise is not None:
            self.report.note(f"note: the initial noise is that of {self.record['noise']}, whatever the seed")

    def run(self, *observers: Observer) -> Run:
        """Return the run that makes the video, which observers look upon before the report, which may stop it."""
        request = PreparedRequest(self.settings, self.record)
        return Run(
            self.pipe, [request], self.pictures, noise=self.noise, observers=[*observers, Reporting(self)], **self.how
        )

    def ahead(self) -> AbstractContextManager[None]:
        """Compile the programs of later stages beside the earlier ones, if any of them has to be compiled."""
        wanted = self.report.owns_process and self.settings.steps <= RECORDED_STEPS
        return EXECUTE.ahead(self.instances) if wanted else nullcontext()

    def instances(self) -> list[Instance]:
        """Return the programs that the run calls, traced; no weights are loaded."""
        settings = replace(self.settings, windows=min(2, self.settings.windows))  # later windows are as the second
        return [one.instance for one in trace_programs(self.pipe, settings, self.pictures, **self.how).programs]

    def tell_prompt(self, videos: Sequence[Settings] = ()) -> None:
        """Print notes on the prompt, or on those of several `videos`, which the model does not know or read whole."""
        chosen, videos = self.settings, videos or [self.settings]
        prompts = list(dict.fromkeys(prompt for one in videos for prompt in one.prompts))
        self._note(*prompt_notes(chosen.model, prompts))
        texts = dict.fromkeys((name, text, one.follow) for one in videos for name, text in texts_of(one))
        self._note(*(note for text in texts for note in truncation_notes(self.pipe, *text)))

    def _note(self, *notes: str) -> None:
        """Print notes, each once; of very many the first ones, and how many more there are."""
        each = list(dict.fromkeys(notes))
        for note in each[:MOST_NOTES]:
            self.report.note(f"note: {note}")
        if len(each) > MOST_NOTES:
            self.report.note(f"note: {len(each) - MOST_NOTES} more of these")

    def denoising(self, *, tells: bool = False) -> Run:
        """Return the run that denoises, keeps its state and saves; with previews and a profile if they are wanted.

        With `tells` it prints what it saved.
        """
        self.ready_previews()
        observers: list[Observer] = []
        if self.profile:
            observers.append(StepProfile(self.profile, self.pipe, self.settings, self.report.note))
        if not self.pipe.model.spec.streams:
            file, report = self.folder / stage_files.STATE, self.report
            observers.append(ResumeObserver(file, self.pipe.partitioner, self._resumed, report.saved))
        return self.run(*observers, Saving(self, tells=tells) if self.settings.windows == 1 else SavingWindows(self))

    def ready_previews(self) -> None:
        """Make ready what makes previews, if they are asked for."""
        if self.previews:
            with self.report.stage("preview"):
                self.pipe.latent_preview()

    def _resumed(self, done: int, total: int) -> None:
        self.report.note(f"taken before: {done} of {quantity(total, 'step')}")

    def decoded(self, run: Run, frames: Iterator[Any]) -> paths.AnyPath:
        """Write the video from its frames, which are decoded as they are asked for; return its place."""
        with run.decode_stage(request := run.requests[0]):
            written = write_frames(self.video, frames, request)
        self.report.resume_command, self.is_written = None, True
        return written

    def streamed(self, frames: Iterator[Any]) -> paths.AnyPath:
        """Write the video while it is made, from the frames of each block; return its place."""
        report, rate, model = self.report, FrameRate(), self.pipe.model
        total = model.spec.latent_shape(self.settings)[2] // model.spec.chunk_frames

        def clips() -> Iterator[Any]:
            report.count("block", 0, total)
            for done, clip in enumerate(frames, 1):
                yield clip
                rate.deliver(len(clip))
                report.count("block", done, total, suffix=str(rate))

        with report.stage("stream"):
            written = write_frames(self.video, clips(), PreparedRequest(self.settings, self.record))
        report.note(f"{rate}, where {self.settings.fps} are played")
        report.resume_command, self.is_written = None, True
        return written

    def try_output(self, video: str | paths.AnyPath, record: Mapping[str, Any]) -> None:
        """Raise WanjaxError where a video could not be written with its record, before it is made."""
        if is_first():
            chosen = self.settings
            video_files.try_output(video, chosen.length, chosen.size, chosen.fps, record)

    def check_room(self) -> None:
        """Raise WanjaxError where the folder of the stages has no room for the latents, which stay in it."""
        if is_first() and self.held is None and self.settings.windows == 1:
            latents = 2 * prod(self.pipe.model.spec.latent_shape(self.settings))  # bfloat16, if not more
            check_room(self.folder, latents, self.folder / LATENTS)

    def made(self, file: paths.AnyPath) -> None:
        """Print the file that the command made, in the first process only."""
        if is_first():
            stays = {} if self.held else {"folder": str(self.folder.absolute())}
            self.report.print_result(file.absolute(), self.record, **stays, seconds=self.report.seconds)

    def save(self, resume_command: str, *steps: Callable[[], None], announcement: str | None = None) -> None:
        """Write what a stage made and the settings, in the first process only, and note the command that goes on.

        Prints it after an `announcement` of the files. Where a run's own folder cannot be written, as on a full disk,
        the run goes on: what is lost is the way back, not the video.
        """
        try:
            for step in steps if is_first() else ():
                step()
            if is_first():
                stage_files.save_settings(self.folder, self.record)
        except WriteError as error:
            if self.held is None:
                raise
            self.report.note(f"note: {error}: if this run is stopped, its last stage is lost")
            self.report.stop_if_asked()
        else:
            self.report.record_resume(resume_command, announcement)

    def command(self, stage: str) -> str:
        """Return the command that resumes from here; from a run's own folder it makes the video."""
        if self.held and stage == "denoise":
            return self.command_again()
        elsewhere = stage == "decode" and self.video != str(self.folder / stage_files.VIDEO)
        out = ["--out", self.video] if elsewhere else []
        return shlex.join(["wanjax", stage, "--dir", str(self.folder), *out, *self._forced])

    def command_again(self) -> str:
        """Return the command that makes the video from what the folder has of it."""
        folder = str(self.folder)
        return shlex.join(["wanjax", "generate", "--from", folder, "--dir", folder, "--out", self.video, *self._forced])


def _shown_parts(chosen: Settings) -> dict[str, str]:
    """Return the settings of a video that are printed before it is made, in words, by what they are."""
    guidance = " and ".join(f"{scale:g}" for scale in chosen.guidance_scales)
    guidance += f" with {chosen.guidance_rule}" if chosen.guidance_rule != CLASSIFIER_FREE else ""
    return {
        "size": f"{chosen.width}x{chosen.height}",
        "length": f"{quantity(chosen.length, 'frame')} at {chosen.fps} a second",
        "steps": quantity(chosen.steps, "step"),
        "guidance": f"guidance {guidance}",
    }


class Reporting(Observer):
    """Shows the progress of a run, and previews; stops it between two steps where that was asked."""

    def __init__(self, rendering: VideoCommand):
        self.report, self.previews = rendering.report, rendering.previews

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.report.stage(name)

    def count(self, unit: str, done: int, total: int) -> None:
        self.report.count(unit, done, total)

    def switched(self, switch: Switch) -> None:
        self.report.note(
            f"from step {switch.index + 1} of {switch.total} on, {switch.network} is at work, "
            f"loaded in {duration(switch.seconds)}"
        )

    def stepped(self, step: Step) -> None:
        if self.previews:
            self.previews(step)
        if step.index + 1 < step.total:
            self.report.stop_if_asked()
        elif self.previews:
            self.previews.wait()


class Saving(Observer):
    """Writes the files that join the stages, and `tells` of each."""

    def __init__(self, rendering: VideoCommand, *, tells: bool):
        self.rendering, self.tells = rendering, tells
        self._blocks: list[Any] = []

    def encoded(self, conditioning: Any) -> None:
        rendering, file = self.rendering, self.rendering.folder / stage_files.EMBEDDINGS
        tensors = {name: x for name, x in conditioning._asdict().items() if x is not None}
        save = partial(stage_files.save_conditioning, rendering.folder, tensors, rendering.record)
        rendering.save(
            rendering.command("denoise"), save, announcement=f"the embeddings are in {file}" if self.tells else None
        )

    def denoised(self, latents: Any, chunk: Chunk) -> None:
        self._blocks.append(latents if chunk.count == 1 else np.asarray(latents))
        if not chunk.last:
            return
        rendering, file = self.rendering, self.rendering.folder / stage_files.LATENTS
        whole = latents if chunk.count == 1 else np.concatenate(self._blocks, axis=2)
        save = partial(stage_files.save_latents, rendering.folder, whole, rendering.record)

        def forget() -> None:
            of_passes = rendering.folder.glob(f"{Path(stage_files.STATE).stem}_pass_*")
            for state in (rendering.folder / stage_files.STATE, *of_passes):
                state.unlink(missing_ok=True)

        rendering.save(
            rendering.command("decode"), save, forget, announcement=f"the latents are in {file}" if self.tells else None
        )


class SavingWindows(Observer):
    """Tells of each window, which `ResumeObserver` keeps, and how to go on from those that are finished."""

    def __init__(self, rendering: VideoCommand):
        self.rendering = rendering

    def window(self, window: Window) -> None:
        position = f"window {window.number + 1} of {window.count}"
        self.rendering.report.note(f"{position}: {window.settings.prompt}")

    def denoised(self, latents: Any, chunk: Chunk) -> None:
        self.rendering.save(self.rendering.command_again())


def _inherited(left: Mapping[str, Any], options: PipelineOptions, loads: str) -> tuple[VideoRequest, PipelineOptions]:
    """Return what the previous stage left as a request, and the options with what it left where they say nothing.

    What belongs to its model is left out if another one is given. `loads` is the option of files, beside the model,
    that this stage takes from it too. Raises WanjaxError for a setting of another type or out of range, and for a file
    that is not the one that it was.
    """
    model = options.model or left.get("model")
    if not isinstance(model, str):
        raise WanjaxError(f"{stage_files.CONFIG} names no model: --model has to")
    try:
        request = VideoRequest.from_metadata(left if model == left.get("model") else {**left, SCHEDULER.name: None})
        dtypes = {name: left.get(name) for name in ("dtype", "vae_dtype")}
        dtypes = {name: value and schema(Settings)[name].read(value) for name, value in dtypes.items()}
    except WanjaxError as error:
        raise WanjaxError(f"{stage_files.CONFIG}: {error}") from error
    recorded = [name for name in ("model", loads) if name and not getattr(options, name)]
    files = {"lora": _loras_left, "decoder": _decoder_left}
    inherited = {name: files[name](left) for name in recorded if name in files}
    check_files(left, recorded)
    if options.lora:
        request = _without_defaults(request, options._replace(model=model))
    dtypes = {name: getattr(options, name) or value for name, value in dtypes.items()}
    revision = left.get("revision") if model == left.get("model") else None
    return request, options._replace(model=model, revision=revision, **dtypes, **inherited)


def _without_defaults(left: VideoRequest, options: PipelineOptions) -> VideoRequest:
    """Return what a stage left, without the model's defaults in whose place a given LoRA brings others."""
    options = located(options)
    model = registry.outline(str(options.model))
    with_loras = registry.with_distillation(model, loras_of(options), lambda sentence: None)
    if with_loras.distillation is model.distillation:
        return left
    defaults = model.settings.to_json()
    brought = {name for name, value in with_loras.settings.to_json().items() if defaults.get(name) != value}
    settings = {k: x for k, x in left.settings.items() if not (k in brought and defaults.get(k) == x)}
    solver = None if left.scheduler == name_of(model.model.scheduler) else left.scheduler
    return replace(left, settings=settings, scheduler=solver)


def in_short(numbers: Sequence[int]) -> str:
    """Return numbers as text: all of a few, else the first ones and the last."""
    first = ", ".join(map(str, numbers[:5]))
    return first if len(numbers) <= 5 else f"{first} ... {numbers[-1]}"


def located(options: PipelineOptions) -> PipelineOptions:
    """Return options with files by their full paths, so that a later stage or a worker finds them from any folder."""
    model = options.model if options.model is None or options.model in registry.presets() else full_name(options.model)
    return options._replace(model=model, lora=tuple(loras_of(options)))


def loras_of(options: PipelineOptions) -> list[Lora]:
    """Return the chosen LoRAs, files by their full paths."""
    loras = [(lora if isinstance(lora, Lora) else Lora.parse(lora)).named() for lora in options.lora]
    paths_of_loras = [(lora, Path(lora.file).expanduser()) for lora in loras]
    return [replace(lora, file=str(path.absolute())) if path.is_file() else lora for lora, path in paths_of_loras]


def loaded(
    options: PipelineOptions,
    request: VideoRequest,
    *,
    offload: bool | None = None,
    progress: Callable[[str, int, int], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Pipeline:
    """Load a pipeline for videos such as this, in the process that uses it; it may ask for its own solver.

    `offload` is for where no option tells; `progress` and `note` are those of `wanjax.load`.
    """
    assert options.model is not None
    pipe = load(
        options.model,
        dtype=options.dtype,
        vae_dtype=options.vae_dtype,
        param_dtype=options.param_dtype,
        attention=options.attention,
        revision=options.revision,
        mesh=options.mesh,
        video=request.settings,
        rules=options.rules,
        compiler=options.compiler or saved_set(),
        lora=options.lora,
        decoder=options.decoder,
        offload=offload if options.offload is None else options.offload,
        verify=options.verify,
        progress=progress,
        note=note,
    )
    return pipe.with_solver(request.scheduler)


def check_published(request: VideoRequest, left: VideoRequest, options: PipelineOptions) -> None:
    """Raise WanjaxError for settings that a published model refuses, before anything of it is downloaded.

    Of what the previous stage `left`, settings that the model does not have do not count.
    """
    preset = registry.find_preset(str(options.model))
    if preset is None or preset.shipped or preset.model is None:
        return
    outline = registry.with_distillation(registry.outline(preset.name), loras_of(options), lambda sentence: None)
    if (solver := request.scheduler or left.scheduler) is not None:
        outline = replace(outline, model=with_scheduler(outline.model, solver))
    settings = request.under(_of_model(left, outline.settings)).settings
    abstract_pipeline(outline, ONE_DEVICE).settings(**settings)


def _of_model(left: VideoRequest, defaults: Settings) -> VideoRequest:
    """Return what a stage left without the settings that a model does not have."""
    names = defaults.to_json()
    return replace(left, settings={name: value for name, value in left.settings.items() if name in names})


def _loras_left(left: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the LoRAs that a stage left; raise WanjaxError where it gives anything but a list of texts."""
    texts = left.get("lora", [])
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise WanjaxError(f"{stage_files.CONFIG} gives lora as {texts!r}: write a list such as ['a.safetensors:0.8']")
    return tuple(texts)


def _decoder_left(left: Mapping[str, Any]) -> str | None:
    """Return the file of the tiny decoder that a stage left, if there is one."""
    file = left.get("decoder")
    if not isinstance(file, str | None):
        raise WanjaxError(f"{stage_files.CONFIG} gives decoder as {file!r}: write the name of a file")
    return file


class FrameRate:
    """The frames delivered, and their number a second since the first block, for which programs are compiled."""

    def __init__(self) -> None:
        self.frames = 0
        self._first: tuple[int, float] | None = None
        self._last = 0.0

    def deliver(self, frames: int) -> None:
        """Count frames that are delivered now."""
        self.frames += frames
        self._last = perf_counter()
        if self._first is None:
            self._first = self.frames, self._last

    def __str__(self) -> str:
        """Tell the frames, and how many there are a second, if there are two blocks."""
        if self._first is None or self.frames == self._first[0]:
            return quantity(self.frames, "frame")
        frames, since = self._first
        return f"{quantity(self.frames, 'frame')}, {digits((self.frames - frames) / (self._last - since))} a second"


def estimate(pipe: Pipeline, settings: Settings, from_video: bool) -> str | None:
    """Return a sentence on the memory of large weights and on the least time; None if there is nothing to tell.

    `from_video` tells whether denoising begins from a video, which saves some steps.
    """
    parts = []
    if sizes := pipe.components.sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] >= LARGE:
            parts.append(f"the weights of its {largest} take about {in_bytes(sizes[largest])} of memory")
    settings = pipe.model.spec.passes_of(settings)[0]  # of several passes the first alone is counted
    steps = settings.strong_steps if from_video else settings.steps
    if seconds := least_seconds(pipe, settings, steps, jax.devices()[0].device_kind):
        parts.append(f"denoising takes at least {duration(seconds)}, at the peak of {devices_of(pipe.partitioner)}")
    return f"{settings.model}: {'; '.join(parts)}" if parts else None


def least_seconds(pipe: Pipeline, settings: Settings, steps: int, kind: str) -> float | None:
    """Return the seconds of so many steps on devices of a kind that work at their peak; None where that is unknown.

    A lower bound: the second forwards of steps that only some of the guidance scales ask for are not counted, nor are
    steps that reuse what another kept or may, nor is self-attention where a window or a mask confines it.
    """
    if (peak := peak_flops(kind)) is None:
        return None
    work = pipe.model.cost(settings)
    flops = sum(work.flops.values()) - (0 if pipe.attention.is_dense else work.scores)
    reused = min(steps - 1, sum(pipe.model.spec.reused(settings)))
    again = pipe.model.spec.cache_rule(settings).forwards
    forwards = (steps - reused) * (2 if min(settings.guidance_scales) > 1 else 1) + reused * again
    return forwards * flops / (peak * pipe.partitioner.mesh.size)
