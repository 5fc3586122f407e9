# SPDX-License-Identifier: Apache-2.0
"""Stores with the protocols of Amazon S3 and Google Cloud Storage on loopback, and a store in memory."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import BytesParser
from functools import partial
from http.server import HTTPServer
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest
from fsspec.implementations.memory import MemoryFileSystem

BUCKET, GCS_BUCKET = "s3://wanjax-videos", "gs://wanjax-videos"


@contextmanager
def running_s3() -> Iterator[str]:
    """Yield the address of an S3 server with a bucket; the environment points at it in the `with` block."""
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    urlopen(
        f"{address}/moto-api/reset", b"", timeout=9
    ).close()  # drop the objects of an earlier server in this process
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


@contextmanager
def running_gcs() -> Iterator[str]:
    """Yield the address of an emulator of Google's store with a bucket; the environment points at it meanwhile.

    It ignores preconditions, such as that an object does not exist.
    """
    from gcp_storage_emulator import server as emulator
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    storage = Storage(use_memory_fs=True)
    create_bucket(GCS_BUCKET.removeprefix("gs://"), storage)
    with (
        QueueingServer(("127.0.0.1", 0), partial(RequestHandler, storage)) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        patch.setattr(emulator, "BytesParser", UploadParser)
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        patch.setenv("NO_GCE_CHECK", "true")  # else the client looks for credentials on Google's network
        patch.setenv(
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
        )  # else the client asks Google for the kind of the bucket
        from gcsfs import GCSFileSystem

        GCSFileSystem.clear_instance_cache()
        yield address
        GCSFileSystem.clear_instance_cache()
        server.shutdown()


class UploadParser(BytesParser):
    """Parses an upload of gcsfs, whose lines end in \n: an \r before the boundary belongs to the file."""

    def parsebytes(self, text: bytes, headersonly: bool = False) -> Message:
        head, _, body = text.partition(b"\r\n")
        if b"multipart/related" not in head:
            return super().parsebytes(text, headersonly)
        message = super().parsebytes(head + b"\r\n")
        boundary, parts = f"\n--{message.get_boundary()}".encode(), []
        for part in (b"\n" + body).split(boundary)[1:3]:
            head, _, content = part.lstrip(b"\n").partition(b"\n\n")
            parts.append(super().parsebytes(head + b"\n\n"))
            parts[-1].set_payload(content.decode("ascii", "surrogateescape"))
        message.set_payload(parts)
        return message


class QueueingServer(HTTPServer):
    """A server that answers one request after another, and lets many requests wait."""

    request_queue_size = 128


def objects() -> dict[str, bytes]:
    """Return all objects of the store in memory, by name."""
    return {name.lstrip("/"): bytes(file.getbuffer()) for name, file in MemoryFileSystem.store.items()}


def clear_memory_store() -> None:
    """Empty the store in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@contextmanager
def failing(method: str, error: Exception, after: int = 0) -> Iterator[list[Any]]:
    """Let a method of the store in memory fail after so many calls; yield the arguments of those that succeeded."""
    original: Callable[..., Any] = getattr(MemoryFileSystem, method)
    calls: list[Any] = []

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if len(calls) >= after:
            raise error
        calls.append(arguments)
        return original(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, call)
        yield calls
