# SPDX-License-Identifier: Apache-2.0
"""What the tests of the commands share: commands that do not run, and stages that end early."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tests.support.commands import Arguments
from wanjax.pipelines.run import Run


@pytest.fixture
def standing_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Arguments]:
    """Let commands pass their arguments to what keeps them, and not run: `standing_for({stages: ["generate"]})`."""

    def kept(commands: dict[ModuleType, list[str]]) -> Arguments:
        arguments = Arguments()
        for module, names in commands.items():
            for name in names:
                monkeypatch.setattr(module, name, partial(arguments.keep, command=name))
        return arguments

    return kept


@pytest.fixture
def failing_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], AbstractContextManager[None]]:
    """Let a method of `Run` fail, as by Ctrl-C or for want of memory: `with failing_in("latents", MemoryError())`."""

    @contextmanager
    def failing(method: str, error: BaseException) -> Iterator[None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Run, method, fail)
            yield

    return failing
