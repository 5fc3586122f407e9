# SPDX-License-Identifier: Apache-2.0
"""A small server of chat completions on loopback, with answers that a test sets."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


def completion(content: Any, **message: Any) -> bytes:
    """Return a completion with this content, as the body of a response."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content, **message}}]}).encode()


class Chat:
    """A server of chat completions. `requests` has the path, the key and the body of each request so far.

    `answer` gets the handler and the user's text. It returns status and body, or None if it has responded itself.
    """

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler, str], tuple[int, bytes] | None]):
        self.answer, self.requests = answer, []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                chat.requests.append((self.path, self.headers.get("Authorization"), body))
                if (response := chat.answer(self, body["messages"][-1]["content"])) is None:
                    return
                self.send_response(response[0])
                self.send_header("Content-Length", str(len(response[1])))
                self.end_headers()
                self.wfile.write(response[1])

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def chatting(answer: Callable[[BaseHTTPRequestHandler, str], tuple[int, bytes] | None]) -> Iterator[Chat]:
    """Run a server of chat completions in the `with` block."""
    chat = Chat(answer)
    Thread(target=chat.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield chat
    finally:
        chat.server.shutdown()
        chat.server.server_close()
