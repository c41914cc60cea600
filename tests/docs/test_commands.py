"""Commands in the docs exist and have the flags that are given."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from jspec.cli.flags import FlagParser, add_flags, named_model, parse_flags
from jspec.cli.main import main
from jspec.server.native.generate_schema import parse_generate

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONTINUED = re.compile(r"\\\n\s*")


def commands(page: Path) -> list[list[str]]:
    """Return the words of each `jspec` or `run_server.py` command in shell blocks."""
    found = []
    for block in SHELL.findall(page.read_text(encoding="utf-8")):
        for line in CONTINUED.sub(" ", block).splitlines():
            for part in re.split(r"\s&&\s", line):
                words = (
                    shlex.split(part, comments=True) if "jspec" in part or "run_" in part else []
                )
                if "run_server.py" in words:
                    found.append(["serve", *words[words.index("run_server.py") + 1 :]])
                starts = [i for i, word in enumerate(words) if re.fullmatch(r"(\S*/)?jspec", word)]
                if starts and starts[0] <= 1 and "<<" not in part:
                    found.append(words[starts[0] + 1 :])
    return [_own(words) for words in found]


def _own(words: list[str]) -> list[str]:
    """Return the words before the shell's own operators."""
    for i, word in enumerate(words):
        if word in ("<", ">", "|", "&", "..."):
            return words[:i]
    return words


COMMANDS = [(page, words) for page in PAGES for words in commands(page) if words]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@cache
def help_of(command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return text.getvalue()


def name_of(value: object) -> str:
    return " ".join(value)[:60] if isinstance(value, list) else Path(str(value)).name


def test_each_guide_has_commands_that_are_looked_at() -> None:
    names = ["nvidia", "offline", "parallelism", "ray", "several_hosts", "tpu_vm"]
    assert [page.name for page in GUIDES] == [f"{name}.md" for name in names]
    for page in (*GUIDES, ROOT / "README.md", ROOT / "docs" / "server.md"):
        assert any(of == page for of, _ in COMMANDS), page
    of_tpu = [words[0] for page, words in COMMANDS if page.name == "tpu_vm.md"]
    servers = ["serve", "serve", "serve", "bench", "serve"]
    assert of_tpu == ["doctor", "generate", "info", *servers, "verify"]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=name_of)
def test_a_command_of_the_docs_takes_its_flags(page: Path, words: list[str]) -> None:
    command, *rest = words
    if command in ("version", "flags"):
        assert main([command]) == 0
        return
    text = help_of(command)
    assert "usage: " in text, f"{page.name}: jspec {command} is no command"
    known = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    for word in rest:
        if word.startswith("--"):
            flag = word.split("=", 1)[0]
            assert flag in known, f"{page.name}: jspec {command} has no {flag}"
    for at, word in enumerate(rest[:-1]):
        if word == "--config":
            assert (ROOT / rest[at + 1]).is_file()


@pytest.mark.parametrize(
    ("page", "words"), [(p, w) for p, w in COMMANDS if w[0] == "serve"], ids=name_of
)
def test_a_server_of_the_docs_is_one_that_could_start(
    page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    parser = FlagParser(prog="jspec serve", allow_abbrev=False)
    add_flags(parser)
    settings = parse_flags(parser, named_model(words[1:]))[1]
    assert settings.engine_args, page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_extras_and_configs_that_are_named_exist(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = page.read_text(encoding="utf-8")
    for named in re.findall(r"'(?:\.|jspec)\[([a-z,]+)\]'", text):
        assert set(named.split(",")) <= set(project["optional-dependencies"]), f"{page}: {named}"
    for config in re.findall(r"configs/[\w.-]+\.(?:toml|json)", text):
        assert (ROOT / config).is_file(), f"{page}: {config}"


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_python_and_bodies_of_the_guides_can_be_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in PYTHON.findall(text):
        compile(block, page.name, "exec")
    for body in re.findall(r"-d '(\{.*\})'", text):
        assert parse_generate(json.loads(body), {}).stream is False
    for line in re.findall(r'^\{"custom_id".*$', text, re.MULTILINE):
        assert json.loads(line)["url"] in ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Files only; mkdocs checks anchors."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_check_of_the_list_is_named_and_its_test_is_there() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| C")]
    numbers = [int(number) for cell in cells for number in re.findall(r"\d+", cell)]
    assert numbers == list(range(1, 25))
    checks = (ROOT / "tests" / "server" / "test_conformance.py").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named == set(re.findall(r"^def (test_\w+)", checks, re.MULTILINE))
    for path in re.findall(r"`(?:pytest .* )?(tests/[\w/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
