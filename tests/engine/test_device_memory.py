"""The share of a device that the pool may take, and the errors for sizes that do not fit."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
from jaxlib import xla_client

from jspec.cli.main import main
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits, SnapshotLimits
from jspec.engine.memory.device_memory import check_weights_fit, share_for_server
from jspec.errors import ConfigError
from jspec.spec.cache_entry import FP8, KV, CacheLayout, Record, State
from jspec.spec.cache_groups import CacheGroup, cache_bytes
from jspec.spec.model_spec import cache_groups
from tests.support.limits import limits_for
from tests.support.tiny_models import tiny_target_config

MIB = 1 << 20
SHARE, OLD_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
OTHERS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
GROUPS = cache_groups(tiny_target_config(), name="target")
PAGE_BYTES = cache_bytes(GROUPS, CacheLayout(page_size=16, dtype="float32"))


@dataclass(frozen=True)
class Card:
    """A device that only reports its memory. limit: None if it does not report one."""

    limit: int | None
    in_use: int = 0
    platform: str = "gpu"
    device_kind: str = "unknown"

    def memory_stats(self) -> dict[str, int] | None:
        if self.limit is None:
            return None
        return {"bytes_limit": self.limit, "bytes_in_use": self.in_use}


def limits_of(*cards: Card, **arguments: Any) -> ServeLimits:
    return limits_for(
        EngineArgs(
            model_path="m",
            dtype="float32",
            attention_backend="xla",
            speculative_algorithm="NONE",
            page_size=16,
            **arguments,
        ),
        GROUPS,
        devices=list(cards),  # type: ignore[arg-type]
    )


def pages_beside(in_use: int, *others: int) -> int:
    """Return the pages of cards with room for 100, each with this many in use."""
    cards = [Card(PAGE_BYTES * 100, PAGE_BYTES * used) for used in (in_use, *others)]
    return limits_of(*cards, mem_fraction_static=0.5, max_running_requests=48).pool.num_pages


def test_the_pool_is_the_share_less_what_is_in_use() -> None:
    assert pages_beside(20) == 30
    assert pages_beside(49) == 1


def test_the_device_with_the_least_room_decides_for_all() -> None:
    assert pages_beside(20, 20) == 60
    assert pages_beside(20, 40) == pages_beside(40, 20) == 20


def test_no_room_on_one_device_is_an_error_whatever_the_others_have() -> None:
    with pytest.raises(ConfigError, match="leaves no memory for the KV pool"):
        pages_beside(0, 60)


def test_that_nothing_is_left_for_a_pool_is_said_in_numbers() -> None:
    card = Card(limit=1000 * MIB, in_use=900 * MIB)
    with pytest.raises(ConfigError) as caught:
        limits_of(card, mem_fraction_static=0.85)
    assert str(caught.value).startswith(
        "mem_fraction_static 0.85 leaves no memory for the KV pool: that is 0.83 GiB of the 0.98 "
        "GiB that jax may use on a device, the weights and other data take 0.88 GiB, and "
    )
    assert "expected mem_fraction_static of at least 0.91, tp_size of about 2, " in str(
        caught.value
    )
    assert limits_of(card, mem_fraction_static=0.91).pool.num_pages > 0
    full = Card(limit=1000 * MIB, in_use=1000 * MIB)
    with pytest.raises(ConfigError, match="expected tp_size of about 3") as caught:
        limits_of(full, full)
    assert "mem_fraction_static of at least" not in str(caught.value)


def test_a_pool_that_was_asked_for_is_refused_only_where_it_cannot_be() -> None:
    card = Card(PAGE_BYTES * 100, PAGE_BYTES * 20)
    assert limits_of(card, max_total_tokens=80 * 16, mem_fraction_static=0.5).pool.num_pages == 80
    with pytest.raises(
        ConfigError, match=r"max_total_tokens 1296 takes .* GiB on each .*480 "
    ) as e:
        limits_of(card, max_total_tokens=81 * 16, mem_fraction_static=0.5)
    assert "free after the weights" in str(e.value)
    assert limits_of(Card(None, platform="cpu"), max_total_tokens=1 << 20).pool.num_pages == 1 << 16


def test_a_page_beyond_what_a_cpu_gives_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the smallest KV pool takes .* smaller page_size"):
        limits_for(
            EngineArgs(
                model_path="m",
                dtype="float32",
                attention_backend="xla",
                speculative_algorithm="NONE",
                page_size=1 << 30,
            ),
            GROUPS,
            devices=[Card(None, platform="cpu")],  # type: ignore[list-item]
        )


@pytest.mark.parametrize("name", [SHARE, OLD_SHARE])
def test_what_jax_leaves_unused_is_said_once_where_it_would_help(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (SHARE, OLD_SHARE):
        monkeypatch.delenv(each, raising=False)
    caplog.set_level(logging.INFO)
    small, large = Card(PAGE_BYTES * 15), Card(PAGE_BYTES * 10000)
    limits_of(large)
    limits_of(small, max_total_tokens=16)
    limits_of(Card(PAGE_BYTES * 15, platform="tpu"))
    assert not caplog.messages
    limits_of(small)
    (message,) = caplog.messages
    assert message.startswith("jax may use ")
    assert "its default share of 75%" in message
    assert "XLA_CLIENT_MEM_FRACTION=0.95" in message
    monkeypatch.setenv(name, "0.6")  # somebody chose
    limits_of(small)
    assert caplog.messages == [message]


def test_weights_that_cannot_fit_are_refused_before_they_are_read() -> None:
    check_weights_fit([Card(100 * MIB), Card(100 * MIB)], 200 * MIB, "model_path 'm'")
    check_weights_fit([Card(None, platform="cpu")], 1 << 50, "model_path 'm'")
    with pytest.raises(ConfigError) as caught:
        check_weights_fit(
            [Card(4096 * MIB), Card(4096 * MIB, 1024 * MIB)], 7 << 30, "model_path 'm'"
        )
    assert str(caught.value) == (
        "model_path 'm' takes at least 3.5 GiB on each of 2 devices (tp_size), and 3.0 GiB of the "
        "4.0 GiB that jax may use are free; expected a smaller model, tp_size of at least 3, or a "
        "larger XLA_CLIENT_MEM_FRACTION"
    )


@pytest.mark.parametrize("name", [SHARE, OLD_SHARE, *OTHERS])
def test_a_server_takes_more_of_a_card_unless_somebody_chose(name: str) -> None:
    assert share_for_server({"PATH": "/bin", name: ""}) == {SHARE: "0.95"}
    assert share_for_server({name: "0.5"}) == {}


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_the_command_line_says_the_share_where_jax_reads_it(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(OLD_SHARE, "")
    monkeypatch.setenv(SHARE, "")  # the replacement is undone after the test
    words = {"serve": ["--port", "0"], "generate": ["x"]}[command]
    assert main([command, *words, "--model-path", "nowhere"]) == 2
    assert os.environ[SHARE] == "0.95"
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.95
    monkeypatch.setenv(SHARE, "0.5")
    assert main([command, *words, "--model-path", "nowhere"]) == 2
    assert os.environ[SHARE] == "0.5"


FULL, APART = CacheGroup("full", 1, KV(1, 8, 8)), CacheGroup("apart", 2, KV(1, 8, 8), 8)
LAYER_BYTES = 16 * 2 * 8 * 4


def limits_in(
    *groups: CacheGroup,
    room: int,
    total: int | None = None,
    prefix_cache: bool = False,
    page_size: int = 16,
) -> ServeLimits:
    """Size four slots of 256 tokens for memory of this many one-layer pages of 16."""
    return limits_for(
        EngineArgs(
            model_path="m",
            speculative_algorithm="NONE",
            dtype="float32",
            attention_backend="xla",
            page_size=page_size,
            max_running_requests=4,
            chunked_prefill_size=256,
            mem_fraction_static=0.5,
            max_total_tokens=total,
            disable_radix_cache=not prefix_cache,
        ),
        groups,
        devices=[Card(2 * room * LAYER_BYTES)],  # type: ignore[list-item]
    )


def spaces_of(
    *groups: CacheGroup, room: int, total: int | None = None, prefix_cache: bool = False
) -> tuple[int, list[tuple[int, int]]]:
    """Return (pages of the full space, (window, pages) of the others) in `limits_in`.

    20 pages are the most that a row can use. A window of 8 takes 2 pages, and the chunks of a step
    (256 tokens of 4 rows) take 20.
    """
    limits = limits_in(*groups, room=room, total=total, prefix_cache=prefix_cache)
    return limits.pool.num_pages, [(space.window, space.num_pages) for space in limits.pool.windows]


def test_windows_of_all_slots_fit_and_the_rest_is_for_what_keeps_everything() -> None:
    assert spaces_of(FULL, APART, room=1000) == (80, [(8, 4 * 2 + 20)])
    assert spaces_of(FULL, APART, room=120) == (120 - 2 * 28, [(8, 28)])  # 40 of each as one


def test_an_fp8_cache_has_four_times_the_tokens_of_float32() -> None:
    halves = [replace(group, entry=KV(1, 8, 8, FP8)) for group in (FULL, APART)]
    assert spaces_of(*halves, room=30) == spaces_of(FULL, APART, room=120)
    assert spaces_of(halves[0], room=5) == (20, [])


def test_no_window_gets_more_than_it_had_in_one_space() -> None:
    assert spaces_of(FULL, APART, room=75) == (25, [(8, 25)])
    assert spaces_of(FULL, APART, room=60) == (20, [])  # not even one row's window fits


def test_states_of_all_slots_come_before_pages() -> None:
    """Five slots, the dummy included, of two layers, each as large as ten pages of a layer."""
    numbers = 10 * LAYER_BYTES // 4  # with one pending, and a path of one
    state = State((Record("state", (numbers - 2,), (None,), "float32"),), pending_size=1)
    states = CacheGroup("states", 2, state)
    assert spaces_of(FULL, states, room=150) == (150 - 5 * 2 * 10, [])
    assert spaces_of(states, room=150) == (80, [])
    for groups in ((FULL, states), (states,)):
        with pytest.raises(ConfigError, match="leaves no memory for the KV pool"):
            spaces_of(*groups, room=99)


@pytest.mark.parametrize(
    ("room", "count", "pages"), [(1000, 16, 80), (60, 5, 60 - 5 - 6), (15, 1, 15 - 5 - 2)]
)
def test_snapshots_are_four_a_slot_and_at_most_a_tenth(room: int, count: int, pages: int) -> None:
    """A state is as large as a page, and so is a snapshot; one snapshot more is the dummy."""
    state = State((Record("state", (LAYER_BYTES // 4 - 2,), (None,), "float32"),), pending_size=1)
    states = CacheGroup("states", 1, state)
    limits = limits_in(FULL, states, room=room, prefix_cache=True)
    assert limits.pool.snapshots == SnapshotLimits(count, 512 // 16)
    assert limits.pool.num_pages == pages
    assert limits_in(FULL, states, room=room).pool.snapshots is None
    assert limits_in(FULL, room=room, prefix_cache=True).pool.snapshots is None


def test_snapshots_of_long_pages_are_a_page_apart() -> None:
    state = State((Record("state", (4,), (None,), "float32"),), pending_size=1)
    groups = FULL, CacheGroup("states", 1, state)
    limits = limits_in(*groups, room=10000, prefix_cache=True, page_size=1024)
    assert limits.pool.snapshots == SnapshotLimits(16, 1)


def test_a_model_of_windows_alone_takes_memory_for_windows_alone() -> None:
    assert spaces_of(APART, room=56) == (80, [(8, 28)])


def test_with_a_prefix_cache_windows_have_pages_for_texts_whose_rows_are_gone() -> None:
    """One page per end of a text, four per slot, and at most an eighth of a single pool's pages."""
    assert spaces_of(FULL, APART, room=1000, prefix_cache=True) == (80, [(8, 28 + 80 // 8)])
    assert spaces_of(FULL, APART, room=120, prefix_cache=True) == (120 - 2 * 33, [(8, 28 + 5)])
    assert spaces_of(FULL, APART, room=75, prefix_cache=True) == (25, [(8, 25)])


def test_a_window_as_long_as_the_context_gives_nothing_back() -> None:
    assert spaces_of(FULL, replace(APART, window=300), room=1000) == (80, [])


def test_max_total_tokens_are_of_the_full_space() -> None:
    assert spaces_of(FULL, APART, room=1000, total=60 * 16) == (60, [(8, 28)])
    with pytest.raises(ConfigError, match="max_total_tokens 32000 takes"):
        spaces_of(FULL, APART, room=1000, total=32000)
    assert spaces_of(APART, room=1000, total=32000) == (2000, [(8, 28)])
