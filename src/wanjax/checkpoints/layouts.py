# SPDX-License-Identifier: Apache-2.0
"""Sources whose components are recognised by their tensors.

A component that such a checkpoint lacks comes from the diffusers repository of the same model.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from wanjax.checkpoints.sources import DiffusersSource, Source, Weights
from wanjax.errors import WanjaxError


class Component(NamedTuple):
    """A recognised component: its config.json, and its tensors by their names in diffusers or transformers."""

    json: dict[str, Any]
    weights: Any  # Weights


class RecognisedSource(Source):
    """A source whose components are recognised by their tensors."""

    @abstractmethod
    def component(self, name: str) -> Component | None:
        """Returns the component, or None where the checkpoint does not hold it."""

    @property
    @abstractmethod
    def repository(self) -> str | None:
        """The diffusers repository of the same model; None where none is known."""

    @property
    @abstractmethod
    def scheduler(self) -> dict[str, Any]:
        """The scheduler_config.json of the same model."""

    @property
    def origin(self) -> str:
        return self.repository or self.name

    @cached_property
    def _published(self) -> DiffusersSource:
        return DiffusersSource(self.origin)

    def _lender(self, component: str) -> DiffusersSource:
        """Returns the repository of the same model, for a component that the checkpoint lacks."""
        if self.origin == self.name:
            raise WanjaxError(
                f"{self.name} holds no {component}, and its transformer has the size of no published model, which "
                "would have one: a whole checkpoint is needed"
            )
        return self._published

    def config(self, component: str) -> dict[str, Any]:
        if component == "scheduler":
            return self.scheduler
        found = self.component(component)
        return self._lender(component).config(component) if found is None else found.json

    def weights(self, component: str) -> Weights:
        found = self.component(component)
        return self._lender(component).weights(component) if found is None else found.weights

    def files(self, component: str) -> Sequence[Path]:
        own = component == "scheduler" or self.component(component) is not None
        return [] if own else self._lender(component).files(component)
