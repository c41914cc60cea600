"""The loaded LoRA adapters and the free slots of the stacked weights."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from jspec.errors import RequestError, shown
from jspec.messages.adapter import Adapter
from jspec.scheduler.sequence import Sequence

Uses = Callable[[Adapter], bool]  # whether an unfinished request uses an adapter


def by_lora(sequences: Iterable[Sequence]) -> Counter[str]:
    """Count sequences by adapter name. Another thread may change `sequences` meanwhile."""
    loras = [sequence.request.lora for sequence in list(sequences)]
    return Counter(lora.name for lora in loras if lora is not None)


class LoadedAdapters:
    """The loaded adapters by name, in `most` slots, each free once no unfinished request uses its
    adapter. One thread changes this object, any thread reads it."""

    def __init__(self, most: int, uses: Uses) -> None:
        self._most, self._uses = most, uses
        self._numbers = itertools.count()
        self._leaving: list[Adapter] = []  # removed, but requests may still use them
        self.by_name: Mapping[str, Adapter] = {}  # replaced as a whole

    def find(self, name: str) -> Adapter:
        found = self.by_name.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def check(self, adapters: Iterable[Adapter | None]) -> None:
        """Raise RequestError if an adapter was removed since its request looked it up."""
        for lora in {each for each in adapters if each is not None}:
            if self.by_name.get(lora.name) != lora:
                raise self._unknown(lora.name)

    def _unknown(self, name: str) -> RequestError:
        names = ", ".join(map(repr, self.by_name))
        known = f"a loaded adapter: {names}" if names else "a loaded adapter, and none is loaded"
        if not self._most:
            known = "none: the engine runs without enable_lora"
        return RequestError(f"lora_path is {shown(name)}; expected {known}")

    def place(self, name: str, path: str) -> Adapter:
        """Return a new adapter with a free slot; `add` it once its weights are loaded. Raises
        RequestError if the name is taken or no slot is free."""
        if not self._most:
            raise self._unknown(name)
        if name in self.by_name:
            raise RequestError(
                f"lora_name is {shown(name)}, which is loaded; expected another name, or "
                "unload_lora_adapter first"
            )
        self._leaving = [lora for lora in self._leaving if self._uses(lora)]
        present = (*self.by_name.values(), *self._leaving)
        free = set(range(1, self._most + 1)).difference(lora.slot for lora in present)
        if not free:
            names = ", ".join(repr(lora.name) for lora in present)
            raise RequestError(
                f"max_loras_per_batch is {self._most}, and so many adapters are loaded or still "
                f"have requests ({names}); expected one of them to be unloaded first"
            )
        return Adapter(name=name, path=path, slot=min(free), number=next(self._numbers))

    def add(self, lora: Adapter) -> None:
        self.by_name = {**self.by_name, lora.name: lora}

    def remove(self, lora: Adapter) -> None:
        """Hide the adapter from new requests. Its slot stays taken while requests use it."""
        self.by_name = {name: each for name, each in self.by_name.items() if each != lora}
        self._leaving.append(lora)

    def is_free(self, slot: int) -> bool:
        return all(lora.slot != slot for lora in self.by_name.values())
