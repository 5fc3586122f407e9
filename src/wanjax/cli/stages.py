# SPDX-License-Identifier: Apache-2.0
"""What `generate`, `encode`, `denoise` and `decode` do: each stage loads what it needs, runs, saves, and is freed."""

import math
import shlex
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from wanjax import io, registry
from wanjax.cli import options
from wanjax.cli.processes import is_first, meet
from wanjax.cli.profile import StepProfile, trace_with_scopes
from wanjax.cli.report import Report
from wanjax.converters.lora import Lora
from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.pictures import Pictures
from wanjax.pipelines.base import Embeddings, Step
from wanjax.pipelines.experts import EXPERTS, Switch


def generate(report: Report, *, folder: Path, out: str | None, noise: str | None, **given: Any) -> None:
    """The three stages in one run."""
    meet(report, given.get("processes"))
    run = Run(report, folder, given, out=out, noise=noise)
    run.tell()
    embeddings = run.encode()
    latents = run.denoise(embeddings)
    run.decode(latents)
    report.table()


def encode(report: Report, *, folder: Path, **given: Any) -> None:
    """The first stage, from the command line alone."""
    meet(report, given.get("processes"))
    run = Run(report, folder, given)
    run.encode()
    report.table()


def denoise(report: Report, *, folder: Path, noise: str | None, **given: Any) -> None:
    """The second stage, from what the first left and what is given anew."""
    meet(report, given.get("processes"))
    left = io.load_settings(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        embeddings = io.load_embeddings(folder, left)
    for warning in told:
        report.note(f"note: {warning.message}")
    run = Run(report, folder, given, left, noise=noise)
    run.check_fit(io.EMBEDDINGS, embeddings.prompt_embeds.shape[2], run.pipe.configs.transformer.text_width)
    run.tell()
    run.denoise(embeddings)
    report.table()


def decode(report: Report, *, folder: Path, out: str | None, **given: Any) -> None:
    """The third stage, from what the second left."""
    meet(report, given.get("processes"))
    left = io.load_settings(folder)
    latents = io.load_latents(folder, left)
    run = Run(report, folder, given, left, out=out)
    run.check_fit(io.LATENTS, latents.shape[1], run.pipe.configs.vae.latent_channels)
    run.record = left | run.record
    run.decode(latents)
    report.table()


class Run:
    """A pipeline, the settings of the video, and where its files are."""

    def __init__(
        self,
        report: Report,
        folder: Path,
        given: Mapping[str, Any],
        left: Mapping[str, Any] | None = None,
        *,
        out: str | None = None,
        noise: str | None = None,
    ):
        """`given` on the command line goes before what is `left` by the stage before, and that before the defaults.

        All that can be wrong is looked at here, before anything takes long.
        """
        chosen = dict(left or {}) | given_settings(**given)
        self.report = report
        self.folder = folder
        self.out = out
        self.tiling = Tiling() if given.get("tile") else None
        self.profile: Path | None = given.get("profile")
        self.batch_guidance = bool(given.get("batch_guidance"))
        loras = _loras(chosen) if "lora" in given else []  # the other stages have no use for them
        self.pipe = registry.load(
            _model(chosen),
            dtype=_dtype(chosen),
            attention=given.get("attention"),
            mesh=given.get("mesh"),
            rules=given.get("rules") or "fsdp",
            lora=loras,
            progress=report.load,
            note=report.note,
        )
        settings = _checked(chosen, self.pipe.defaults.to_json())
        files = {name: chosen[name] for name in Pictures._fields if chosen.get(name)}
        if left is None:
            self.pictures, self.settings = self.pipe.prepare(**files, **settings)
        else:  # pictures are in what the stage before left
            self.settings = self.pipe.settings(**settings)
        self.noise = None if noise is None else self._noise(noise, len(files.get("references", ())))
        if is_first():
            io.check_output(self.target)
            io.check_folder(folder)
        if self.profile:
            io.check_folder(self.profile)
            trace_with_scopes()
        self.record = self.settings.to_json() | files | ({} if noise is None else {"noise": noise})
        self.record |= {"lora": [str(lora) for lora in loras]} if loras else {}

    @property
    def target(self) -> str:
        return self.out or str(self.folder / io.VIDEO)

    def _noise(self, file: str, references: int) -> jax.Array:
        noise = io.load_noise(file)
        right = self.pipe.latent_shape(self.settings, references)
        if noise.shape != right:
            raise WanjaxError(f"the noise in {file} is {list(noise.shape)} where this video needs {list(right)}")
        return noise

    def check_fit(self, name: str, channels: int, right: int) -> None:
        """Raises WanjaxError unless a stage's file has the channels that the model works with."""
        if channels != right:
            raise WanjaxError(
                f"{self.folder / name} has {channels} channels where {self.settings.model} has {right}: "
                "it was made with another model"
            )

    def tell(self) -> None:
        """Tells what will be made, and what of it may not be meant."""
        chosen = self.settings
        scales = [scale for scale in (chosen.guidance_scale, chosen.guidance_scale_2) if scale is not None]
        guidance = " and ".join(f"{scale:g}" for scale in scales)
        self.report.note(
            f"{chosen.model}: {chosen.width}x{chosen.height}, {chosen.frames} frames at {chosen.fps} a second, "
            f"{chosen.steps} steps, guidance {guidance}, seed {chosen.seed}, {chosen.dtype}, "
            f"on {jax.devices()[0].device_kind}"
        )
        if max(scales) <= 1:
            self.report.note("note: guidance is off, so the negative prompt has no effect")
        if self.noise is not None:
            self.report.note(f"note: the initial noise is that of {self.record['noise']}, whatever the seed")

    def encode(self) -> Embeddings:
        chosen = self.settings
        if not chosen.prompt.strip():
            self.report.note("note: the prompt is empty, so the video shows what the model likes")
        for name, text in (("prompt", chosen.prompt), ("negative prompt", chosen.negative_prompt)):
            for truncation in filter(None, self.pipe.tokenize(text).truncated):
                self.report.note("note: " + str(truncation).replace("the prompt", f"the {name}", 1))
        embeddings = self.embed()
        self._save(io.save_embeddings, embeddings)
        self.report.kept(f"the embeddings are in {self.folder / io.EMBEDDINGS}", self._command("denoise"))
        return embeddings

    def embed(self) -> Embeddings:
        """What becomes of the prompts and the pictures."""
        with self.report.stage("encode"):
            texts = self.settings.prompt, self.settings.negative_prompt
            embeddings = jax.block_until_ready(self.pipe.encode_prompts(*texts))
            self.pipe.free("text_encoder")
            made = self.pipe.encode_pictures(self.pictures, self.settings, tiling=self.tiling)
            jax.block_until_ready(made)
        self.pipe.free("image_encoder", "vae")
        return embeddings._replace(**made)

    def denoise(self, embeddings: Embeddings) -> jax.Array:
        profile = self._profile(embeddings)

        def show(step: Step) -> None:
            if profile:
                profile.after(step)
            self.report.advance("step", step.index + 1, step.total)

        def tell_switch(switch: Switch) -> None:
            self.report.note(
                f"from step {switch.index + 1} of {switch.total} on the expert of little noise is at work, "
                f"loaded in {switch.seconds:.1f} s"
            )

        with self.report.stage("denoise"):
            given = self.settings.to_json()
            latents = self.pipe.denoise(
                embeddings,
                noise=self.noise,
                callback=show,
                switched=tell_switch,
                batch_guidance=self.batch_guidance,
                **given,
            )
            jax.block_until_ready(latents)
        if profile and is_first():
            self.report.note(profile.report())
        self.pipe.free(*EXPERTS)
        self._save(io.save_latents, latents)
        self.report.kept(f"the latents are in {self.folder / io.LATENTS}", self._command("decode"))
        return latents

    def _profile(self, embeddings: Embeddings) -> StepProfile | None:
        if self.profile is None:
            return None
        image = embeddings.image_embeds
        return StepProfile(self.profile, self.pipe, self.settings, 0 if image is None else image.shape[1])

    def decode(self, latents: Any) -> None:
        def frames() -> Iterator[np.ndarray]:
            """The frames as they are decoded, so that they are never all in memory."""
            for done, chunk in enumerate(self.pipe.decode_chunks(latents, tiling=self.tiling), 1):
                yield np.asarray(chunk)
                self.report.advance("chunk", done, latents.shape[2])

        with self.report.stage("decode"):
            if is_first():
                click.echo(io.write_video(self.target, frames(), self.settings.fps, self.record))
            else:
                deque(frames(), maxlen=0)
        self.pipe.free("vae")
        self.report.way_on = None

    def _save(self, save: Callable[..., None], made: Any) -> None:
        """Writes what a stage made, and the settings; of several processes the first does."""
        if is_first():
            save(self.folder, made, self.record)
            io.save_settings(self.folder, self.record)

    def _command(self, stage: str) -> str:
        """The command that goes on from here."""
        out = ["--out", self.out] if self.out and stage == "decode" else []
        return shlex.join(["wanjax", stage, "--dir", str(self.folder), *out])


def given_settings(size: tuple[int, int] | None = None, **given: Any) -> dict[str, Any]:
    """What is given on the command line, a size as the height and width that it stands for."""
    if size and (given["height"] or given["width"]):
        raise WanjaxError("--size is given beside --height or --width: one way is enough")
    height, width = size or (given.get("height"), given.get("width"))
    return {k: v for k, v in (given | {"height": height, "width": width}).items() if v not in (None, ())}


def _model(chosen: Mapping[str, Any]) -> str:
    """The model that is chosen; a folder with its full path, so that a later stage finds it from anywhere."""
    name = chosen.get("model")
    if not isinstance(name, str):
        raise WanjaxError(f"{io.CONFIG} names no model: --model has to")
    return name if name in registry.PRESETS or not Path(name).is_dir() else str(Path(name).absolute())


def _loras(chosen: Mapping[str, Any]) -> list[Lora]:
    """The LoRA that are chosen, files with their full paths as for a model."""
    texts = chosen.get("lora", [])
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise WanjaxError(f"{io.CONFIG} gives lora as {texts!r} where a list such as ['a.safetensors:0.8'] is right")
    loras = [Lora.parse(text) for text in texts]
    found = [(lora, Path(lora.file).expanduser()) for lora in loras]
    return [replace(lora, file=str(path.absolute())) if path.is_file() else lora for lora, path in found]


def _dtype(chosen: Mapping[str, Any]) -> str | None:
    dtype = chosen.get("dtype")
    if dtype not in (None, *options.DTYPES):
        raise WanjaxError(f"{io.CONFIG} gives the dtype {dtype!r} where {' or '.join(options.DTYPES)} is right")
    return dtype


def _checked(chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among what is chosen, each of the kind that its default is."""
    settings = {name: value for name, value in chosen.items() if name in defaults and value is not None}
    for name, value in settings.items():
        kind = float if defaults[name] is None else type(defaults[name])  # numbers that not every model has
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise WanjaxError(
                f"{io.CONFIG} gives {name} as {value!r} where a value such as {defaults[name]!r} is right"
            )
        if kind is float and not math.isfinite(value):
            raise WanjaxError(f"{name} is {value} where a finite number such as {defaults[name]} is right")
    return settings
