# SPDX-License-Identifier: Apache-2.0
"""`wanjax calibrate` measures tables and saves them, and `--cache` reads them."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import wanjax
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as command
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_hunyuan_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable
from wanjax.pipelines.caching.calibration import Measurements, measure, reused_steps, tables_from
from wanjax.pipelines.caching.rules import TeaCache
from wanjax.pipelines.phases import Phase

pytestmark = pytest.mark.usefixtures("cached_programs")

MODELS = {"wan": tiny_checkpoint, "cogvideox": tiny_cogvideox_checkpoint, "hunyuanvideo": tiny_hunyuan_checkpoint}
SMALL = {"size": (32, 32), "frames": 9, "steps": 4, "seed": 3}


@pytest.mark.parametrize("model", quick(["wan"], MODELS))
def test_measured_ratios_are_those_that_magcache_uses(model, tmp_path):
    """The norms of the cached residuals have the measured ratios, if every step is computed."""
    pipe = wanjax.load(MODELS[model](tmp_path))
    settings = pipe.settings(**SMALL, guidance_scale=3.0)
    conditioning = pipe.encode("a red circle", "a dog")
    measured = measure(pipe.runtime, pipe.model, conditioning, settings)
    residuals = []

    def callback(step):
        residuals.append([np.asarray(jax.tree.leaves(part)[0], np.float64) for part in step.state.cached])

    large_ratios = (1.0, 5.0, 5.0, 1.0)  # with these ratios, only the last step may reuse
    pipe.model = replace(pipe.model, tables=CacheTables(MagCacheTable(large_ratios, large_ratios, 0.1, 1, 0.0)))
    pipe.denoise(conditioning, **SMALL, guidance_scale=3.0, cache="magcache", callback=callback)
    for step in (1, 2):
        for prompt in (0, 1):
            norms = [np.linalg.norm(residuals[i][prompt], axis=-1) for i in (step - 1, step)]
            token_ratios = norms[1] / norms[0]
            assert measured.ratios[prompt, step] == pytest.approx(token_ratios.mean(), rel=1e-4)
    assert measured.ratios[:, 0].tolist() == [1, 1]
    assert measured.ratios.shape == measured.output_changes.shape == (2, SMALL["steps"])
    assert [phase[1:6] for phase in measured.phases] == [(0, (3.0,) * 4, 4, 0, 0)]


def test_tables_fit_the_measurements():
    """A polynomial of degree four is recovered; ratios are means; half of the steps reuse at the threshold."""
    steps, polynomial = 40, [3.0, -2.0, 5.0, 0.5, 0.01]
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(3):
        embedding_changes = rng.uniform(0.02, 0.5, steps)
        output_changes = np.stack([np.polyval(polynomial, embedding_changes)] * 2)
        ratios = rng.uniform(0.95, 1.0, (2, steps))
        runs.append(
            Measurements(ratios, output_changes, embedding_changes, (Phase("transformer", 0, (3.0,) * steps, steps),))
        )
    tables = tables_from(runs)
    assert error(np.array(tables.changes.polynomial), np.array(polynomial)) <= 1e-5
    assert error(np.array(tables.magnitudes.prompt), np.mean([run.ratios[0] for run in runs], axis=0)) <= 1e-5
    assert error(np.array(tables.magnitudes.negative), np.mean([run.ratios[1] for run in runs], axis=0)) <= 1e-5
    assert steps / 2 <= reused_steps(TeaCache(), tables, runs[0]) < 0.8 * steps
    short_runs = [
        Measurements(run.ratios[:, :9], run.output_changes[:, :9], run.embedding_changes[:9], run.phases)
        for run in runs
    ]
    with pytest.raises(WanjaxError, match=line_with_words("9 steps model 10")):
        tables_from(short_runs)


def test_the_command_saves_tables_that_the_cache_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = str(tiny_checkpoint(tmp_path / "model"))
    small = ("--size", "32x32", "--frames", "9", "--steps", "12", "--guidance-scale", "3")
    output = refused("a", "--model", folder, "--cache", "magcache")
    assert has_line_with_words(output, f"table {folder} magcache calibrate")
    refusal = refused("calibrate", folder, *small[:-4], "--steps", "2")
    assert has_line_with_words(refusal, "2 steps 10")
    assert "prompt 1" not in refusal
    output = succeeded(command("calibrate", folder, *small, "--with-prompt", "a cat", "--with-prompt", "a dog")).stderr
    assert "prompt 2 of 2: a dog" in output
    (file,) = (tmp_path / "data" / "wanjax" / "caches").glob("model-*.json")
    assert str(file) in output
    saved = json.loads(file.read_text())
    assert saved["prompts"] == ["a cat", "a dog"]
    assert len(saved["magcache"]["prompt"]) == len(saved["magcache"]["negative"]) == 12
    tables = wanjax.load(folder).model.tables
    assert list(tables.magnitudes.prompt) == saved["magcache"]["prompt"]
    assert list(tables.changes.polynomial) == saved["teacache"]["polynomial"]
    file.write_text(json.dumps(saved | {"magcache": saved["magcache"] | {"prompt": [1.0]}}))
    output = refused("a", "--model", folder, "--cache", "magcache")
    assert has_line_with_words(output, "1 ratio prompt 12 negative")
