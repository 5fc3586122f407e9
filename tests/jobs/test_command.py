# SPDX-License-Identifier: Apache-2.0
"""`wanjax worker` refuses invalid options, and makes the jobs of a batch that only fills the queue."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.batches import read_manifest
from tests.support.commands import refused
from tests.support.words import has_line_with_words
from wanjax.jobs.store import JobStore

SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--database WANJAX_DATABASE"),
        (("--database", "jobs.sqlite"), "--dir --out"),
        (("--database", "jobs.sqlite", "--dir", "a", "--out", "b"), "--dir --out"),
        (("--database", "mysql://me@here/jobs", "--out", "b"), "mysql:// postgresql://"),
        (("--database", "jobs.sqlite", "--dir", "a", "--processes", "auto"), "--processes"),
        (
            ("--database", "jobs.sqlite", "--out", "a", "--extend-prompt", "http://localhost:1/v1"),
            "--extend-prompt --dir",
        ),
        (("--database", "typo/nope.sqlite", "--out", "a"), "typo/nope.sqlite --database"),
        (("--database", "typo/nope.sqlite", "--dir", "a"), "typo/nope.sqlite --database"),
    ],
    ids=str,
)
def test_a_worker_with_missing_or_invalid_options_is_refused(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANJAX_DATABASE", raising=False)
    assert has_line_with_words(refused("worker", *arguments), words)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_batch_is_made_by_workers_that_join(tmp_path):
    """The environment names the database; a worker with another folder takes no job and says so."""
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    variables = os.environ | {"WANJAX_DATABASE": str(tmp_path / "jobs.sqlite")}
    command, options = [sys.executable, "-m", "wanjax"], {"cwd": tmp_path, "env": variables, "text": True}
    JobStore(variables["WANJAX_DATABASE"]).close()  # workers join a database that exists
    workers = [
        subprocess.Popen([*command, "worker", "--out", name], stderr=subprocess.PIPE, **options)
        for name in ("videos", "elsewhere")
    ]
    batch = [*command, "batch", "prompts.txt", "--out", "videos", "--workers", "0", *SMALL]
    subprocess.run(batch, check=True, capture_output=True, timeout=500, **options)
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    stderr, other_stderr = (worker.communicate(timeout=100)[1] for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0]
    assert len(read_manifest(tmp_path / "videos")) == 2
    assert "takes no job" in other_stderr, stderr
    assert not list((tmp_path / "elsewhere").glob("*.mp4"))


def test_workers_of_this_machine_plan_and_make_a_batch(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    batch = ["batch", "prompts.txt", "--out", "videos", "--workers", "2", "--size", "32x32", "--frames", "1"]
    command = [sys.executable, "-m", "wanjax", *batch, "--steps", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    assert len(read_manifest(tmp_path / "videos")) == 1
