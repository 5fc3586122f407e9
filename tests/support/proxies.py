# SPDX-License-Identifier: Apache-2.0
"""nginx and Caddy in front of a server, with the configuration of docs/guides/server.md."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks

PROGRAMS = {"nginx": "/usr/sbin/nginx", "caddy": "caddy"}
PREFIX = "/wan/"  # the path in the documented configuration
NGINX_LINES = "location /wan/ {\n    proxy_pass http://127.0.0.1:8000/;\n}\n"  # without headers
NGINX_1_29_7_LINES = (
    'proxy_http_version 1.1;\nproxy_set_header Connection "";\n' + NGINX_LINES
)  # the default of later versions
NGINX_CONFIG = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    server {
        listen %s;
        %s
    }
}
"""
CADDY_CONFIG = "{\n    admin off\n    auto_https off\n}\n%s"


def documented_lines(kind: str) -> str:
    """Return the configuration that the documentation has for a proxy."""
    [block] = [block for block in blocks(ROOT / "docs/guides/server.md") if block.language == kind]
    return block.text


@contextmanager
def running_proxy(kind: str, folder: Path, port: int, prefix: str = PREFIX, lines: str | None = None) -> Iterator[str]:
    """Yield the address of a proxy to a server's port; skip the test if the proxy is not installed.

    Args:
        kind: "nginx" or "caddy".
        folder: A folder for its files, created if it is missing.
        port: The server's port on this machine.
        prefix: The path under which the server is reached, "/" for all.
        lines: The proxy's configuration; None is what the documentation prints.
    """
    if (program := shutil.which(PROGRAMS[kind])) is None:
        pytest.skip(f"there is no {kind}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        proxy_port = free.getsockname()[1]
    lines = (lines or documented_lines(kind)).replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(PREFIX, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "proxy.conf"
    if kind == "nginx":
        config.write_text(NGINX_CONFIG % (proxy_port, lines))
        command = [program, "-p", folder, "-c", config, "-e", "stderr"]
    else:
        if prefix == "/":  # "/" needs no redirect
            lines = re.sub(r"(?m)^\s*redir .*\n", "", lines)
        config.write_text(CADDY_CONFIG % lines.replace("videos.example", f"http://127.0.0.1:{proxy_port}"))
        command = [program, "run", "--adapter", "caddyfile", "--config", config]
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(folder))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | homes)
    try:
        _wait(process, proxy_port)
        yield f"http://127.0.0.1:{proxy_port}{prefix}"
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _wait(process: subprocess.Popen, port: int) -> None:
    """Wait until a proxy listens."""
    for _ in range(200):
        assert process.poll() is None, process.stderr and process.stderr.read()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the proxy does not listen")
