# SPDX-License-Identifier: Apache-2.0
"""Mutation tests: change the code in one place, run the tests that could notice, and check that one fails.

Each mutation is a mistake that an edit could introduce and that a user would notice. The tests run on copies of the
tree, where they must pass before the mutation. A mutation is caught if one of its tests fails or takes too long.

    python -m benchmarks.mutations [--only NAME ...] [--jobs 2] [--timeout SECONDS]
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MAX_JOBS = 2  # the tests of one mutation take a core and up to 3 GB
TIMEOUT = 300.0  # seconds that the tests of one mutation may take
NO_TESTS_RUN = 5  # the exit status of pytest if it ran no test


class Mutation(NamedTuple):
    """A change of the code: `old`, which is in `file` exactly once, becomes `new`.

    `breaks` says what a user would notice. `tests` has the node ids, below tests/, of tests that could notice.
    `survives` says why no test can notice, or is empty.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    survives: str = ""

    def apply(self, text: str) -> str:
        """Return the changed text of the file; raise ValueError unless `old` is in it exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} is {count} times in {self.file}: choose text that is there once"
            )
        return text.replace(self.old, self.new)


MUTATIONS = (
    # kernels
    Mutation(
        "flash-guard",
        "src/wanjax/kernels/attention/flash_kernel.py",
        "state.weight_sum[...] <= max_weight_sum",
        "state.weight_sum[...] <= jnp.inf",
        "attention is infinite or NaN on a TPU if a later key's logit is far above the logits of the first keys",
        (
            "kernels/test_flash_tpu.py::test_a_later_large_logit_is_exact",
            "kernels/test_flash_tpu.py::test_large_and_small_values_stay_exact",
        ),
    ),
    Mutation(
        "flash-tail",
        "src/wanjax/kernels/attention/flash_kernel.py",
        "num_blocks, tail = num_compute_blocks(is_last, sizes), sizes.num_keys % sizes.block_kv_compute",
        "num_blocks, tail = num_compute_blocks(is_last, sizes), 0",
        "on a TPU, attention ignores the last keys if the number of keys is not a multiple of a tile",
        ("kernels/test_flash_tpu.py::test_attention_is_exact_for_every_length",),
    ),
    Mutation(
        "padded-keys",
        "src/wanjax/kernels/attention/masks.py",
        "jnp.arange(num_keys)[None, :] < lengths[:, None]",
        "jnp.arange(num_keys)[None, :] <= lengths[:, None]",
        "a video's tokens attend to one token of padding",
        (
            "kernels/test_sharded_attention.py::test_a_wrong_number_of_keys_is_refused",
            "kernels/test_joint_attention.py",
        ),
    ),
    Mutation(
        "ring-count",
        "src/wanjax/kernels/attention/sharded.py",
        'jnp.clip(kv_length - jax.lax.axis_index("sp") * k.shape[1], 0, k.shape[1])',
        "jnp.clip(kv_length, 0, k.shape[1])",
        "with sp > 1, queries attend to the padding on the last device",
        (
            "kernels/test_sharded_attention.py::test_a_wrong_number_of_keys_is_refused",
            "kernels/test_sharded_attention.py::test_sharded_attention_is_exact",
        ),
    ),
    Mutation(
        "ring-gradient",
        "src/wanjax/kernels/attention/sharded.py",
        'dk, dv = jax.lax.ppermute(dkv_sums, "sp", _ring_permutation(ring_size))',
        "dk, dv = dkv_sums",
        "training with sp > 1 gives a device the gradients of its neighbour's keys",
        ("kernels/test_sharded_attention.py::test_sharded_gradients_are_exact",),
    ),
    # layers, models and sharding
    Mutation(
        "rope-table",
        "src/wanjax/layers/rope.py",
        "-np.arange(0, channels, 2, dtype=np.float64) / channels",
        "-np.arange(0, channels, 2, dtype=np.float64) / (channels + 2)",
        "every published model rotates positions by other angles than it was trained with",
        ("parity/test_wan_transformer.py::test_the_velocity_equals_that_of_diffusers",),
    ),
    Mutation(
        "first-chunk",
        "src/wanjax/models/wan/vae.py",
        "            cache = self.time_conv.initial_frames(x)\n",
        "            cache = to_operand_dtype(jnp.concatenate([x, x], axis=1), self.time_conv.dtype)\n",
        "the second to fifth frames of every Wan video flicker, since the first frame replaces zeros in the cache",
        (
            "parity/test_wan_vae.py::test_decoded_videos_equal_those_of_diffusers",
            "parity/test_wan_vae.py::test_modules_run_chunk_by_chunk_equal_those_of_diffusers",
        ),
    ),
    Mutation(
        "kept-frames",
        "src/wanjax/layers/conv.py",
        "x[:, x.shape[1] - (self.kernel.shape[0] - self.time_stride) :]",
        "x[:, : self.kernel.shape[0] - self.time_stride]",
        "each chunk of a decoded video continues from the wrong frames",
        (
            "parity/test_wan_vae.py::test_decoded_videos_equal_those_of_diffusers",
            "models/test_cogvideox_vae.py::test_any_number_of_frames_is_decoded_in_chunks",
        ),
    ),
    Mutation(
        "tile-fade",
        "src/wanjax/layers/tiling.py",
        "jnp.arange(overlap, dtype=tile.dtype) / overlap",
        "jnp.arange(overlap, dtype=tile.dtype) * 0 + 1",
        "seams between tiles are visible",
        ("parity/test_wan_vae.py::test_videos_decoded_in_tiles_equal_those_of_diffusers",),
    ),
    Mutation(
        "weight-rule",
        "src/wanjax/sharding.py",
        'weights={"heads": ("sp", "tp"), "mlp": ("sp", "tp"), "vocab": ("sp", "tp")}',
        'weights={"heads": ("sp", "tp"), "vocab": ("sp", "tp")}',
        "a model no longer fits on eight chips, since each chip stores all weights of the MLPs",
        (
            "test_sharding.py::test_weights_have_the_sharding_of_the_rules",
            "test_sharding.py::test_eight_chips_share_the_weights_of_the_14b",
        ),
    ),
    # schedulers
    Mutation(
        "unipc-corrector",
        "src/wanjax/schedulers/unipc.py",
        "previous = (c1 - c2) / (1 - r)",
        "previous = (c1 + c2) / (1 - r)",
        "every Wan video differs from the video of the authors' code",
        ("parity/test_schedulers.py::test_unipc_with_official_noise_levels_equals_diffusers",),
    ),
    Mutation(
        "last-sigma",
        "src/wanjax/schedulers/base.py",
        "np.append(levels[skip:], 0)",
        "np.append(levels[skip:], levels[-1] / 2)",
        "some noise remains in every video",
        ("schedulers/test_schedulers.py::test_the_last_step_gives_the_clean_sample_exactly",),
    ),
    Mutation(
        "flow-shift",
        "src/wanjax/schedulers/base.py",
        "return shift * sigmas / (1 + (shift - 1) * sigmas)",
        "return shift * sigmas / (1 + shift * sigmas)",
        "the noise levels of every flow-matching model are wrong",
        ("schedulers/test_schedulers.py::test_official_euler_sigmas_are_shifted_once",),
    ),
    Mutation(
        "renoise",
        "src/wanjax/schedulers/consistency.py",
        "schedule.sigmas[index + 1] * noise, state",
        "schedule.sigmas[index] * noise, state",
        "models of three or four steps add too much noise in each step, and their videos are grainy",
        ("schedulers/test_consistency.py::test_every_step_is_the_published_one",),
    ),
    Mutation(
        "v-target",
        "src/wanjax/schedulers/base.py",
        "return alphas * noise - sigmas * x0",
        "return alphas * noise + sigmas * x0",
        "a LoRA that was trained for CogVideoX turns videos into noise",
        ("schedulers/test_schedulers.py::test_the_training_target_gives_the_clean_sample",),
    ),
    # pipelines
    Mutation(
        "cfg-order",
        "src/wanjax/pipelines/guidance.py",
        "return negative + values * (prompt - negative), moving_average",
        "return prompt + values * (negative - prompt), moving_average",
        "guidance pushes videos towards the negative prompt",
        ("parity/test_guidance_rules.py::test_apg_without_reduction_is_classifier_free_guidance",),
    ),
    Mutation(
        "cache-counter",
        "src/wanjax/pipelines/caching/rules.py",
        "errors, count = errors + np.abs(1 - growth), count + 1",
        "errors, count = errors + np.abs(1 - growth), count",
        "MagCache reuses more steps in a row than its table allows, and videos lose detail",
        ("pipelines/test_cache_rules.py::test_magcache_skips_the_published_steps",),
    ),
    Mutation(
        "resume-check",
        "src/wanjax/pipelines/resume.py",
        'file.metadata.get("origin") != self.inputs_digest',
        '"origin" not in file.metadata',
        "a stopped video resumes from the latents of another prompt or seed",
        (
            "pipelines/test_resume.py::test_another_video_does_not_resume",
            "pipelines/test_resume.py::test_another_noise_does_not_resume",
        ),
    ),
    Mutation(
        "resume-step",
        "src/wanjax/pipelines/resume.py",
        "str(step.index + 1 - self._earlier_steps)",
        "str(step.index - self._earlier_steps)",
        "a resumed video repeats a step, and differs from the video without the stop",
        ("pipelines/test_resume.py::test_a_stopped_run_continues_to_the_same_latents",),
    ),
    Mutation(
        "seed-high-word",
        "src/wanjax/pipelines/seeds.py",
        "[[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds]",
        "[[0, seed & 0xFFFFFFFF] for seed in seeds]",
        "two seeds that differ only above the lowest 32 bits give the same video",
        ("pipelines/test_seeds.py::test_all_bits_of_a_seed_affect_the_noise",),
    ),
    Mutation(
        "step-noise",
        "src/wanjax/pipelines/seeds.py",
        "jnp.stack([jax.random.fold_in(key_of(pair), key_number) for pair in key_data])",
        "jnp.stack([key_of(pair) for pair in key_data])",
        "a stochastic solver adds noise that is not independent of the initial noise",
        ("pipelines/test_seeds.py::test_the_noise_of_steps_has_a_separate_key",),
    ),
    Mutation(
        "uint8-rounding",
        "src/wanjax/pipelines/frames.py",
        "jnp.round(frames * 255.0).astype(dtype)",
        "(frames * 255.0).astype(dtype)",
        "every pixel of every video is half a level too dark",
        ("pipelines/test_components.py::test_decoded_values_are_rounded_to_the_nearest_byte",),
    ),
    Mutation(
        "window-fade",
        "src/wanjax/pipelines/windows.py",
        "np.float32(1 - number / (FADE_FRAMES + 1))",
        "np.float32(number / (FADE_FRAMES + 1))",
        "a long video jumps where windows meet",
        ("pipelines/test_windows.py::test_a_small_jump_is_faded_and_motion_is_not",),
    ),
    Mutation(
        "record-field",
        "src/wanjax/pipelines/video_metadata.py",
        'metadata |= {"batch_guidance": True}',
        "metadata |= {}",
        "`--from` makes a different video, because the metadata lacks a setting",
        ("pipelines/test_record.py::test_metadata_contains_the_options_of_loading_and_of_the_call",),
    ),
    Mutation(
        "expert-boundary",
        "src/wanjax/pipelines/model.py",
        ">= settings.boundary * TRAIN_STEPS",
        "> settings.boundary * TRAIN_STEPS + 1",
        "Wan 2.2's second expert runs a step that belongs to the first expert",
        (
            "pipelines/test_experts.py::test_experts_share_the_steps_at_the_boundary",
            "pipelines/test_experts.py::test_every_step_is_taken_once_by_its_expert",
        ),
    ),
    # media
    Mutation(
        "crop-rounding",
        "src/wanjax/media/pictures.py",
        "image.resize((round(image.width * scale), round(image.height * scale)), LANCZOS)",
        "image.resize((int(image.width * scale), int(image.height * scale)), LANCZOS)",
        "a picture has a black line at its edge",
        (
            "media/test_pictures.py::test_a_picture_is_stretched_cropped_or_padded",
            "media/test_pictures.py::test_a_picture_of_any_size_fills_the_frame",
        ),
    ),
    Mutation(
        "resize-filter",
        "src/wanjax/pipelines/image_processor.py",
        "image = image.resize((width, height), Image.Resampling.BICUBIC)",
        "image = image.resize((width, height), Image.Resampling.BILINEAR)",
        "the image encoder gets pictures that are resized differently than in its training",
        ("parity/test_vision.py::test_preprocessed_pictures_equal_those_of_transformers",),
    ),
    Mutation(
        "frame-times",
        "src/wanjax/media/video.py",
        "round(1000 * i / fps / unit) * unit",
        "round(1000 / fps / unit) * unit * i",
        "the length of an animation does not match its frame rate",
        ("media/test_videos.py::test_animations_have_their_frames_times_and_settings",),
    ),
    Mutation(
        "fps",
        "src/wanjax/media/video.py",
        '"-framerate", str(fps)',
        '"-framerate", str(int(fps) + 1)',
        "films play too fast",
        ("media/test_videos.py::test_videos_of_each_format_have_their_frames_and_settings",),
    ),
    # checkpoints and stores
    Mutation(
        "row-scale",
        "src/wanjax/checkpoints/dequantized.py",
        " / parts.tensor_names.divisor",
        "",
        "weights of 8-bit integers are 127 times too large",
        ("checkpoints/test_dequantized.py::test_integers_with_the_scale_of_127_are_dequantized",),
    ),
    Mutation(
        "block-scale",
        "src/wanjax/checkpoints/dequantized.py",
        "x = np.repeat(x, size, axis)",
        "x = np.concatenate([x] * size, axis)",
        "fp8 weights with a scale for each block are multiplied by the scales of other blocks",
        ("checkpoints/test_dequantized.py::test_every_name_and_shape_of_a_scale_is_dequantized",),
    ),
    Mutation(
        "table-rows",
        "converters/weight_rules.py",
        '*linear(f"{source}.to_k", f"{target}.k", rows=rows)',
        '*linear(f"{source}.to_k", f"{target}.k")',
        "RoPE rotates other channel pairs of keys than of queries, and every video is noise",
        ("parity/test_wan_transformer.py::test_a_block_and_its_attention_equal_those_of_diffusers",),
    ),
    Mutation(
        "lora-alpha",
        "src/wanjax/checkpoints/lora_scales.py",
        "return 1.0 if rank is None else number / rank",
        "return 1.0 if rank is None else number",
        "a LoRA is too strong by a factor of its rank",
        ("checkpoints/test_lora_files.py::test_factors_with_alpha_are_added_in_float32",),
    ),
    Mutation(
        "unpickling",
        "src/wanjax/checkpoints/torch_file.py",
        "        return PickledName(module, name)\n",
        "        return super().find_class(module, name)\n",
        "a file of weights can run any code",
        ("parity/test_torch_file.py::test_a_pickle_never_runs_code",),
    ),
    Mutation(
        "path-escape",
        "src/wanjax/stores/paths.py",
        'not {"", ".", ".."} & {*parts}',
        'not {"", "."} & {*parts}',
        "a name in a store's listing can write a file outside the destination folder",
        ("stores/test_paths.py::test_names_outside_the_folder_are_ignored",),
    ),
    Mutation(
        "hub-revision",
        "src/wanjax/checkpoints/hub.py",
        "snapshot_download, repository, revision=revision, ",
        "snapshot_download, repository, revision=None, ",
        "`--revision` is ignored: the newest weights are loaded",
        ("checkpoints/test_hub.py::test_the_requested_revision_is_downloaded",),
    ),
    Mutation(
        "atomic-rename",
        "src/wanjax/stores/writing.py",
        "            yield partial_path\n            partial_path.replace(path)\n",
        "            yield path\n",
        "a stopped run leaves an incomplete file under the video's name",
        ("stores/test_writing.py",),
    ),
    # training
    Mutation(
        "loss",
        "src/wanjax/training/objective.py",
        "return jnp.mean(jnp.square(predict(network) - target))",
        "return jnp.mean(jnp.abs(predict(network) - target))",
        "training minimises a different error than the reference",
        ("parity/test_training.py::test_training_a_lora_equals_torch",),
    ),
    Mutation(
        "resumed-rate",
        "src/wanjax/training/loop.py",
        "self.state = dict(self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract)))",
        "self.state = dict(self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract)))\n"
        '        self.state["optimizer"] = jax.tree.map(jax.numpy.zeros_like, abstract["optimizer"])',
        "a resumed training restarts the learning-rate schedule and the optimiser's averages",
        ("training/test_run.py::test_numbers_that_are_not_finite_are_never_written",),
    ),
    Mutation(
        "mean-weights",
        "src/wanjax/training/step.py",
        'state["ema"], 1.0 - static.ema_decay)',
        'state["ema"], static.ema_decay)',
        "the EMA of the weights is nearly equal to the last weights",
        ("training/test_loop.py::test_the_ema_moves_towards_the_weights",),
    ),
    Mutation(
        "accumulation",
        "src/wanjax/training/step.py",
        "a + b / jnp.asarray(parts, b.dtype)",
        "a + b",
        "gradients of accumulated batches are added instead of averaged",
        ("training/test_loop.py::test_accumulated_gradients_equal_those_of_the_full_batch",),
    ),
    Mutation(
        "caption-dropout",
        "src/wanjax/training/batches.py",
        ".random(len(clips)) < self.caption_dropout",
        ".random(len(clips)) >= self.caption_dropout",
        "training drops the captions that it should use, and uses the captions that it should drop",
        ("training/test_data.py::test_captions_are_dropped_at_their_rate",),
    ),
    # servers, batches and plans
    Mutation(
        "commit",
        "src/wanjax/jobs/databases.py",
        "'FULL' if durable else 'NORMAL'",
        "'NORMAL' if durable else 'FULL'",
        "after a power failure a server has lost requests that it had accepted",
        ("jobs/test_store.py::test_acknowledged_writes_are_on_the_disk",),
    ),
    Mutation(
        "requeue",
        "src/wanjax/jobs/store.py",
        "db.update(job.id, error=error and json.dumps(error), **REQUEUED_COLUMNS)",
        "db.update(job.id, position=db.tick(), error=error and json.dumps(error), **REQUEUED_COLUMNS)",
        "a video whose worker died waits behind all others",
        ("jobs/test_store.py::test_jobs_of_dead_workers_are_requeued_first",),
    ),
    Mutation(
        "token",
        "src/wanjax/serve/auth.py",
        "hmac.compare_digest(token.encode(), self.token.encode())",
        "self.token.startswith(token)",
        "a server with a token accepts requests without the token",
        (
            "serve/test_refusals.py::test_a_part_of_a_token_gives_no_access",
            "serve/test_refusals.py::test_a_valid_token_gives_access",
        ),
    ),
    Mutation(
        "batch-resume",
        "src/wanjax/jobs/batch.py",
        "if job.is_over and (task",
        "if not job.is_over and (task",
        "a batch reports videos that are not made yet",
        ("jobs/test_batch.py::test_each_task_ends_once",),
    ),
    Mutation(
        "plan-memory",
        "src/wanjax/plan/estimate.py",
        "spare_bytes_per_chip=memory - largest.peak_bytes - program.resident_bytes",
        "spare_bytes_per_chip=memory - largest.peak_bytes",
        "a plan says that a video fits although other loaded networks use the memory",
        ("plan/test_estimate.py::test_loaded_networks_are_counted_in_each_stage",),
    ),
    Mutation(
        "price-unit",
        "src/wanjax/plan/scale.py",
        "devices * slice_count * rental_seconds / 3600",
        "devices * slice_count * rental_seconds / 60",
        "the chip-hours and the cost of many videos are 60 times too high",
        ("plan/test_scale.py::test_slices_hours_and_cost_are_computed",),
    ),
)


class Result(NamedTuple):
    """The result of a mutation: whether a test caught it, the test or the timeout that did, and the seconds."""

    mutation: Mutation
    caught: bool
    failure: str
    seconds: float


class Copy:
    """A copy of the tree in a folder. Its tests import the package from the copy."""

    def __init__(self, folder: Path):
        self.folder = folder
        git_output = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        for name in filter(None, git_output.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "src/wanjax/converters").symlink_to(folder / "converters")  # as the package has it when installed
        script = "import wanjax, wanjax.converters as c; print(wanjax.__file__, c.__file__, sep='\\n')"
        command = [sys.executable, "-c", script]
        completed = subprocess.run(
            command, cwd=folder, env=self.environment, check=True, capture_output=True, text=True
        )
        imported_files = completed.stdout.splitlines()
        if not all(Path(file).resolve().is_relative_to(folder.resolve()) for file in imported_files):
            raise RuntimeError(f"tests in {folder} would import {imported_files}: remove them from the path")

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": f"{self.folder}/src:{self.folder}",
            "XDG_CACHE_HOME": f"{self.folder}/.cache",
        }

    @contextmanager
    def changed(self, mutation: Mutation):
        """Change the file in the `with` block."""
        file = self.folder / mutation.file
        text = file.read_text(encoding="utf-8")
        try:
            file.write_text(mutation.apply(text), encoding="utf-8")
            self._forget(file)
            yield
        finally:
            file.write_text(text, encoding="utf-8")
            self._forget(file)

    @staticmethod
    def _forget(file: Path) -> None:
        """Remove the bytecode of a file, since two changes within a second may have the same time and size."""
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def test(self, tests: Iterable[str], timeout: float | None) -> tuple[int, str]:
        """Run tests; return pytest's exit status, or 124 after a timeout, and its output."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
        paths = [f"tests/{test}" for test in tests]
        with subprocess.Popen(
            [*command, *paths],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # also ends the processes that tests started
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return 124, ""


def run(mutations: Sequence[Mutation], jobs: int, timeout: float) -> list[Result]:
    """Return the result of each mutation, and print it when it is known; exit if tests fail without a mutation."""
    with TemporaryDirectory(prefix="wanjax-mutations-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))
        first = copies.get()
        tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
        start = perf_counter()
        status, output = first.test(tests, None)
        if status != 0:
            sys.exit(f"{output}\nthese tests fail without a mutation: fix them first")
        print(f"{len(tests)} tests or files pass without a mutation, in {perf_counter() - start:.0f} s", flush=True)
        copies.put(first)

        def run_mutation(mutation: Mutation) -> Result:
            copy, start = copies.get(), perf_counter()
            try:
                with copy.changed(mutation):
                    status, output = copy.test(mutation.tests, timeout)
            finally:
                copies.put(copy)
            if status == NO_TESTS_RUN:
                raise RuntimeError(f"{mutation.name}: no test of {', '.join(mutation.tests)} was run: name quick tests")
            failed = (line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
            failure = next(failed, "a timeout" if status == 124 else f"exit status {status}")
            result = Result(mutation, status != 0, failure if status else "", perf_counter() - start)
            outcome = f"by {failure.removeprefix('FAILED tests/')}" if result.caught else f"so: {mutation.breaks}"
            print(
                f"{'caught' if result.caught else 'SURVIVED':9} {mutation.name:16} {outcome} ({result.seconds:.0f} s)",
                flush=True,
            )
            return result

        with ThreadPoolExecutor(jobs) as pool:
            try:
                return list(pool.map(run_mutation, mutations))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutations", description=(__doc__ or "").partition("\n\n")[0])
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="run only this mutation; may be repeated"
    )
    parser.add_argument("--jobs", type=int, choices=range(1, MAX_JOBS + 1), default=MAX_JOBS, help="at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for the tests of one (%(default)g)")
    parser.add_argument("--list", action="store_true", help="print the effect of each mutation, and run nothing")
    arguments = parser.parse_args()
    selected = [mutation for mutation in MUTATIONS if arguments.only is None or mutation.name in arguments.only]
    for mutation in selected:
        mutation.apply((ROOT / mutation.file).read_text(encoding="utf-8"))
    if arguments.list:
        for mutation in selected:
            print(f"{mutation.name:16} {mutation.breaks}")
        return
    results = run(selected, arguments.jobs, arguments.timeout)
    surviving = [result.mutation for result in results if not result.caught]
    print(f"{len(results) - len(surviving)} of {len(results)} mutations are caught")
    for mutation in surviving:
        print(f"survived: {mutation.name} ({mutation.file}): {mutation.survives or mutation.breaks}")
    sys.exit(any(not mutation.survives for mutation in surviving))


if __name__ == "__main__":
    main()
