# SPDX-License-Identifier: Apache-2.0
"""Each kernel is tried before its first use. A failing kernel is replaced, and one warning reports it."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import wanjax
from tests.support import trial_kernels
from tests.support.devices import free_port
from tests.support.words import has_line_with_words
from wanjax import loading
from wanjax.errors import WanjaxWarning
from wanjax.execution import EXECUTE
from wanjax.kernels import admission, admitted
from wanjax.kernels.attention import IMPLEMENTATIONS, api, choose_implementation
from wanjax.kernels.trials import KERNELS
from wanjax.pipelines.tracing import trace_programs

SETTINGS: dict[str, Any] = {"steps": 1, "seed": 3, "frames": 5, "size": (32, 32)}
TWO_PROCESSES = """
import json, sys, warnings
from wanjax.jobs.multihost import join_processes
from wanjax.kernels import admission
join_processes(sys.argv[1])
first = sys.argv[1].endswith(",0")
reasons = {"splash": "", "flash_tpu": "it raises" if first else "", "normed_silu": ""}
admission.failure_reasons = lambda kind, kernels, is_needed: reasons
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    refused = admission.admit("v6e", lambda name: True)
print(json.dumps([sorted(refused), len(caught)]))
"""


@pytest.fixture
def pretend_accelerator(monkeypatch, tmp_path):
    """Return a function that makes the CPU an accelerator whose preferred kernel is one of `trial_kernels`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of the child
    monkeypatch.setattr(admitted, "_rejected", {})
    monkeypatch.setattr(admission, "KERNEL_SECONDS", 2.0)
    preferred = dict(api.PREFERRED_CHOICES)

    def pretend(name):
        monkeypatch.setattr(admitted, "_tried", set())
        monkeypatch.setattr(admission, "_has_hung_kernel", False)
        monkeypatch.setattr(admitted, "tpu_kind", lambda: "v6e")
        monkeypatch.setattr(admission, "KERNELS", f"tests.support.trial_kernels:{name.upper()}")
        broken = replace(
            IMPLEMENTATIONS["chunked"],
            attention=vars(trial_kernels)[name],
            unsupported=lambda *arrays, **options: None,
        )
        monkeypatch.setitem(IMPLEMENTATIONS, "flash_tpu", broken)
        monkeypatch.setitem(api.PREFERRED_CHOICES, "cpu", (*preferred["tpu"][:1], *api.FALLBACK_CHOICES))

    yield pretend
    EXECUTE.clear_programs()


def video():
    pipe = wanjax.load("nano")
    return np.asarray(pipe("a red circle", **SETTINGS).frames)


@pytest.fixture(scope="module")
def expected_frames():
    return video()


@pytest.mark.parametrize(
    ("fault", "refused", "words"),
    [
        ("wrong", ["flash_tpu"], "flash_tpu a small shape differs"),
        ("raising", ["flash_tpu"], "flash_tpu raises ValueError Mosaic"),
        ("dying", ["flash_tpu"], "flash_tpu ended process"),
        ("hanging", ["flash_tpu", "heads_joined"], "flash_tpu did not return"),
    ],
)
def test_a_kernel_that_fails_is_not_used(fault, refused, words, pretend_accelerator, expected_frames):
    pretend_accelerator(fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames = video()
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, WanjaxWarning)]
    (message,) = (text for text in messages if "was trained only on" not in text)
    assert has_line_with_words(message, f"{words} v6e jax libtpu report")
    assert sorted(admitted.rejected_kernels()) == refused
    np.testing.assert_array_equal(frames, expected_frames)


def test_a_correct_kernel_is_used(pretend_accelerator):
    pretend_accelerator("right")
    admitted.admit_kernels()
    operand = jax.ShapeDtypeStruct((1, 96, 2, 64), "float32")
    assert admitted.rejected_kernels() == {}
    assert choose_implementation(operand, operand, operand).name == "flash_tpu"
    admitted.set_rejected({"flash_tpu": "a reason"})
    assert choose_implementation(operand, operand, operand).name == "chunked"
    # a kernel that the caller names is never replaced
    assert choose_implementation(operand, operand, operand, implementation="flash_tpu").name == "flash_tpu"


def test_a_rarely_used_kernel_is_tried_when_a_run_needs_it(pretend_accelerator, monkeypatch):
    pretend_accelerator("right")
    trial = admission._load_kernels("tests.support.trial_kernels:WRONG")[1]
    kernels = [trial, *(trial._replace(name=name) for name in admitted.TRIED_WHEN_NEEDED)]
    monkeypatch.setattr(trial_kernels, "MANY", kernels, raising=False)
    monkeypatch.setattr(admission, "KERNELS", "tests.support.trial_kernels:MANY")
    tried = []

    def try_all(kernels, names):
        tried.append(names)
        return iter([(name, "it differs") for name in names])

    monkeypatch.setattr(admission, "_try_in_child", try_all)
    with pytest.warns(WanjaxWarning):
        admitted.admit_kernels()
    assert not admitted.is_admitted("flash_tpu")
    assert admitted.is_admitted("chunked")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reported in another thread
        assert not jax.jit(lambda: admitted.is_admitted("splash"))()
        assert not admitted.is_admitted("splash")
    assert tried == [["flash_tpu"], ["splash"]]
    assert sorted(admitted.rejected_kernels()) == ["flash_tpu", "splash"]


def test_loading_a_model_tries_the_kernels_of_its_attention(monkeypatch):
    tried = []
    monkeypatch.setattr(loading, "admit_kernels", lambda *names: tried.append(names))
    wanjax.load("nano")
    wanjax.load("nano", attention="radial:0.2")
    assert tried == [(), ("flash_tpu_radial",)]


def test_a_trial_result_is_reused_until_code_packages_or_chip_change(pretend_accelerator, monkeypatch):
    pretend_accelerator("wrong")
    assert admission.failure_reasons("v6e", admission.KERNELS)["flash_tpu"]
    with monkeypatch.context() as patch:
        patch.setattr(admission, "_TrialProcess", None)  # so that no trial can start
        assert admission.failure_reasons("v6e", admission.KERNELS)["flash_tpu"]
    pretend_accelerator("right")  # the module now has other code, and then a package has another version
    tried = []
    monkeypatch.setattr(
        admission, "_try_in_child", lambda kernels, names: iter([(name, "") for name in tried or names])
    )
    assert admission.failure_reasons("v6e", admission.KERNELS)["flash_tpu"]
    for package in ("jax", "jaxlib", "libtpu"):
        with monkeypatch.context() as patch:
            patch.setattr(admission, "_version", lambda name, package=package: "9" if name == package else "1")
            assert not admission.failure_reasons("v6e", admission.KERNELS)["flash_tpu"]
    assert not admission.failure_reasons("v5e", admission.KERNELS)["flash_tpu"]
    with monkeypatch.context() as patch:
        patch.setattr(admission.Path, "read_bytes", lambda file: b"other code")
        assert not admission.failure_reasons("v6e", admission.KERNELS)["flash_tpu"]


def test_a_kernel_that_fails_in_one_process_is_rejected_in_both(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    address = f"localhost:{free_port()}"
    command = [sys.executable, "-c", TWO_PROCESSES]
    runs = [
        subprocess.Popen([*command, f"{address},2,{i}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == [["flash_tpu"], 1]


def test_a_program_is_recompiled_if_a_kernel_is_rejected(monkeypatch):
    monkeypatch.setattr(admitted, "_rejected", {})
    pipe = wanjax.load("nano")
    [instance, *_] = [program.traced_program for program in trace_programs(pipe, pipe.settings(**SETTINGS)).programs]
    key_before = EXECUTE.key_of(instance)
    admitted.set_rejected({"flash_tpu": "a reason"})
    assert EXECUTE.key_of(instance) != key_before


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=() if kernel.name in ("splash", "heads_apart") else pytest.mark.slow)
        for kernel in KERNELS
    ],
    ids=lambda kernel: kernel.name,
)
def test_every_kernel_passes_its_trial(kernel):
    """Pallas' interpreter runs each kernel's trial: its small shapes, its reference and its bound."""
    assert admission.failure_reason(kernel) == ""


def test_no_kernel_is_tried_on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code = "import sys, wanjax; wanjax.load('nano'); print('wanjax.kernels.admission' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["False"]
