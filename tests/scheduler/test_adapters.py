"""Slots of LoRA adapters: free once no request has the adapter that was in them."""

from __future__ import annotations

import pytest

from jspec.errors import RequestError
from jspec.messages.adapter import Adapter
from jspec.scheduler.adapters import LoadedAdapters


def test_a_slot_is_free_once_no_request_has_its_adapter() -> None:
    used: set[Adapter] = set()
    table = LoadedAdapters(2, used.__contains__)

    def load(name: str) -> Adapter:
        lora = table.place(name, f"/{name}")
        table.add(lora)
        return lora

    a, b = load("a"), load("b")
    assert (a.slot, b.slot) == (1, 2)
    with pytest.raises(RequestError, match="lora_name is 'a', which is loaded"):
        table.place("a", "/x")
    used.add(a)
    table.remove(a)
    with pytest.raises(RequestError, match="lora_path is 'a'; expected a loaded adapter: 'b'"):
        table.find("a")
    with pytest.raises(RequestError, match=r"still have requests \('b', 'a'\)"):
        table.place("c", "/c")
    used.clear()
    assert table.is_free(1)
    again = load("a")
    assert (again.slot, again == a) == (1, False)
    assert not table.is_free(1)
    table.check([None, again, b])
    with pytest.raises(RequestError, match="lora_path is 'a'; expected"):
        table.check([a])


def test_an_engine_without_slots_has_no_adapters() -> None:
    table = LoadedAdapters(0, lambda _: False)
    for ask in (table.find, lambda name: table.place(name, "/x")):
        with pytest.raises(RequestError, match="expected none: the engine runs without enable"):
            ask("a")
