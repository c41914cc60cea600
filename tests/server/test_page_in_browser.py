"""The page in a real browser: states, reasons, seeds, steps and scrolling.

By hand, since it needs a browser: pip install playwright, a Chromium at $CHROMIUM (Debian's
package is /usr/bin/chromium), then pytest -m exhaustive tests/server/test_page_in_browser.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def endless(route: Any) -> None:
    """Make requests endless: the tests' model is random and may end by chance."""
    body = json.loads(route.request.post_data)
    body["sampling_params"]["ignore_eos"] = True
    route.continue_(post_data=json.dumps(body))


@pytest.fixture
def page(browser: Any, client: httpx.Client) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 900, "height": 700})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("**/generate", endless)
    page.goto(str(client.base_url))
    yield page
    page.close()
    assert errors == []


def wait(page: Any, condition: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def words(page: Any) -> list[str]:
    return page.locator(".word").all_text_contents()


def test_queued_is_not_running_and_stopped_is_not_ended(page: Any) -> None:
    """The server of these tests runs two sequences at once."""
    for _ in range(3):
        page.click("#add")
    page.fill("#max_new_tokens", "8000")
    page.click("#go")
    wait(page, "panels.filter((p) => p.get('.word').textContent === 'queued').length === 2")
    assert sorted(words(page)) == ["queued", "queued", "running", "running"]
    assert page.locator("#server").text_content() == "2 running, 2 queued"
    page.click("#go")
    wait(page, "panels.every((p) => !p.running)")
    assert words(page) == ["stopped"] * 4
    assert page.locator(".why").all_text_contents() == ["by you"] * 4


def test_an_abort_from_elsewhere_is_said(page: Any, client: httpx.Client) -> None:
    page.fill("#max_new_tokens", "8000")
    page.click("#go")
    wait(page, "panels[0].meta !== null")
    client.post("/abort_request", json={"abort_all": True})
    wait(page, "panels.every((p) => !p.running)")
    assert words(page) == ["aborted"]


def test_a_seed_that_is_used_again_gives_the_same_text(page: Any) -> None:
    page.fill("#temperature", "0.75")
    page.fill("#max_new_tokens", "40")
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running")
    text = page.locator(".out").text_content()
    seed = str(page.evaluate("panels[0].meta.sampling_seed"))
    assert f"seed {seed} " in page.locator(".seed").text_content()
    page.click("text=use again")
    assert page.input_value("#seed") == seed
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running")
    assert page.locator(".out").text_content() == text
    step = page.evaluate("[...panels[0].steps.keys()][2]")
    # Not by the pointer: a random model's text may be a character that has no width.
    page.locator(f'.out [data-step="{step}"]').first.dispatch_event("click")
    assert f"Verification {step}: 3 drafted" in page.locator(".step").text_content()
    assert page.locator(".chip").count() > 0
    counts = page.evaluate("panels[0].meta.spec_accept_histogram")
    shown = page.locator(".bars span").all_text_contents()
    assert [int(word) for word in shown[1::2]] == counts


@pytest.mark.parametrize("seed", ["-3", "18446744073709551613", "9007199254740993"])
def test_a_seed_of_64_bits_is_shown_and_used_again_as_it_is(page: Any, seed: str) -> None:
    page.fill("#seed", seed)
    page.fill("#max_new_tokens", "8")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    for _ in range(2):
        page.click("#go")
        wait(page, "panels[0].meta !== null && !panels[0].running")
        assert page.locator(".seed").text_content().startswith(f"seed {seed} ")
        page.click("text=use again")
        assert page.input_value("#seed") == seed
    assert sum(f'"sampling_seed":{seed}}}' in body for body in asked) == 2


def test_the_text_is_followed_until_the_reader_scrolls_up(page: Any) -> None:
    page.evaluate("panels[0].output.append('x\\n'.repeat(200), 'own')")
    box = "panels[0].output.element"
    gap = f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight"
    assert page.evaluate(gap) < 2
    page.evaluate(f"{box}.scrollTop = 100")
    page.evaluate("panels[0].output.append('y\\n'.repeat(50), 'own')")
    assert page.evaluate(f"{box}.scrollTop") == 100
    page.evaluate(f"{box}.scrollTop = {box}.scrollHeight")
    page.evaluate("panels[0].output.append('z\\n'.repeat(50), 'own')")
    assert page.evaluate(gap) < 2


def test_a_wrapped_line_stays_right_of_its_indentation(page: Any) -> None:
    page.evaluate("panels[0].output.append('        ' + 'word '.repeat(60), 'own')")
    assert page.evaluate(
        """() => {
          const rows = panels[0].output.element.querySelector('.text-line span').getClientRects();
          const box = panels[0].output.element.getBoundingClientRect();
          return rows.length > 2 && [...rows].slice(1).every((row) => row.left - box.left > 80);
        }"""
    )


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_needs_no_sideways_scrolling(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.fill("#max_new_tokens", "30")
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate(
        "[...document.querySelectorAll('dt, dd, button, input')]"
        ".every((e) => e.getBoundingClientRect().right <= window.innerWidth)"
    )


def test_the_tree_of_a_step_is_drawn_and_reached_by_keys(page: Any) -> None:
    page.check("#trees")
    page.fill("#max_new_tokens", "24")
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running", seconds=240)
    known = page.evaluate("[...panels[0].steps.keys()]")
    page.focus(".out")
    for key, step in (("ArrowRight", known[0]), ("ArrowRight", known[1]), ("ArrowLeft", known[0])):
        page.keyboard.press(key)
        assert f"Verification {step}: 3 drafted" in page.locator(".step").text_content()
        tree = page.evaluate(f"panels[0].trees.get({step})")
        assert page.locator(".tree .chip.root").count() == 1
        assert page.locator(".tree .chip.draft").count() == len(tree["accepted"])
        refused = len(tree["ids"]) - 1 - len(tree["accepted"])
        assert page.locator(".tree .chip.no").count() == refused


def shown(page: Any) -> list[Any]:
    fields = ("#temperature", "#max_new_tokens", "#seed", "textarea")
    texts = (".out", ".seed", ".word", ".why", "dd", ".bars span")
    return [
        *(page.input_value(each) for each in fields),
        *(page.locator(each).all_text_contents() for each in texts),
        page.is_checked("#chat"),
    ]


def test_a_reload_shows_prompts_settings_and_answers_until_they_are_forgotten(page: Any) -> None:
    page.fill("textarea", "some words")
    page.fill("#max_new_tokens", "24")
    page.fill("#seed", "18446744073709551613")
    page.check("#chat")
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running")
    before = shown(page)
    page.reload()
    assert shown(page) == before
    first, *_, last = page.evaluate("[...panels[0].steps.keys()]")
    page.evaluate(f"panels[0].showStep('{last}')")
    assert f"Verification {last}: 3 drafted" in page.locator(".step").text_content()
    page.fill("#max_new_tokens", "8000")
    page.click("#go")
    wait(page, f"panels[0].meta !== null && panels[0].steps.has({first})")
    page.reload()
    assert page.locator(".word").text_content() == "stopped"
    assert page.locator(".why").text_content() == "by a reload"
    page.click("#forget")
    wait(page, "document.readyState === 'complete' && panels[0].meta === null")
    assert page.input_value("textarea") == "class Stack:"
    assert page.evaluate("localStorage.length") == 0


def test_a_chat_is_written_as_the_template_has_it(page: Any) -> None:
    page.fill("textarea", "some words")
    page.fill("#max_new_tokens", "8")
    page.check("#chat")
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running")
    said = "".join(page.locator(".out .prompt").all_text_contents())
    assert said.endswith("<user>some words</><assistant>")


def test_nothing_moves_when_a_step_is_shown_and_a_chain_has_no_bars(page: Any) -> None:
    page.check("#trees")
    page.fill("#max_new_tokens", "24")
    page.click("#go")
    wait(page, "panels[0].meta !== null && !panels[0].running", seconds=240)
    places = page.evaluate(
        """() => {
          const panel = panels[0], found = [];
          for (const step of [undefined, ...panel.steps.keys()]) {
            panel.showStep(step && String(step));
            const parts = [panel.section, panel.output.element, panel.get(".histogram")];
            found.push(JSON.stringify(parts.map((part) => part.getBoundingClientRect())));
          }
          return new Set(found).size;
        }"""
    )
    assert places == 1
    bars = page.evaluate(
        """() => [...panels[0].steps.keys()].flatMap((step) => {
          panels[0].showStep(String(step));
          return [...document.querySelectorAll(".tree li > ul")].map((list) =>
            [list.children.length > 1, getComputedStyle(list).borderLeftWidth !== "0px"]);
        })"""
    )
    assert bars
    assert all(has_branches == has_bar for has_branches, has_bar in bars)
