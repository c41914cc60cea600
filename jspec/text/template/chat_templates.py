"""The chat templates of a checkpoint or a flag, by transformers' names; a request brings none."""

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
MORE = "additional_chat_templates"  # a folder of NAME.jinja in JINJA's directory
# By model_type: the package's templates, for checkpoints without one.
PACKAGED = {"deepseek_v32": Path(__file__).with_name("deepseek_v32.jinja")}
DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTemplates:
    default: ChatTemplate | None = None  # for any chat, except with tools if there is tool_use
    tool_use: ChatTemplate | None = None

    @classmethod
    def find(cls, tokenizer: Path, *, named: str | None) -> ChatTemplates | None:
        if named is not None:
            return cls.from_file(named, tokenizer=tokenizer)
        return cls.from_directory(tokenizer)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ChatTemplates | None:
        """Load chat_template.jinja and its folder, else chat_template.json, else CONFIG, else the
        package's template for config.json's model_type."""
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
        config = directory / "config.json"
        kind = read_object(config).get("model_type") if config.exists() else None
        own = PACKAGED.get(str(kind))
        if own is None:
            return None
        return cls._of({DEFAULT: read_text(own)}, where=own, tokenizer=directory)

    @classmethod
    def from_file(cls, path: str, *, tokenizer: str | os.PathLike[str]) -> ChatTemplates:
        """Load the file of --chat-template: Jinja, or JSON. tokenizer: the directory whose special
        tokens it may use. Raises ConfigError, CheckpointError."""
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
        names = [name for name in (DEFAULT, TOOL_USE) if name in sources]
        if not names:
            raise CheckpointError(
                f"chat_template in {where} has {sorted(sources)}; expected one named {DEFAULT!r}"
            )
        special = special_tokens(tokenizer)
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
        """Render one template. Raises RequestError without tools if all templates need them."""
        chosen = self.tool_use if tools and self.tool_use is not None else self.default
        if chosen is None:
            raise RequestError(
                f"tools is left out, and the only chat template is {TOOL_USE!r}; expected tools, "
                "or a template for chats without (--chat-template FILE)"
            )
        return chosen.render(messages, tools=tools, **options)


def _stored(path: Path) -> dict[str, str] | None:
    """Return a JSON file's `chat_template` by name: text, or [{"name", "template"}]."""
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


def special_tokens(directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if not (directory / name).exists():
            continue
        for key, value in read_object(directory / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found
