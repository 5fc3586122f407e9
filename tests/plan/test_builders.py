# SPDX-License-Identifier: Apache-2.0
"""What a compiling process is told: values as JSON."""

import json

import pytest

from wanjax.plan.builders import from_json, to_json
from wanjax.registry import outline, presets


@pytest.mark.parametrize("name", presets())
def test_an_architecture_comes_back_from_json(name):
    _, architecture, _ = outline(name)
    told = from_json(json.loads(json.dumps(to_json(architecture))))
    assert told == architecture
    assert type(told.tables.magnitudes) is type(architecture.tables.magnitudes)
