# SPDX-License-Identifier: Apache-2.0
"""`wanjax serve` in a new process, and an HTTP client for it."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx

PROMPT = "a red circle moving right"
SMALL = {"prompt": PROMPT, "size": "32x32", "frames": 5}


@contextmanager
def serving(folder, *options, **environment):
    port = () if "--port" in options else ("--port", "0")
    command = [sys.executable, "-m", "wanjax", "serve", *port, "--dir", str(folder), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    assert process.stderr is not None
    try:
        address, output = None, ""
        while not address:
            line = process.stderr.readline()
            output += line
            assert line, output
            address = re.search(r"serving .* at (http://\S+)/,", line)
        with httpx.Client(base_url=address[1], timeout=60) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_until_finished(client, id):
    while (video := client.get(f"/v1/videos/{id}").json())["status"] not in ("completed", "failed"):
        time.sleep(0.05)
    return video
