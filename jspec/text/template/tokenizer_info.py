"""A tokenizer's settings for clients that render and tokenize themselves (GET /tokenizer_info)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jspec.files.json_files import exists, read_object
from jspec.text.template.chat_templates import CONFIG, ChatTemplates, special_tokens
from jspec.text.tokenizer.tokenizer import Tokenizer


def tokenizer_info(directory: Path, tokenizer: Tokenizer, *, named: str | None) -> dict[str, Any]:
    """Return tokenizer_config.json in vLLM's form: special tokens as text, always with eos_token
    and bos_token, and no paths. named: the file of --chat-template."""
    config = read_object(directory / CONFIG) if exists(directory / CONFIG) else {}
    found = {name: _plain(value) for name, value in config.items() if not _is_path(name)}
    found |= special_tokens(directory)
    eos = next(iter(tokenizer.eos_token_ids), None)
    for name, token_id in (("eos_token", eos), ("bos_token", tokenizer.bos_token_id)):
        text = None if token_id is None else tokenizer.backend.id_to_token(token_id)
        found[name] = found.get(name) or text
    found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    templates = ChatTemplates.find(directory, named=named)
    default = None if templates is None else templates.default or templates.tool_use
    found["chat_template"] = None if default is None else default.source
    return found


def _is_path(name: str) -> bool:
    return name.endswith("_file") or name in ("name_or_path", "auto_map")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
