"""Pictures of the web page: those that examples/page_pictures.py takes, each shown in the docs."""

from __future__ import annotations

import re
import struct

import pytest

from examples.page_pictures import MAX_BYTES, PICTURES, TAKEN, Picture

ROOT = PICTURES.parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


def test_every_picture_is_one_that_is_taken() -> None:
    assert sorted(file.name for file in PICTURES.iterdir()) == sorted(each.name for each in TAKEN)
    assert {each.scheme for each in TAKEN} == {"light", "dark"}
    assert min(each.width for each in TAKEN) < 400 < 1000 < max(each.width for each in TAKEN)


@pytest.mark.parametrize("picture", TAKEN, ids=lambda each: each.name)
def test_a_picture_has_its_windows_size_and_is_shown(picture: Picture) -> None:
    data = (PICTURES / picture.name).read_bytes()
    assert data.startswith(PNG)
    assert len(data) <= MAX_BYTES
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (picture.width * picture.scale, picture.height * picture.scale)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    link = re.compile(rf"\]\([^)]*{re.escape(picture.name)}\)")
    assert any(link.search(page.read_text(encoding="utf-8")) for page in pages)
