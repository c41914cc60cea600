"""Parsing of flags and TOML files by the table of flags, and that table as Markdown."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jspec.cli.flag_table import FLAGS, GROUPS, Flag, FlagClass, FlagKind
from jspec.config.arguments import meant_argument, near_name
from jspec.config.engine_args import EngineArgs
from jspec.config.peer_flags import advice
from jspec.errors import ConfigError
from jspec.files.json_files import utf8_fault
from jspec.messages.request import SAMPLING_FIELDS
from jspec.server.server_args import ServerArgs, Settings

_KINDS = {"int": "an integer", "float": "a number"}
_INVALID = re.compile(r"argument ([\w-]+)(?:/\S+)*: invalid (int|float) value: (.*)", re.DOTALL)
_MISSING = re.compile(r"argument ([\w-]+)(?:/\S+)*: expected one argument")
_PYTHON_TYPES: Mapping[FlagKind, type] = {
    FlagKind.INT: int,
    FlagKind.FLOAT: float,
    FlagKind.TEXT: str,
    FlagKind.SWITCH: bool,
    FlagKind.MANY: list,
}


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if found := _INVALID.fullmatch(message):
            flag, kind, value = found.groups()
            raise ConfigError(f"{flag} is {value}; expected {_KINDS[kind]}")
        if found := _MISSING.fullmatch(message):
            raise ConfigError(f"{found[1]} has no value; expected one after it")
        raise ConfigError(message)


def add_flags(
    parser: argparse.ArgumentParser,
    *,
    groups: Sequence[str] = tuple(GROUPS),
    also: Sequence[str] = (),  # arguments of other groups, listed under Answers
    unlisted: Sequence[str] = (),  # arguments that the command refuses
) -> None:
    """Add `--config` and the flags of `groups`, after the command's own flags. The help lists only
    implemented flags, and its usage only the command's own."""
    parser.add_argument("--config", metavar="FILE.toml", help="Read arguments from a file")
    own_usage = parser.format_usage().removeprefix("usage: ").rstrip()
    parser.usage = f"{own_usage} [flags listed below]".replace("%", "%%")
    if also:
        section = parser.add_argument_group("Answers")
        for flag in FLAGS:
            if flag.argument in also:
                _add_flag(section, flag)
    for title in groups:
        section = parser.add_argument_group(title)
        for flag in GROUPS[title]:
            _add_flag(section, flag, is_listed=flag.argument not in unlisted)


def _add_flag(section: argparse._ArgumentGroup, flag: Flag, *, is_listed: bool = True) -> None:
    is_implemented = flag.flag_class is FlagClass.IMPLEMENTED
    shared: dict[str, Any] = {
        "dest": flag.argument if is_implemented else flag.name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS,
    }
    if is_implemented and is_listed:
        shared["help"] = flag.text.replace("%", "%%")
    match flag.kind:
        case FlagKind.SWITCH:
            section.add_argument(*flag.names, action="store_const", const=flag.const, **shared)
        case FlagKind.MANY:
            section.add_argument(*flag.names, nargs="*", **shared)
        case _:
            # A refused flag's value is compared as text.
            kind = _PYTHON_TYPES[flag.kind] if is_implemented else str
            metavar = flag.kind.name
            section.add_argument(*flag.names, type=kind, metavar=metavar, **shared)


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, Settings]:
    """Parse `argv` with a parser to which `add_flags` was applied. Raises ConfigError."""
    namespace, unknown = parser.parse_known_args(argv)
    for word in unknown:
        raise ConfigError(_unknown_flag(parser, word))
    given = vars(namespace)
    file = read_toml(Path(given["config"])) if given.get("config") else {}
    warnings = _check_table(given)
    fields = {flag.argument for flag in FLAGS if flag.argument}
    values = {**file, **{key: value for key, value in given.items() if key in fields}}
    return namespace, make_settings(values, warnings=warnings)


def named_model(argv: Sequence[str]) -> Sequence[str]:
    """Turn a first word that is not a flag into --model-path, like vLLM: DIR → --model-path DIR."""
    if not argv or argv[0].startswith("-"):
        return argv
    for word in argv[1:]:
        if word.split("=", 1)[0] in ("--model-path", "--model"):
            raise ConfigError(f"the model is {argv[0]!r} and {word!r}; expected one of them")
    return ["--model-path", *argv]


def _unknown_flag(parser: argparse.ArgumentParser, word: str) -> str:
    if not word.startswith("--"):
        takes_prompt = any(action.dest == "prompt" for action in parser._actions)
        hint = " (quote a prompt of several words)" if takes_prompt else ""
        return f"unexpected argument {word!r}; expected flags{hint}"
    name = word.split("=", 1)[0]
    stem = name.removeprefix("--").replace("-", "_")
    if any(stem in (parameter.name, parameter.openai) for parameter in SAMPLING_FIELDS):
        hint = f"{stem} is set by each request"
        return f"unknown flag {name!r}: {hint}; {parser.prog} --help lists the flags"
    if instead := advice(name):
        return f"unknown flag {name!r}: {instead}"
    known = [n.removeprefix("--") for action in parser._actions for n in action.option_strings]
    near = near_name(name.removeprefix("--"), known)
    hint = f"did you mean '--{near}'? " if near else ""
    return f"unknown flag {name!r}; {hint}{parser.prog} --help lists the flags"


def _check_table(given: Mapping[str, Any]) -> tuple[str, ...]:
    warnings = []
    for flag in FLAGS:
        if flag.flag_class is FlagClass.IMPLEMENTED or flag.name not in given:
            continue
        if flag.flag_class is FlagClass.ACCEPTED:
            warnings.append(f"{flag.name} has no effect: {flag.text}")
            continue
        value = given[flag.name]
        if isinstance(value, str) and value.lower() in flag.neutral:
            continue
        shown = "" if flag.kind is FlagKind.SWITCH else f" {value!r}"
        expected = f"; expected {' or '.join(flag.neutral)}" if flag.neutral else ""
        raise ConfigError(f"{flag.name}{shown} is refused: {flag.text}{expected}")
    return tuple(warnings)


def read_toml(path: Path) -> dict[str, Any]:
    """Read engine and server arguments from a UTF-8 file without sections. Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {str(path)!r} {utf8_fault(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML: {error}") from error
    known = (*EngineArgs.names(), *ServerArgs.names())
    for key in values:
        if key not in known:
            meant = _why_not_in_file(key) or meant_argument(key, EngineArgs, ServerArgs)
            raise ConfigError(f"config file {str(path)!r} has the unknown key {key!r}{meant}")
    return values


def _why_not_in_file(key: str) -> str:
    for flag in FLAGS:
        if f"--{key.replace('_', '-')}" in flag.names and not flag.argument:
            return f"; leave it out: {flag.text}"
    return ""


def make_settings(values: Mapping[str, Any], *, warnings: tuple[str, ...] = ()) -> Settings:
    rows = {flag.argument: flag for flag in FLAGS if flag.argument and flag.is_primary}
    checked = {key: _check_value(rows[key], value) for key, value in values.items()}
    for key, value in checked.items():
        instead = rows[key].replaced.get(value) if isinstance(value, str) else None
        if instead is not None:
            checked[key] = instead
            warnings += (f"{rows[key].name} {value} is another server's: {instead} is used",)
    server = {key: value for key, value in checked.items() if key in ServerArgs.names()}
    engine = {key: value for key, value in checked.items() if key not in server}
    settings = Settings(engine=engine, server=ServerArgs(**server), warnings=warnings)
    settings.engine_args  # noqa: B018  (raises for invalid arguments before anything loads)
    return settings


def _check_value(flag: Flag, value: Any) -> Any:
    expected = _PYTHON_TYPES[flag.kind]
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise ConfigError(f"{flag.argument} is {value!r}; expected {_expected(flag.kind)}")
    return flag.aliases.get(value, value) if isinstance(value, str) else value


def _expected(kind: FlagKind) -> str:
    return {
        FlagKind.INT: "an integer",
        FlagKind.FLOAT: "a number",
        FlagKind.TEXT: "text",
        FlagKind.SWITCH: "true or false",
        FlagKind.MANY: "a list of texts",
    }[kind]


def markdown_table() -> str:
    lines: list[str] = []
    for title, flags in GROUPS.items():
        lines += [f"### {title}", "", "| flag | value | class | |", "|---|---|---|---|"]
        for flag in flags:
            names = ", ".join(f"`{name}`" for name in flag.names)
            kind = "" if flag.kind is FlagKind.SWITCH else flag.kind.value
            neutral = f" (allowed: {', '.join(flag.neutral)})" if flag.neutral else ""
            lines.append(f"| {names} | {kind} | {flag.flag_class.value} | {flag.text}{neutral} |")
        lines.append("")
    return "\n".join(lines)
