# SPDX-License-Identifier: Apache-2.0
"""A training from data to its outcome: encode once, train each network, and write what others can load."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from wanjax.checkpoints.network_kinds import Network, network_of
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.execution import program
from wanjax.figures import digits, quantity
from wanjax.kernels.compiler_options import matmul_options
from wanjax.media.metadata import DIGESTS
from wanjax.media.video import try_output, write_video
from wanjax.pipelines import progress
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.seeds import key_of, seed_to_key_data
from wanjax.stores.locks import locked
from wanjax.stores.writing import check_folder, writing
from wanjax.training import adapters, clips
from wanjax.training.batches import Batches
from wanjax.training.config import TrainConfig
from wanjax.training.data import CACHE_FOLDER, list_data
from wanjax.training.latent_cache import (
    NEGATIVE,
    EncodedClip,
    LatentCache,
    bucket_summaries,
    clip_identity,
    join_batch,
    load_text,
)
from wanjax.training.loop import RATE, STEPS, NotFiniteError, Trainer
from wanjax.training.objective import Batch, NoiseLevels, error, loss_of, settings_of
from wanjax.training.optimizers import learning_rates, make_optimizer
from wanjax.training.saving import save_checkpoint, save_lora
from wanjax.training.step import FINITE, all_parameters
from wanjax.training.step_metrics import Metrics

LORA, CHECKPOINT, SAMPLES, LOCK = "lora.safetensors", "checkpoint", "samples", "training.lock"
EXPERTS = {"high": 0, "low": 1}
LEVELS = 8  # fixed noise levels of the validation loss
LEFT_OUT, CUT = "left_out.txt", "cut_captions.txt"
SHOWN = 5  # of what was left out; a file has all of it
IN_FLIGHT = 2  # steps whose metrics are not waited for
Note = Callable[[str], Any]
Count = Callable[[str, int, int], Any]


@dataclass(frozen=True, eq=False)
class Validation:
    """What the validation loss is compiled for: the network, its pipeline, noise levels and name."""

    graphdef: Any
    pipe: Pipeline
    levels: NoiseLevels


@program(matmul_options)
def validation_error(
    static: Validation, weights: Any, batch: Batch, u: Float[Array, "B"], number: Int[Array, ""]
) -> Array:
    """Compute the error at fixed noise levels u, with fixed noise of a number."""
    network, key = nnx.merge(static.graphdef, weights), jax.random.fold_in(key_of(seed_to_key_data([0])[0]), number)
    noise = jax.random.normal(key, static.pipe.model.spec.to_training_latents(batch.latents).shape, jnp.float32)
    return error(static.pipe, network, batch, static.levels.at(u), noise, key)


class Training:
    """A training of a pipeline's denoisers on a data set, one after the other, in a folder.

    `note(sentence)` receives what a person should read, and `count(unit, done, total)` the progress. `trainer` has the
    arrays of the network whose turn it is, which `begin` loads.
    """

    def __init__(
        self,
        pipe: Pipeline,
        data: str | Path,
        out: str | Path,
        config: TrainConfig,
        *,
        note: Note = lambda sentence: None,
        count: Count = lambda unit, done, total: None,
    ):
        """Raise WanjaxError for everything that can be told before anything is encoded."""
        if jax.process_count() > 1:
            raise WanjaxError("training runs in one process: several hosts are not offered")
        if config.lora is None and pipe.components.source is None:
            raise WanjaxError("all weights are written as a checkpoint beside files, which this model has none of")
        self.pipe, self.out, self.config = pipe, Path(out).expanduser(), config
        self.note, self.count = note, count
        self.networks = _chosen(pipe, config)
        self.levels = {name: _levels(pipe, config, name) for name in self.networks}
        self.learning_rates = learning_rates(config.optimizer, config.steps)
        shape = {"size": config.size, "frames": config.frames, "fps": config.fps}
        self.settings = pipe.settings(**{name: x for name, x in shape.items() if x is not None})
        self.cutting = self._cutting()
        self.listing = list_data(Path(data).expanduser())
        if config.lora is None and any(example.preserve for example in self.listing.examples):
            raise WanjaxError("clips are preserved by what the model predicts without its LoRA: --full has none")
        check_folder(self.out)

    def _cutting(self) -> clips.Cutting:
        config, settings = self.config, self.settings
        factor = self.pipe.model.vae.temporal_factor
        return clips.Cutting(
            clips.sizes(settings.size, lambda shape: self.pipe.model.size_for(shape, settings), config.buckets),
            clips.lengths(settings.frames, factor, config.min_frames),
            settings.fps,
            config.cut,
            config.resize,
        )

    def encode(self) -> None:
        """Encode the clips and captions that were not encoded before, and free the encoders."""
        folder = self.config.latent_cache or self.listing.folder / CACHE_FOLDER
        cache = LatentCache(Path(folder), self.pipe)
        pieces = cache.encode(self.listing, self.cutting, self.count)
        negative = self.pipe.defaults.negative_prompt
        texts = cache.texts(["", negative, *self.config.sample_prompts])
        self.pipe.free()
        self.texts, self.empty, self.negative = texts, texts[""], texts[negative]
        every = self.config.holdout_every
        self.held_out = pieces[every - 1 :: every] if every else []
        self.pieces = [piece for i, piece in enumerate(pieces) if not every or (i + 1) % every]
        self._tell(pieces)
        if every and not self.held_out:
            raise WanjaxError(
                f"one in {every} cannot be held out of {quantity(len(pieces), 'clip')}: give fewer, or none"
            )
        for prompt in self.config.sample_prompts:
            bucket = self.sampled.bucket
            size = bucket.height, bucket.width
            try_output(self.out / SAMPLES / "0.mp4", bucket.frames, size, self.settings.fps, {"prompt": prompt})

    @property
    def sampled(self) -> EncodedClip:
        """The clip whose shape the samples have: the first that moves, or the first picture where none does."""
        return next((piece for piece in self.pieces if piece.bucket.frames > 1), self.pieces[0])

    def _tell(self, pieces: list[EncodedClip]) -> None:
        """Note what is trained on, and what was left out; warn of captions that were cut.

        The folder has a file of each list, which the notes may shorten.
        """
        listing = self.listing
        self.note(f"{quantity(len(pieces), 'clip')}: {'; '.join(bucket_summaries(pieces))}")
        if listing.left_out:
            self.note(f"{len(listing.left_out)} left out: {_in_short(listing.left_out, self.out / LEFT_OUT)}")
        if listing.others:
            self.note(f"files passed over, as hidden or no clip, picture or caption: {listing.others}")
        if listing.cut:
            count = quantity(len(listing.cut), "caption")
            message = f"the model does not read all of {count}: {_in_short(listing.cut, self.out / CUT)}"
            warnings.warn(message, WanjaxWarning, stacklevel=2)
        for name, sentences in ((LEFT_OUT, listing.left_out), (CUT, listing.cut)):
            (self.out / name).unlink(missing_ok=True)
            if sentences:
                with writing(self.out / name) as file:
                    file.write_text("\n".join(sentences) + "\n", encoding="utf-8", errors="backslashreplace")

    def run(self) -> Path:
        """Train, and return the LoRA file or the checkpoint; of two networks, the folder of their LoRA files.

        Raises WanjaxError too where another training uses the folder.
        """
        with locked(self.out / LOCK, "training", "folder"):
            return self._run()

    def _run(self) -> Path:
        self.encode()
        trained: dict[str, tuple[Any, Network]] = {}
        written = self.out
        for name in self.networks:
            self._train(name)
            if self.config.lora is None:
                trained[name] = (self.trainer.network(), self.network_info)
            else:
                written = self.save(self.folder / LORA)
            del self.trainer  # before the next network is loaded
            if len(self.networks) > 1 and self.config.lora is not None:
                self.pipe.free(name)
        if trained:
            written = self.out / CHECKPOINT
            save_checkpoint(self.pipe.components.source, trained, written, self.pipe.components.kinds)
        elif len(self.networks) > 1:
            written = self.out
        self.pipe.free()
        return written

    def _train(self, name: str) -> None:
        """Train a network, from an earlier state if the last one is so large that nothing finite follows from it."""
        while True:
            self.begin(name)
            with closing(self.trainer), closing(self.metrics):
                try:
                    return self._take_steps()
                except NotFiniteError as error:
                    if not (start_step := self.trainer.start_step) or error.start_step != start_step:
                        raise
                    self.note(f"nothing finite follows from the state of step {start_step}: it goes on from one before")
                    self.trainer.drop(start_step)
            del self.trainer  # or there would be two in memory

    def begin(self, name: str) -> None:
        """Load a network, and its last state if the folder has one; `encode` comes before."""
        pipe, config = self.pipe, self.config
        self.name, self.folder = name, self.out / name if len(self.networks) > 1 else self.out
        self.network_info = network_of(pipe.model.spec.networks[name], pipe.components.kinds)
        network, self.chosen = pipe.components.get(name), {}
        if config.lora is not None:
            network, self.chosen = adapters.adapt(
                network, self.network_info.rules, config.lora, config.seed, pipe.partitioner
            )
        pipe.free(name)
        self.batches = Batches(
            self.pieces,
            config.batch_size,
            config.seed,
            empty=self.empty,
            dropped=config.caption_dropout,
            uncaptioned=config.uncaptioned_preservation,
        )
        self.trainer = Trainer(
            network,
            loss_of(pipe, self.levels[name]),
            make_optimizer(config.optimizer, config.steps),
            self.folder,
            config.seed,
            trained=all_parameters if config.lora is None else adapters.is_factor,
            ema_decay=config.ema_decay,
            grad_accum_steps=config.grad_accum_steps,
            partitioner=pipe.partitioner,
            identity=self._identity(),
        )
        self.metrics = Metrics(self.folder, self.trainer.start_step)
        self._measured: Validation | None = None
        self._pending: deque[tuple[int, float, Mapping[str, jax.Array]]] = deque()

    def _identity(self) -> dict[str, Any]:
        """Return everything on which the trained weights depend, as JSON."""
        clips = [clip_identity(piece) for piece in self.pieces]
        levels = asdict(self.levels[self.name])
        facts = {"model": self.pipe.defaults.model, "network": self.name, "dtype": self.pipe.defaults.dtype}
        facts |= {DIGESTS: self.pipe.components.metadata.get(DIGESTS, {})}
        facts |= _learned(self.pipe)
        mesh = None if self.pipe.partitioner.single_device else dict(self.pipe.partitioner.mesh.shape)
        return self.config.to_json() | facts | {"levels": levels, "mesh": mesh, "clips": clips}

    def _take_steps(self) -> None:
        """Train up to the last step, with samples and validation losses along the way."""
        total, start_step = self.config.steps, self.trainer.start_step
        if start_step:
            self.note(f"taken before: {start_step} of {quantity(total, 'step')}")
        if not start_step:
            self._look(0)
        elif start_step < total and (changed := self.trainer.changed_settings):
            now = {STEPS: quantity(total, "step"), RATE: f"the learning rate {self.config.optimizer.learning_rate:g}"}
            changes = " and ".join(f"{now[name]} in place of {before:g}" for name, before in changed.items())
            rate = digits(float(np.asarray(self.learning_rates(start_step))))
            self.note(
                f"{changes}: the learning rate is that of the {self.config.optimizer.lr_scheduler} schedule of "
                f"{quantity(total, 'step')} from here on, {rate} at step {start_step + 1}"
            )
        self.count("step", start_step, total)
        try:
            self.trainer.run(total, self._draw, self._after, self.config.save_every)
        except KeyboardInterrupt:
            with suppress(NotFiniteError):
                self._write(0, counts=False)  # a count may interrupt again
            raise
        self._write(0)

    def _draw(self, step: int, generator: np.random.Generator) -> Batch:
        del generator  # the batches have their own
        shown = self.batches.at(step)
        latents, conditioning = join_batch([(x.latents, x.text) for x in shown], self.pipe.model.conditioning_type)
        preserved = np.array([x.preserved for x in shown], np.float32) if self.batches.preserves else None
        return Batch(latents, conditioning, preserved)

    def _after(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        self._pending.append((step, time.time(), metrics))
        every = (self.config.validation_every, self.config.sample_every, self.config.save_every)
        due = step == self.config.steps or any(step % n == 0 for n in every)
        self._write(0 if due else IN_FLIGHT)  # nothing is made of a state that may not be finite
        if due:
            self._look(step)
        if step % self.config.save_every == 0 and self.config.lora is not None and step < self.config.steps:
            self.save(self.folder / f"lora-{step:06}.safetensors")

    def _write(self, left: int, *, counts: bool = True) -> None:
        """Write the metrics of all steps but the last `left`; raise NotFiniteError."""
        while len(self._pending) > left:
            step, at, metrics = self._pending[0]
            values = {name: float(value) for name, value in metrics.items() if name != FINITE}
            if strange := [name for name, value in values.items() if not np.isfinite(value)]:
                raise self.trainer.not_finite_error(strange[0], step, start_step=step - 1)
            if not metrics[FINITE]:
                raise self.trainer.not_finite_error("state", step)
            self.metrics.add(step, at, **values, learning_rate=float(np.asarray(self.learning_rates(step - 1))))
            self._pending.popleft()
            if counts:
                self.count("step", step, self.config.steps)
            if step % self.config.validation_every == 0 or step in (1, self.config.steps):
                self.note(f"step {step} of {self.config.steps}: loss {digits(values['loss'])}")

    def _look(self, step: int) -> None:
        """Compute the validation loss and make the sample videos, where this step is one for them."""
        last = step == self.config.steps
        if self.held_out and (step % self.config.validation_every == 0 or last):
            value = self.validation_loss()
            if not np.isfinite(value):
                raise self.trainer.not_finite_error("validation loss", step)
            self.metrics.add(step, time.time(), validation_loss=value)
            self.note(f"step {step}: validation loss {digits(value)}")
        if self.config.sample_prompts and (step % self.config.sample_every == 0 or last):
            self.sample(step)

    def validation_loss(self) -> float:
        """Return the mean loss of the held-out clips at fixed noise levels, with fixed noise."""
        losses, (graphdef, weights) = [], nnx.split(self._plain())
        if self._measured is None:  # one value for a network, so that the error is compiled once
            self._measured = Validation(graphdef, self.pipe, self.levels[self.name])
        for index, piece in enumerate(self.held_out):
            latents, conditioning = join_batch([(piece.latents, piece.text)], self.pipe.model.conditioning_type)
            for level in range(LEVELS):
                u = np.full((1,), (level + 0.5) / LEVELS, np.float32)
                number = np.int32(index * LEVELS + level)
                losses.append(
                    self.pipe.call(validation_error, self._measured, weights, Batch(latents, conditioning), u, number)
                )
        return float(np.mean([float(loss) for loss in losses]))

    def _plain(self) -> Any:
        """Return the network as it is used: with its mean weights if there are any, and without dropout."""
        network = self.trainer.network()
        for _, module in nnx.iter_modules(network):
            if isinstance(module, adapters.LoraLinear):
                module.dropout_key = None
        return network

    def sample(self, step: int) -> None:
        """Make a video of each sample prompt with the present weights, in the shape of `sampled`."""
        pipe, piece = self.pipe, self.sampled
        pipe.components.override(self.name, self._plain())
        for index, prompt in enumerate(self.config.sample_prompts):
            x, settings = self._sampled(piece, prompt)
            with progress.naming("sample"):
                latents = pipe.denoise(x, seed=index, **settings)
                frames = np.asarray(pipe.decode(latents))
            file = self.folder / SAMPLES / f"{step:06}-{index}.mp4"
            write_video(file, frames, self.settings.fps, {"prompt": prompt, "step": step, "seed": index})
        pipe.free()

    def _sampled(self, piece: EncodedClip, prompt: str) -> tuple[Any, dict[str, Any]]:
        """Return a sample's inputs, with the pictures of a clip, and its settings."""
        latents, conditioning = join_batch([(piece.latents, self.texts[prompt])], self.pipe.model.conditioning_type)
        negative = {NEGATIVE + name: x for name, x in load_text(self.negative).items()}
        shape = settings_of(self.pipe, latents.shape)
        return conditioning._replace(**negative), {"size": shape.size, "frames": shape.frames}

    def save(self, file: Path) -> Path:
        """Write the present LoRA to a file."""
        assert self.config.lora is not None
        factors = adapters.factors_of(self.trainer.network(), self.network_info.rules, self.chosen)
        about = {"model": self.pipe.defaults.model, "step": self.trainer.step, "rank": self.config.lora.rank}
        about |= _learned(self.pipe)
        save_lora(
            file, factors, self.config.lora, self.network_info, lora_format=self.config.lora_format, training_info=about
        )
        return file


def _learned(pipe: Pipeline) -> dict[str, str]:
    """Return the entry on the attention that is learned with the weights; none where it has none of its own."""
    return {"attention": str(pipe.attention)} if pipe.attention.sparse else {}


def _chosen(pipe: Pipeline, config: TrainConfig) -> tuple[str, ...]:
    """Return the networks to train."""
    names = pipe.model.spec.denoisers
    pipe.model.spec.check_trainable(pipe.defaults.model)
    if config.expert == "both":
        return names
    if len(names) == 1:
        raise WanjaxError(f"{pipe.defaults.model} has one network: the expert {config.expert} is one of two")
    return (names[EXPERTS[config.expert]],)


def _levels(pipe: Pipeline, config: TrainConfig, network: str) -> NoiseLevels:
    """Return the noise levels of a network's training."""
    default = pipe.model.spec.schedule_options(pipe.defaults).get("shift")
    kind = config.timesteps or ("uniform" if default is None else "shift")
    if kind == "shift" and default is None and config.shift is None:
        raise WanjaxError(f"{pipe.defaults.model} has no flow shift: give timesteps uniform or logit-normal")
    low, high = pipe.model.spec.noise_range(network, pipe.defaults)
    shift = (default if config.shift is None else config.shift) if kind == "shift" else 1.0
    return NoiseLevels(kind, 1.0 if shift is None else float(shift), config.logit_mean, config.logit_std, low, high)


def _in_short(sentences: Sequence[str], file: Path) -> str:
    """Return a few sentences, and the file that has all of them where there are more."""
    few = "; ".join(sentences[:SHOWN])
    return few if len(sentences) <= SHOWN else f"{few}; and {len(sentences) - SHOWN} more, all in {file}"


def train(
    pipe: Pipeline, data: str | Path, out: str | Path, config: TrainConfig | None = None, **settings: Any
) -> Path:
    """Train a LoRA, or all weights, of a pipeline's denoiser on a folder of clips with captions; return the result.

    `settings` are fields of `TrainConfig`, which override those of `config`. `out` is a folder, from which the same
    call continues after it was stopped. Raises WanjaxError where the data or the settings cannot be used.
    """
    return Training(pipe, data, out, replace(config or TrainConfig(), **settings)).run()
