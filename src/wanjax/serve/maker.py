# SPDX-License-Identifier: Apache-2.0
"""Make a server's videos. Each video has a folder with its file, thumbnail and preview."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from PIL import Image

from wanjax.errors import WanjaxError
from wanjax.execution import EXECUTE
from wanjax.figures import format_duration
from wanjax.jobs.maker import JobProgress, VideoMaker, write_frames
from wanjax.jobs.notes import noting_warnings, video_notes
from wanjax.jobs.store import Job
from wanjax.jobs.worker import Failure, Interrupted, Lease, logger
from wanjax.layers.tiling import Tiling
from wanjax.media.video import write_trial_video
from wanjax.pipelines.components import free_memory
from wanjax.pipelines.observers import Cancelled
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import LOAD_SETTINGS, Settings
from wanjax.pipelines.text.prompt_extension import ExtendedPrompt
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.pipelines.video_metadata import digest_of
from wanjax.serve import model_info
from wanjax.serve.error_details import OUT_OF_MEMORY, STORAGE, describe_error
from wanjax.serve.served_models import LoadedModels, ServedModels
from wanjax.serve.videos import NOTES, PREVIEW, THUMBNAIL, file_names, file_paths, local_files
from wanjax.stores.paths import AnyPath, RemotePath

MAX_PROGRAM_KEYS = 16  # compiled programs are kept for this many kinds of videos (by size, length and so on)
THUMBNAIL_SIDE = 480  # pixels


class ServedMaker(VideoMaker):
    """Makes the videos of a server.

    Args:
        loaded_models: The models and the LoRAs.
        folder: The folder that contains one folder per video.
        tiling: Tiling of the autoencoder, for all videos.
        batch_guidance: Whether guidance computes the prompt and the negative prompt in one batch, for all videos.
        compiles: Whether to load the model and compile the programs of its default video before the first job.
        preview: Whether to write a preview after some steps.
        note: Called with each progress message of the warm-up.
        extend_prompt: A function that extends a prompt. Its second argument says whether the video starts from a
            picture.
    """

    def __init__(
        self,
        loaded_models: LoadedModels,
        folder: AnyPath,
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        compiles: bool = True,
        preview: bool = False,
        note: Callable[[str], object] = lambda text: None,
        extend_prompt: Callable[[str, bool], ExtendedPrompt] | None = None,
    ):
        super().__init__(lambda: loaded_models.model(None), folder, tiling=tiling, batch_guidance=batch_guidance)
        self.loaded_models, self.preview, self.note, self.extend_prompt = loaded_models, preview, note, extend_prompt
        self._compiles = compiles
        self._program_keys: set[Any] = set()

    @property
    def models(self) -> list[str]:
        return list(self.loaded_models.pipes)

    @property
    def folders(self) -> list[AnyPath]:
        """The folders whose paths must not appear in messages to clients."""
        return [self.folder, *self.loaded_models.folders]

    def models_and_cards(self) -> tuple[ServedModels, list[dict[str, Any]]]:
        """The models and their cards, for a server in another process."""
        return self.loaded_models, self.model_cards()

    def model_cards(self) -> list[dict[str, Any]]:
        """Return descriptions of the models for clients, the served model first."""
        loras = [
            {"name": name, "strength": strength} for name, strength in self.loaded_models.default_strengths.items()
        ]
        common_fields = {"created": int(time.time()), "loras": loras, "extends_prompts": self.extend_prompt is not None}
        return [
            common_fields | model_info.model_card(pipe, **self.run_options)
            for pipe in self.loaded_models.pipes.values()
        ]

    def warm_up(self, should_stop: Callable[[], bool]) -> None:
        self.pipe.progress = False
        if self._compiles:
            warm_up(self.pipe, **self.run_options, preview=self.preview, note=self.note, should_stop=should_stop)

    def explain(self, error: Exception) -> Failure:
        details = describe_error(error, self.folders)
        log = ""
        if details.is_server_error and details.message != OUT_OF_MEMORY:
            log = str(error) if details.code == STORAGE else "".join(traceback.format_exception(error))
        return Failure(details.code, details.message, is_retryable=details.is_server_error, log=log)

    def make(self, jobs: Sequence[Job], lease: Lease) -> Iterator[Job]:
        """Make videos one after another, and yield each job when its video is written."""
        for job in jobs:
            notes = VideoNotes(lease, job.request.get(NOTES, ()))
            try:
                with noting_warnings(notes.add):
                    self._make_video(job, lease, notes)
            except Cancelled as error:
                raise Interrupted from error
            yield job

    def _make_video(self, job: Job, lease: Lease, notes: "VideoNotes") -> None:
        request = VideoRequest.from_json(job.request)
        output = self.folder / job.output
        folder = output.parent
        if isinstance(folder, Path):
            folder.mkdir(exist_ok=True)
        progress = JobProgress(lease, lease.should_stop, folder / PREVIEW if self.preview else None)
        with local_files(folder, file_names(request.inputs)) as local_folder:
            pipe = self.loaded_models.load_variant(
                request.model or self.loaded_models.default_name, self.loaded_models.strengths(request.lora)
            )
            pipe = model_info.with_scheduler(pipe, request.scheduler)
            load_settings = {name: getattr(pipe.defaults, name) for name in LOAD_SETTINGS if name != "model"}
            lease.report(settings=load_settings)
            if self.extend_prompt and not request.settings.get("original_prompt"):
                with progress.stage("extend"):
                    extended_prompts = self._extended_prompts(request, self.extend_prompt)
                lease.report(settings=load_settings | extended_prompts)
                request = request.updated(extended_prompts)
            keywords: Any = {name: value for name, value in request.settings.items() if value is not None}
            pictures, settings = pipe.prepare(**file_paths(request.inputs, local_folder), **keywords)
            notes.add(*video_notes(pipe, settings))
            if (program_key := self._program_key(request, settings)) not in self._program_keys:
                with progress.stage("compile"):
                    trace = trace_programs(
                        pipe, replace(settings, windows=min(2, settings.windows)), pictures, **self.run_options
                    )
                    EXECUTE.compile(*(traced.traced_program for traced in trace.programs), on_start=progress.compiling)
                    # compiles the encoder's programs here, because their time would count as denoising
                    if self.preview:
                        pipe.latent_preview()
                self._program_keys.add(program_key)
            all_digests = {str(folder / name): digest_of(local_folder / name) for name in file_names(request.inputs)}
            digests = {name: digest for name, digest in all_digests.items() if digest is not None}
            metadata = pipe.metadata(settings, file_paths(request.inputs, folder), digests=digests, **self.run_options)
            prepared = PreparedRequest(settings, model_info.strip_folders(metadata))
            write_trial_video(output, settings.length, settings.size, settings.fps, prepared.metadata)
            for _, frames in (
                run := Run(pipe, [prepared], pictures, observers=[progress, *self.observers], **self.run_options)
            ):
                with run.decode_stage(prepared):
                    chunks = with_thumbnail(map(np.asarray, frames), settings.length, local_folder / THUMBNAIL)
                    write_frames(output, chunks, prepared)
            if isinstance(folder, RemotePath):  # after the video, so that a failing store does not lose the video
                (folder / THUMBNAIL).upload(local_folder / THUMBNAIL)

    @staticmethod
    def _extended_prompts(
        request: VideoRequest, extend_prompt: Callable[[str, bool], ExtendedPrompt]
    ) -> dict[str, str]:
        """Return the prompt settings of a request: the extended prompts, and the original prompts."""
        texts = [request.settings["prompt"], *(request.settings.get("then") or "").splitlines()]
        prompt, *then = (extend_prompt(text, "image" in request.inputs) for text in texts)
        return {"prompt": str(prompt), "then": "\n".join(then), "original_prompt": "\n".join(texts)}

    def _program_key(self, request: VideoRequest, settings: Settings) -> tuple[Any, ...]:
        """Return the part of a request that decides which programs the video needs, except the lengths of prompts.

        To limit memory, all compiled programs are dropped if there are too many different keys.
        """
        rule = settings.guidance_rule
        settings_key = (
            settings.model,
            settings.size,
            settings.frames,
            settings.windows > 1,
            settings.guided,
            settings.cache,
            settings.follow,
        )
        program_key = (
            *settings_key,
            type(rule),
            rule.uses_running_average,
            request.scheduler,
            tuple(file_names(request.inputs)),
        )
        if program_key not in self._program_keys and len(self._program_keys) >= MAX_PROGRAM_KEYS:
            self._program_keys.clear()
            EXECUTE.clear_programs()
        return program_key


class VideoNotes:
    """The notes on a video that is being made, for its clients.

    Args:
        lease: The lease of the video's worker.
        request_notes: The notes on the request, which the server made when the request arrived.
    """

    def __init__(self, lease: Lease, request_notes: Iterable[str]):
        self._lease, self._notes = lease, list(request_notes)

    def add(self, *notes: str) -> None:
        """Add notes, each once."""
        self._notes = list(dict.fromkeys((*self._notes, *notes)))
        self._lease.report(notes=self._notes)


def with_thumbnail(chunks: Iterator[np.ndarray], frame_count: int, file: Path) -> Iterator[np.ndarray]:
    """Yield the chunks of a video, and write its middle frame to a small image file."""
    chunk_start = 0
    for chunk in chunks:
        if chunk_start <= frame_count // 2 < chunk_start + len(chunk):
            image = Image.fromarray(chunk[frame_count // 2 - chunk_start])
            image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
            image.save(file, "WEBP", quality=85)
        chunk_start += len(chunk)
        yield chunk


def warm_up(
    pipe: Pipeline,
    *,
    tiling: Tiling | None,
    batch_guidance: bool,
    preview: bool,
    note: Callable[[str], object],
    should_stop: Callable[[], bool],
) -> None:
    """Compile the programs of a default video, and load the model if it fits into memory as a whole.

    Errors are only logged, because the first request fails with the same error and reports it.

    Args:
        pipe: The pipeline.
        tiling: Tiling of the autoencoder.
        batch_guidance: Whether guidance computes the prompt and the negative prompt in one batch.
        preview: Whether to load the preview decoder too.
        note: Receives a message for each program and each network.
        should_stop: Returns True to stop early.
    """
    start_time = perf_counter()

    def report_program(number: int, total: int) -> None:
        if should_stop():
            raise Cancelled(0)
        note(f"compiling program {number} of {total} of a default video")

    try:
        settings = pipe.settings()
        trace = trace_programs(
            pipe, settings, needed_pictures(pipe, settings), tiling=tiling, batch_guidance=batch_guidance
        )
        EXECUTE.compile(*(traced.traced_program for traced in trace.programs), on_start=report_program)
        if sum(pipe.components.sizes.values()) < free_memory(jax.local_devices()[0]):
            for name in pipe.components.names:
                if not should_stop():
                    note(f"loading the {name.replace('_', ' ')}")
                    pipe.components.get(name)
        if preview and not should_stop():
            pipe.latent_preview()
        if not should_stop():
            note(f"ready after {format_duration(perf_counter() - start_time)}")
    except (WanjaxError, Cancelled):
        pass
    except Exception as error:
        logger.warning("the warm-up failed: %s", str(error)[:500])
