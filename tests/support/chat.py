# SPDX-License-Identifier: Apache-2.0
"""A small server of chat completions on the loopback, which answers as a test says."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


def completion(content: Any, **message: Any) -> bytes:
    """Return the answer that holds a text."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content, **message}}]}).encode()


class Chat:
    """The server's address, and the path, the key and the body of each request so far.

    `answer` is called with the handler and the user's text, and returns status and bytes, or None if it has responded.
    """

    def __init__(self, result: Callable[[BaseHTTPRequestHandler, str], tuple[int, bytes] | None]):
        self.answer, self.requests = result, []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                chat.requests.append((self.path, self.headers.get("Authorization"), body))
                if (message := chat.answer(self, body["messages"][-1]["content"])) is None:
                    return
                self.send_response(message[0])
                self.send_header("Content-Length", str(len(message[1])))
                self.end_headers()
                self.wfile.write(message[1])

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def chatting(result: Callable[[BaseHTTPRequestHandler, str], tuple[int, bytes] | None]) -> Iterator[Chat]:
    """Run a server of chat completions meanwhile."""
    chat = Chat(result)
    Thread(target=chat.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield chat
    finally:
        chat.server.shutdown()
        chat.server.server_close()
