"""The maps in the docs name files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_house import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# A changelog names files of its time; these guides name files that the reader writes.
GUIDES = {"CHANGELOG.md", "add_a_model.md", "add_a_drafter.md"}
DESIGN = (ROOT / "docs" / "design.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    if page.name in GUIDES:
        return
    named = set(
        re.findall(r"\b(?:jspec|recipes|tests|benchmarks)/[\w/]+\.py", page.read_text("utf-8"))
    )
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_a_newcomer_finds_thirty_things_in_the_map() -> None:
    table = DESIGN.split("## Where is X?")[1].split("##")[0]
    questions = re.findall(r"^\| .*\? \| `jspec/", table, re.MULTILINE)
    assert len(questions) >= 30


def test_the_rooms_of_the_design_are_those_of_the_house() -> None:
    listing = DESIGN.split("```text\ncli/")[1].split("```")[0]
    rooms = re.findall(r"^(\w+)(?:/|\.py)", "cli/" + listing, re.MULTILINE)
    assert tuple(rooms) == ROOMS
