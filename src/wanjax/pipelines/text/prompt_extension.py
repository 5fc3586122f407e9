# SPDX-License-Identifier: Apache-2.0
"""Prompts that a language model extends, at any address that answers as OpenAI's chat completions do.

Everything that is answered is a stranger's: it is bounded in time and size, and becomes one line of text or an error.
The key comes from the environment and goes to the address alone.
"""

import json
import os
import re
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from wanjax.errors import NetworkError, WanjaxError, repr_short

KEY = "WANJAX_EXTEND_KEY"  # the variable with what the address wants to be shown
MODEL = "default"  # servers of one model take any name
PATIENCE = 60.0  # seconds for a whole answer
LARGEST = 2**20  # bytes of an answer
LONGEST = 4_000  # characters of an extended prompt
THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)  # which some models write before their answer
FROM_TEXT = (
    "You prepare prompts for a model that makes a short video from a text. The user writes what the video should show. "
    "Describe the same scene so that one who has never seen it could film it: who or what is there and how it looks, "
    "what moves and how, the place and the light, the camera's distance and movement, and the style. Keep every fact, "
    "number, name and quoted text of the user, and add nothing that contradicts them. Write one paragraph of 80 to 120 "
    "words, in the language of the user's text. Answer with this paragraph alone."
)
FROM_PICTURE = (
    "You prepare prompts for a model that makes a short video from a picture and a text. The model sees the picture, "
    "which is the first frame, and you do not. The user writes what should happen. Describe how things move from "
    "there, in which order and how fast, and what the camera does. Say nothing of how things look beyond what the user "
    "says. Keep every fact, number, name and quoted text of the user. Write one paragraph of 40 to 80 words, in the "
    "language of the user's text. Answer with this paragraph alone."
)


class Extended(str):
    """A prompt that was extended; `original` is what was asked for."""

    original: str

    def __new__(cls, text: str, original: str = "") -> "Extended":
        extended = super().__new__(cls, text)
        extended.original = original
        return extended


def as_settings(prompt: str) -> dict[str, str]:
    """Return a prompt as settings: its text and, where it was extended, what was asked for."""
    original = getattr(prompt, "original", "")
    return {"prompt": str(prompt), **({"original_prompt": original} if original else {})}


def extend_prompt(prompt: str, url: str, *, model: str | None = None, picture: bool = False) -> Extended:
    """Return a prompt as a language model extends it.

    The key of the address is WANJAX_EXTEND_KEY in the environment.

    Args:
        prompt: The prompt.
        url: The address before `/chat/completions`, such as http://localhost:11434/v1.
        model: A model's name there; None is `default`, for servers of one model, which take any.
        picture: Whether the video begins from a picture.
    """
    check_address(url)
    key = os.environ.get(KEY, "")
    if not key.isascii() or not key.isprintable():
        raise WanjaxError(f"{KEY} in the environment is no key: use printable letters of ASCII")
    messages = [
        {"role": "system", "content": FROM_PICTURE if picture else FROM_TEXT},
        {"role": "user", "content": str(prompt)},
    ]
    body = {"model": model or MODEL, "messages": messages, "stream": False}
    return Extended(_text_of(_asked(url, body, key), url, key), str(prompt))


def check_address(url: str) -> None:
    """Raise WanjaxError unless this is an address that can be asked, and that holds no key."""
    right = f"give an address such as http://localhost:11434/v1, and a key in {KEY}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
        parts = urlsplit("")
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise WanjaxError(f"the address that extends prompts is given as {repr_short(url)}: {right}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise WanjaxError(f"the address that extends prompts holds more than an address: {right}")


def cleaned(text: str) -> str:
    """Return a text as one line of printable characters, without a model's thoughts and quotation marks around it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in THOUGHTS.sub(" ", text)).split())
    return line[1:-1].strip() if len(line) > 1 and line[0] == line[-1] == '"' and '"' not in line[1:-1] else line


class NoRedirect(HTTPRedirectHandler):
    """Follows no redirection, which would take a secret elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _asked(url: str, body: Mapping[str, Any], key: str) -> bytes:
    """Return the bytes that are answered; raise WanjaxError where there are none in time.

    A thread asks, because a timeout of a socket bounds each of its reads and not their sum.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
    answers: list[bytes | BaseException] = []

    def ask() -> None:
        try:
            with build_opener(NoRedirect).open(request, timeout=PATIENCE) as answer:
                answers.append(answer.read(LARGEST + 1))
        except HTTPError as error:
            kind = NetworkError if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else WanjaxError
            answers.append(kind(f"{url} extends no prompt: {_refusal(error, key)}"))
        except (OSError, HTTPException, ValueError) as error:
            answers.append(error)

    thread = Thread(target=ask, name="wanjax-extending", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    answer_or_error = answers[0] if answers else TimeoutError()
    if isinstance(answer_or_error, WanjaxError):
        raise answer_or_error
    if isinstance(answer_or_error, BaseException):
        why = getattr(answer_or_error, "reason", answer_or_error)
        if isinstance(why, TimeoutError):
            raise NetworkError(f"{url} extends no prompt: it does not answer within {PATIENCE:g} s")
        told_why = getattr(why, "strerror", None) or type(why).__name__
        raise NetworkError(f"{url} extends no prompt: it cannot be asked, {_short(told_why, key)}")
    if len(answer_or_error) > LARGEST:
        raise WanjaxError(f"{url} extends no prompt: it answers with more than {LARGEST:,} bytes")
    return answer_or_error


def _refusal(error: HTTPError, key: str) -> str:
    """Return why an address refuses, from its status and its answer."""
    if 300 <= error.code < 400:
        return f"it redirects elsewhere ({error.code}), which is not followed"
    why: Any = error.reason
    try:
        details = json.loads(error.read(10_000))["error"]
        why = details if isinstance(details, str) else details["message"]
    except (ValueError, KeyError, TypeError, OSError, HTTPException, RecursionError):
        pass
    return f"it answers {error.code}, {_short(why, key)}"


def _text_of(answer: bytes, url: str, key: str) -> str:
    """Return the extended prompt in an answer; raise WanjaxError where there is none that can be used."""
    try:
        message = json.loads(answer)["choices"][0]["message"]
        text = message["content"]
        refusal = message.get("refusal")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise WanjaxError(f"{url} extends no prompt: it answers with no chat completion of OpenAI's form") from error
    if isinstance(refusal, str) and refusal.strip() and not text:
        raise WanjaxError(f"{url} extends no prompt: it refuses, {_short(refusal, key)}")
    line = cleaned(text) if isinstance(text, str) else ""
    if not line:
        raise WanjaxError(f"{url} extends no prompt: its answer is empty")
    if len(line) > LONGEST:
        message = f"its answer has {len(line):,} characters where {LONGEST:,} are allowed at most"
        raise WanjaxError(f"{url} extends no prompt: {message}")
    if key and key in line:
        raise WanjaxError(f"{url} extends no prompt: its answer repeats the key")
    return line


def _short(text: Any, key: str) -> str:
    """Return a stranger's text for a message, without the key and without characters that would steer a terminal."""
    short = str(text)[:10_000]
    return cleaned(short.replace(key, "***") if key else short)[:300] or "without a reason"
