# SPDX-License-Identifier: Apache-2.0
"""Data sets: folders and tables, buckets of sizes and lengths, and messages about unusable files."""

import codecs
import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.support.clips import CAPTIONS, write_clips
from tests.support.words import has_line_with, line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.video import write_video
from wanjax.training.batches import Batches
from wanjax.training.clips import Bucket, Cutting, bucket_lengths, nearest_size
from wanjax.training.data import CACHE_FOLDER, check_outside, list_data
from wanjax.training.latent_cache import EncodedClip


def test_a_folder_of_clips_and_captions(tmp_path):
    folder = write_clips(tmp_path / "a", 3)
    (folder / "alone.txt").write_text("no clip")
    (folder / "mute.png").write_bytes((write_clips(tmp_path / "b", 1, frames=1, suffix=".png") / "0.png").read_bytes())
    result = list_data(folder)
    assert [(x.file.name, x.caption) for x in result.examples] == [(f"{i}.gif", CAPTIONS[i]) for i in range(3)]
    assert len(result.skipped) == 2
    assert has_line_with(result.skipped[0], "mute.png caption")
    assert has_line_with(result.skipped[1], "alone.txt clip")


def test_clips_are_in_natural_order_without_other_files(tmp_path):
    folder = write_clips(tmp_path / "a", 12)
    (folder / "later").mkdir()
    for i in range(12):
        for suffix in (".gif", ".txt"):
            (folder / f"{i}{suffix}").rename(folder / ("later" if i == 3 else "") / f"Clip_{i}{suffix}")
    for name in ("._Clip_1.gif", ".DS_Store", "Thumbs.db", "notes.pdf", "later/.hidden.txt"):
        (folder / name).write_bytes(b"no clip")
    (folder / CACHE_FOLDER).mkdir()
    (folder / CACHE_FOLDER / "clips.jsonl").write_text("{}")
    result = list_data(folder)
    assert [x.file.name for x in result.examples] == [f"Clip_{i}.gif" for i in (0, 1, 2, *range(4, 12), 3)]
    assert (result.skipped, result.num_ignored) == ([], 5)


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
        result = list_data(data)
        assert [(x.file.name, x.caption, x.repeats) for x in result.examples] == [("0.gif", "one, with a comma", 3)]
        assert result.skipped == ["row 2 of metadata." + kind + " names gone.gif, which does not exist"]


CAFE = "ein café, naïve"
READ = [
    CAFE.encode(),
    codecs.BOM_UTF8 + CAFE.encode(),
    CAFE.encode("utf-16"),
    codecs.BOM_UTF16_BE + CAFE.encode("utf-16-be"),
]
UNREAD = [
    CAFE.encode("cp1252"),
    "一只红色的猫".encode("gbk"),
    "赤い猫".encode("shift-jis"),
    "赤い猫".encode("iso2022-jp"),
    CAFE.encode("utf-16-le"),
    CAFE.encode("utf-32"),
    CAFE.encode("utf-16")[:-1],
]
EMPTY = [b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, 2 * codecs.BOM_UTF8, b"\r\n \t", "\u200b\xa0\n".encode()]


@pytest.mark.parametrize("data", READ + UNREAD + EMPTY)
def test_a_caption_is_read_in_its_encoding_or_left_out_with_its_clip(data, tmp_path):
    write_clips(tmp_path, 2)
    (tmp_path / "1.txt").write_bytes(data + b"\r\n" * (data in READ[:2]))
    result = list_data(tmp_path)
    captions = [x.caption for x in result.examples]
    if data in READ:
        assert (captions, result.skipped) == ([CAPTIONS[0], CAFE], [])
    else:
        assert captions == [CAPTIONS[0]]
        [messages] = result.skipped
        assert has_line_with(messages, "1.gif empty" if data in EMPTY else "1.gif 1.txt UTF-8") or "UTF-16" in messages


def test_names_of_captions_in_other_letters(tmp_path):
    """As from systems without case, or with accents as separate characters."""
    picture = (write_clips(tmp_path / "a", 1, frames=1, suffix=".png") / "0.png").read_bytes()
    folder = tmp_path / "b"
    folder.mkdir()
    pairs = {"UP.PNG": "UP.TXT", "Low.png": "low.txt", "cafe\u0301.png": "caf\u00e9.txt", "x.png": "x.txt"}
    for media, caption in pairs.items():
        (folder / media).write_bytes(picture)
        (folder / caption).write_text(caption)
    (folder / "X.txt").write_text("of no clip")
    result = list_data(folder)
    assert {x.file.name: x.caption for x in result.examples} == pairs
    [message] = result.skipped
    assert has_line_with(message, "X.txt clip")


@pytest.mark.parametrize(
    ("table", "captions"),
    [
        ("file_name,text\n0.gif,a cat, a dog\n1.gif,one", ["a cat, a dog", "one"]),
        ("file_name,text\r\n0.gif,a cat, a dog\r\n1.gif,one\r\n", ["a cat, a dog", "one"]),
        ('file_name,text\n0.gif, "a cat, a dog"\n1.gif,"one, ""two"""', ["a cat, a dog", 'one, "two"']),
        ("text,file_name\na cat, a dog,0.gif\none,1.gif", ["a cat, a dog", "one"]),
        ("file_name,text,repeats\n0.gif,a cat, a dog,2\n1.gif,one,", ["a cat, a dog", "one"]),
        ("id, file_name, text\n7,0.gif,a cat, a dog\n8,1.gif,one", ["a cat, a dog", "one"]),
        ("file_name,text,source\n0.gif,a cat, a dog,web\n1.gif,one,web", [None, "one"]),
        ("file_name,tags,text\n0.gif,x,y,a cat\n1.gif,x,one", [None, "one"]),
        ('file_name,text\n0.gif,"a cat\n1.gif,one', [None, "one"]),
        ('file_name,text\n0.gif,"a" cat\n1.gif,one', [None, "one"]),
        ("file_name,text\n0.gif\n1.gif,one", [None, "one"]),
        ("file_name,text\n0.gif,caf\udce9\n1.gif,one", [None, "one"]),
        ("file_name,text\n1.gif,one\n1.gif,one\n0.gif,zero\n0.gif,null", ["zero", "null", "one"]),
    ],
)
def test_incomplete_rows_of_a_table_are_skipped(table, captions, tmp_path):
    write_clips(tmp_path, 2)
    (tmp_path / "metadata.csv").write_bytes(table.encode("utf-8", "surrogateescape"))
    result = list_data(tmp_path)
    assert sorted(x.caption for x in result.examples) == sorted(filter(None, captions))
    assert len(result.skipped) == (captions.count(None) or len(captions) - 2)
    assert all(has_line_with(messages, "metadata.csv row") or "0.gif" in messages for messages in result.skipped)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gbk"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_in_other_encodings(encoding, kind, tmp_path):
    write_clips(tmp_path, 3)
    rows = [{"file_name": "0.gif", "text": "红色的猫"}, {"file_name": "1.gif", "text": "one"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows] + ['{"file_name": "2.gif", "text": "\\ud800"}']
    text = "\r\n".join(lines) if kind == "jsonl" else "file_name,text\r\n0.gif,红色的猫\r\n1.gif,one\r\n"
    (tmp_path / f"metadata.{kind}").write_bytes(text.encode(encoding))
    result = list_data(tmp_path)
    assert [x.caption for x in result.examples] == [row["text"] for row in rows[encoding == "gbk" :]]
    assert len(result.skipped) == (encoding == "gbk") + (kind == "jsonl")
    assert all("UTF-8" in messages for messages in result.skipped)


def test_rows_choose_clips_to_preserve(tmp_path):
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
        ({"metadata.jsonl": "{"}, "line 1 JSON object row"),
        ({"metadata.jsonl": "[1]"}, "JSON"),
        ({"metadata.jsonl": '{"file": "a.mp4", "text": ["x"]}', "a.mp4": "x"}, "a.mp4 text"),
        ({"metadata.csv": "file_name,text,text\na.mp4,b,c"}, "two columns text"),
        ({"metadata.csv": "file_name,text\n" + 300 * "a" + ",b"}, f"{300 * 'a'}"),
        ({"a.mp4": "x", "metadata.csv": "file_name,text,repeats\na.mp4,b,no"}, "has repeats 'no'"),
        ({"a.mp4": "x", "metadata.jsonl": '{"file_name": "a.mp4", "text": "b", "repeats": 0}'}, "has repeats 0"),
        ({"a.mp4": "x", "metadata.jsonl": '{"file_name": "a.mp4", "text": "b", "repeats": 2.5}'}, "has repeats 2.5"),
        ({"a.mp4": "x", "metadata.jsonl": '{"file_name": "a.mp4", "text": "b", "repeats": 1e999}'}, "has repeats inf"),
        ({"a.mp4": "x", "metadata.csv": "file_name,text,preserve\na.mp4,b,2"}, "'2' true false"),
        ({"a.mp4": "x", "a.txt": "caf\udce9"}, "a.txt UTF-8"),
    ],
)
def test_unusable_data_is_refused(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(WanjaxError, match=line_with_words(sentence)):
        list_data(tmp_path)
    with pytest.raises(WanjaxError, match=r"the folder or table .* does not exist"):
        list_data(tmp_path / "none")


def cutting(cut="head", longest=9, **more):
    options = {
        "sizes": ((32, 32), (32, 48), (48, 32)),
        "lengths": bucket_lengths(longest, 4),
        "fps": 8,
        "resize": "crop",
    }
    return Cutting(cut=cut, **options | more)


def test_lengths_are_halved_and_of_the_model_s_form():
    assert bucket_lengths(81, 4) == (81, 41, 21, 9, 5, 1)
    assert bucket_lengths(49, 8) == (49, 25, 9, 1)
    assert bucket_lengths(81, 4, min_frames=9) == (81, 41, 21, 9)
    with pytest.raises(WanjaxError, match=line_with_words("100 81")):
        bucket_lengths(81, 4, min_frames=100)
    assert nearest_size((480, 832), [(32, 32), (32, 48), (48, 32)]) == (32, 48)


def test_clips_are_cut_to_buckets(tmp_path):
    wide = write_clips(tmp_path / "a", 1, frames=23, size=(40, 70)) / "0.gif"
    [head] = cutting().clips(wide)
    assert head.shape == (9, 32, 48, 3)
    windows = list(cutting("windows").clips(wide))
    assert [x.shape for x in windows] == [(9, 32, 48, 3)] * 2
    np.testing.assert_array_equal(windows[0], head)
    [spread] = cutting("uniform").clips(wide)
    [uncut] = cutting(longest=25, lengths=(23,)).clips(wide)
    np.testing.assert_array_equal(spread, uncut[[round(i * 22 / 8) for i in range(9)]])
    short = write_clips(tmp_path / "b", 1, frames=7) / "0.gif"
    [clip] = cutting().clips(short)
    assert clip.shape == (5, 32, 32, 3)
    picture = write_clips(tmp_path / "c", 1, frames=1, suffix=".png") / "0.png"
    [clip] = cutting().clips(picture)
    assert clip.shape == (1, 32, 32, 3)


def short(folder):
    return write_clips(folder, 1, frames=3) / "0.gif"


def damaged(folder):
    (folder / "damaged.mp4").write_bytes(b"no film")
    return folder / "damaged.mp4"


@pytest.mark.parametrize(("clip", "words"), [(short, "3 frames 8 5"), (damaged, "damaged.mp4 read video")])
def test_a_clip_that_cannot_be_cut_is_reported(clip, words, tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        list(cutting().clips(clip(tmp_path)))


def pieces(counts, tmp_path):
    result = []
    for bucket, count in counts.items():
        result += [EncodedClip(tmp_path / f"{bucket.frames}-{i}", tmp_path / f"t{i}", bucket) for i in range(count)]
    return result


def test_batches_follow_from_the_seed_and_the_step(tmp_path):
    counts = {Bucket(9, 32, 32): 5, Bucket(5, 32, 32): 3}
    batches, again = (Batches(pieces(counts, tmp_path), 2, 7, empty_caption=tmp_path / "none") for _ in range(2))
    epoch = [batches.clips_of_step(step) for step in range(5)]
    assert epoch == [again.clips_of_step(step) for step in range(5)]
    assert {x.latents for batch in epoch for x in batch} == {x.latents for x in pieces(counts, tmp_path)}
    assert all(len({x.latents.name.partition("-")[0] for x in batch}) == 1 for batch in epoch)
    assert epoch != [batches.clips_of_step(step) for step in range(5, 10)]


@pytest.mark.parametrize("counts", [(7, 1, 1), (5, 3, 2), (3, 0, 0), (100, 1, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 4])
def test_every_clip_is_shown_as_often_however_few_have_its_shape(counts, size, tmp_path):
    shapes = (Bucket(9, 32, 32), Bucket(5, 32, 48), Bucket(1, 32, 32))
    options = pieces({shape: count for shape, count in zip(shapes, counts, strict=True) if count}, tmp_path)
    options[0] = replace(options[0], repeats=2)
    batches = Batches(options, size, 0, empty_caption=tmp_path / "none")
    rounds = 3  # each of `size` epochs, of whose batches each has one shape
    drawn_batches = [batches.clips_of_step(step) for step in range(rounds * (len(options) + 1))]
    assert all(len({x.latents.name.partition("-")[0] for x in batch}) == 1 for batch in drawn_batches)
    seen = Counter(x.latents for batch in drawn_batches for x in batch)
    assert seen == {piece.latents: piece.repeats * rounds * size for piece in options}
    first = -(-(counts[0] + 1) // size) + sum(-(-count // size) for count in counts[1:])
    assert len({x.latents for batch in drawn_batches[:first] for x in batch}) == len(
        options
    )  # an epoch leaves none out


def test_the_prompt_of_a_generated_video_is_its_caption(tmp_path):
    frames = np.zeros((5, 16, 16, 3), np.uint8)
    for name in ("film.mp4", "moving.gif", "still.png"):
        write_video(tmp_path / name, frames[: 1 if name == "still.png" else 5], 8, {"prompt": f"a {name}", "seed": 1})
    write_video(tmp_path / "told.mp4", frames, 8, {"prompt": "another"})
    (tmp_path / "told.txt").write_text("its own caption")
    write_clips(tmp_path, 1)
    (tmp_path / "0.txt").unlink()
    result = list_data(tmp_path)
    captions = {example.file.name: example.caption for example in result.examples}
    expected = {name: f"a {name}" for name in ("film.mp4", "moving.gif", "still.png")}
    assert captions == {**expected, "told.mp4": "its own caption"}
    assert [has_line_with(sentence, "0.gif caption") for sentence in result.skipped] == [True]


def test_captions_are_dropped_at_their_rate(tmp_path):
    batches = Batches(
        pieces({Bucket(9, 32, 32): 8}, tmp_path), 8, 0, empty_caption=tmp_path / "none", caption_dropout=0.25
    )
    drawn_clips = [x for step in range(100) for x in batches.clips_of_step(step)]
    assert 0.2 < np.mean([x.text.name == "none" for x in drawn_clips]) < 0.3


def test_with_clips_to_preserve_uncaptioned_ones_are_preserved_too(tmp_path):
    options = pieces({Bucket(9, 32, 32): 8}, tmp_path)
    options[3] = replace(options[3], preserve=True)
    batches = Batches(options, 8, 0, empty_caption=tmp_path / "none", caption_dropout=0.25)
    assert batches.has_preserved_clips
    for x in batches.clips_of_step(0) + batches.clips_of_step(1):
        assert x.preservation == (x.text.name == "none" or x.latents == options[3].latents)
    batches = Batches(
        options, 8, 0, empty_caption=tmp_path / "none", caption_dropout=0.25, uncaptioned_preservation=0.5
    )
    for x in batches.clips_of_step(0) + batches.clips_of_step(1):
        assert x.preservation == (1.0 if x.latents == options[3].latents else 0.5 * (x.text.name == "none"))


def test_twice_the_captions_take_twice_the_calls(tmp_path):
    def calls(count: int) -> int:
        """Return the calls of functions, Python's own too, that it takes to list so many clips."""
        folder, output = tmp_path / str(count), Counter()
        folder.mkdir()
        for index in range(count):
            (folder / f"{index}.txt").write_text(f"caption {index}")
            (folder / f"{index}.mp4").touch()
        sys.setprofile(lambda frame, event, value: output.update([event.endswith("call")]))
        try:
            result = list_data(folder)
        finally:
            sys.setprofile(None)
        assert len(result.examples) == count
        return output[True]

    assert calls(200) < 2.5 * calls(100)


def test_results_are_not_written_among_the_clips(tmp_path):
    """Their samples would be clips of the next run. With a table, only its rows are clips."""
    data = write_clips(tmp_path / "clips", 2)
    for out in (data, data / "out", data / ".." / "clips" / "out"):
        with pytest.raises(WanjaxError, match=line_with_words(f"clips {out} outside {data}")):
            check_outside(data, out)
    for out in (tmp_path, tmp_path / "clips 2", tmp_path / "out"):
        check_outside(data, out)
    (data / "metadata.csv").write_text("file_name,text\n0.gif,a cat\n")
    check_outside(data, data / "out")


@pytest.mark.parametrize(("name", "kind"), [("circle.mp4", "clip"), ("circle.png", "picture")])
def test_a_single_file_is_refused_with_the_path_of_its_caption(tmp_path, name, kind):
    (tmp_path / name).touch()
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} {kind} circle.txt {tmp_path}")):
        list_data(tmp_path / name)
