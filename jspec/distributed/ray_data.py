"""Generation over a Ray Data set: `dataset.map_batches(Generate, ...)`. It imports no Ray.

dataset.map_batches(
    Generate,
    fn_constructor_kwargs={"model_path": "org/name", "sampling_params": {"max_new_tokens": 64}},
    batch_size=64, concurrency=2, num_gpus=1,
)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.errors import RequestError
from jspec.messages.seeds import MAX_SEED, choice_seed
from jspec.serving.engine import Engine

Batch = dict[str, Any]  # numpy arrays by column


class Generate:
    """An engine that adds the columns `output_column`, finish_reason and error to each batch.

    sampling_params: for all rows. Without a sampling_seed, a row's seed is its entry of seed_column
    or follows from random_seed and its prompt. So a text does not depend on the actor that made it,
    and a repeated run makes the same texts. engine: arguments of EngineArgs.
    """

    def __init__(
        self,
        *,
        prompt_column: str = "prompt",
        output_column: str = "text",
        seed_column: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self._prompt_column, self._output_column = prompt_column, output_column
        self._seed_column = seed_column
        self._sampling = dict(sampling_params or {})
        if self._sampling.get("n", 1) != 1:
            raise RequestError(f"n is {self._sampling['n']}; expected 1: a row has one text")
        self._engine = Engine(**engine)
        self._random_seed = self._engine.args.random_seed or 0

    def __call__(self, batch: Batch) -> Batch:
        for name in {self._prompt_column, self._seed_column} - {None}:
            if name not in batch:
                raise RequestError(f"column {name!r} is missing; expected one of {[*batch]}")
        prompts = [str(text) for text in batch[self._prompt_column]]
        found = self._engine.generate(
            prompts,
            [self._sampling_of(batch, row, text) for row, text in enumerate(prompts)],
            return_exceptions=True,
        )
        errors = ["" if isinstance(each, dict) else str(each) for each in found]
        done = [each if isinstance(each, dict) else NOTHING for each in found]
        reasons = [each["meta_info"]["finish_reason"]["type"] for each in done]
        texts = [each["text"] for each in done]
        columns = {self._output_column: texts, "finish_reason": reasons, "error": errors}
        return {**batch, **{name: np.array(x, dtype=object) for name, x in columns.items()}}

    def _sampling_of(self, batch: Batch, row: int, prompt: str) -> dict[str, Any]:
        if self._seed_column is not None:
            return {**self._sampling, "sampling_seed": int(batch[self._seed_column][row])}
        digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        seed = choice_seed(self._random_seed & MAX_SEED, int.from_bytes(digest, "little"))
        return {"sampling_seed": seed, **self._sampling}


NOTHING: Mapping[str, Any] = {"text": "", "meta_info": {"finish_reason": {"type": "error"}}}
