# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server for tests, run by an unprivileged user."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

STRICT, PASSWORD = "strict", "p@ss/word"  # a user who has to give a password


def program(name: str) -> str:
    """Return the path of a PostgreSQL program, also in Debian's folder; skip the test if it is missing."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    path = shutil.which(name) or next((str(each / name) for each in folders if (each / name).exists()), None)
    return path or pytest.skip("there is no PostgreSQL")


class Server:
    """A server with its data in a folder. `port` stays the same when the server restarts.

    Its commands begin with `command_prefix`, such as `ip netns exec NAME`. It listens on `address`.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", command_prefix: Sequence[str] = ()):
        self.folder, self.address, self._command_prefix = folder, address, list(command_prefix)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._user_options: dict[str, Any] = {}
        if os.getuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
            if command_prefix:
                self._command_prefix += [
                    "setpriv",
                    f"--reuid={user.pw_uid}",
                    f"--regid={user.pw_gid}",
                    "--clear-groups",
                ]
            else:
                self._user_options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._run("initdb", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        rules = folder / "data/pg_hba.conf"
        rules.write_text(f"host all {STRICT} all scram-sha-256\nhost all all {address}/24 trust\n{rules.read_text()}")
        self.start()
        with psycopg.connect(self.url("postgres"), autocommit=True) as admin:
            admin.execute(f"CREATE ROLE {STRICT} LOGIN PASSWORD '{PASSWORD}'")

    def _run(self, name: str, *arguments: str) -> None:
        command = [*self._command_prefix, program(name), "-D", str(self.folder / "data"), *arguments]
        result = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=60, **self._user_options
        )
        assert result.returncode == 0, result.stderr + result.stdout

    def start(self) -> None:
        settings = f"listen_addresses={self.address}", f"unix_socket_directories={self.folder}", "fsync=off"
        options = " ".join([f"-p {self.port}", *(f"-c {setting}" for setting in settings)])
        self._run("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-m", mode)

    def suspend_writer(self) -> None:
        """Suspend the process that writes asynchronous commits, until the server stops."""
        state = "SELECT pid, wait_event FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        with psycopg.connect(self.url("postgres"), autocommit=True) as admin:
            while True:
                [(pid, _)] = admin.execute(state).fetchall()
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.1)
                [(_, waits_for)] = admin.execute(state).fetchall()
                if waits_for == "WalWriterMain":  # it holds no lock that a commit needs
                    return
                os.kill(pid, signal.SIGCONT)

    def url(self, database: str, login: str = "postgres") -> str:
        return f"postgresql://{login}@{self.address}:{self.port}/{database}"

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield the URL of a new database."""
        name = f"jobs_{uuid4().hex[:8]}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}")
        yield self.url(name)
        with psycopg.connect(self.url("postgres"), autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def running(address: str = "127.0.0.1", command_prefix: Sequence[str] = ()) -> Iterator[Server]:
    """Run a server in the `with` block."""
    program("initdb")
    with tempfile.TemporaryDirectory(prefix="wanjax-postgres-") as folder:
        os.chmod(folder, 0o755)
        server = Server(Path(folder), address, command_prefix)
        try:
            yield server
        finally:
            server.stop()
