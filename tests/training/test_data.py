# SPDX-License-Identifier: Apache-2.0
"""Data sets: folders and tables, buckets of sizes and lengths, and what is told of files that cannot be used."""

import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.support.clips import CAPTIONS, write_clips
from tests.support.words import naming, says
from wanjax.errors import WanjaxError
from wanjax.training.batches import Batches
from wanjax.training.clips import Bucket, Cutting, lengths, nearest
from wanjax.training.data import KEPT, list_data
from wanjax.training.encoded import Piece


def test_a_folder_with_captions_beside_its_clips(tmp_path):
    folder = write_clips(tmp_path / "a", 3)
    (folder / "alone.txt").write_text("no clip")
    (folder / "mute.png").write_bytes((write_clips(tmp_path / "b", 1, frames=1, suffix=".png") / "0.png").read_bytes())
    found = list_data(folder)
    assert [(x.file.name, x.caption) for x in found.examples] == [(f"{i}.gif", CAPTIONS[i]) for i in range(3)]
    assert len(found.left_out) == 2
    assert says(found.left_out[0], "mute.png caption")
    assert says(found.left_out[1], "alone.txt clip")


def test_clips_come_in_natural_order_without_what_is_none(tmp_path):
    folder = write_clips(tmp_path / "a", 12)
    (folder / "later").mkdir()
    for i in range(12):
        for suffix in (".gif", ".txt"):
            (folder / f"{i}{suffix}").rename(folder / ("later" if i == 3 else "") / f"Clip_{i}{suffix}")
    for name in ("._Clip_1.gif", ".DS_Store", "Thumbs.db", "notes.pdf", "later/.hidden.txt"):
        (folder / name).write_bytes(b"no clip")
    (folder / KEPT).mkdir()
    (folder / KEPT / "clips.jsonl").write_text("{}")
    found = list_data(folder)
    assert [x.file.name for x in found.examples] == [f"Clip_{i}.gif" for i in (0, 1, 2, *range(4, 12), 3)]
    assert (found.left_out, found.others) == ([], 5)


@pytest.mark.parametrize("columns", [("file_name", "text"), ("video", "prompt"), ("video_path", "caption")])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_tables_with_the_columns_in_use(tmp_path, columns, kind):
    folder = write_clips(tmp_path, 2)
    file, text = columns
    rows = [{file: "0.gif", text: "one, with a comma", "repeats": 3}, {file: "gone.gif", text: "two"}]
    if kind == "csv":
        lines = [f"{file},{text},repeats", '0.gif,"one, with a comma",3', "gone.gif,two,"]
    else:
        lines = [json.dumps(row) for row in rows]
    (folder / f"metadata.{kind}").write_text("\n".join(lines))
    for data in (folder, folder / f"metadata.{kind}"):
        found = list_data(data)
        assert [(x.file.name, x.caption, x.repeats) for x in found.examples] == [("0.gif", "one, with a comma", 3)]
        assert found.left_out == ["row 2 of metadata." + kind + " names gone.gif, which is not there"]


def test_rows_say_what_to_preserve(tmp_path):
    folder = write_clips(tmp_path, 4)
    words = (True, "Yes", False, None)
    rows = [{"file_name": f"{i}.gif", "text": "x", "preserve": word} for i, word in enumerate(words)]
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert [x.preserve for x in list_data(folder).examples] == [True, True, False, False]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "clip picture caption"),
        ({"a.mp4": "x"}, "a.mp4 caption a.txt"),
        ({"a.txt": "x"}, "a.txt caption clip"),
        ({"metadata.csv": "name,text\na.mp4,b"}, "column file_name"),
        ({"metadata.csv": "file_name,text\na.mp4,b"}, "a.mp4"),
        ({"metadata.jsonl": "{"}, "table clips"),
        ({"metadata.jsonl": "[1]"}, "JSON"),
        ({"a.mp4": "x", "metadata.csv": "file_name,text,repeats\na.mp4,b,no"}, "has repeats 'no'"),
        ({"a.mp4": "x", "metadata.csv": "file_name,text,preserve\na.mp4,b,2"}, "'2' true false"),
    ],
)
def test_one_sentence_for_data_that_cannot_be_used(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(WanjaxError, match=naming(sentence)):
        list_data(tmp_path)
    with pytest.raises(WanjaxError, match="there is no folder or table"):
        list_data(tmp_path / "none")


def cutting(cut="head", longest=9, **more):
    given = {"sizes": ((32, 32), (32, 48), (48, 32)), "lengths": lengths(longest, 4), "fps": 8, "resize": "crop"}
    return Cutting(cut=cut, **given | more)


def test_lengths_are_halved_and_of_the_model_s_form():
    assert lengths(81, 4) == (81, 41, 21, 9, 5, 1)
    assert lengths(49, 8) == (49, 25, 9, 1)
    assert lengths(81, 4, shortest=9) == (81, 41, 21, 9)
    assert nearest((480, 832), [(32, 32), (32, 48), (48, 32)]) == (32, 48)


def test_clips_are_cut_to_buckets(tmp_path):
    wide = write_clips(tmp_path / "a", 1, frames=23, size=(40, 70)) / "0.gif"
    [head] = cutting().pieces(wide)
    assert head.shape == (9, 32, 48, 3)
    windows = list(cutting("windows").pieces(wide))
    assert [x.shape for x in windows] == [(9, 32, 48, 3)] * 2
    np.testing.assert_array_equal(windows[0], head)
    [spread] = cutting("uniform").pieces(wide)
    [whole] = cutting(longest=25, lengths=(23,)).pieces(wide)
    np.testing.assert_array_equal(spread, whole[[round(i * 22 / 8) for i in range(9)]])
    short = write_clips(tmp_path / "b", 1, frames=7) / "0.gif"
    [clip] = cutting().pieces(short)
    assert clip.shape == (5, 32, 32, 3)
    picture = write_clips(tmp_path / "c", 1, frames=1, suffix=".png") / "0.png"
    [clip] = cutting().pieces(picture)
    assert clip.shape == (1, 32, 32, 3)


def test_a_clip_too_short_and_a_damaged_one_are_told(tmp_path):
    short = write_clips(tmp_path, 1, frames=3) / "0.gif"
    with pytest.raises(WanjaxError, match=naming("3 frames 8 5")):
        list(cutting().pieces(short))
    damaged = tmp_path / "damaged.mp4"
    damaged.write_bytes(b"no film")
    with pytest.raises(WanjaxError, match="cannot be read as a video"):
        list(cutting().pieces(damaged))


def pieces(counts, tmp_path):
    found = []
    for bucket, count in counts.items():
        found += [Piece(tmp_path / f"{bucket.frames}-{i}", tmp_path / f"t{i}", bucket) for i in range(count)]
    return found


def test_batches_follow_from_the_seed_and_the_step(tmp_path):
    counts = {Bucket(9, 32, 32): 5, Bucket(5, 32, 32): 3}
    batches, again = (Batches(pieces(counts, tmp_path), 2, 7, empty=tmp_path / "none") for _ in range(2))
    assert batches.per_epoch == 3 + 2
    epoch = [batches.at(step) for step in range(5)]
    assert epoch == [again.at(step) for step in range(5)]
    assert {x.latents for batch in epoch for x in batch} == {x.latents for x in pieces(counts, tmp_path)}
    assert all(len({x.latents.name.partition("-")[0] for x in batch}) == 1 for batch in epoch)
    assert epoch != [batches.at(step) for step in range(5, 10)]


def test_captions_are_dropped_at_their_rate(tmp_path):
    batches = Batches(pieces({Bucket(9, 32, 32): 8}, tmp_path), 8, 0, empty=tmp_path / "none", dropped=0.25)
    shown = [x for step in range(100) for x in batches.at(step)]
    assert 0.2 < np.mean([x.text.name == "none" for x in shown]) < 0.3


def test_with_clips_to_preserve_what_has_no_caption_is_preserved_too(tmp_path):
    given = pieces({Bucket(9, 32, 32): 8}, tmp_path)
    given[3] = replace(given[3], preserve=True)
    batches = Batches(given, 8, 0, empty=tmp_path / "none", dropped=0.25)
    assert batches.preserves
    for x in batches.at(0) + batches.at(1):
        assert x.preserved == (x.text.name == "none" or x.latents == given[3].latents)
    batches = Batches(given, 8, 0, empty=tmp_path / "none", dropped=0.25, uncaptioned=0.5)
    for x in batches.at(0) + batches.at(1):
        assert x.preserved == (1.0 if x.latents == given[3].latents else 0.5 * (x.text.name == "none"))


def test_twice_the_captions_take_twice_the_calls(tmp_path):
    def calls(count: int) -> int:
        """Returns the calls of functions, Python's own too, that it takes to list so many clips."""
        folder, made = tmp_path / str(count), Counter()
        folder.mkdir()
        for index in range(count):
            (folder / f"{index}.txt").write_text(f"caption {index}")
            (folder / f"{index}.mp4").touch()
        sys.setprofile(lambda frame, event, value: made.update([event.endswith("call")]))
        try:
            found = list_data(folder)
        finally:
            sys.setprofile(None)
        assert len(found.examples) == count
        return made[True]

    assert calls(200) < 2.5 * calls(100)
