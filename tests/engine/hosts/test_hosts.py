"""One engine over several hosts, each a process with devices of its own: the same text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jspec.engine.hosts.handshake import TOKEN_VARIABLE
from jspec.errors import CheckpointError, ConfigError, RequestError
from jspec.serving.engine import Engine
from tests.support.hosts import TOKEN, FollowerProcess, FollowerThread, free_address
from tests.support.lora_adapters import write_adapter
from tests.support.tiny_models import TinyPair, write_tiny_pair

PROMPTS = ["def f(", "def g(", "x = "]
PARAMS: list[dict[str, Any]] = [
    {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 7, **each}
    for each in ({"temperature": 0.9}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.9})
]
NGRAM = {"speculative_algorithm": "NGRAM"}
ADAPTERS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "lora_target_modules": ("q_proj", "down_proj"),
}
TREE = {
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 5,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def arguments(pair: TinyPair, programs_of_all: Path) -> dict[str, Any]:
    return {
        "model_path": str(pair.target_path),
        # As few programs as possible: every host compiles them.
        "max_running_requests": 1,
        "chunked_prefill_size": 16,
        "disable_radix_cache": True,
        "disable_logprobs": True,
        "max_total_tokens": 1024,
        "dtype": "float32",
        "compile_at_start": "first",
        "compilation_cache_dir": str(programs_of_all),
    }


@pytest.fixture(scope="module")
def chain(arguments: dict[str, Any], pair: TinyPair) -> dict[str, Any]:
    draft = str(pair.draft_path)
    return {
        **arguments,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
    }


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def over(count: int, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    address = free_address()
    return {
        **arguments,
        "nnodes": count,
        "tp_size": count,
        "dist_init_addr": address,
        "dist_timeout": 60.0,
        **more,
    }


def ids_of(engine: Engine, params: list[dict[str, Any]] = PARAMS, **more: Any) -> list[list[int]]:
    return [answer["output_ids"] for answer in engine.generate(PROMPTS, params, **more)]


def check_texts(
    count: int, arguments: dict[str, Any], found: Callable[[Engine], object] = ids_of
) -> None:
    with Engine(**arguments) as engine:
        expected = found(engine)
    shared = over(count, arguments)
    followers = [FollowerThread(rank, shared) for rank in range(1, count)]
    with Engine(**shared) as engine:
        assert found(engine) == expected
    assert [each.join() for each in followers] == [None] * (count - 1)


def with_adapter(engine: Engine, path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of the target alone, and of two rows with an adapter."""
    plain = ids_of(engine)
    engine.load_lora_adapter("a", str(path))
    adapted = ids_of(engine, lora_path=["a", "a", None])
    assert adapted[:2] != plain[:2]
    return plain, adapted


@pytest.fixture(scope="module")
def adapter(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "a"
    target = load_file(pair.target_path / "model.safetensors")
    write_adapter(path, target, ADAPTERS["lora_target_modules"])
    return path


@pytest.mark.slow
@pytest.mark.exhaustive  # below two hosts have trees
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_four_hosts_give_the_text_of_one(
    arguments: dict[str, Any], adapter: Path, algorithm: str
) -> None:
    plain = algorithm == "NONE"
    more = {**arguments, "speculative_algorithm": algorithm, **(ADAPTERS if plain else {})}
    check_texts(4, more, partial(with_adapter, path=adapter) if plain else ids_of)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_trees_on_four_hosts_give_the_text_of_one(chain: dict[str, Any]) -> None:
    check_texts(4, {**chain, **TREE})


LONG = [{**each, "max_new_tokens": 60} for each in PARAMS]


def kill_while(engine: Engine, process_id: int) -> list[list[int]]:
    """Kill a process while requests run; return their ids."""
    emitted = engine.stats.num_emitted
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ids_of, engine, LONG)
        while engine.stats.num_emitted < emitted + 20:
            assert not running.done()
            time.sleep(0.001)
        os.kill(process_id, signal.SIGKILL)
        return running.result(timeout=120)


@pytest.fixture(scope="module")
def pair_of_hosts(
    chain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, list[FollowerProcess], dict[str, Any], Path]]:
    log = tmp_path_factory.mktemp("hosts") / "follower.log"
    shared = over(2, {**chain, **TREE, **ADAPTERS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        followers = [FollowerProcess(1, shared, log)]
        try:
            with Engine(**shared) as engine:
                yield engine, followers, shared, log
            assert followers[-1].process.wait(20) == 0, log.read_text()
        finally:
            for each in followers:
                each.process.kill()
                each.process.wait()


@pytest.fixture(scope="module")
def alone(chain: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**chain, **TREE, **ADAPTERS) as engine:
        yield engine


@pytest.mark.slow
def test_text_goes_on_over_the_loss_of_any_process(
    pair_of_hosts: tuple[Engine, list[FollowerProcess], dict[str, Any], Path],
    alone: Engine,
) -> None:
    engine, followers, shared, log = pair_of_hosts
    expected = ids_of(alone, LONG)
    assert ids_of(engine, LONG) == expected
    assert engine.process_id is not None
    assert kill_while(engine, engine.process_id) == expected
    assert kill_while(engine, followers[-1].runner_id) == expected
    assert engine.stats.num_restarts == 2
    with ThreadPoolExecutor() as pool:  # a whole host, whose command is run again
        running = pool.submit(kill_while, engine, followers[-1].process.pid)
        followers[-1].process.wait(60)
        followers.append(FollowerProcess(1, shared, log))
        assert running.result(timeout=120) == expected
    assert engine.stats.num_restarts == 3


@pytest.mark.slow
def test_weights_and_grammars_on_two_hosts(
    pair_of_hosts: tuple[Engine, list[FollowerProcess], dict[str, Any], Path],
) -> None:
    engine, _, shared, _ = pair_of_hosts
    expected = ids_of(engine)
    engine.update_weights_from_disk(shared["model_path"], weight_version="two")
    assert ids_of(engine) == expected
    with pytest.raises(CheckpointError, match="architecture is"):
        engine.update_weights_from_disk(shared["speculative_draft_model_path"])
    with pytest.raises(RequestError, match="given as arrays"):
        engine.update_weights_from_tensor({"model.norm.weight": [1.0]})
    with pytest.raises(RequestError, match="spread over 2 hosts"):
        engine.get_weights_by_name("model.norm.weight")
    constrained = {"max_new_tokens": 8, "regex": "[ab]{8}"}
    assert set(engine.generate("x", constrained)["text"]) <= {"a", "b"}
    assert ids_of(engine) == expected
    with pytest.raises(ConfigError, match="several hosts"):
        _ = engine.served


@pytest.mark.slow
def test_adapters_on_two_hosts_give_the_text_of_one(
    pair_of_hosts: tuple[Engine, list[FollowerProcess], dict[str, Any], Path],
    alone: Engine,
    adapter: Path,
) -> None:
    assert with_adapter(pair_of_hosts[0], adapter) == with_adapter(alone, adapter)
