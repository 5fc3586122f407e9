# SPDX-License-Identifier: Apache-2.0
"""A store that speaks as Amazon's S3 does, on loopback, and one in memory."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import pytest
from fsspec.implementations.memory import MemoryFileSystem

BUCKET = "s3://wanjax-videos"


@contextmanager
def running_s3() -> Iterator[str]:
    """Yields the address of a server that has a bucket; the environment points at it meanwhile."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which tells each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    urlopen(f"{address}/moto-api/reset", b"", timeout=9).close()  # what an earlier one of this process had
    keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (keys | {"AWS_ENDPOINT_URL": address}).items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET.removeprefix("s3://"))
        client.close()
        yield address
        S3FileSystem.clear_instance_cache()
    server.stop()


def objects() -> dict[str, bytes]:
    """Returns all objects in memory, by their names."""
    return {name.lstrip("/"): bytes(file.getbuffer()) for name, file in MemoryFileSystem.store.items()}


def forget() -> None:
    """Empties the store in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@contextmanager
def failing(method: str, error: Exception, after: int = 0) -> Iterator[list[Any]]:
    """Lets a method of the store in memory fail after so many calls; yields the arguments of those that succeeded."""
    whole: Callable[..., Any] = getattr(MemoryFileSystem, method)
    calls: list[Any] = []

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if len(calls) >= after:
            raise error
        calls.append(given)
        return whole(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, call)
        yield calls
