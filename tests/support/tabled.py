# SPDX-License-Identifier: Apache-2.0
"""Pipelines of small checkpoints with tables for step caches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import wanjax
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable, TeaCacheTable

STEPS = 7
RATIOS = (1.0, 1.02, 0.99, 0.97, 0.99, 0.98, 0.9)
TABLES = CacheTables(MagCacheTable(RATIOS, RATIOS[::-1], 0.1, 2, 0.2), TeaCacheTable((1.0, 0.0), 0.3, 1, 1))


def pipeline_with_tables(folder: Path, **options: Any) -> Any:
    """Return the pipeline of a checkpoint, with tables for seven steps."""
    pipe = wanjax.load(folder, **options)
    pipe.model = replace(pipe.model, tables=TABLES)
    return pipe
