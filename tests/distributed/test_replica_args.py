"""Arguments of replicas: texts of a command line, the file's values, and errors of one line."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from jspec.distributed.ray_replicas import actor_options, check_gpus
from jspec.distributed.ray_serve import app
from jspec.distributed.replica_args import ReplicaArgs, ServeSettings
from jspec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_texts_mean_what_the_files_values_mean() -> None:
    values: dict[str, Any] = {
        "max_running_requests": 4,
        "speculative_adaptive": False,
        "mem_fraction_static": 0.5,
        "served_model_name": "7",
        "num_replicas": 2,
        "max_replicas": 4,
        "num_gpus": 0.5,
        "ray_actor_options": {"resources": {"TPU": 4}},
    }
    texts = {name: str(value) for name, value in values.items()}
    texts["ray_actor_options"] = '{"resources": {"TPU": 4}}'
    settings = ServeSettings.of(values)
    assert ServeSettings.of(texts) == settings
    assert settings.server.served_model_name == "7"
    assert settings.replicas.num_replicas == 2
    assert dict(settings.engine) == {
        "max_running_requests": 4,
        "speculative_adaptive": False,
        "mem_fraction_static": 0.5,
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_replica": 2}, "unknown argument 'num_replica'; did you mean 'num_replicas'?"),
        ({"tensor_parallel_size": 2}, "unknown .*; did you mean 'tp_size'?"),
        ({"num_replicas": "two"}, "num_replicas is 'two'; expected an integer"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2; expected at least min_rep"),
        ({"port": 30000}, "port is 30000; on Ray it has no effect: expected `serve start`"),
        ({"dtype": "int4"}, "dtype is 'int4'; expected one of"),
        ({"ray_actor_options": "TPU"}, "ray_actor_options is 'TPU'; expected an object"),
    ],
)
def test_errors_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ServeSettings.of(values)
    assert "\n" not in str(caught.value)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; expected `pip install"):
        app({})


def test_gpus_that_no_node_has() -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": 2.0}}, {"Alive": False, "Resources": {"GPU": 8}}]
    settings = ServeSettings.of({"num_gpus": 2})
    check_gpus(settings, nodes)
    assert actor_options(settings) == {"num_cpus": 1.0, "num_gpus": 2}
    with pytest.raises(ConfigError, match="num_gpus is 4, and no node has more than 2; expected"):
        check_gpus(ServeSettings.of({"num_gpus": 4}), nodes)
    unchecked = ServeSettings.of({"ray_actor_options": {"num_gpus": 4}})
    check_gpus(unchecked, [])
    assert actor_options(unchecked) == {"num_cpus": 1.0, "num_gpus": 4}


def test_the_file_and_the_commands_of_the_guide_are_valid() -> None:
    config = yaml.safe_load((ROOT / "configs" / "ray_serve.yaml").read_text())
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    assert getattr(importlib.import_module(module), name) is app
    assert ServeSettings.of(application["args"]).replicas.num_replicas == 2
    guide = (ROOT / "docs" / "guides" / "ray.md").read_text()
    commands = re.findall(r"^serve run \S+:app((?:[^\n]*\\\n)*[^\n]*)$", guide, re.MULTILINE)
    assert len(commands) == 2
    for words in commands:
        pairs = [word.split("=", 1) for word in words.replace("\\\n", " ").split()]
        assert ServeSettings.of(dict(pairs)).replicas.num_replicas == 2
    for known in fields(ReplicaArgs):
        assert f"`{known.name}`" in guide
