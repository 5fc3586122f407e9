# SPDX-License-Identifier: Apache-2.0
"""The recipes in deploy/: their tools read them, wanjax accepts their commands, and the steps of the image run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from tests.support.documents import PAGES, ROOT, calls, check_call
from wanjax.jobs import multihost
from wanjax.pricing.chips import SLICES

DEPLOY = ROOT / "deploy"
COMMANDS = {
    "compose.yaml": ["serve", "worker"],
    "jobset.yaml": ["batch"],
    "kubernetes.yaml": ["serve", "worker"],
    "ray.yaml": ["batch"],
    "sky-serve.yaml": ["serve"],
    "sky.yaml": ["warmup", "batch"],
    "xpk.sh": ["batch"],
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def container() -> dict[str, Any]:
    return read("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def containers() -> list[dict[str, Any]]:
    """Return the containers of Kubernetes' manifest."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pods = [each["spec"]["template"]["spec"] for each in documents if "template" in each["spec"]]
    return [container for pod in pods for container in pod["containers"]]


def calls_of(name: str) -> list[list[str]]:
    """Return the arguments of each call of `wanjax` with a command in a recipe, in comments too."""
    if name == "jobset.yaml":
        return [container()["args"]]
    if name == "kubernetes.yaml":
        return [each["args"] for each in containers() if "args" in each]
    if name == "compose.yaml":
        return [each["command"] for each in read(name)["services"].values() if "command" in each]
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.lstrip(" #") for line in text.splitlines() if re.search(r"wanjax [a-z]+ .*--", line)]
    return [words for line in lines for words in calls(line)]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_wanjax_command_in_a_recipe_is_valid(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = calls_of(name)
    assert [words[0] for words in result] == COMMANDS[name]
    for words in result:
        check_call(words)


def test_every_recipe_is_tested():
    other_files = {"README.md", "Dockerfile", "Dockerfile.dockerignore"}
    assert {file.name for file in DEPLOY.iterdir()} == other_files | COMMANDS.keys()


def test_servers_and_workers_share_a_database_and_a_folder():
    """No file has a password, and both use the same model."""
    services = read("compose.yaml")["services"]
    database_urls = [services[name]["environment"]["WANJAX_DATABASE"] for name in ("front", "worker")]
    assert database_urls[0] == database_urls[1]
    assert "${POSTGRES_PASSWORD}@database/" in database_urls[0]
    secrets = [
        x["valueFrom"]["secretKeyRef"]["key"]
        for container in containers()
        for x in container["env"]
        if "valueFrom" in x
    ]
    assert secrets == ["password", "database", "token", "database"]
    for name in ("compose.yaml", "kubernetes.yaml"):
        front, worker = ({word: words[i + 1] for i, word in enumerate(words[:-1])} for words in calls_of(name))
        assert (front["--dir"], front["--model"]) == (worker["--dir"], worker["--model"])
        assert front["--workers"] == "0"


@pytest.mark.parametrize(
    "name", ["Dockerfile", "compose.yaml", "kubernetes.yaml", "ray.yaml", "sky.yaml", "sky-serve.yaml"]
)
def test_the_installed_extras_exist(name):
    text = (DEPLOY / name).read_text(encoding="utf-8")
    groups = re.findall(r"EXTRAS=([a-z0-9,]+)", text) + re.findall(r"(?:\.|wanjax)\[([a-z0-9,]+)\]", text)
    extras = {extra for group in groups for extra in group.split(",")}
    assert extras
    assert not extras - EXTRAS.keys()


def contains(parent: Any, part: Any) -> bool:
    """Return whether `parent` contains everything in `part`. It may contain more."""
    if isinstance(part, dict):
        return isinstance(parent, dict) and all(
            name in parent and contains(parent[name], x) for name, x in part.items()
        )
    if isinstance(part, list):
        return isinstance(parent, list) and len(parent) == len(part) and all(map(contains, parent, part))
    return parent == part


def test_the_jobset_follows_the_api():
    """The API's models drop unknown fields and refuse values of a wrong type."""
    api = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set").JobsetV1alpha2JobSet
    jobset = read("jobset.yaml")
    assert contains(api.from_dict(jobset).to_dict(), jobset)
    wrong = deepcopy(jobset)
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 4
    assert not contains(api.from_dict(wrong).to_dict(), wrong)


def test_a_jobset_gives_each_process_its_index(monkeypatch):
    jobset = read("jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    (size,) = {template["parallelism"], template["completions"]}
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *process, **options: joined.append(process))
    for index in range(size):
        annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
        multihost.join_processes(None, {x["name"]: value_of(x, annotations) for x in container()["env"]})
    name = jobset["metadata"]["name"]
    (port,) = (port["containerPort"] for port in container()["ports"])
    first = f"{name}-{job['name']}-0-0.{name}:{port}"  # as JobSet names a pod, with enableDNSHostnames
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    assert template["completionMode"] == "Indexed"
    assert joined == [(first, size, index) for index in range(size)]
    topology = selector()["cloud.google.com/gke-tpu-topology"]
    chips = size * container()["resources"]["limits"]["google.com/tpu"]
    assert chips == prod(map(int, topology.split("x"))) == SLICES["v6e-16"].devices


def test_the_rented_machines_have_all_chips_of_the_slice():
    """Checks the machines that docs/start/tpu.md rents from Compute Engine, and the node pool of the JobSet."""
    page = (ROOT / "docs/start/tpu.md").read_text(encoding="utf-8")
    notes = re.sub(r"^#", "", (DEPLOY / "jobset.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    kinds = "instance-templates create", "workload-policy", "managed resize", "node-pools create"
    lines = [line for text in (page, notes) for line in text.replace("\\\n", "").splitlines() if "gcloud " in line]
    template, policy, resize, pool = (next(line for line in lines if kind in line) for kind in kinds)

    def number(pattern: str, line: str) -> int:
        return prod(int(n) for n in re.search(pattern, line)[1].split("x"))

    chips = number(r"standard-(\d+)t", template) * number(r"--size (\d+)", resize)
    assert chips == number(r"--accelerator-topology (\S+)", policy) == SLICES["v6e-16"].devices
    pooled = number(r"standard-(\d+)t", pool) * number(r"--num-nodes (\d+)", pool)
    assert pooled == number(r"--tpu-topology (\S+)", pool)
    assert re.search(r"--tpu-topology (\S+)", pool)[1] == selector()["cloud.google.com/gke-tpu-topology"]


def test_only_one_page_mentions_googles_retired_api():
    files = [*PAGES, *DEPLOY.iterdir()]
    file_names = [file.name for file in files for _ in re.findall(r"compute tpus\b", file.read_text(encoding="utf-8"))]
    assert file_names == ["tpu.md"]


def selector() -> dict[str, str]:
    return read("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nodeSelector"]


def value_of(variable: dict[str, Any], annotations: dict[str, str]) -> str:
    if "value" in variable:
        return variable["value"]
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    return annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]


def test_the_ray_cluster_is_valid():
    util = pytest.importorskip("ray.autoscaler._private.util")
    cluster = read("ray.yaml")
    util.validate_config(util.prepare_config(deepcopy(cluster)))
    slices = cluster["available_node_types"]["slice"]
    tpu_slice = SLICES[slices["node_config"]["acceleratorType"]]
    assert slices["resources"]["TPU"] == tpu_slice.devices
    (words,) = calls_of("ray.yaml")
    assert int(words[words.index("--workers") + 1]) <= slices["max_workers"] * tpu_slice.devices
    with pytest.raises(Exception, match="max_worker"):
        util.validate_config(util.prepare_config(cluster | {"max_worker": 8}))


@pytest.mark.skipif(shutil.which("hadolint", path=Path(sys.executable).parent) is None, reason="hadolint is missing")
def test_the_image_is_linted():
    subprocess.run([Path(sys.executable).parent / "hadolint", DEPLOY / "Dockerfile"], check=True)


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each with its arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    result = [line.partition(" ") for line in text.replace("\\\n", "").splitlines() if line]
    return [(name, rest) for name, _, rest in result]


def test_files_copied_into_the_image_are_not_ignored():
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = {word for name, rest in steps() if name == "COPY" for word in shlex.split(rest)[:-1]}
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def environment(folder: Path, python: str = sys.executable) -> dict[str, str]:
    """Create a virtual environment. Return variables that activate it, without the user's settings."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX", "XLA"))}
    return variables | {"PATH": f"{folder / 'venv/bin'}:{os.environ['PATH']}", "HOME": str(folder)}


@pytest.mark.slow
def test_the_steps_of_the_image_make_a_video(tmp_path):
    """All steps but those of the system: copy files, install packages, and make a video with the entry point."""
    variables, work = environment(tmp_path), tmp_path / "image"
    work.mkdir()
    variables |= {name: value for kind, rest in steps() if kind == "ARG" for name, _, value in [rest.partition("=")]}
    for name, rest in steps():
        if name == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                destination = work / target
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, destination, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, destination)
        elif name == "RUN" and rest.startswith("pip "):
            subprocess.run(["bash", "-ec", rest], cwd=work, env=variables, check=True)
    (entry,) = (yaml.safe_load(rest) for name, rest in steps() if name == "ENTRYPOINT")
    call = [*entry, "a red circle moving right", "--steps", "2", "--out", "a.mp4"]
    subprocess.run(call, cwd=tmp_path, env=variables | {"XDG_CACHE_HOME": str(tmp_path)}, check=True)
    assert (tmp_path / "a.mp4").stat().st_size > 1000
    subprocess.run([*entry, "serve", "--help"], cwd=tmp_path, env=variables, check=True)


@pytest.mark.slow
def test_skypilot_reads_its_tasks(tmp_path):
    variables = environment(tmp_path) | {"WANJAX_TOKEN": "0123456789abcdef"}
    subprocess.run(["pip", "install", "-q", "skypilot"], env=variables, check=True)
    for name in ("sky.yaml", "sky-serve.yaml"):
        script = f"import sky; task = sky.Task.from_yaml({str(DEPLOY / name)!r}); print(task.resources, task.service)"
        output = subprocess.run(
            ["python", "-c", script], cwd=ROOT, env=variables, check=True, capture_output=True, text=True
        )
        assert "tpu-v6e-8" in output.stdout
        assert ("GET /" in output.stdout) is (name == "sky-serve.yaml")


@pytest.mark.slow
def test_xpk_would_start_the_slice(tmp_path):
    variables = environment(tmp_path)
    subprocess.run(["pip", "install", "-q", "xpk"], env=variables, check=True)
    options = ["my-cluster", "registry/wanjax:tpu", "--dry-run", "--project", "my-project", "--zone", "us-east5-b"]
    call = ["bash", DEPLOY / "xpk.sh", *options]
    output = subprocess.run(call, cwd=tmp_path, env=variables, check=True, capture_output=True, text=True).stdout
    assert "cloud.google.com/gke-tpu-topology: 4x4" in output
    assert re.search(r"wanjax batch .*--processes auto", output)
    assert "HF_HOME" in output


def test_the_compose_file_follows_the_specification():
    """The parser of the specification refuses unknown keys and values of a wrong type."""
    read_compose = pytest.importorskip("compose_spec").PyCompose.from_yaml
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    assert sorted(read_compose(text).service_names()) == ["database", "front", "worker"]
    for valid, wrong in (("ports:", "portz:"), ("service_healthy", "service_helthy"), ("count: 1", "count: [a]")):
        assert valid in text
        with pytest.raises(ValueError):  # noqa: PT011  # the message is the parser's
            read_compose(text.replace(valid, wrong))


def test_the_pods_and_services_follow_the_api():
    """The API's models drop unknown fields and refuse values of a wrong type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
    services = [each for each in documents if each["kind"] == "Service"]
    templates = [each["spec"]["template"] for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    assert (len(services), len(templates)) == (2, 3)
    for kind, manifest in (
        *((models.IoK8sApiCoreV1Service, each) for each in services),
        *((models.IoK8sApiCoreV1PodTemplateSpec, each) for each in templates),
    ):
        assert contains(kind.from_dict(manifest).to_dict(), manifest)
    wrong = deepcopy(templates[0])
    wrong["spec"]["containers"][0]["imagePullPolcy"] = "Always"
    assert not contains(models.IoK8sApiCoreV1PodTemplateSpec.from_dict(wrong).to_dict(), wrong)
    for each in documents:
        if "template" in each["spec"]:
            assert contains(each["spec"]["template"]["metadata"]["labels"], each["spec"]["selector"]["matchLabels"])
