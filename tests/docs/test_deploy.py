"""The Dockerfile and the Kubernetes manifest name flags, routes, extras and files that exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from tests.support.speaking_engine import SpeakingEngine, write_text_files

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


def instruction(name: str) -> str:
    joined = DOCKERFILE.replace("\\\n", " ")
    (found,) = re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8"))
    return {document["kind"]: document for document in documents}


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (found,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_extras_and_copied_files_exist() -> None:
    named = re.findall(r"EXTRA=([a-z,]+)", DOCKERFILE)
    assert len(named) == 3
    assert {extra for names in named for extra in names.split(",")} <= set(EXTRAS)
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert [
        extra for extra in EXTRAS if f"`{extra}`" not in page and f"[{extra}]" not in page
    ] == []


def test_flags_exist(manifest: dict[str, Any]) -> None:
    command = json.loads(instruction("ENTRYPOINT"))
    words = [*command[2:], *container(manifest)["args"]]
    assert command[:2] == ["jspec", "serve"]
    parser = FlagParser(prog="jspec")
    add_flags(parser)
    _, settings = parse_flags(parser, words)
    assert settings.server.port == 30000


def test_probes_ask_what_is_served(manifest: dict[str, Any], tmp_path: Path) -> None:
    pod = container(manifest)
    with SpeakingEngine(write_text_files(tmp_path / "text", template="")) as engine:
        routes = {getattr(route, "path", "") for route in create_app(engine, ServerArgs()).routes}
    probes = {name: pod[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert {probe["path"] for probe in probes.values()} <= routes
    (port,) = pod["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert f"EXPOSE {port['containerPort']}" in DOCKERFILE


def test_a_pod_outlives_its_requests(manifest: dict[str, Any]) -> None:
    args = container(manifest)["args"]
    seconds = float(args[args.index("--shutdown-timeout") + 1])
    assert (
        seconds
        < manifest["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
