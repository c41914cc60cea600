"""Pictures of the page for the docs: desktop, phone and dark, of a server that runs.

    pip install playwright        # and a Chromium, say Debian's package
    jspec serve --speculative-num-steps 3 --speculative-eagle-topk 2 \
        --speculative-num-draft-tokens 7      # elsewhere; the bundled pair, with wide trees
    python examples/page_pictures.py http://127.0.0.1:30000 --chromium /usr/bin/chromium

Each is written to docs/pictures. They fail rather than show a page that is not done.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
MAX_BYTES = 150_000
SEED = "7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One file: the window's size, its colours, and the number of prompts."""

    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"] = "light"
    num_prompts: int = 1
    scale: float = 1
    is_touched: bool = False


TAKEN = (
    Picture(name="page-desktop.png", width=1180, height=1080, num_prompts=2),
    Picture(name="page-dark.png", width=1180, height=1080, num_prompts=2, scheme="dark"),
    Picture(name="page-phone.png", width=390, height=1560, is_touched=True),
)


def take(browser: Any, url: str, picture: Picture) -> None:
    """Fill the page in, wait for its answers, point at a step, and write the file."""
    page = browser.new_page(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme=picture.scheme,
        device_scale_factor=picture.scale,
        has_touch=picture.is_touched,
    )
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.goto(url)
    for _ in range(picture.num_prompts - 1):
        page.click("#add")
    page.check("#trees")
    page.fill("#temperature", "0.75")
    page.fill("#seed", SEED)
    page.click("#go")
    is_done = "panels.every((panel) => panel.meta && !panel.running)"
    _wait(page, is_done + " && $('server').textContent === ''", seconds=120)
    # The step that accepted most, as a reader would look for one.
    best = page.evaluate(
        """() => [...panels[0].steps].sort((a, b) => b[1].length - a[1].length)[0][0]"""
    )
    span = page.locator(f'.out [data-step="{best}"]').first
    span.tap() if picture.is_touched else span.hover()
    page.wait_for_selector(".tree .chip")
    file = PICTURES / picture.name
    file.write_bytes(page.screenshot())
    page.close()
    if failures:
        raise SystemExit(f"{picture.name}: the page's script failed: {failures}")
    if file.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{file} has {file.stat().st_size} bytes; expected {MAX_BYTES} at most")
    print(f"{picture.name}: {file.stat().st_size:,} bytes")


def _wait(page: Any, condition: str, *, seconds: float) -> None:
    """Poll from here: the page's policy forbids evaluating text there."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        if time.monotonic() > end:
            raise SystemExit(f"not true after {seconds:g} s: {condition}")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("url", help="http://HOST:PORT of a server that runs")
    parser.add_argument("--chromium", help="The browser; unset: playwright's own")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox", "--font-render-hinting=none"]
        )
        for picture in TAKEN:
            take(browser, options.url, picture)
        browser.close()


if __name__ == "__main__":
    main()
