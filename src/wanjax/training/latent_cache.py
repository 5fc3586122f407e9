# SPDX-License-Identifier: Apache-2.0
"""Latents of clips and features of captions, made once by the pipeline's own stages, and kept beside the data.

Each file's name is a digest of all that it depends on: the clip or caption, the way of cutting, and the weights. Clips
are read, encoded and written one at a time, and every encoder is freed before training.
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
from wanjax.training.data import Example, Listing, summarize_first

INDEX = "clips.jsonl"
LATENTS = "latents"
NEGATIVE = "negative_"
LISTED = 1000  # files of a checkpoint
ReportProgress = Callable[[str, int, int], Any]  # the unit, and how many of how many are done


@dataclass(frozen=True)
class EncodedClip:
    """An encoded clip: the files of its latents and its caption, its bucket, and what `Example` says of it."""

    latents: Path
    text: Path
    bucket: Bucket
    repeats: int = 1
    preserve: bool = False


class LatentCache:
    """The folder of what was encoded for one model."""

    def __init__(self, folder: Path, pipe: Pipeline):
        self.folder, self.pipe = folder, pipe
        check_folder(folder)
        self._weights = encoder_identity(pipe)

    def encode(self, listing: Listing, cutting: Cutting, report: ReportProgress) -> list[EncodedClip]:
        """Encode what is not there yet, and return all clips.

        Adds to the listing's sentences on what is left out or cut. Raises WanjaxError where no clip can be read, and
        where the folder cannot be written.
        """
        clips = self._clips(listing, cutting, report)
        self.pipe.free()
        if not clips:
            raise WanjaxError(f"no clip of {listing.folder} can be used: {summarize_first(listing.left_out)}")
        listing.cut.extend(self._cut(example for example, _ in clips))
        texts = self.texts(sorted({example.caption for example, _ in clips} | {""}), report)
        self.pipe.free()
        return [
            EncodedClip(self.folder / name, texts[example.caption], Bucket(*shape), example.repeats, example.preserve)
            for example, files in clips
            for name, *shape in files
        ]

    def _cut(self, examples: Iterable[Example]) -> Iterator[str]:
        """Yield a sentence on each caption of which the model does not read the end, whether it was encoded before."""
        cut = cache(self.pipe.truncations)
        for example in examples:
            for truncation in cut(example.caption):
                yield f"{example.file.name}: {replace(truncation, name=truncation.name.replace('prompt', 'caption'))}"

    def _clips(
        self, listing: Listing, cutting: Cutting, report: ReportProgress
    ) -> list[tuple[Example, list[list[Any]]]]:
        """Return the examples that can be read, each with the file and the bucket's sizes of its clips."""
        index, digests = self._index()
        examples: list[tuple[Example, list[list[Any]]]] = []
        with (self.folder / INDEX).open("a", encoding="utf-8") as file:
            for done, example in enumerate(listing.examples, 1):
                file_stamp = _file_stamp(example.file)
                if file_stamp not in digests:
                    digests[file_stamp] = content_digest(example.file)
                    file.write(json.dumps({"look": file_stamp, "digest": digests[file_stamp]}) + "\n")
                input_names = list(self.pipe.model.spec.needs)
                key = _digest([READER_VERSION, digests[file_stamp], asdict(cutting), input_names, self._weights])
                if key not in index:
                    try:
                        index[key] = [self._clip(f"{key}-{i}", x) for i, x in enumerate(cutting.clips(example.file))]
                    except WriteError:
                        raise
                    except WanjaxError as error:
                        listing.left_out.append(f"{example.file.name}: {error}")
                        continue
                    file.write(json.dumps({"key": key, "clips": index[key]}) + "\n")
                    file.flush()
                    report("clip", done, len(listing.examples))
                examples.append((example, index[key]))
        return examples

    def _clip(self, name: str, frames: np.ndarray) -> list[Any]:
        """Encode a clip; return the name of its file, and its frames, height and width."""
        count, height, width, _ = frames.shape
        settings = self.pipe.settings(size=(height, width), frames=count)
        ends = {"image": frames[0], "last_image": frames[-1]}
        pictures = Pictures(**{name: ends[name] for name in self.pipe.model.spec.needs if name in ends})
        digests = self.pipe.model.encode_inputs(self.pipe.runtime, pictures, settings)
        fields = {LATENTS: self.pipe.encode_video(frames), **digests}
        file = f"clip-{name}.safetensors"
        save_safetensors(self.folder / file, {field: np.asarray(x) for field, x in fields.items()})
        return [file, count, height, width]

    def texts(
        self, captions: Sequence[str], report: ReportProgress = lambda unit, done, total: None
    ) -> dict[str, Path]:
        """Encode captions, two at a time, as a prompt and a negative one; return their files."""
        files = {text: self.folder / f"text-{_digest([text, self._weights])}.safetensors" for text in captions}
        existing = {path.name for path in self.folder.glob("text-*")}
        missing, done = [text for text in captions if files[text].name not in existing], 0
        for pair in (missing[i : i + 2] for i in range(0, len(missing), 2)):
            conditioning = self.pipe.encode_prompts(pair[0], pair[-1])._asdict()
            for text, prefix in zip(pair, ("", NEGATIVE), strict=False):
                fields = {name for name in conditioning if NEGATIVE + name in conditioning}
                features = {name: np.asarray(conditioning[prefix + name]) for name in fields}
                lengths = {name: str(x.shape[1]) for name, x in features.items()}
                save_safetensors(files[text], {name: shortened(x) for name, x in features.items()}, lengths)
            done += len(pair)
            report("caption", done, len(missing))
        return files

    def _index(self) -> tuple[dict[str, list[list[Any]]], dict[str, str | None]]:
        """Return the clips that were made before, by key, and digests of files by their looks.

        Clips whose files are gone are made again.
        """
        try:
            lines = (self.folder / INDEX).read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}, {}
        existing = {path.name for path in self.folder.glob("clip-*")}
        clips: dict[str, list[list[Any]]] = {}
        digests: dict[str, str | None] = {}
        for line in lines:
            try:
                entry = json.loads(line)
                if "look" in entry:
                    digests[entry["look"]] = entry["digest"]
                elif all(name in existing for name, *_ in entry["clips"]):
                    clips[entry["key"]] = entry["clips"]
            except (ValueError, KeyError, TypeError):  # a line that was cut off
                continue
        return clips, digests


def encoder_identity(pipe: Pipeline) -> dict[str, Any]:
    """Return what tells the weights of a pipeline's encoders apart: the model, options, and local files."""
    identity = {name: getattr(pipe.defaults, name) for name in ("dtype", "vae_dtype", "follow")}
    identity |= {"param_dtype": pipe.components.options.get("param_dtype"), "version": VERSION}
    source = pipe.components.source
    if source is None:
        return identity | {"model": pipe.defaults.model}
    files: list[Any] = []
    if source.revision is None:  # a folder, whose files may be replaced
        paths = sorted(x for x in source.root.rglob("*") if x.is_file() and not _denoises(x.relative_to(source.root)))
        files = [(str(x.relative_to(source.root)), content_digest(x)) for x in paths[:LISTED]]
    return identity | {"origin": source.origin, "revision": source.revision, "files": files}


def _denoises(path: Path) -> bool:
    return path.parts[0].startswith("transformer")


def _file_stamp(file: Path) -> str:
    """Return what a file looks like without being read: with another look its contents are read again."""
    try:
        state = file.stat()
    except OSError as error:
        raise WanjaxError(f"{file} cannot be read: {error.strerror or error}") from error
    return _digest([str(file.absolute()), state.st_size, state.st_mtime_ns, state.st_ctime_ns])


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:24]


def shortened(x: np.ndarray) -> np.ndarray:
    """Return features [1 S ...] without the rows of zeros at the end, which padding has."""
    rows = np.flatnonzero(x[0].reshape(x.shape[1], -1).any(axis=1))
    return np.ascontiguousarray(x[:, : (rows[-1] + 1 if len(rows) else 0)])


def load_text(file: Path) -> dict[str, np.ndarray]:
    """Return the features of a caption, padded to their full length again."""
    opened = SafetensorsFile(file)
    features = {}
    for name in opened.specs:
        x = opened.read(name)
        rest = int(opened.metadata[name]) - x.shape[1]
        features[name] = np.pad(x, [(0, rest if axis == 1 else 0) for axis in range(x.ndim)])
    return features


def join_batch(files: Iterable[tuple[Path, Path]], conditioning_type: type[Any]) -> tuple[np.ndarray, Any]:
    """Return the latents of a batch [B C T H W], and what was encoded beside them, as `encode` would return it."""
    clips, texts = [], []
    for latents, text in files:
        clips.append(load_safetensors(latents))
        texts.append(load_text(text))
    fields: dict[str, Any] = {}
    for name in clips[0]:
        fields[name] = np.concatenate([clip[name] for clip in clips])
    latents = fields.pop(LATENTS)
    for name in texts[0]:
        fields[name] = fields[NEGATIVE + name] = np.concatenate([text[name] for text in texts])
    return latents, conditioning_type(**fields)


def bucket_summaries(clips: Sequence[EncodedClip]) -> Iterator[str]:
    """Yield a sentence for each bucket, with the number of its clips."""
    counts: dict[Bucket, int] = {}
    for clip in clips:
        counts[clip.bucket] = counts.get(clip.bucket, 0) + clip.repeats
    for bucket, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"{count} of {bucket}"


def clip_identity(clip: EncodedClip) -> dict[str, Any]:
    """Return a clip as JSON, by which a resumed training recognises its data."""
    training_fields = {"repeats": clip.repeats, "preserve": clip.preserve}
    return {"latents": clip.latents.name, "text": clip.text.name, **asdict(clip.bucket), **training_fields}
