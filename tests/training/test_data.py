# SPDX-License-Identifier: Apache-2.0
"""Training data: folders and tables, buckets of sizes and lengths, and messages about unusable files."""

import codecs
import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.support.clips import CAPTIONS, write_clips
from tests.support.words import has_line_with_words, line_with_words
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
    dataset = list_data(folder)
    assert [(x.file.name, x.caption) for x in dataset.examples] == [(f"{i}.gif", CAPTIONS[i]) for i in range(3)]
    assert len(dataset.skipped) == 2
    assert has_line_with_words(dataset.skipped[0], "mute.png caption")
    assert has_line_with_words(dataset.skipped[1], "alone.txt clip")


def test_the_error_for_data_without_captions_says_what_is_missing(tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words("put a .txt file with a caption beside each clip")):
        list_data(tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "gone.gif", "text": "a cat"}')
    with pytest.raises(WanjaxError, match=line_with_words("gone.gif each row needs a file and a caption")):
        list_data(tmp_path)


def test_clips_have_a_natural_order_and_other_files_are_ignored(tmp_path):
    folder = write_clips(tmp_path / "a", 12)
    (folder / "later").mkdir()
    for i in range(12):
        for suffix in (".gif", ".txt"):
            (folder / f"{i}{suffix}").rename(folder / ("later" if i == 3 else "") / f"Clip_{i}{suffix}")
    for name in ("._Clip_1.gif", ".DS_Store", "Thumbs.db", "notes.pdf", "later/.hidden.txt"):
        (folder / name).write_bytes(b"no clip")
    (folder / CACHE_FOLDER).mkdir()
    (folder / CACHE_FOLDER / "clips.jsonl").write_text("{}")
    dataset = list_data(folder)
    assert [x.file.name for x in dataset.examples] == [f"Clip_{i}.gif" for i in (0, 1, 2, *range(4, 12), 3)]
    assert (dataset.skipped, dataset.num_ignored) == ([], 5)


@pytest.mark.parametrize("columns", [("file_name", "text"), ("video", "prompt"), ("video_path", "caption")])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_tables_of_common_column_names_are_read(tmp_path, columns, kind):
    folder = write_clips(tmp_path, 2)
    file, text = columns
    rows = [{file: "0.gif", text: "one, with a comma", "repeats": 3}, {file: "gone.gif", text: "two"}]
    if kind == "csv":
        lines = [f"{file},{text},repeats", '0.gif,"one, with a comma",3', "gone.gif,two,"]
    else:
        lines = [json.dumps(row) for row in rows]
    (folder / f"metadata.{kind}").write_text("\n".join(lines))
    for data in (folder, folder / f"metadata.{kind}"):
        dataset = list_data(data)
        assert [(x.file.name, x.caption, x.repeats) for x in dataset.examples] == [("0.gif", "one, with a comma", 3)]
        assert dataset.skipped == ["row 2 of metadata." + kind + " names gone.gif, which does not exist"]


CAFE = "ein café, naïve"
READABLE = [
    CAFE.encode(),
    codecs.BOM_UTF8 + CAFE.encode(),
    CAFE.encode("utf-16"),
    codecs.BOM_UTF16_BE + CAFE.encode("utf-16-be"),
]
UNREADABLE = [
    CAFE.encode("cp1252"),
    "一只红色的猫".encode("gbk"),
    "赤い猫".encode("shift-jis"),
    "赤い猫".encode("iso2022-jp"),
    CAFE.encode("utf-16-le"),
    CAFE.encode("utf-32"),
    CAFE.encode("utf-16")[:-1],
]
EMPTY = [b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, 2 * codecs.BOM_UTF8, b"\r\n \t", "\u200b\xa0\n".encode()]


@pytest.mark.parametrize("data", READABLE + UNREADABLE + EMPTY)
def test_a_clip_with_an_unreadable_caption_is_skipped(data, tmp_path):
    write_clips(tmp_path, 2)
    (tmp_path / "1.txt").write_bytes(data + b"\r\n" * (data in READABLE[:2]))
    dataset = list_data(tmp_path)
    captions = [x.caption for x in dataset.examples]
    if data in READABLE:
        assert (captions, dataset.skipped) == ([CAPTIONS[0], CAFE], [])
    else:
        assert captions == [CAPTIONS[0]]
        [message] = dataset.skipped
        assert (
            has_line_with_words(message, "1.gif empty" if data in EMPTY else "1.gif 1.txt UTF-8") or "UTF-16" in message
        )


def test_captions_are_found_by_names_in_other_spellings(tmp_path):
    """Letters may differ in case, and accents may be separate characters."""
    picture = (write_clips(tmp_path / "a", 1, frames=1, suffix=".png") / "0.png").read_bytes()
    folder = tmp_path / "b"
    folder.mkdir()
    pairs = {"UP.PNG": "UP.TXT", "Low.png": "low.txt", "cafe\u0301.png": "caf\u00e9.txt", "x.png": "x.txt"}
    for media, caption in pairs.items():
        (folder / media).write_bytes(picture)
        (folder / caption).write_text(caption)
    (folder / "X.txt").write_text("of no clip")
    dataset = list_data(folder)
    assert {x.file.name: x.caption for x in dataset.examples} == pairs
    [message] = dataset.skipped
    assert has_line_with_words(message, "X.txt clip")


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
    dataset = list_data(tmp_path)
    assert sorted(x.caption for x in dataset.examples) == sorted(filter(None, captions))
    assert len(dataset.skipped) == (captions.count(None) or len(captions) - 2)
    assert all(has_line_with_words(messages, "metadata.csv row") or "0.gif" in messages for messages in dataset.skipped)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gbk"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_tables_of_several_encodings_are_read(encoding, kind, tmp_path):
    write_clips(tmp_path, 3)
    rows = [{"file_name": "0.gif", "text": "红色的猫"}, {"file_name": "1.gif", "text": "one"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows] + ['{"file_name": "2.gif", "text": "\\ud800"}']
    text = "\r\n".join(lines) if kind == "jsonl" else "file_name,text\r\n0.gif,红色的猫\r\n1.gif,one\r\n"
    (tmp_path / f"metadata.{kind}").write_bytes(text.encode(encoding))
    dataset = list_data(tmp_path)
    assert [x.caption for x in dataset.examples] == [row["text"] for row in rows[encoding == "gbk" :]]
    assert len(dataset.skipped) == (encoding == "gbk") + (kind == "jsonl")
    assert all("UTF-8" in messages for messages in dataset.skipped)


def test_rows_choose_clips_to_preserve(tmp_path):
    folder = write_clips(tmp_path, 4)
    words = (True, "Yes", False, None)
    rows = [{"file_name": f"{i}.gif", "text": "x", "preserve": word} for i, word in enumerate(words)]
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert [x.preserve for x in list_data(folder).examples] == [True, True, False, False]


@pytest.mark.parametrize(
    ("files", "words"),
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
def test_unusable_data_is_refused(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        list_data(tmp_path)
    with pytest.raises(WanjaxError, match=r"the folder or table .* does not exist"):
        list_data(tmp_path / "none")


def make_cutting(cut="head", max_frames=9, **changes):
    options = {
        "sizes": ((32, 32), (32, 48), (48, 32)),
        "lengths": bucket_lengths(max_frames, 4),
        "fps": 8,
        "resize": "crop",
    }
    return Cutting(cut=cut, **options | changes)


def test_bucket_lengths_are_halved_to_valid_lengths():
    assert bucket_lengths(81, 4) == (81, 41, 21, 9, 5, 1)
    assert bucket_lengths(49, 8) == (49, 25, 9, 1)
    assert bucket_lengths(81, 4, min_frames=9) == (81, 41, 21, 9)
    with pytest.raises(WanjaxError, match=line_with_words("100 81")):
        bucket_lengths(81, 4, min_frames=100)
    assert nearest_size((480, 832), [(32, 32), (32, 48), (48, 32)]) == (32, 48)


def test_clips_are_cut_to_buckets(tmp_path):
    wide_clips = write_clips(tmp_path / "a", 1, frames=23, size=(40, 70)) / "0.gif"
    [first_frames] = make_cutting().clips(wide_clips)
    assert first_frames.shape == (9, 32, 48, 3)
    windows = list(make_cutting("windows").clips(wide_clips))
    assert [x.shape for x in windows] == [(9, 32, 48, 3)] * 2
    np.testing.assert_array_equal(windows[0], first_frames)
    [even_frames] = make_cutting("uniform").clips(wide_clips)
    [all_frames] = make_cutting(max_frames=25, lengths=(23,)).clips(wide_clips)
    np.testing.assert_array_equal(even_frames, all_frames[[round(i * 22 / 8) for i in range(9)]])
    short_clip = write_clips(tmp_path / "b", 1, frames=7) / "0.gif"
    [clip] = make_cutting().clips(short_clip)
    assert clip.shape == (5, 32, 32, 3)
    picture = write_clips(tmp_path / "c", 1, frames=1, suffix=".png") / "0.png"
    [clip] = make_cutting().clips(picture)
    assert clip.shape == (1, 32, 32, 3)


def write_short_clip(folder):
    return write_clips(folder, 1, frames=3) / "0.gif"


def write_damaged_clip(folder):
    (folder / "damaged.mp4").write_bytes(b"no film")
    return folder / "damaged.mp4"


@pytest.mark.parametrize(
    ("write_clip", "words"), [(write_short_clip, "3 frames 8 5"), (write_damaged_clip, "damaged.mp4 read video")]
)
def test_a_clip_that_cannot_be_cut_is_reported(write_clip, words, tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        list(make_cutting().clips(write_clip(tmp_path)))


def encoded_clips(counts, tmp_path):
    clips = []
    for bucket, count in counts.items():
        clips += [EncodedClip(tmp_path / f"{bucket.frames}-{i}", tmp_path / f"t{i}", bucket) for i in range(count)]
    return clips


def test_batches_follow_from_the_seed_and_the_step(tmp_path):
    counts = {Bucket(9, 32, 32): 5, Bucket(5, 32, 32): 3}
    batches, same_batches = (
        Batches(encoded_clips(counts, tmp_path), 2, 7, empty_caption=tmp_path / "none") for _ in range(2)
    )
    epoch = [batches.clips_of_step(step) for step in range(5)]
    assert epoch == [same_batches.clips_of_step(step) for step in range(5)]
    assert {x.latents for batch in epoch for x in batch} == {x.latents for x in encoded_clips(counts, tmp_path)}
    assert all(len({x.latents.name.partition("-")[0] for x in batch}) == 1 for batch in epoch)
    assert epoch != [batches.clips_of_step(step) for step in range(5, 10)]


@pytest.mark.parametrize("counts", [(7, 1, 1), (5, 3, 2), (3, 0, 0), (100, 1, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 4])
def test_every_clip_is_shown_equally_often(counts, size, tmp_path):
    shapes = (Bucket(9, 32, 32), Bucket(5, 32, 48), Bucket(1, 32, 32))
    clips = encoded_clips({shape: count for shape, count in zip(shapes, counts, strict=True) if count}, tmp_path)
    clips[0] = replace(clips[0], repeats=2)
    batches = Batches(clips, size, 0, empty_caption=tmp_path / "none")
    rounds = 3  # a round has `size` epochs; all clips of a batch have one shape
    drawn_batches = [batches.clips_of_step(step) for step in range(rounds * (len(clips) + 1))]
    assert all(len({x.latents.name.partition("-")[0] for x in batch}) == 1 for batch in drawn_batches)
    counts_of_clips = Counter(x.latents for batch in drawn_batches for x in batch)
    assert counts_of_clips == {clip.latents: clip.repeats * rounds * size for clip in clips}
    first_epoch = -(-(counts[0] + 1) // size) + sum(-(-count // size) for count in counts[1:])
    # an epoch contains every clip
    assert len({x.latents for batch in drawn_batches[:first_epoch] for x in batch}) == len(clips)


def test_a_generated_video_has_its_prompt_as_caption(tmp_path):
    frames = np.zeros((5, 16, 16, 3), np.uint8)
    for name in ("film.mp4", "moving.gif", "still.png"):
        write_video(tmp_path / name, frames[: 1 if name == "still.png" else 5], 8, {"prompt": f"a {name}", "seed": 1})
    write_video(tmp_path / "captioned.mp4", frames, 8, {"prompt": "another"})
    (tmp_path / "captioned.txt").write_text("its own caption")
    write_clips(tmp_path, 1)
    (tmp_path / "0.txt").unlink()
    dataset = list_data(tmp_path)
    captions = {example.file.name: example.caption for example in dataset.examples}
    expected = {name: f"a {name}" for name in ("film.mp4", "moving.gif", "still.png")}
    assert captions == {**expected, "captioned.mp4": "its own caption"}
    assert [has_line_with_words(sentence, "0.gif caption") for sentence in dataset.skipped] == [True]


def test_captions_are_dropped_at_their_rate(tmp_path):
    batches = Batches(
        encoded_clips({Bucket(9, 32, 32): 8}, tmp_path), 8, 0, empty_caption=tmp_path / "none", caption_dropout=0.25
    )
    drawn_clips = [x for step in range(100) for x in batches.clips_of_step(step)]
    assert 0.2 < np.mean([x.text.name == "none" for x in drawn_clips]) < 0.3


def test_clips_without_captions_are_preserved_with_preserved_clips(tmp_path):
    clips = encoded_clips({Bucket(9, 32, 32): 8}, tmp_path)
    clips[3] = replace(clips[3], preserve=True)
    batches = Batches(clips, 8, 0, empty_caption=tmp_path / "none", caption_dropout=0.25)
    assert batches.has_preserved_clips
    for x in batches.clips_of_step(0) + batches.clips_of_step(1):
        assert x.preservation == (x.text.name == "none" or x.latents == clips[3].latents)
    batches = Batches(clips, 8, 0, empty_caption=tmp_path / "none", caption_dropout=0.25, uncaptioned_preservation=0.5)
    for x in batches.clips_of_step(0) + batches.clips_of_step(1):
        assert x.preservation == (1.0 if x.latents == clips[3].latents else 0.5 * (x.text.name == "none"))


def test_the_time_to_list_clips_grows_linearly(tmp_path):
    def count_calls(count: int) -> int:
        """Return the number of function calls, including built-in functions, for a list of `count` clips."""
        folder, event_counts = tmp_path / str(count), Counter()
        folder.mkdir()
        for index in range(count):
            (folder / f"{index}.txt").write_text(f"caption {index}")
            (folder / f"{index}.mp4").touch()
        sys.setprofile(lambda frame, event, value: event_counts.update([event.endswith("call")]))
        try:
            dataset = list_data(folder)
        finally:
            sys.setprofile(None)
        assert len(dataset.examples) == count
        return event_counts[True]

    assert count_calls(200) < 2.5 * count_calls(100)


def test_results_in_the_folder_of_clips_are_refused(tmp_path):
    """Samples in the folder would be clips of the next run. With a table, only the rows of the table are clips."""
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
