"""The forms in which adapters are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["a=/x", "b=y=z"], [("a", "/x"), ("b", "y=z")]),
        (["org/name"], [("org/name", "org/name")]),
        (['{"lora_name": "a", "lora_path": "/x", "pinned": true}'], [("a", "/x")]),
        ([{"lora_name": "a", "lora_path": "/x"}], [("a", "/x")]),
        ({"a": Path("/x"), "b": "/y"}, [("a", "/x"), ("b", "/y")]),
        ([Path("/x")], [("/x", "/x")]),
        (None, []),
    ],
)
def test_adapters_are_named_in_sglangs_forms(given: Any, named: list[tuple[str, str]]) -> None:
    args = EngineArgs(lora_paths=given)
    assert list(args.named_lora_paths) == named
    assert args.has_loras == bool(named)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_paths": ["=x"]}, "lora_paths has '=x'; expected NAME=PATH, PATH, or"),
        ({"lora_paths": ["{"]}, "lora_paths has '{'; expected NAME=PATH"),
        ({"lora_paths": [{"lora_name": "a"}]}, "expected NAME=PATH"),
        ({"lora_paths": ["a=x", "a=y"]}, "lora_paths names 'a' twice"),
        ({"lora_paths": "a=x"}, "lora_paths is 'a=x'; expected a list of texts"),
        ({"lora_paths": [3]}, r"lora_paths is \(3,\); expected a list of texts"),
        ({"lora_paths": ["a=x", "b=y"], "max_loras_per_batch": 1}, "has 2 adapters; expected at"),
        ({"enable_lora": True, "max_loras_per_batch": 9}, "9; expected an integer from 1 to 8"),
        ({"max_lora_rank": 8}, "max_lora_rank is 8, but enable_lora is False; expected it True"),
        ({"lora_target_modules": ["q_proj"]}, "but enable_lora is False; expected it True"),
    ],
)
def test_what_names_no_adapters_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineArgs(**given)
