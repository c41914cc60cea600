"""The chat templates of a checkpoint: where they are, and which of several a chat gets.

They come from the checkpoint or from a flag, never from a request. Names are transformers':
`default`, and `tool_use` for a chat with tools; no request names another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jspec.errors import CheckpointError, ConfigError, RequestError, shown
from jspec.files.json_files import read_object, read_text
from jspec.text.template.chat_template import ChatTemplate

CONFIG, JINJA, JSON = "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
MORE = "additional_chat_templates"  # a folder of NAME.jinja, beside JINJA
DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTemplates:
    """default: for any chat, unless it has tools and there is one for those."""

    default: ChatTemplate | None = None
    tool_use: ChatTemplate | None = None

    @classmethod
    def find(cls, tokenizer: Path, *, named: str | None) -> ChatTemplates | None:
        """The file that was named, else the checkpoint's own, if it has one."""
        if named is not None:
            return cls.from_file(named, tokenizer=tokenizer)
        return cls.from_directory(tokenizer)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ChatTemplates | None:
        """The checkpoint's own: chat_template.jinja with the folder of further ones beside it, else
        chat_template.json, else what tokenizer_config.json has; None if none of them has one.
        Raises CheckpointError.
        """
        directory = Path(path)
        files = {file.stem: file for file in sorted((directory / MORE).glob("*.jinja"))}
        if (directory / JINJA).exists():
            files[DEFAULT] = directory / JINJA
        if files:
            sources = {name: read_text(file) for name, file in files.items()}
            return cls._of(sources, where=directory, tokenizer=directory)
        for name in (JSON, CONFIG):
            if not (directory / name).exists():
                continue
            stored = _stored(directory / name)
            if stored is not None:
                return cls._of(stored, where=directory / name, tokenizer=directory)
        return None

    @classmethod
    def from_file(cls, path: str, *, tokenizer: str | os.PathLike[str]) -> ChatTemplates:
        """The file that --chat-template names: Jinja, or JSON that holds `chat_template`.

        tokenizer: the directory whose special tokens it may name. Raises ConfigError for a file
        that is not there, CheckpointError for one that holds no template.
        """
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"chat_template is {path!r}; expected a file with a Jinja template")
        is_json = file.suffix == ".json"
        sources = _stored(file) if is_json else {DEFAULT: read_text(file)}
        if sources is None:
            raise CheckpointError(f"{file} has no chat_template; expected one")
        return cls._of(sources, where=file, tokenizer=Path(tokenizer))

    @classmethod
    def _of(cls, sources: Mapping[str, str], *, where: Path, tokenizer: Path) -> ChatTemplates:
        """Of the texts by name; those that no chat gets are not compiled."""
        names = [name for name in (DEFAULT, TOOL_USE) if name in sources]
        if not names:
            raise CheckpointError(
                f"chat_template in {where} has {sorted(sources)}; expected one named {DEFAULT!r}"
            )
        special = _special_tokens(tokenizer)
        made = {
            name: ChatTemplate(source=sources[name], where=str(where), special_tokens=special)
            for name in names
        }
        return cls(default=made.get(DEFAULT), tool_use=made.get(TOOL_USE))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt's text, as `ChatTemplate.render`. Raises RequestError for a chat without tools
        where every template is for tools, too."""
        chosen = self.tool_use if tools and self.tool_use is not None else self.default
        if chosen is None:
            raise RequestError(
                f"tools is left out, and the only chat template is {TOOL_USE!r}; expected tools, "
                "or a template for chats without (--chat-template FILE)"
            )
        return chosen.render(messages, tools=tools, **options)


def _stored(path: Path) -> dict[str, str] | None:
    """`chat_template` of a JSON file by name: text, or a list of {"name", "template"}; None without
    it."""
    value = read_object(path).get("chat_template")
    if value is None:
        return None
    listed = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    for item in listed:
        fields = (item.get("name"), item.get("template")) if isinstance(item, dict) else ()
        if not fields or not all(isinstance(text, str) for text in fields):
            raise CheckpointError(
                f"chat_template in {path} is {shown(value)}; expected text, or a list of objects "
                'whose "name" and "template" are texts'
            )
    return {item["name"]: item["template"] for item in listed}


def _special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, ... as tokenizer_config.json and special_tokens_map.json spell them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if not (directory / name).exists():
            continue
        for key, value in read_object(directory / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found
