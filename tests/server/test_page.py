"""The page's colours are readable in light and dark, and it explains its fields."""

from __future__ import annotations

import json
import re

import pytest

from jspec.server.http.event_json import encode_event
from jspec.server.http.page import page

LEAST, LEAST_OF_EDGES = 4.5, 3.0  # WCAG 2.2, 1.4.3 (text) and 1.4.11 (what shows where a field is)
# Text on what lies under it.
TEXT_ON = (
    ("ink", "page"),
    ("ink", "card"),
    ("soft", "page"),
    ("soft", "card"),
    ("error", "card"),
    ("draft", "wash"),
    ("draft", "card"),
    ("hot-ink", "hot"),
    ("on-button", "button"),
    ("on-button", "stop"),
)


def style() -> str:
    found = re.search(r"<style>(.*?)</style>", page(), re.DOTALL)
    assert found
    return found[1]


def colours(scheme: str) -> dict[str, str]:
    """Return the variables of a scheme; the dark ones replace the light ones."""
    blocks = re.findall(r":root \{(.*?)\}", style(), re.DOTALL)
    assert len(blocks) == 2
    used = blocks[:1] if scheme == "light" else blocks
    return {
        name: value
        for block in used
        for name, value in re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)
    }


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_it_is_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # a known near miss


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    known = colours(scheme)
    for text, ground in TEXT_ON:
        value = contrast(known[text], known[ground])
        assert value >= LEAST, f"{scheme}: --{text} on --{ground} has {value:.2f}"
    for ground in ("page", "card"):
        assert contrast(known["edge"], known[ground]) >= LEAST_OF_EDGES


def test_no_colour_stands_outside_the_variables() -> None:
    """Else the test above would miss it; and no text is paler than its colour."""
    rules = re.sub(r":root \{.*?\}", "", style(), flags=re.DOTALL)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?!\s*\{)(?=[;\s])", rules)
    assert not re.search(r"\b(rgb|hsl|oklch|color-mix)\(", rules)
    assert set(re.findall(r"opacity: ([^;]+);", rules)) == {"1"}
    names = set(re.findall(r"(?<![-\w])color: var\(--([a-z-]+)\)", rules))
    assert names <= {text for text, _ in TEXT_ON}


def test_fields_take_any_number_and_an_empty_one_is_the_default() -> None:
    text = page()
    for name in ("temperature", "top_p"):
        assert re.search(rf'id="{name}" [^>]*step="any" placeholder="default"', text)
    assert "An empty field is the model's default" in text
    assert 'if ($(id).value !== "") found[name] = Number($(id).value);' in text


def test_what_a_browser_keeps_is_named_and_has_no_key() -> None:
    text = page()
    assert "This browser keeps prompts, settings and answers." in text
    kept = re.search(r"function keep\(\) \{(.*?)\n\}", text, re.DOTALL)
    assert kept
    assert "localStorage.setItem" in kept[1]
    assert text.count("localStorage.setItem") == 1
    assert "apiKey" not in kept[1]
    assert '{messages: [{role: "user", content: text}]}' in text  # of /tokenize


def rule_of(function: str) -> tuple[str, str]:
    """Return the pattern and the replacement of the page's function that rewrites JSON, in
    Python."""
    found = re.search(
        rf"function {function}\(.*?\.replace\(/(.+?)/g?, '(.+?)'\)", page(), re.DOTALL
    )
    assert found
    return found[1], found[2].replace("$1", r"\1")


@pytest.mark.parametrize("seed", [-3, 2**64 - 3, -(2**63), 2**53 + 1, 7, 0])
def test_seeds_are_text_on_the_page_for_its_numbers_have_53_bits(seed: int) -> None:
    text = '"sampling_seed": 18446744073709551613, \\"sampling_seed\\":1'
    meta = {"sampling_seed": seed, "completion_tokens": 1}
    event = encode_event({"text": text, "meta_info": meta}).removeprefix(b"data: ").decode()
    found = json.loads(re.sub(*rule_of("parsed"), event))
    assert found["meta_info"] == {**meta, "sampling_seed": str(seed)}
    assert found["text"] == text
    asked = {"text": text, "sampling_params": {"temperature": 1, "sampling_seed": str(seed)}}
    written = json.dumps(asked, separators=(",", ":"))
    assert json.loads(re.sub(*rule_of("written"), written)) == {
        "text": text,
        "sampling_params": {"temperature": 1, "sampling_seed": seed},
    }
    pattern = re.search(r'id="seed" type="text" pattern="(.+?)"', page())
    assert pattern
    assert re.fullmatch(pattern[1], str(seed))
    assert not re.fullmatch(pattern[1], "1e3")
    assert "JSON.parse(data)" not in page()
    assert "JSON.stringify(payload), signal" not in page()
