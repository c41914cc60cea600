"""A loaded LoRA adapter, as requests name it and as the device finds its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jspec.errors import RequestError, shown, shown_json
from jspec.messages.plain_values import listed

LORA_NAMES = ("lora_path", "lora_name")  # SGLang's name of an adapter's name, and another


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Equal only to itself: a later one of the same name, or in the same slot, has another number.

    So cached prefixes of a former adapter are never those of a later one.
    """

    name: str
    path: str  # as given
    slot: int  # of the stacked weights, from 1
    number: int  # of all that were ever loaded


def adapter_names(given: Mapping[str, Any], num_prompts: int) -> list[str | None]:
    """Return each prompt's adapter from `LORA_NAMES`: a name, or a name or null for each prompt."""
    found: list[Any] | None = None
    for key in LORA_NAMES:
        value = listed(given.get(key))
        if value is None:
            continue
        names = list(value) if isinstance(value, list | tuple) else [value] * num_prompts
        if len(names) != num_prompts:
            raise RequestError(
                f"{key} has {len(names)} names; expected one for each of {num_prompts} prompts"
            )
        for name in names:
            if name is not None and not (isinstance(name, str) and name):
                raise RequestError(f"{key} has {shown_json(name)}; expected names of adapters")
        if found not in (None, names):
            raise RequestError(f"{' and '.join(LORA_NAMES)} differ; expected one of them")
        found = names
    return found or [None] * num_prompts


def no_adapter(name: str) -> Adapter:
    raise RequestError(f"lora_path is {shown(name)}; expected none: there are no adapters")
