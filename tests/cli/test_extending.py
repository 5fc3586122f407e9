# SPDX-License-Identifier: Apache-2.0
"""Prompts that a language model extends: what is sent, stored and refused, with a server on loopback."""

import copy
import json
import pickle
import time
from pathlib import Path

import pytest
from PIL import Image

import wanjax
from tests.support.chat import chatting, completion
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as run
from tests.support.tiny import tiny_checkpoint, tiny_image_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError, is_failure
from wanjax.media.video import read_metadata
from wanjax.pipelines.text import prompt_extension

pytestmark = pytest.mark.usefixtures("cached_programs")

SECRET = "sk-0123456789abcdef"
SMALL = ("--frames", "1", "--size", "16x16", "--steps", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("text")))


@pytest.fixture(autouse=True)
def _with_a_key(monkeypatch, tmp_path):
    monkeypatch.setenv(prompt_extension.KEY_VARIABLE, SECRET)
    monkeypatch.chdir(tmp_path)


def lengthen(handler, text):
    return 200, completion(f"\x1b[31m{text},\n slowly\u202e, <think>")


def files_with(secret: str, folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def test_a_video_stores_both_prompts_and_is_reproduced_without_the_language_model(model, tmp_path):
    with chatting(lengthen) as chat:
        extend = ("--extend-prompt", chat.url, "--extend-model", "small")
        messages = succeeded(run("a cat", "--model", model, *SMALL, *extend, "--dir", "stages", "--out", "one.png"))
        (path, key, body) = chat.requests[0]
        again = ("generate", "--from", "one.png", *extend)
        succeeded(run(*again, "--out", "two.png"))
        succeeded(run(*again, "--count", "2", "--out", "many"))
        assert len(chat.requests) == 1
        succeeded(run("generate", "a dog", *again[1:], "--out", "three.png"))
    assert (path, key, body["model"]) == ("/v1/chat/completions", f"Bearer {SECRET}", "small")
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    result = "[31ma cat, slowly , <think>"
    for file in ("one.png", "two.png", *Path("many").glob("*.mp4")):
        record = read_metadata(file)
        assert (record["prompt"], record["original_prompt"]) == (result, "a cat")
    assert read_metadata("three.png")["original_prompt"] == "a dog"
    assert files_with(SECRET, tmp_path) == []
    assert SECRET not in messages.stderr + messages.stdout
    assert "original prompt  a cat" in run("info", "one.png").output


def test_an_unextended_prompt_of_metadata_is_extended():
    record = {"model": "nano", "prompt": "a cat", "original_prompt": "", "frames": 1, "steps": 1}
    Path("one.json").write_text(json.dumps(record))
    with chatting(lengthen) as chat:
        succeeded(run("--from", "one.json", "--size", "32x32", "--extend-prompt", chat.url, "--out", "two.png"))
    assert read_metadata("two.png")["original_prompt"] == "a cat"


def test_each_prompt_of_a_list_is_extended_once(model):
    Path("list.txt").write_text("a cat\na dog\n")
    options = ("--prompts", "list.txt", "--seeds", "1,2", "--model", model, *SMALL, "--out", "many")
    with chatting(lengthen) as chat:
        succeeded(run("generate", *options, "--extend-prompt", chat.url))
        assert [body["messages"][-1]["content"] for _, _, body in chat.requests] == ["a cat", "a dog"]
        Path("list.txt").write_text("a cat\na dog\na hen\n")
        message = succeeded(run("generate", *options, "--extend-prompt", chat.url)).stderr
        assert len(chat.requests) == 3
    assert has_line_with_words(message, "2 made 4 exist")


@pytest.mark.slow
def test_a_picture_has_other_instructions_and_later_windows_are_extended(tmp_path):
    Image.new("RGB", (16, 16)).save("in.png")
    model = tiny_image_checkpoint(tmp_path / "model")
    shape = ("--frames", "5", "--size", "16x16", "--steps", "1", "--image", "in.png", "--model", str(model))
    with chatting(lengthen) as chat:
        succeeded(run("a cat", "--then", "a dog", *shape, "--extend-prompt", chat.url, "--out", "made.gif"))
        bodies = [body["messages"] for _, _, body in chat.requests]
    assert [messages[1]["content"] for messages in bodies] == ["a cat", "a dog"]
    assert {messages[0]["content"] for messages in bodies} == {prompt_extension.PICTURE_INSTRUCTIONS}
    record = read_metadata("made.gif")
    assert record["original_prompt"] == "a cat\na dog"
    assert record["then"] == "[31ma dog, slowly , <think>"


def dripping(handler, text):
    """Send one byte at a time, often enough for the timeout of a socket."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def redirected(handler, text):
    handler.send_response(307)
    handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


HOSTILE = {
    "nothing": (lambda *_: time.sleep(2), "within 0.5 s"),
    "drips": (dripping, "within 0.5 s"),
    "redirects": (redirected, "redirects 307"),
    "unauthorised": (
        lambda *_: (401, json.dumps({"error": {"message": f"no {SECRET}\x1b[2J"}}).encode()),
        "401 no ***",
    ),
    "unknown model": (lambda *_: (404, b'{"error": "no such model"}'), "404 such model"),
    "broken": (lambda *_: (500, b"\xff" * 100_000), "500"),
    "no JSON": (lambda *_: (200, b"<html>"), "OpenAI chat completion"),
    "a list": (lambda *_: (200, b"[]"), "OpenAI chat completion"),
    "no choice": (lambda *_: (200, b'{"choices": []}'), "OpenAI chat completion"),
    "nested": (lambda *_: (200, b"[" * 200_000), "OpenAI chat completion"),
    "a number": (lambda *_: (200, completion(7)), "empty"),
    "blanks": (lambda *_: (200, completion(" \n\x00\u200b")), "empty"),
    "half a letter": (lambda *_: (200, completion("\ud800")), "empty"),
    "a refusal": (lambda *_: (200, completion(None, refusal="I will\nnot")), "refused not"),
    "a book": (lambda *_: (200, completion("word " * 2000)), "9,999 4,000"),
    "megabytes": (lambda *_: (200, completion("w" * 2**21)), "1,048,576 bytes"),
    "the key": (lambda *_: (200, completion(f"a cat with {SECRET}")), "repeats key"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_responses_are_refused(kind, monkeypatch):
    monkeypatch.setattr(prompt_extension, "TIMEOUT", 0.5)
    result, message = HOSTILE[kind]
    start = time.monotonic()
    with chatting(result) as chat, pytest.raises(WanjaxError, match=line_with_words(message)) as error:
        wanjax.extend_prompt("a cat", chat.url)
    assert time.monotonic() - start < 20
    assert SECRET not in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500
    assert is_failure(error.value) == (kind in ("nothing", "drips", "broken"))


def test_thoughts_and_quotation_marks_are_removed_from_a_prompt():
    with chatting(lambda *_: (200, completion('<think>a\nb</think>\n"A cat."'))) as chat:
        result = wanjax.extend_prompt("a cat", chat.url)
    assert (result, result.original) == ("A cat.", "a cat")


@pytest.mark.parametrize("copy_function", [copy.copy, copy.deepcopy, lambda prompt: pickle.loads(pickle.dumps(prompt))])
def test_an_extended_prompt_can_be_copied(copy_function):
    result = copy_function(prompt_extension.ExtendedPrompt("A cat.", "a cat"))
    assert (result, result.original) == ("A cat.", "a cat")
    settings = copy_function(wanjax.load("nano").settings(prompt=result))
    assert (settings.prompt, settings.original_prompt) == ("A cat.", "a cat")
    assert type(settings.prompt) is str


UNUSED_URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("localhost:80", SECRET),
        ("ftp://a/v1", SECRET),
        ("http://", SECRET),
        ("http://user:key@localhost/v1", SECRET),
        ("http://a/v1?key=1", SECRET),
        ("http://a:x/", SECRET),
        ("http://a/\n", SECRET),
        (UNUSED_URL, "sk\nsecret"),
    ],
)
def test_a_url_with_a_key_and_a_key_of_two_lines_are_refused(url, key, monkeypatch):
    monkeypatch.setenv(prompt_extension.KEY_VARIABLE, key)
    with pytest.raises(WanjaxError, match=line_with_words(prompt_extension.KEY_VARIABLE)) as error:
        wanjax.extend_prompt("a cat", url)
    assert "user:key" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words", "status"),
    [
        (("--extend-prompt", UNUSED_URL), f"{UNUSED_URL} request failed start server", 1),
        (("--extend-model", "small"), "--extend-prompt", 2),
    ],
)
def test_options_that_cannot_extend_a_prompt_are_refused(options, words, status):
    assert has_line_with_words(refused("a cat", *SMALL, *options, status=status), words)
