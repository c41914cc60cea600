"""Names of models in requests: the served one, or one of its LoRA adapters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from http import HTTPStatus

from starlette.exceptions import HTTPException

from jspec.errors import RequestError, shown
from jspec.text.intake import Prompt


def adapter_of(
    name: str | None, own: Sequence[str | None], adapters: Collection[str]
) -> str | None:
    """Return the adapter that a name means, ADAPTER (vLLM) or BASE:ADAPTER (SGLang), or None. own:
    the served model's names. Raises HTTPException for an unknown model, not for an adapter."""
    if name is None or name in own:
        return None
    if name in adapters:
        return name
    for base in own:
        if base is not None and name.startswith(f"{base}:") and len(name) > len(base) + 1:
            return name.removeprefix(f"{base}:")
    known = ", ".join(repr(each) for each in (own[0], *adapters))
    raise HTTPException(
        HTTPStatus.NOT_FOUND, f"model is {shown(name)}; expected {known} or 'default'"
    )


def of_model(prompts: Sequence[Prompt], model: str | None, lora: str | None) -> Sequence[Prompt]:
    """Return the prompts with the adapter `lora` that their model's name means, if any."""
    if lora is None:
        return prompts
    for prompt in prompts:
        if prompt.lora not in (None, lora):
            raise RequestError(
                f"lora_path is {shown(prompt.lora)}, and model {shown(model)}; expected one of them"
            )
    return [replace(prompt, lora=lora) for prompt in prompts]
