# SPDX-License-Identifier: Apache-2.0
"""Stores with the protocols of S3 and Google: videos, checkpoints, and the messages of failures."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from s3fs import S3FileSystem

from tests.support.commands import refused, succeeded, wanjax
from tests.support.quick import quick
from tests.support.stores import BUCKET, GCS_BUCKET, running_gcs, running_s3
from tests.support.words import has_line_with_words
from wanjax.media.pictures import read_clip
from wanjax.stores.paths import local_copy, parse_path

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2", "-q")


@pytest.fixture(scope="module")
def s3():
    with running_s3() as address:
        yield address


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch, s3):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def frames(file: str) -> np.ndarray:
    with local_copy(parse_path(file)) as local_file:
        return read_clip(local_file, 5, 8)


@pytest.fixture(params=quick([BUCKET], [BUCKET, GCS_BUCKET]))
def bucket(request):
    with running_gcs() if request.param == GCS_BUCKET else nullcontext():
        yield request.param


@pytest.mark.filterwarnings("ignore:Sending a large body")  # by gcsfs
def test_a_converted_model_in_a_bucket_makes_the_same_video_in_a_bucket(bucket):
    model, video = f"{bucket}/models/nano", f"{bucket}/videos/a.mp4"
    assert has_line_with_words(succeeded(wanjax("convert", "nano", model)).stderr, f"{model} complete")
    assert succeeded(wanjax("a red circle", "--model", model, *SMALL, "--out", video)).stdout == f"{video}\n"
    succeeded(wanjax("a red circle", *SMALL, "--out", "local.mp4"))
    np.testing.assert_array_equal(frames(video), read_clip("local.mp4", 5, 8))
    data = json.loads(succeeded(wanjax("info", video, "--json")).stdout)
    assert data["model"] == model
    assert "a-secret" not in str(data)


@pytest.mark.slow
def test_a_video_in_a_bucket_is_reproduced_from_its_metadata():
    video = f"{BUCKET}/videos/again.mp4"
    succeeded(wanjax("a blue square", *SMALL, "--out", video))
    succeeded(wanjax("generate", "--from", video, "--out", "local.mp4", "-q"))
    np.testing.assert_array_equal(frames(video), read_clip("local.mp4", 5, 8))


@pytest.mark.slow  # tests/stores has a quick test
def test_many_videos_in_a_bucket_are_made_once():
    options = ("a red circle", "--out", f"{BUCKET}/many", *SMALL)
    first = succeeded(wanjax(*options, "--count", "2")).stdout.splitlines()
    assert len(first) == 2
    [third] = succeeded(wanjax(*options, "--count", "3", "--preview")).stdout.splitlines()
    assert set(S3FileSystem().ls(f"{BUCKET}/many", refresh=True)) == {
        name.removeprefix("s3://") for name in (*first, third, f"{BUCKET}/many/manifest.jsonl")
    }
    assert not list(Path().glob("*many*"))


@pytest.mark.parametrize("many", [[], ["--count", "2"]], ids=["one", "many"])
def test_a_missing_bucket_is_reported_before_the_first_step(many):
    out = "s3://no-such-bucket/videos" if many else "s3://no-such-bucket/a.mp4"
    assert has_line_with_words(
        refused("a red circle", *SMALL, "--out", out, *many, started=False), "s3://no-such-bucket bucket"
    )


@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["one", "several"])
def test_a_server_reports_a_missing_bucket_before_it_loads_its_model(options):
    output = refused(
        "serve",
        "--port",
        "0",
        "--model",
        "no/model",
        "--dir",
        "s3://no-such-bucket/served",
        "--database",
        "local.sqlite",
        *options,
    )
    assert has_line_with_words(output, "s3://no-such-bucket/served bucket")


@contextmanager
def without_keys(address: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.delenv("AWS_SECRET_ACCESS_KEY")
    patch.delenv("AWS_ACCESS_KEY_ID")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield


@contextmanager
def with_a_denied_key(address: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    def deny_after(requests: bytes) -> None:
        request = urllib.request.Request(f"{address}/moto-api/reset-auth", requests, {"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=9).close()

    deny_after(b"0")
    try:
        yield
    finally:
        deny_after(b"inf")


@contextmanager
def without_a_connection(address: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    yield


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (without_keys, f"{BUCKET} credentials"),
        (with_a_denied_key, BUCKET),
        pytest.param(  # the store's library retries for seconds
            without_a_connection, f"{BUCKET} http://127.0.0.1:9", marks=pytest.mark.slow
        ),
    ],
)
def test_an_unwritable_store_is_reported_before_the_first_step(fault, words, s3, monkeypatch):
    S3FileSystem.clear_instance_cache()
    try:
        with fault(s3, monkeypatch):
            status = 1 if fault is without_a_connection else 2
            output = refused("a red circle", *SMALL, "--out", f"{BUCKET}/a.mp4", status=status, started=False)
    finally:
        S3FileSystem.clear_instance_cache()
    assert has_line_with_words(output, words)
    assert "a-secret" not in output


MUST_BE_LOCAL = {
    "stages": ("a", "--dir", f"{BUCKET}/stages"),
    "a picture": ("a", "--image", f"{BUCKET}/a.png"),
    "a trace": ("a", "--profile", f"{BUCKET}/trace"),
    "data": ("train", "nano", f"{BUCKET}/data"),
    "a training": ("train", "nano", "data", "--out", f"{BUCKET}/trained"),
    "a server without a local database": ("serve", "--port", "0", "--dir", f"{BUCKET}/served"),
    "the database of a server": (
        "serve",
        "--port",
        "0",
        "--dir",
        f"{BUCKET}/served",
        "--database",
        f"{BUCKET}/jobs.sqlite",
    ),
}


@pytest.mark.parametrize("arguments", MUST_BE_LOCAL.values(), ids=MUST_BE_LOCAL)
def test_files_that_must_be_local_are_reported(arguments):
    assert BUCKET in refused(*arguments)
    assert not list(Path().iterdir())
