"""A loaded LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jspec.errors import RequestError, shown, shown_json
from jspec.messages.plain_values import listed

LORA_NAMES = ("lora_path", "lora_name")  # SGLang's name of an adapter's name, and another


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A loaded adapter. Reloading one gives it a new `number`, so it is never equal to an earlier
    adapter of the same name or slot and never reuses its cached prefixes."""

    name: str
    path: str  # as given
    slot: int  # in the stacked weights, from 1
    number: int  # increases with every load


def adapter_names(given: Mapping[str, Any], num_prompts: int) -> list[str | None]:
    """Return each prompt's adapter name, or None: a request gives one of `LORA_NAMES`, a name for
    all prompts or a list with a name or null for each. Raises RequestError."""
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
