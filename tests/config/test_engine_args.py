"""Engine arguments that are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    ["model_path", "tokenizer_path", "speculative_draft_model_path", "compilation_cache_dir"],
)
@pytest.mark.parametrize(
    "value",
    ["gs://b/c", "s3://bucket", "file:///tmp/x", "hf+x://a/b", "gs:/b/c", "gs:b/c", "S3:/bucket"],
)
def test_a_remote_path_is_refused_and_nothing_is_made(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if value == "gs://b/c":  # fetched: tests/engine/test_remote_..., test_program_bucket
        assert EngineArgs(**{**DRAFTED, name: value})
        return
    with pytest.raises(ConfigError, match=rf"{name} is '.*:.*'; expected a directory of this"):
        EngineArgs.from_mapping({name: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["a:b", "./gs:/b", "C:/models", "/a/b//c", ""])
def test_other_names_are_directories(value: str) -> None:
    assert EngineArgs(compilation_cache_dir=value).compilation_cache_dir == value


def test_a_directory_may_be_a_path(tmp_path: Path) -> None:
    given: Any = tmp_path
    assert EngineArgs(compilation_cache_dir=given).compilation_cache_dir == str(tmp_path)
    assert EngineArgs(model_path=given).model_path == str(tmp_path)
    with pytest.raises(ConfigError, match=r"cache_dir is 'gs:/b'; expected a directory"):
        EngineArgs.from_mapping({"compilation_cache_dir": Path("gs://b")})


@pytest.mark.parametrize("value", [5, b"m", True, ["a"]])
def test_what_is_no_text_is_refused_by_its_name(value: object) -> None:
    for name in ("compilation_cache_dir", "speculative_adaptive_config"):
        with pytest.raises(ConfigError, match=rf"^{name} is .*; expected text"):
            EngineArgs.from_mapping({name: value})


DRAFTED: dict[str, Any] = {
    "model_path": "m",
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "d",
}


@pytest.mark.parametrize("name", ["model_path", "tokenizer_path", "speculative_draft_model_path"])
@pytest.mark.parametrize("value", ["", "  ", 5, b"m"])
def test_a_path_that_is_none_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is {value!r}; expected a directory"):
        EngineArgs(**{**DRAFTED, name: value})


@pytest.mark.parametrize("value", ["", "none", True, None])
def test_what_is_compiled_at_the_start_has_three_values(value: object) -> None:
    with pytest.raises(ConfigError, match=r"compile_at_start is .*; expected one of auto, first, "):
        EngineArgs.from_mapping({"compile_at_start": value})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor_parallel_size", "; did you mean 'tp_size'?"),
        ("gpu_memory_utilization", ": write mem_fraction_static"),
        ("max_num_seqs", ": write max_running_requests"),
        ("expert_parallel_size", "; did you mean 'ep_size'?"),
        ("disable_overlap_schedule", ": write overlap_depth=0"),
        (
            "speculative_total_nodes_per_row",
            ": removed: it brought about 1% more tokens for 3 to 10 points of step time; write "
            "speculative_num_draft_tokens for a smaller tree",
        ),
        ("pagesize", "; did you mean 'page_size'?"),
        ("max_queued", "; did you mean 'max_queued_requests'?"),
        ("num_steps", ""),  # of more than one
        ("foo", ""),
    ],
)
def test_a_name_of_another_server_or_a_removed_one_is_known(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineArgs.from_mapping({name: 1})
    assert str(raised.value) == f"unknown engine argument {name!r}{message}"


def test_groups_of_experts_divide_the_devices() -> None:
    with pytest.raises(ConfigError, match="ep_size is 3; expected a divisor of tp_size 4, whose"):
        EngineArgs(tp_size=4, ep_size=3)
    shared: dict[str, Any] = {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}
    with pytest.raises(ConfigError, match="ep_size is 2; expected 1 or a multiple of dp_size 4"):
        EngineArgs(**shared, ep_size=2)
    assert [EngineArgs(**shared, ep_size=n).expert_ranks for n in (1, 4, 8)] == [1, 4, 4]
    assert EngineArgs(tp_size=2, dp_size=2, ep_size=2).expert_ranks == 1
