# SPDX-License-Identifier: Apache-2.0
"""`generate` with several prompts or seeds: one load for all videos. Each is saved when it is done."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from wanjax.cli.extending import Extender
from wanjax.cli.names import VIDEOS, slug
from wanjax.cli.options import MOST_VIDEOS, is_typed
from wanjax.cli.processes import is_first, meet
from wanjax.cli.report import Report
from wanjax.cli.stages import Rendering, Reporting
from wanjax.errors import WanjaxError, reason
from wanjax.media import videos
from wanjax.media.pictures import Pictures
from wanjax.media.texts import decoded, read_text, trimmed
from wanjax.pipelines.seeds import checked_seed
from wanjax.stores.places import Place, names_in, place

HERE = ("devices", "version")  # entries of a record that do not say which video it is
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def generate(
    report: Report,
    *,
    prompt: str | None,
    prompts: str | None,
    seeds: str | None,
    count: int | None,
    folder: Path | None,
    out: str | None,
    force: bool,
    extend: Extender | None = None,
    **given: Any,
) -> None:
    """Makes a video of each prompt and seed into a folder, except those that are there already."""
    meet(report, given.get("processes"))
    for option in ("noise", "profile"):
        if given.pop(option) is not None:
            raise WanjaxError(f"--{option} is for one video: it cannot be given for several")
    listed = prompts_of(prompt, prompts)
    texts = list(dict.fromkeys(listed))
    if repeated := len(listed) - len(texts):
        report.note(f"note: {repeated} of the {len(listed)} prompts repeat another, and are made once")
    if seeds is not None and is_typed("seed"):
        raise WanjaxError(f"--seeds {seeds} is given beside --seed {given['seed']}: one way is enough")
    target = _target(folder, out)
    if extend is not None:
        texts = extend.all_of(texts, target)
    with nullcontext(target) if isinstance(target, Path) else TemporaryDirectory(prefix="wanjax-") as here:
        run = Rendering(report, Path(here), given | {"prompt": texts[0]}, offload=None)
        numbers = seeds_of(seeds, count, run.settings.seed)
        report.note(f"prompts: {len(texts)}, seeds: {len(numbers)}, into {target}")
        run.tell(numbers)
        pictures = {name: given[name] for name in Pictures._fields if given.get(name)}
        _save_all(report, run, target, force, texts, seeds=numbers, **pictures)
    report.table()


def _save_all(report: Report, run: Rendering, target: Place, force: bool, prompts: Sequence[str], **given: Any) -> None:
    """Makes the videos that are not there and saves each when it is done; `given` are keywords of `videos`."""
    wanted, there, found = [], [], set() if force else names_in(target)

    def skip(record: Mapping[str, Any]) -> bool:
        known = name_of(record) in found
        (there if known else wanted).append(record)
        return known

    run.ready_previews()
    made = run.pipe.videos(
        prompts,
        negative_prompt=run.settings.negative_prompt,
        callback=Reporting(run).stepped,
        tiling=run.tiling,
        batch_guidance=run.batch_guidance,
        skip=skip,
        **given,
        **_shared(run.settings.to_json()),
    )
    if there:
        report.note(f"{len(there)} of the videos are there already, {len(wanted)} are to be made")
    if wanted:
        run.try_output(target / name_of(wanted[0]), max(wanted, key=lambda record: len(record["prompt"])))
    with report.stage("videos"):
        start = perf_counter()
        for done, video in enumerate(made, 1):
            path = target / name_of(video.settings)
            if is_first():
                written = videos.write_video(path, video.frames, video.fps, video.settings)
                seconds = {"video": round(perf_counter() - start, 3)}  # its three stages, or their part of a batch
                report.made(written, video.settings, seconds=seconds)
            start = perf_counter()
            report.note(f"video {done} of {len(wanted)} is done")
    if run.previews:
        run.previews.wait()


def prompts_of(prompt: str | None, file: str | None) -> list[str]:
    """Returns the prompt, or the lines of a file of prompts, "-" for standard input, without empty ones.

    Raises WanjaxError where both are given, the file cannot be read, or it has no prompt.
    """
    if file is None:
        assert prompt is not None
        return [prompt]
    if prompt is not None:
        raise WanjaxError("--prompts is given beside a prompt: one way is enough")
    try:
        text = decoded(sys.stdin.buffer.read()) if file == "-" else read_text(Path(file).expanduser())
    except (OSError, ValueError) as error:
        raise WanjaxError(f"the prompts in {file} cannot be read: {reason(error)}") from error
    lines = [trimmed(line) for line in text.splitlines()]
    if found := [line for line in lines if line]:
        return found
    raise WanjaxError(f"{'standard input' if file == '-' else file} has no prompt: one on each line is right")


def seeds_of(listed: str | None, count: int | None, first: int) -> list[int]:
    """Returns the seeds of a list such as "1,5,8..11", or `count` seeds from the first on.

    Raises WanjaxError for another list, and where both are given.
    """
    if listed is None:
        return [checked_seed(seed) for seed in range(first, first + (count or 1))]
    if count is not None:
        raise WanjaxError("--seeds is given beside --count: one way is enough")
    found: list[int] = []
    for part in listed.split(","):
        if bounds := RANGE.fullmatch(part.strip()):
            low, high = int(bounds[1]), int(bounds[2])
            if high - low >= MOST_VIDEOS:
                raise WanjaxError(f"the seeds {part.strip()} are {high - low + 1:,} where {MOST_VIDEOS:,} are the most")
            found += range(low, high + 1)
        elif part.strip().isdecimal():
            found.append(int(part))
        else:
            raise WanjaxError(f"the seeds {listed!r} are no list of whole numbers such as 1,5,8..11")
    if not found:
        raise WanjaxError(f"the seeds {listed!r} are none at all: 0..3 are four")
    return [checked_seed(seed) for seed in dict.fromkeys(found)]


def name_of(record: Mapping[str, Any]) -> str:
    """Returns the name of a video: its prompt, its seed, and a digest of all that shapes it."""
    told = {name: value for name, value in record.items() if name not in HERE}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return f"{slug(record['prompt'])}-{record['seed']}-{digest}.mp4"


def _target(folder: Path | None, out: str | None) -> Place:
    """Returns the folder of the videos, which may be in a store."""
    if folder is not None:
        raise WanjaxError("--dir keeps the stages of one video: --out names the folder of several")
    if out is not None and Path(out).suffix:
        raise WanjaxError(f"--out names the file {out} for several videos: a folder is right")
    return VIDEOS if out is None else place(out)


def _shared(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that all videos share, which a call of the pipeline takes."""
    own = ("model", "dtype", "prompt", "original_prompt", "negative_prompt", "seed")
    return {name: value for name, value in settings.items() if name not in own and value is not None}
