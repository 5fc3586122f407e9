# SPDX-License-Identifier: Apache-2.0
"""The maker of a server's videos: each in a folder of its own, with a thumbnail, previews and notes beside it."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from PIL import Image

from wanjax.errors import WanjaxError
from wanjax.execution import EXECUTE
from wanjax.figures import duration
from wanjax.jobs.maker import JobProgress, VideoMaker, write_frames
from wanjax.jobs.notes import video_notes
from wanjax.jobs.store import Job
from wanjax.jobs.worker import Failure, Interrupted, Lease, logger
from wanjax.layers.tiling import Tiling
from wanjax.media.video import try_output
from wanjax.pipelines.components import free_memory
from wanjax.pipelines.observers import Cancelled
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import LOADED, Settings
from wanjax.pipelines.text.prompt_extension import ExtendedPrompt
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.pipelines.video_metadata import digest_of
from wanjax.serve import model_info
from wanjax.serve.faults import OUT_OF_MEMORY, STORAGE, fault_of
from wanjax.serve.variants import ServedModels, Variants
from wanjax.serve.videos import PREVIEW, THUMBNAIL, local_files, names_of, paths_of
from wanjax.stores.paths import AnyPath, RemotePath

SHAPES = 16  # shapes whose compiled programs are kept
THUMBNAIL_SIDE = 480  # pixels


class ServedMaker(VideoMaker):
    """Makes the videos of a server.

    Args:
        variants: The models, and the LoRAs.
        folder: Folder that contains the videos' folders.
        tiling: That of all videos.
        batch_guidance: That of all videos.
        compiles: Whether the model is loaded, and the programs of its default video compiled, before the first job.
        preview: Whether to show at a few steps what a video will be.
        note: Receives lines on what is done before the first job.
        extend: Extends a prompt; it is told whether the video begins from a picture.
    """

    def __init__(
        self,
        variants: Variants,
        folder: AnyPath,
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        compiles: bool = True,
        preview: bool = False,
        note: Callable[[str], object] = lambda text: None,
        extend: Callable[[str, bool], ExtendedPrompt] | None = None,
    ):
        super().__init__(lambda: variants.model(None), folder, tiling=tiling, batch_guidance=batch_guidance)
        self.variants, self.preview, self.note, self.extend = variants, preview, note, extend
        self._compiles = compiles
        self._shapes: set[Any] = set()

    @property
    def models(self) -> list[str]:
        return list(self.variants.pipes)

    @property
    def folders(self) -> list[AnyPath]:
        """Folders of this machine or of a store that no client is told of."""
        return [self.folder, *self.variants.folders]

    def served(self) -> tuple[ServedModels, list[dict[str, Any]]]:
        """Return the models, and what clients are told of them, for a server in another process."""
        return self.variants, self.model_cards()

    def model_cards(self) -> list[dict[str, Any]]:
        """Return what a server tells of its models, the served one first."""
        loras = [{"name": name, "strength": strength} for name, strength in self.variants.usual.items()]
        about = {"created": int(time.time()), "loras": loras, "extends_prompts": self.extend is not None}
        return [about | model_info.model_card(pipe, **self.run_options) for pipe in self.variants.pipes.values()]

    def warm_up(self, should_stop: Callable[[], bool]) -> None:
        self.pipe.progress = False
        if self._compiles:
            warm_up(self.pipe, **self.run_options, preview=self.preview, note=self.note, should_stop=should_stop)

    def explain(self, error: Exception) -> Failure:
        fault = fault_of(error, self.folders)
        log = ""
        if fault.is_ours and fault.message != OUT_OF_MEMORY:
            log = str(error) if fault.code == STORAGE else "".join(traceback.format_exception(error))
        return Failure(fault.code, fault.message, is_retryable=fault.is_ours, log=log)

    def make(self, jobs: Sequence[Job], lease: Lease) -> Iterator[Job]:
        """Make videos, one after another; yield each job once its video is there."""
        for job in jobs:
            try:
                self._video(job, lease)
            except Cancelled as error:
                raise Interrupted from error
            yield job

    def _video(self, job: Job, lease: Lease) -> None:
        request = VideoRequest.from_json(job.request)
        output = self.folder / job.output
        folder = output.parent
        if isinstance(folder, Path):
            folder.mkdir(exist_ok=True)
        progress = JobProgress(lease, lease.should_stop, folder / PREVIEW if self.preview else None)
        with local_files(folder, names_of(request.inputs)) as here:
            pipe = self.variants.take(request.model or self.variants.first, self.variants.strengths(request.lora))
            pipe = model_info.with_scheduler(pipe, request.scheduler)
            loaded = {name: getattr(pipe.defaults, name) for name in LOADED if name != "model"}
            lease.report(settings=loaded)
            if self.extend and not request.settings.get("original_prompt"):
                with progress.stage("extend"):
                    extended = self._extend(request, self.extend)
                lease.report(settings=loaded | extended)
                request = request.updated(extended)
            settings: Any = {name: value for name, value in request.settings.items() if value is not None}
            pictures, chosen = pipe.prepare(**paths_of(request.inputs, here), **settings)
            lease.report(notes=video_notes(pipe, chosen))
            if (shape := self._shape(request, chosen)) not in self._shapes:
                with progress.stage("compile"):
                    traced = trace_programs(
                        pipe, replace(chosen, windows=min(2, chosen.windows)), pictures, **self.run_options
                    )
                    EXECUTE.compile(*(one.instance for one in traced.programs), on_start=progress.compiling)
                self._shapes.add(shape)
            all_digests = {str(folder / name): digest_of(here / name) for name in names_of(request.inputs)}
            digests = {name: digest for name, digest in all_digests.items() if digest is not None}
            metadata = pipe.metadata(chosen, paths_of(request.inputs, folder), digests=digests, **self.run_options)
            prepared = PreparedRequest(chosen, model_info.without_folders(metadata))
            try_output(output, chosen.length, chosen.size, chosen.fps, prepared.metadata)
            for _, frames in (
                run := Run(pipe, [prepared], pictures, observers=[progress, *self.observers], **self.run_options)
            ):
                with run.decode_stage(prepared):
                    clips = with_thumbnail(map(np.asarray, frames), chosen.length, here / THUMBNAIL)
                    write_frames(output, clips, prepared)
            if isinstance(folder, RemotePath):  # after the video, which a store that fails meanwhile is not to cost
                (folder / THUMBNAIL).upload(here / THUMBNAIL)

    @staticmethod
    def _extend(request: VideoRequest, extend: Callable[[str, bool], ExtendedPrompt]) -> dict[str, str]:
        """Return the settings of a request's prompts, extended, with what was asked for beside them."""
        texts = [request.settings["prompt"], *(request.settings.get("then") or "").splitlines()]
        prompt, *then = (extend(text, "image" in request.inputs) for text in texts)
        return {"prompt": str(prompt), "then": "\n".join(then), "original_prompt": "\n".join(texts)}

    def _shape(self, request: VideoRequest, chosen: Settings) -> tuple[Any, ...]:
        """Return what decides which programs a video needs, but for the lengths of its prompts.

        Before one of too many shapes all programs are dropped, so that memory does not grow.
        """
        rule = chosen.guidance_rule
        form = (
            chosen.model,
            chosen.size,
            chosen.frames,
            chosen.windows > 1,
            chosen.guided,
            chosen.cache,
            chosen.follow,
        )
        shape = *form, type(rule), rule.keeps_average, request.scheduler, tuple(names_of(request.inputs))
        if shape not in self._shapes and len(self._shapes) >= SHAPES:
            self._shapes.clear()
            EXECUTE.forget()
        return shape


def with_thumbnail(chunks: Iterator[np.ndarray], frames: int, file: Path) -> Iterator[np.ndarray]:
    """Yield the chunks of a video, and write its middle frame, made small, to a file."""
    start = 0
    for chunk in chunks:
        if start <= frames // 2 < start + len(chunk):
            image = Image.fromarray(chunk[frames // 2 - start])
            image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
            image.save(file, "WEBP", quality=85)
        start += len(chunk)
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
    """Compile the programs of a default video, and load the model where all of it fits into memory.

    `note` receives a line on each program that is compiled and each network that is loaded. What fails here fails the
    first request, which is told of it.
    """
    begun = perf_counter()

    def check(number: int, total: int) -> None:
        if should_stop():
            raise Cancelled(0)
        note(f"compiling program {number} of {total} of a default video")

    try:
        settings = pipe.settings()
        recorded = trace_programs(
            pipe, settings, needed_pictures(pipe, settings), tiling=tiling, batch_guidance=batch_guidance
        )
        EXECUTE.compile(*(one.instance for one in recorded.programs), on_start=check)
        if sum(pipe.components.sizes.values()) < free_memory(jax.local_devices()[0]):
            for name in pipe.components.names:
                if not should_stop():
                    note(f"loading the {name.replace('_', ' ')}")
                    pipe.components.get(name)
        if preview and not should_stop():
            pipe.latent_preview()
        if not should_stop():
            note(f"ready after {duration(perf_counter() - begun)}")
    except (WanjaxError, Cancelled):
        pass
    except Exception as error:
        logger.warning("the warm-up did not succeed: %s", str(error)[:500])
