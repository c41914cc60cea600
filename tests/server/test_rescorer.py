"""A served text scored again: the same choices, whatever the sampling; alterations are found.

It tests engine/rescorer, here because of this folder's engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jspec.cli.diagnosis.prompts import Prompt
from jspec.cli.diagnosis.texts import Text, make_texts
from jspec.engine.rescorer import Rescorer
from jspec.errors import RequestError
from jspec.serving.engine import Engine

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    {
        "temperature": 0.9,
        "frequency_penalty": 0.9,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.4,
        "logit_bias": {"65": 2.5},
        "min_new_tokens": 20,
    },
)


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[Text]:
    requests = [
        engine.requests(
            prompt="some words of a prompt " * (1 + 2 * i),
            sampling_params={**sampling, "sampling_seed": i, "max_new_tokens": 40},
        )[0]
        for i, sampling in enumerate(SAMPLINGS)
    ]
    return make_texts(engine, requests)


@pytest.fixture(scope="module")
def rescorer(engine: Engine) -> Rescorer:
    return Rescorer(engine.served, most_tokens=256, chunk_size=32)


def test_every_token_is_chosen_again(rescorer: Rescorer, texts: list[Text]) -> None:
    for text in texts:
        scores = rescorer.score(text.request, text.ids)
        assert scores.num_differences == 0
        assert tuple(scores.chosen_ids[scores.prompt_len :]) == text.ids
        others = rescorer.score(text.request, text.ids, first_chunk=7)
        np.testing.assert_allclose(others.logprobs, scores.logprobs, atol=1e-4)


def test_an_altered_token_is_found_and_the_rest_judged_after_it(
    rescorer: Rescorer, texts: list[Text]
) -> None:
    text = texts[0]
    wrong = (text.ids[5] + 1) % 256
    ids = (*text.ids[:5], wrong, *text.ids[6:])
    scores = rescorer.score(text.request, ids)
    first = scores.differences[0]
    assert (first.index, first.emitted_id, first.chosen_id) == (5, wrong, text.ids[5])
    at = scores.prompt_len + 5
    # Greedy: the margin is how much likelier the choice is.
    assert first.margin == pytest.approx(scores.top_logprobs[at, 0] - scores.logprobs[at], abs=1e-4)


@pytest.mark.slow
def test_another_seed_explains_no_sampled_text(rescorer: Rescorer, texts: list[Text]) -> None:
    text = texts[1]
    other = dataclasses.replace(text.request, seed=text.request.seed + 1)
    assert rescorer.score(other, text.ids).num_differences > 0


def test_a_text_that_is_too_long_is_refused(rescorer: Rescorer, texts: list[Text]) -> None:
    with pytest.raises(RequestError, match="expected from 2 to 256"):
        rescorer.score(texts[0].request, (1,) * 300)


def test_a_text_under_a_grammar_is_refused(
    engine: Engine, rescorer: Rescorer, texts: list[Text]
) -> None:
    """Its tokens are those that the grammar allowed; rescoring knows no grammar."""
    text = texts[0]
    tied = dataclasses.replace(text.request.sampling, ignore_eos=False, regex="[a-f]{20}")
    with pytest.raises(RequestError, match="the request has a regex; expected none"):
        rescorer.score(dataclasses.replace(text.request, sampling=tied), text.ids)
    asks = Prompt(number=3, kind="prompt", given="a", sampling={"regex": "[a-f]"})
    with pytest.raises(RequestError, match="prompt 3: regex is given; expected none"):
        asks.request(engine)
