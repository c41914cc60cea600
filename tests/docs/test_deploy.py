"""The Dockerfile and the manifests have fields, flags, routes, extras and files that exist."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml
from lightkube.models.apps_v1 import DeploymentSpec
from lightkube.models.batch_v1 import JobTemplateSpec
from lightkube.models.core_v1 import PodTemplateSpec, ServiceSpec
from lightkube.models.meta_v1 import ObjectMeta

from jspec.cli.flag_table import FLAGS
from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.distributed.replica_args import ServeSettings
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from tests.support.speaking_engine import SpeakingEngine, write_text_files

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


class Given(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """The parts of custom resources that the manifests use; pods in them are Kubernetes' own."""


class Group(Given):
    size: int
    restart_policy: Literal["RecreateGroupOnPodRestart", "None"]
    leader_template: PodTemplateSpec
    worker_template: PodTemplateSpec


class Groups(Given):
    replicas: int
    startup_policy: Literal["LeaderCreated", "LeaderReady"]
    leader_worker_template: Group


class ReplicatedJob(Given):
    name: str
    replicas: int
    template: JobTemplateSpec


class FailurePolicy(Given):
    max_restarts: int


class Network(Given):
    enable_dns_hostnames: bool = msgspec.field(name="enableDNSHostnames")
    publish_not_ready_addresses: bool


class Jobs(Given):
    failure_policy: FailurePolicy
    network: Network
    replicated_jobs: list[ReplicatedJob]


class RayHead(Given):
    ray_start_params: dict[str, str]
    template: PodTemplateSpec


class RayWorkers(RayHead):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int


class RayCluster(Given):
    enable_in_tree_autoscaling: bool
    head_group_spec: RayHead
    worker_group_specs: list[RayWorkers]


class RayServe(Given):
    serve_config_v2: str
    ray_cluster_config: RayCluster


SPECS: dict[tuple[str, str], Any] = {
    ("v1", "Service"): ServiceSpec,
    ("apps/v1", "Deployment"): DeploymentSpec,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): Groups,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): Jobs,
    ("ray.io/v1", "RayService"): RayServe,
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def unread(given: Any, read: Any, at: str) -> Iterator[str]:
    """Yield the places of values that the types do not have."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(read, dict) or name not in read:
                yield f"{at}.{name}"
            else:
                yield from unread(value, read[name], f"{at}.{name}")
    elif isinstance(given, list):
        for i, value in enumerate(given):
            yield from unread(value, read[i], f"{at}[{i}]")
    elif given != read:
        yield at


def check(document: dict[str, Any]) -> None:
    """Raise AssertionError or msgspec.ValidationError for a wrong name or type of a field."""
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    kind = SPECS[document["apiVersion"], document["kind"]]
    for name, type in (("metadata", ObjectMeta), ("spec", kind)):
        read = msgspec.to_builtins(msgspec.convert(document[name], type))
        assert list(unread(document[name], read, name)) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_fields_have_kubernetes_names_and_types(path: Path) -> None:
    for document in documents(path):
        check(document)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("periodSeconds: 5", "periodSecond: 5"),
        ("periodSeconds: 5", "periodSeconds: often"),
        ("size: 4", "size: four"),
        ("startupPolicy", "startPolicy"),
        ("httpGet:", "httpget:"),
        ("LeaderCreated", "LeaderMade"),
    ],
)
def test_wrong_fields_are_found(old: str, new: str) -> None:
    text = (ROOT / "deploy" / "tpu-v5e-16.yaml").read_text("utf-8")
    assert old in text
    found = next(yaml.safe_load_all(text.replace(old, new)))
    with pytest.raises((AssertionError, msgspec.ValidationError)):
        check(found)


def containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield from node.get("containers", ())
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from containers(each)


def servers(path: Path) -> list[dict[str, Any]]:
    """Return the containers that run the image's own command, those with probes first."""
    found = [each for each in containers(documents(path)) if "args" in each]
    return sorted(found, key=lambda each: "startupProbe" not in each)


SERVERS = [path for path in MANIFESTS if servers(path)]


def instruction(name: str) -> str:
    joined = DOCKERFILE.replace("\\\n", " ")
    (found,) = re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)
    return str(found)


def test_extras_and_copied_files_exist() -> None:
    named = re.findall(r"EXTRA=([a-z,]+)", DOCKERFILE + "".join(map(Path.read_text, MANIFESTS)))
    assert len(named) == 4
    assert {extra for names in named for extra in names.split(",")} <= set(EXTRAS)
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert [
        extra for extra in EXTRAS if f"`{extra}`" not in page and f"[{extra}]" not in page
    ] == []
    assert [path.name for path in MANIFESTS if f"deploy/{path.name}" not in page] == []


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.stem)
def test_flags_exist_and_fit_the_devices(path: Path) -> None:
    command = json.loads(instruction("ENTRYPOINT"))
    assert command[:2] == ["jspec", "serve"]
    alike = {tuple(each["args"]) for each in servers(path)}
    assert len(alike) == 1
    words = list(alike.pop())
    known = {name for flag in FLAGS for name in flag.names}
    assert [word for word in words if word.startswith("--") and word not in known] == []
    # What several hosts need has the controller's variables for values.
    pairs = list(zip(words[::2], words[1::2], strict=True))
    own = [word for pair in pairs if "$(" not in pair[1] for word in pair]
    parser = FlagParser(prog="jspec")
    add_flags(parser)
    settings = parse_flags(parser, [*command[2:], *own])[1]
    assert settings.server.port == 30000
    hosts = 1
    for document in documents(path):
        spec = document["spec"]
        hosts *= spec.get("leaderWorkerTemplate", {}).get("size", 1)
        for job in spec.get("replicatedJobs", ()):
            hosts *= job["template"]["spec"]["completions"]
    (chips,) = {next(iter(each["resources"]["limits"].values())) for each in servers(path)}
    assert settings.engine_args.tp_size == hosts * int(chips)


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    texts = write_text_files(tmp_path_factory.mktemp("deploy") / "text", template="")
    with SpeakingEngine(texts) as engine:
        return {getattr(route, "path", "") for route in create_app(engine, ServerArgs()).routes}


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.stem)
def test_probes_ask_what_is_served(path: Path, routes: set[str]) -> None:
    pod = servers(path)[0]
    asked = {}
    for name in ("startup", "liveness", "readiness"):
        probe = pod[f"{name}Probe"]
        if "exec" in probe:
            code = probe["exec"]["command"][-1]
            compile(code, name, "exec")
            (asked[name],) = re.findall(r"127.0.0.1:30000(/\w+)", code)
        else:
            asked[name] = probe["httpGet"]["path"]
            assert probe["httpGet"]["port"] == pod["ports"][0]["name"]
    assert asked == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert set(asked.values()) <= routes
    assert f"EXPOSE {pod['ports'][0]['containerPort']}" in DOCKERFILE
    startup = pod["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 30 * 60


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.stem)
def test_a_pod_outlives_its_requests(path: Path) -> None:
    grace = re.findall(r"terminationGracePeriodSeconds: (\d+)", path.read_text("utf-8"))
    for each in servers(path):
        seconds = float(each["args"][each["args"].index("--shutdown-timeout") + 1])
        assert seconds < min(map(int, grace))


def test_ray_serves_the_app_with_its_arguments() -> None:
    (service,) = documents(ROOT / "deploy" / "ray-service.yaml")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert app["import_path"] == "jspec.distributed.ray_serve:app"
    settings = ServeSettings.of(app["args"])
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["maxReplicas"] == settings.replicas.max_replicas
