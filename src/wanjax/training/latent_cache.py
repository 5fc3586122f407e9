# SPDX-License-Identifier: Apache-2.0
"""A cache of encoded clips and captions, in the folder of the data. The encoders of the pipeline compute the entries.

The name of each file is a digest of everything that determines its contents: the clip or caption, how clips are cut,
and the weights of the encoders. Clips are read, encoded and written one at a time. The encoders are freed before
training.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from wanjax.checkpoints.files import SafetensorsFile, content_digest, load_safetensors, save_safetensors
from wanjax.errors import WanjaxError, WriteError
from wanjax.media.pictures import READER_VERSION, Pictures
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.video_metadata import VERSION
from wanjax.stores.writing import check_folder
from wanjax.training.clips import Bucket, Cutting
from wanjax.training.data import DataListing, Example, summarize_first

INDEX = "clips.jsonl"
LATENTS = "latents"
NEGATIVE = "negative_"
MAX_FILES = 1000  # the maximum number of files of a checkpoint to digest
ReportProgress = Callable[[str, int, int], Any]  # unit, done, total


@dataclass(frozen=True)
class EncodedClip:
    """An encoded clip.

    Args:
        latents: The file of the clip's latents.
        text: The file of the caption's features.
        bucket: The shape of the clip.
        repeats: How often the clip is in an epoch.
        preserve: Whether the clip is for prior preservation.
    """

    latents: Path
    text: Path
    bucket: Bucket
    repeats: int = 1
    preserve: bool = False


CLIP_FILES = "clip-*.safetensors"


class LatentCache:
    """A folder with the latents and features that the encoders of one model computed."""

    def __init__(self, folder: Path, pipe: Pipeline):
        self.folder, self.pipe = folder, pipe
        check_folder(folder, "latent_cache")
        self._weights = encoder_fingerprint(pipe)

    def encode(self, listing: DataListing, cutting: Cutting, report: ReportProgress) -> list[EncodedClip]:
        """Encode the clips and captions that are not in the cache yet, and return all clips.

        Adds sentences about skipped clips and truncated captions to the listing. Raises WanjaxError if no clip can be
        read, or if the folder cannot be written.
        """
        clips = self._encode_clips(listing, cutting, report)
        self.pipe.free()
        if not clips:
            raise WanjaxError(f"no clip of {listing.folder} can be used: {summarize_first(listing.skipped)}")
        listing.truncated.extend(self._truncated(example for example, _ in clips))
        text_files = self.encode_captions(sorted({example.caption for example, _ in clips} | {""}), report)
        self.pipe.free()
        return [
            EncodedClip(
                self.folder / name, text_files[example.caption], Bucket(*shape), example.repeats, example.preserve
            )
            for example, clip_files in clips
            for name, *shape in clip_files
        ]

    def _truncated(self, examples: Iterable[Example]) -> Iterator[str]:
        """Yield a sentence about each caption that the model truncates, including captions in the cache."""
        truncations = cache(self.pipe.truncations)
        for example in examples:
            for truncation in truncations(example.caption):
                yield f"{example.file.name}: {replace(truncation, name=truncation.name.replace('prompt', 'caption'))}"

    def _encode_clips(
        self, listing: DataListing, cutting: Cutting, report: ReportProgress
    ) -> list[tuple[Example, list[list[Any]]]]:
        """Encode the clips of all readable examples. For each clip, return [file name, frames, height, width]."""
        index, digests = self._read_index()
        examples: list[tuple[Example, list[list[Any]]]] = []
        with (self.folder / INDEX).open("a", encoding="utf-8") as file:
            for number, example in enumerate(listing.examples, 1):
                file_stamp = _file_stamp(example.file)
                if file_stamp not in digests:
                    digests[file_stamp] = content_digest(example.file)
                    file.write(json.dumps({"look": file_stamp, "digest": digests[file_stamp]}) + "\n")
                input_names = list(self.pipe.model.spec.required_inputs)
                clip_key = _digest([READER_VERSION, digests[file_stamp], asdict(cutting), input_names, self._weights])
                if clip_key not in index:
                    try:
                        index[clip_key] = [
                            self._encode_clip(f"{clip_key}-{i}", frames)
                            for i, frames in enumerate(cutting.clips(example.file))
                        ]
                    except WriteError:
                        raise
                    except WanjaxError as error:
                        listing.skipped.append(f"{example.file.name}: {error}")
                        continue
                    file.write(json.dumps({"key": clip_key, "clips": index[clip_key]}) + "\n")
                    file.flush()
                    report("clip", number, len(listing.examples))
                examples.append((example, index[clip_key]))
        return examples

    def _encode_clip(self, name: str, frames: np.ndarray) -> list[Any]:
        """Encode a clip, and return [file name, frames, height, width]."""
        count, height, width, _ = frames.shape
        settings = self.pipe.settings(size=(height, width), frames=count)
        input_frames = {"image": frames[0], "last_image": frames[-1]}
        pictures = Pictures(
            **{name: input_frames[name] for name in self.pipe.model.spec.required_inputs if name in input_frames}
        )
        encoded_inputs = self.pipe.model.encode_inputs(self.pipe.runtime, pictures, settings)
        tensors = {LATENTS: self.pipe.encode_video(frames), **encoded_inputs}
        file = CLIP_FILES.replace("*", name)
        save_safetensors(self.folder / file, {key: np.asarray(tensor) for key, tensor in tensors.items()})
        return [file, count, height, width]

    def encode_captions(
        self, captions: Sequence[str], report: ReportProgress = lambda unit, done, total: None
    ) -> dict[str, Path]:
        """Encode captions, and return their files. Two captions are encoded together, as a prompt and a negative
        prompt."""
        files = {text: self.folder / f"text-{_digest([text, self._weights])}.safetensors" for text in captions}
        existing_files = {path.name for path in self.folder.glob("text-*")}
        uncached, done = [text for text in captions if files[text].name not in existing_files], 0
        for pair in (uncached[i : i + 2] for i in range(0, len(uncached), 2)):
            settings = self.pipe.defaults.updated({"prompt": pair[0], "negative_prompt": pair[-1]})
            conditioning = self.pipe.model.encode_text(self.pipe.runtime, settings)._asdict()
            for text, prefix in zip(pair, ("", NEGATIVE), strict=False):
                names = {name for name in conditioning if NEGATIVE + name in conditioning}
                features = {name: np.asarray(conditioning[prefix + name]) for name in names}
                lengths = {name: str(x.shape[1]) for name, x in features.items()}
                save_safetensors(files[text], {name: trim_padding(x) for name, x in features.items()}, lengths)
            done += len(pair)
            report("caption", done, len(uncached))
        return files

    def _read_index(self) -> tuple[dict[str, list[list[Any]]], dict[str, str | None]]:
        """Return two mappings: from keys to cached clips whose files exist, and from file stamps to content digests."""
        try:
            lines = (self.folder / INDEX).read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}, {}
        existing_files = {path.name for path in self.folder.glob("clip-*")}
        clips: dict[str, list[list[Any]]] = {}
        digests: dict[str, str | None] = {}
        for line in lines:
            try:
                entry = json.loads(line)
                if "look" in entry:
                    digests[entry["look"]] = entry["digest"]
                elif all(name in existing_files for name, *_ in entry["clips"]):
                    clips[entry["key"]] = entry["clips"]
            except (ValueError, KeyError, TypeError):  # a truncated line
                continue
        return clips, digests


def encoder_fingerprint(pipe: Pipeline) -> dict[str, Any]:
    """Return JSON that identifies the weights of a pipeline's encoders: the model, its options and its files."""
    identity = {name: getattr(pipe.defaults, name) for name in ("dtype", "vae_dtype", "follow")}
    identity |= {"param_dtype": pipe.components.options.get("param_dtype"), "version": VERSION}
    source = pipe.components.source
    if source is None:
        return identity | {"model": pipe.model_name}
    files: list[Any] = []
    if source.revision is None:  # the files of a folder can change while its path stays the same
        paths = sorted(
            path
            for path in source.root.rglob("*")
            if path.is_file() and not _is_denoiser_file(path.relative_to(source.root))
        )
        files = [(str(path.relative_to(source.root)), content_digest(path)) for path in paths[:MAX_FILES]]
    return identity | {"origin": source.published_name, "revision": source.revision, "files": files}


def _is_denoiser_file(path: Path) -> bool:
    return path.parts[0].startswith("transformer")


def _file_stamp(file: Path) -> str:
    """Return a digest of a file's path, size and times. If this digest changes, the digest of the file's contents is
    computed again."""
    try:
        status = file.stat()
    except OSError as error:
        raise WanjaxError(f"{file} cannot be read: {error.strerror or error}") from error
    return _digest([str(file.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns])


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:24]


def trim_padding(x: np.ndarray) -> np.ndarray:
    """Remove the padding, which is rows of zeros, from the end of features [1 S ...]."""
    rows = np.flatnonzero(x[0].reshape(x.shape[1], -1).any(axis=1))
    return np.ascontiguousarray(x[:, : (rows[-1] + 1 if len(rows) else 0)])


def load_features(file: Path) -> dict[str, np.ndarray]:
    """Load the features of a caption, padded to their full length."""
    tensors_file = SafetensorsFile(file)
    features = {}
    for name in tensors_file.specs:
        tensor = tensors_file.read(name)
        padding = int(tensors_file.metadata[name]) - tensor.shape[1]
        features[name] = np.pad(tensor, [(0, padding if axis == 1 else 0) for axis in range(tensor.ndim)])
    return features


def join_batch(files: Iterable[tuple[Path, Path]], conditioning_type: type[Any]) -> tuple[np.ndarray, Any]:
    """Load a batch: the latents [B C T H W], and the conditioning, of the type `conditioning_type`."""
    clips, captions = [], []
    for latents_file, text_file in files:
        clips.append(load_safetensors(latents_file))
        captions.append(load_features(text_file))
    fields: dict[str, Any] = {}
    for name in clips[0]:
        fields[name] = np.concatenate([clip[name] for clip in clips])
    latents = fields.pop(LATENTS)
    for name in captions[0]:
        fields[name] = fields[NEGATIVE + name] = np.concatenate([features[name] for features in captions])
    return latents, conditioning_type(**fields)


def bucket_summaries(clips: Sequence[EncodedClip]) -> Iterator[str]:
    """Yield a text with the number of clips and the shape of each bucket, the largest bucket first."""
    counts: dict[Bucket, int] = {}
    for clip in clips:
        counts[clip.bucket] = counts.get(clip.bucket, 0) + clip.repeats
    for bucket, count in sorted(counts.items(), key=lambda bucket_and_count: -bucket_and_count[1]):
        yield f"{count} of {bucket}"


def clip_fingerprint(clip: EncodedClip) -> dict[str, Any]:
    """Return JSON that identifies a clip, so that a resumed training run recognises its data."""
    training_fields = {"repeats": clip.repeats, "preserve": clip.preserve}
    return {"latents": clip.latents.name, "text": clip.text.name, **asdict(clip.bucket), **training_fields}
