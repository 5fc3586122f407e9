# SPDX-License-Identifier: Apache-2.0
"""Extension of prompts by a language model behind an API that is compatible with OpenAI's chat completions.

Answers are not trusted: their time and size are limited, and an answer becomes one line of text or an error. The API
key comes from the environment and is sent only to the API.
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
from wanjax.stores.paths import is_http_url

KEY_VARIABLE = "WANJAX_EXTEND_KEY"  # the environment variable with the API key
DEFAULT_MODEL = "default"  # servers with one model accept any name
TIMEOUT = 60.0  # the time limit of a whole answer, in seconds
MAX_ANSWER_BYTES = 2**20  # the maximum size of an answer, in bytes
MAX_PROMPT_LENGTH = 4_000  # the maximum length of an extended prompt, in characters
REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)  # the reasoning that some models write before their answer
TEXT_INSTRUCTIONS = (
    "You prepare prompts for a model that makes a short video from a text. The user writes what the video should show. "
    "Describe the same scene so that one who has never seen it could film it: who or what is there and how it looks, "
    "what moves and how, the place and the light, the camera's distance and movement, and the style. Keep every fact, "
    "number, name and quoted text of the user, and add nothing that contradicts them. Write one paragraph of 80 to 120 "
    "words, in the language of the user's text. Answer with this paragraph alone."
)
PICTURE_INSTRUCTIONS = (
    "You prepare prompts for a model that makes a short video from a picture and a text. The model sees the picture, "
    "which is the first frame, and you do not. The user writes what should happen. Describe how things move from "
    "there, in which order and how fast, and what the camera does. Say nothing of how things look beyond what the user "
    "says. Keep every fact, number, name and quoted text of the user. Write one paragraph of 40 to 80 words, in the "
    "language of the user's text. Answer with this paragraph alone."
)


class ExtendedPrompt(str):
    """An extended prompt; `original` is the user's prompt."""

    original: str

    def __new__(cls, text: str, original: str = "") -> "ExtendedPrompt":
        extended = super().__new__(cls, text)
        extended.original = original
        return extended


def as_settings(prompt: str) -> dict[str, str]:
    """Return a prompt as settings: its text and, if it was extended, the original."""
    original = getattr(prompt, "original", "")
    return {"prompt": str(prompt), **({"original_prompt": original} if original else {})}


def extend_prompt(prompt: str, url: str, *, model: str | None = None, picture: bool = False) -> ExtendedPrompt:
    """Extend a prompt with a language model.

    The API key, if any, is the environment variable WANJAX_EXTEND_KEY.

    Args:
        prompt: The prompt.
        url: The base URL, before `/chat/completions`, such as http://localhost:11434/v1.
        model: The name of the model at that API; None sends `default`, which servers with one model accept.
        picture: Whether the video starts from an image.
    """
    check_url(url)
    key = os.environ.get(KEY_VARIABLE, "")
    if not key.isascii() or not key.isprintable():
        raise WanjaxError(f"the key in {KEY_VARIABLE} is not printable ASCII: set it to a valid key")
    messages = [
        {"role": "system", "content": PICTURE_INSTRUCTIONS if picture else TEXT_INSTRUCTIONS},
        {"role": "user", "content": str(prompt)},
    ]
    body = {"model": model or DEFAULT_MODEL, "messages": messages, "stream": False}
    return ExtendedPrompt(_prompt_in(_request(url, body, key), url, key), str(prompt))


def check_url(url: Any) -> None:
    """Raise WanjaxError unless this is a valid base URL that contains no key."""
    advice = f"give an address such as http://localhost:11434/v1, and a key in {KEY_VARIABLE}"
    if not isinstance(url, str) or not is_http_url(url):
        raise WanjaxError(f"the URL for extending prompts is {repr_short(url)}: {advice}")
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise WanjaxError(f"the URL for extending prompts contains a user, a query or a fragment: {advice}")


def one_line(text: str) -> str:
    """Return a text as one line of printable characters, without a model's reasoning and enclosing quotes."""
    line = " ".join("".join(c if c.isprintable() else " " for c in REASONING.sub(" ", text)).split())
    return line[1:-1].strip() if len(line) > 1 and line[0] == line[-1] == '"' and '"' not in line[1:-1] else line


class NoRedirect(HTTPRedirectHandler):
    """A handler that refuses redirects, because a redirect would send the API key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _request(url: str, body: Mapping[str, Any], key: str) -> bytes:
    """Send a request and return the answer's bytes; raise WanjaxError if there is none in time.

    The request runs in a thread, because a socket's timeout limits each read but not the whole answer.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    http_request = Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
    outcomes: list[bytes | BaseException] = []

    def send() -> None:
        try:
            with build_opener(NoRedirect).open(http_request, timeout=TIMEOUT) as answer:
                outcomes.append(answer.read(MAX_ANSWER_BYTES + 1))
        except HTTPError as error:
            kind = NetworkError if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else WanjaxError
            outcomes.append(kind(f"{url} did not extend the prompt: {_error_reason(error, key)}"))
        except (OSError, HTTPException, ValueError) as error:
            outcomes.append(error)

    thread = Thread(target=send, name="wanjax-extending", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    outcome = outcomes[0] if outcomes else TimeoutError()
    if isinstance(outcome, WanjaxError):
        raise outcome
    if isinstance(outcome, BaseException):
        cause = getattr(outcome, "reason", outcome)
        if isinstance(cause, TimeoutError):
            raise NetworkError(
                f"{url} did not extend the prompt: it did not answer within {TIMEOUT:g} s: run again, or "
                "give another address"
            )
        cause_text = getattr(cause, "strerror", None) or type(cause).__name__
        raise NetworkError(
            f"{url} did not extend the prompt: the request failed, {_safe_text(cause_text, key)}: start a server of a "
            "language model there, or give another address"
        )
    if len(outcome) > MAX_ANSWER_BYTES:
        raise WanjaxError(f"{url} did not extend the prompt: its answer has more than {MAX_ANSWER_BYTES:,} bytes")
    return outcome


def _error_reason(error: HTTPError, key: str) -> str:
    """Return the reason of an HTTP error, from its status and body."""
    if 300 <= error.code < 400:
        return f"it redirects ({error.code}), and redirects are not followed"
    message: Any = error.reason
    try:
        details = json.loads(error.read(10_000))["error"]
        message = details if isinstance(details, str) else details["message"]
    except (ValueError, KeyError, TypeError, OSError, HTTPException, RecursionError):
        pass
    return f"it answered {error.code}, {_safe_text(message, key)}"


def _prompt_in(answer: bytes, url: str, key: str) -> str:
    """Extract the extended prompt from an answer; raise WanjaxError if the answer has no usable prompt."""
    try:
        message = json.loads(answer)["choices"][0]["message"]
        text = message["content"]
        refusal = message.get("refusal")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise WanjaxError(f"{url} did not extend the prompt: its answer is not an OpenAI chat completion") from error
    if isinstance(refusal, str) and refusal.strip() and not text:
        raise WanjaxError(f"{url} did not extend the prompt: it refused, {_safe_text(refusal, key)}")
    line = one_line(text) if isinstance(text, str) else ""
    if not line:
        raise WanjaxError(f"{url} did not extend the prompt: its answer is empty")
    if len(line) > MAX_PROMPT_LENGTH:
        message = f"its answer has {len(line):,} characters, and at most {MAX_PROMPT_LENGTH:,} are allowed"
        raise WanjaxError(f"{url} did not extend the prompt: {message}")
    if key and key in line:
        raise WanjaxError(f"{url} did not extend the prompt: its answer repeats the key")
    return line


def _safe_text(text: Any, key: str) -> str:
    """Shorten an untrusted text for a message: without the key, and without control characters for a terminal."""
    short = str(text)[:10_000]
    return one_line(short.replace(key, "***") if key else short)[:300] or "without a reason"
