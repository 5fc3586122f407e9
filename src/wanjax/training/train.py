# SPDX-License-Identifier: Apache-2.0
"""A training run from data to result: encode once, train each network, and write a LoRA file or a checkpoint."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from wanjax.checkpoints.network_kinds import Network, network_of
from wanjax.errors import SettingError, WanjaxError, WanjaxWarning, repr_short
from wanjax.execution import program
from wanjax.figures import format_number, pluralize
from wanjax.kernels.compiler_options import matmul_options
from wanjax.layers.precision import UNQUANTIZED, Precision
from wanjax.media.metadata import DIGESTS_KEY
from wanjax.media.training_data import CHECKPOINT_FOLDER, LORA_FILE
from wanjax.media.video import write_trial_video, write_video
from wanjax.pipelines import progress
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.seeds import key_of, seed_to_key_data
from wanjax.stores.locks import locked
from wanjax.stores.writing import atomic_write, check_folder
from wanjax.training import adapters, clips
from wanjax.training.batches import Batches
from wanjax.training.config import TrainConfig
from wanjax.training.data import CACHE_FOLDER, check_outside, list_data
from wanjax.training.latent_cache import (
    CLIP_FILES,
    NEGATIVE,
    EncodedClip,
    LatentCache,
    bucket_summaries,
    clip_fingerprint,
    join_batch,
    load_features,
)
from wanjax.training.loop import LEARNING_RATE, STATES_FOLDER, STEPS, NotFiniteError, Trainer
from wanjax.training.objective import Batch, NoiseLevels, denoising_error, make_loss, video_settings
from wanjax.training.optimizers import OptimizerConfig, learning_rates, make_optimizer
from wanjax.training.saving import save_checkpoint, save_lora
from wanjax.training.step import FINITE, all_parameters
from wanjax.training.step_metrics import Metrics

SAMPLES, LOCK = "samples", "training.lock"
EXPERTS = {"high": 0, "low": 1}
NUM_VALIDATION_LEVELS = 8  # the number of fixed noise levels of the validation loss
SKIPPED_FILE, TRUNCATED_FILE = "left_out.txt", "cut_captions.txt"
MAX_SENTENCES = 5  # the maximum number of sentences in a note; all sentences are in a file
MAX_PENDING_STEPS = 2  # the number of steps that the device may compute before metrics are read
Note = Callable[[str], Any]
ReportProgress = Callable[[str, int, int], Any]  # unit, done, total


@dataclass(frozen=True, eq=False)
class Validation:
    """The static argument of the validation loss's program: the network's definition, the pipeline and the levels."""

    graphdef: Any
    pipe: Pipeline
    noise_levels: NoiseLevels


@program(matmul_options)
def validation_error(
    static: Validation, weights: Any, batch: Batch, u: Float[Array, "B"], number: Int[Array, ""]
) -> Array:
    """Compute the loss at the quantiles `u` of the noise levels. `number` selects the noise."""
    network, key = nnx.merge(static.graphdef, weights), jax.random.fold_in(key_of(seed_to_key_data([0])[0]), number)
    noise = jax.random.normal(key, static.pipe.model.spec.to_training_latents(batch.latents).shape, jnp.float32)
    return denoising_error(static.pipe, network, batch, static.noise_levels.from_uniform(u), noise, key)


class Training:
    """A training run.

    The run trains a pipeline's denoisers one after another on a data set, and writes the results to a folder.

    Args:
        pipe: The pipeline.
        data: A folder of clips with captions, or a table of them.
        out: The folder of checkpoints and results.
        config: The settings.
        note: Called with sentences for the user.
        report_progress: Called with a unit such as "step", the number of finished units, and the total.

    Attributes:
        trainer: The trainer of the current network, which `begin` loads.

    Raises:
        WanjaxError: The settings or the data cannot be used. The constructor checks everything that can be checked
            before encoding.
    """

    def __init__(
        self,
        pipe: Pipeline,
        data: str | Path,
        out: str | Path,
        config: TrainConfig,
        *,
        note: Note = lambda sentence: None,
        report_progress: ReportProgress = lambda unit, done, total: None,
    ):
        if not isinstance(pipe, Pipeline):
            raise WanjaxError(f"training takes a pipeline, got {repr_short(pipe)}: give wanjax.load(MODEL)")
        if jax.process_count() > 1:
            raise WanjaxError("training on several hosts is not supported: run one process")
        if config.lora is None and pipe.components.source is None:
            raise WanjaxError(
                "training of all weights needs a checkpoint on disk, and this model has none: train a LoRA"
            )
        if pipe.attention.qk:
            raise WanjaxError(f"attention with qk={pipe.attention.qk} has no gradient: train with --attention auto")
        source = pipe.components.source
        adapters.check_trainable_precision(
            Precision.of(pipe.defaults.precision),
            config.lora,
            is_stored=source is not None and source.has_quantized_weights,
        )
        self.pipe, self.out, self.config = pipe, Path(out).expanduser(), config
        self.note, self.report_progress = note, report_progress
        self.networks = _select_networks(pipe, config)
        self.noise_levels = {name: _noise_levels(pipe, config, name) for name in self.networks}
        self.learning_rates = learning_rates(config.optimizer, config.steps)
        shape = {"size": config.size, "frames": config.frames, "fps": config.fps}
        self.settings = pipe.settings(**{name: x for name, x in shape.items() if x is not None})
        self.cutting = self._make_cutting()
        check_outside(Path(data).expanduser(), self.out)
        self.listing = list_data(data)
        if config.lora is None and any(example.preserve for example in self.listing.examples):
            raise WanjaxError("prior preservation needs a LoRA: drop --full, or set preserve to false for all clips")
        check_folder(self.out)

    def _make_cutting(self) -> clips.Cutting:
        config, settings = self.config, self.settings
        factor = self.pipe.model.vae.temporal_factor
        return clips.Cutting(
            clips.bucket_sizes(settings.size, lambda shape: self.pipe.model.size_for(shape, settings), config.buckets),
            clips.bucket_lengths(settings.frames, factor, config.min_frames),
            settings.fps,
            config.cut,
            config.resize,
        )

    @property
    def latent_cache(self) -> Path:
        """The folder of the encoded clips and captions."""
        return Path(self.config.latent_cache or self.listing.folder / CACHE_FOLDER)

    def has_saved_work(self) -> bool:
        """Return whether there are files from which another run resumes: encoded clips, or a saved state."""
        return any(self.latent_cache.glob(CLIP_FILES)) or any(
            path.name.isdigit() for path in self.out.glob(f"**/{STATES_FOLDER}/*")
        )

    def encode(self) -> None:
        """Encode the clips and captions that are not in the latent cache, and free the encoders."""
        cache = LatentCache(self.latent_cache, self.pipe)
        all_clips = cache.encode(self.listing, self.cutting, self.report_progress)
        negative_prompt = self.pipe.defaults.negative_prompt
        caption_files = cache.encode_captions(["", negative_prompt, *self.config.sample_prompts])
        self.pipe.free()
        self.caption_files = caption_files
        self.empty_caption, self.negative_caption = caption_files[""], caption_files[negative_prompt]
        holdout_every = self.config.holdout_every
        self.held_out_clips = all_clips[holdout_every - 1 :: holdout_every] if holdout_every else []
        self.train_clips = [clip for i, clip in enumerate(all_clips) if not holdout_every or (i + 1) % holdout_every]
        self._note_data(all_clips)
        if holdout_every and not self.held_out_clips:
            raise WanjaxError(
                f"holdout_every is {holdout_every}, but there are {pluralize(len(all_clips), 'clip')}: give a smaller "
                "number, or 0"
            )
        for prompt in self.config.sample_prompts:
            bucket = self.sample_clip.bucket
            size = bucket.height, bucket.width
            write_trial_video(self.out / SAMPLES / "0.mp4", bucket.frames, size, self.settings.fps, {"prompt": prompt})

    @property
    def sample_clip(self) -> EncodedClip:
        """The clip whose shape sample videos have: the first clip with several frames, or else the first picture."""
        return next((clip for clip in self.train_clips if clip.bucket.frames > 1), self.train_clips[0])

    def _note_data(self, train_clips: list[EncodedClip]) -> None:
        """Report the training data and skipped files, and warn about truncated captions.

        The notes may shorten the lists of files and captions, so the full lists are written to files in the folder.
        """
        listing = self.listing
        self.note(f"{pluralize(len(train_clips), 'clip')}: {'; '.join(bucket_summaries(train_clips))}")
        if listing.skipped:
            self.note(f"{len(listing.skipped)} skipped: {_shorten(listing.skipped, self.out / SKIPPED_FILE)}")
        if listing.num_ignored:
            self.note(f"files ignored (hidden, or not a clip, picture or caption): {listing.num_ignored}")
        if listing.truncated:
            count = pluralize(len(listing.truncated), "caption")
            message = f"the model truncates {count}: {_shorten(listing.truncated, self.out / TRUNCATED_FILE)}"
            warnings.warn(message, WanjaxWarning, stacklevel=2)
        for name, sentences in ((SKIPPED_FILE, listing.skipped), (TRUNCATED_FILE, listing.truncated)):
            (self.out / name).unlink(missing_ok=True)
            if sentences:
                with atomic_write(self.out / name) as file:
                    file.write_text("\n".join(sentences) + "\n", encoding="utf-8", errors="backslashreplace")

    def run(self) -> Path:
        """Train. Return the LoRA file or the checkpoint. For LoRAs of two networks, return the folder of their files.

        Raises WanjaxError if another process is training in the folder.
        """
        with locked(self.out / LOCK, "training", "folder"):
            return self._run_locked()

    def _run_locked(self) -> Path:
        self.encode()
        trained_networks: dict[str, tuple[Any, Network]] = {}
        result = self.out
        for name in self.networks:
            self._train(name)
            if self.config.lora is None:
                trained_networks[name] = (self.trainer.network(), self.network_info)
            else:
                result = self.save(self.folder / LORA_FILE)
            del self.trainer  # frees the network before the next network is loaded
            if len(self.networks) > 1 and self.config.lora is not None:
                self.pipe.free(name)
        if trained_networks:
            result = self.out / CHECKPOINT_FOLDER
            save_checkpoint(self.pipe.components.source, trained_networks, result, self.pipe.components.kinds)
        elif len(self.networks) > 1:
            result = self.out
        self.pipe.free()
        return result

    def _train(self, name: str) -> None:
        """Train a network. If training diverges from the last checkpoint, resume from an earlier checkpoint."""
        while True:
            self.begin(name)
            with closing(self.trainer), closing(self.metrics):
                try:
                    return self._take_steps()
                except NotFiniteError as error:
                    if not (start_step := self.trainer.start_step) or error.start_step != start_step:
                        raise
                    self.note(
                        f"training diverges from the checkpoint of step {start_step}: resuming from the previous one"
                    )
                    self.trainer.delete_checkpoint(start_step)
            del self.trainer  # frees the old network before the new network is loaded

    def begin(self, name: str) -> None:
        """Load a network and, if there is one, its last checkpoint. Call `encode` first."""
        pipe, config = self.pipe, self.config
        self.name, self.folder = name, self.out / name if len(self.networks) > 1 else self.out
        self.network_info = network_of(pipe.model.spec.networks[name], pipe.components.kinds)
        network, self.adapted_names = pipe.components.get(name), {}
        if config.lora is not None:
            network, self.adapted_names = adapters.adapt(
                network, self.network_info.rules, config.lora, config.seed, pipe.partitioner
            )
        pipe.free(name)
        self.batches = Batches(
            self.train_clips,
            config.batch_size,
            config.seed,
            empty_caption=self.empty_caption,
            caption_dropout=config.caption_dropout,
            uncaptioned_preservation=config.uncaptioned_preservation,
        )
        self.trainer = Trainer(
            network,
            make_loss(pipe, self.noise_levels[name]),
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
        self._validation: Validation | None = None
        self._pending_metrics: deque[tuple[int, float, Mapping[str, jax.Array]]] = deque()

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines the trained weights, as JSON."""
        clips = [clip_fingerprint(clip) for clip in self.train_clips]
        levels = asdict(self.noise_levels[self.name])
        model_info = {"model": self.pipe.model_name, "network": self.name, "dtype": self.pipe.defaults.dtype}
        model_info |= {DIGESTS_KEY: self.pipe.components.metadata.get(DIGESTS_KEY, {})}
        model_info |= _attention_entry(self.pipe) | _precision_entry(self.pipe)
        mesh = None if self.pipe.partitioner.is_single_device else dict(self.pipe.partitioner.mesh.shape)
        return self.config.to_json() | model_info | {"levels": levels, "mesh": mesh, "clips": clips}

    def _take_steps(self) -> None:
        """Train up to the last step, with sample videos and validation losses."""
        total, start_step = self.config.steps, self.trainer.start_step
        if start_step:
            self.note(f"resuming after {start_step} of {pluralize(total, 'step')}")
        if not start_step:
            self._validate_and_sample(0)
        elif start_step < total and (changed_settings := self.trainer.changed_settings):
            new_values = {
                STEPS: pluralize(total, "step"),
                LEARNING_RATE: f"the learning rate {self.config.optimizer.learning_rate:g}",
            }
            changes = " and ".join(
                f"{new_values[name]} in place of {previous:g}" for name, previous in changed_settings.items()
            )
            rate = format_number(float(np.asarray(self.learning_rates(start_step))))
            self.note(
                f"{changes}: the learning rate now follows the {self.config.optimizer.lr_scheduler} schedule of "
                f"{pluralize(total, 'step')}, {rate} at step {start_step + 1}"
            )
        self.report_progress("step", start_step, total)
        try:
            self.trainer.run(total, self._draw_batch, self._after_step, self.config.save_every)
        except KeyboardInterrupt:
            with suppress(NotFiniteError):
                self._write_metrics(0, show_progress=False)  # the callback of this metric may interrupt again
            raise
        self._write_metrics(0)

    def _draw_batch(self, step: int, generator: np.random.Generator) -> Batch:
        del generator  # `Batches` has its own random generator
        batch_clips = self.batches.clips_of_step(step)
        latents, conditioning = join_batch(
            [(clip.latents, clip.text) for clip in batch_clips], self.pipe.model.conditioning_type
        )
        preservation = (
            np.array([clip.preservation for clip in batch_clips], np.float32)
            if self.batches.has_preserved_clips
            else None
        )
        return Batch(latents, conditioning, preservation)

    def _after_step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        self._pending_metrics.append((step, time.time(), metrics))
        intervals = (self.config.validation_every, self.config.sample_every, self.config.save_every)
        is_due = step == self.config.steps or any(step % interval == 0 for interval in intervals)
        # before validation and samples, all metrics are read, to stop if the state is not finite
        self._write_metrics(0 if is_due else MAX_PENDING_STEPS)
        if is_due:
            self._validate_and_sample(step)
        if step % self.config.save_every == 0 and self.config.lora is not None and step < self.config.steps:
            self.save(self.folder / f"lora-{step:06}.safetensors")

    def _write_metrics(self, max_pending: int, *, show_progress: bool = True) -> None:
        """Write the metrics of all steps except the last `max_pending` steps. Raises NotFiniteError if a value is not
        finite."""
        while len(self._pending_metrics) > max_pending:
            step, finish_time, metrics = self._pending_metrics[0]
            values = {name: float(value) for name, value in metrics.items() if name != FINITE}
            if not_finite := [name for name, value in values.items() if not np.isfinite(value)]:
                raise self.trainer.not_finite_error(not_finite[0], step, start_step=step - 1)
            if not metrics[FINITE]:
                raise self.trainer.not_finite_error("state", step)
            self.metrics.add(
                step, finish_time, **values, learning_rate=float(np.asarray(self.learning_rates(step - 1)))
            )
            self._pending_metrics.popleft()
            if show_progress:
                self.report_progress("step", step, self.config.steps)
            if step % self.config.validation_every == 0 or step in (1, self.config.steps):
                self.note(f"step {step} of {self.config.steps}: loss {format_number(values['loss'])}")

    def _validate_and_sample(self, step: int) -> None:
        """Compute the validation loss and make the sample videos if they are due at this step."""
        is_last = step == self.config.steps
        if self.held_out_clips and (step % self.config.validation_every == 0 or is_last):
            value = self.validation_loss()
            if not np.isfinite(value):
                raise self.trainer.not_finite_error("validation loss", step)
            self.metrics.add(step, time.time(), validation_loss=value)
            self.note(f"step {step}: validation loss {format_number(value)}")
        if self.config.sample_prompts and (step % self.config.sample_every == 0 or is_last):
            self.sample(step)

    def validation_loss(self) -> float:
        """Compute the mean loss of the held-out clips at fixed noise levels with fixed noise."""
        losses, (graphdef, weights) = [], nnx.split(self._inference_network())
        if self._validation is None:  # created once, so that its program is compiled only once
            self._validation = Validation(graphdef, self.pipe, self.noise_levels[self.name])
        for index, clip in enumerate(self.held_out_clips):
            latents, conditioning = join_batch([(clip.latents, clip.text)], self.pipe.model.conditioning_type)
            for level in range(NUM_VALIDATION_LEVELS):
                quantile = np.full((1,), (level + 0.5) / NUM_VALIDATION_LEVELS, np.float32)
                number = np.int32(index * NUM_VALIDATION_LEVELS + level)
                losses.append(
                    self.pipe.call(
                        validation_error, self._validation, weights, Batch(latents, conditioning), quantile, number
                    )
                )
        return float(np.mean([float(loss) for loss in losses]))

    def _inference_network(self) -> Any:
        """Return the network for inference, without dropout.

        If there is a moving average of its weights, use the average.
        """
        network = self.trainer.network()
        for _, module in nnx.iter_modules(network):
            if isinstance(module, adapters.LoraLinear):
                module.dropout_key = None
        return network

    def sample(self, step: int) -> None:
        """Make a video of each sample prompt with the current weights, in the shape of `sample_clip`."""
        pipe, clip = self.pipe, self.sample_clip
        pipe.components.override(self.name, self._inference_network())
        for index, prompt in enumerate(self.config.sample_prompts):
            conditioning, settings = self._sample_inputs(clip, prompt)
            with progress.unit_prefix("sample"):
                latents = pipe.denoise(conditioning, seed=index, **settings)
                frames = np.asarray(pipe.decode(latents))
            file = self.folder / SAMPLES / f"{step:06}-{index}.mp4"
            write_video(file, frames, self.settings.fps, {"prompt": prompt, "step": step, "seed": index})
        pipe.free()

    def _sample_inputs(self, clip: EncodedClip, prompt: str) -> tuple[Any, dict[str, Any]]:
        """Return the conditioning of a sample video, including the pictures of a clip, and the video's settings."""
        latents, conditioning = join_batch(
            [(clip.latents, self.caption_files[prompt])], self.pipe.model.conditioning_type
        )
        negative_features = {NEGATIVE + name: x for name, x in load_features(self.negative_caption).items()}
        shape = video_settings(self.pipe, latents.shape)
        return conditioning._replace(**negative_features), {"size": shape.size, "frames": shape.frames}

    def save(self, file: Path) -> Path:
        """Write the current LoRA to a file."""
        assert self.config.lora is not None
        factors = adapters.export_factors(self.trainer.network(), self.network_info.rules, self.adapted_names)
        training_info = {"model": self.pipe.model_name, "step": self.trainer.step, "rank": self.config.lora.rank}
        training_info |= _attention_entry(self.pipe) | _precision_entry(self.pipe)
        save_lora(
            file,
            factors,
            self.config.lora,
            self.network_info,
            lora_format=self.config.lora_format,
            training_info=training_info,
        )
        return file


def _attention_entry(pipe: Pipeline) -> dict[str, str]:
    """Return a metadata entry for the sparse attention of this training run, or no entry for dense attention."""
    return {"attention": str(pipe.attention)} if pipe.attention.sparse else {}


def _precision_entry(pipe: Pipeline) -> dict[str, str]:
    """Return a metadata entry for the precision of frozen weights, or no entry for floats."""
    precision = pipe.defaults.precision
    return {} if precision == UNQUANTIZED.name else {"precision": precision}


def _select_networks(pipe: Pipeline, config: TrainConfig) -> tuple[str, ...]:
    """Select the names of the networks to train."""
    names = pipe.model.spec.denoisers
    pipe.model.spec.check_trainable(pipe.defaults)
    if config.expert == "both":
        return names
    if len(names) == 1:
        raise WanjaxError(f"{pipe.model_name} has one network and no expert {config.expert}: give expert both")
    return (names[EXPERTS[config.expert]],)


def _noise_levels(pipe: Pipeline, config: TrainConfig, network: str) -> NoiseLevels:
    """Return the distribution of noise levels for training a network."""
    default = pipe.model.spec.schedule_options(pipe.defaults).get("shift")
    timesteps = config.timesteps or ("uniform" if default is None else "shift")
    if timesteps == "shift" and default is None and config.shift is None:
        raise WanjaxError(f"{pipe.model_name} has no flow shift: give timesteps uniform or logit-normal")
    low, high = pipe.model.spec.noise_range(network, pipe.defaults)
    shift = (default if config.shift is None else config.shift) if timesteps == "shift" else 1.0
    return NoiseLevels(
        timesteps, 1.0 if shift is None else float(shift), config.logit_mean, config.logit_std, low, high
    )


def _shorten(sentences: Sequence[str], file: Path) -> str:
    """Join the first sentences. If there are more sentences, refer to the file that has all of them."""
    first_sentences = "; ".join(sentences[:MAX_SENTENCES])
    return (
        first_sentences
        if len(sentences) <= MAX_SENTENCES
        else f"{first_sentences}; and {len(sentences) - MAX_SENTENCES} more, all in {file}"
    )


def train(
    pipe: Pipeline, data: str | Path, out: str | Path, config: TrainConfig | None = None, **settings: Any
) -> Path:
    """Train a LoRA, or all weights, of a pipeline's denoisers on clips with captions.

    Args:
        pipe: The pipeline.
        data: A folder of clips with captions, or a table of them.
        out: The folder of checkpoints and results. The same call resumes a run that was stopped.
        config: The settings.
        **settings: Fields of `TrainConfig`, which override the fields of `config`.

    Returns:
        The LoRA file or the checkpoint. For LoRAs of two networks, the folder of their files.

    Raises:
        WanjaxError: The data or the settings cannot be used.
    """
    for name in settings.keys() - {field.name for field in fields(TrainConfig)}:
        raise _unknown_setting(name)
    return Training(pipe, data, out, replace(config or TrainConfig(), **settings)).run()


def _unknown_setting(name: str) -> SettingError:
    """Create the error for a keyword that is not a field of `TrainConfig`. The error says which object has it."""
    for argument, config_type in (("optimizer", OptimizerConfig), ("lora", adapters.LoraConfig)):
        if name in (field.name for field in fields(config_type)):
            call = f"{argument}={config_type.__name__}({name}=...)"
            return SettingError(f"{name!r} is not a keyword here: give {call}", name)
    return unknown_keyword(name, [field.name for field in fields(TrainConfig)])
