# SPDX-License-Identifier: Apache-2.0
"""Euler's method along a rectified flow: x moves along the velocity by the difference of two noise levels."""

from dataclasses import dataclass

from wanjax.schedulers.base import Flow, Index, Sample, Schedule


@dataclass(frozen=True)
class FlowEuler(Flow):
    """Euler's method for flow predictions."""

    def step(
        self, schedule: Schedule, index: Index, prediction: Sample, x: Sample, state: tuple[()]
    ) -> tuple[Sample, tuple[()]]:
        """Move x along the velocity to the next noise level."""
        return x + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * prediction, state
