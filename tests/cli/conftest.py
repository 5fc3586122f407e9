# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the commands' tests: commands that do not run, and stages that fail."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tests.support.commands import Arguments
from wanjax.pipelines.run import Run


@pytest.fixture
def record_arguments(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Arguments]:
    """Record the arguments of commands instead of running them: `record_arguments({stages: ["generate"]})`."""

    def record(commands: dict[ModuleType, list[str]]) -> Arguments:
        arguments = Arguments()
        for module, names in commands.items():
            for name in names:
                monkeypatch.setattr(module, name, partial(arguments.keep, command=name))
        return arguments

    return record


@pytest.fixture
def failing_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], AbstractContextManager[None]]:
    """Make a method of `Run` raise an error: `with failing_in("latents", MemoryError())`."""

    @contextmanager
    def failing(method: str, error: BaseException) -> Iterator[None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Run, method, fail)
            yield

    return failing
