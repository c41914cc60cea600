"""Rescores finished texts chunk by chunk, with the engine's weights and separate KV pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jspec.device.parallel import Parallel, shardings
from jspec.device.state import SEEN_SPEC, Caches, SamplingBatch, Seen, cache_specs, empty_caches
from jspec.engine.weights.served_weights import ServedWeights
from jspec.errors import RequestError
from jspec.messages.request import Request
from jspec.messages.sampling_rows import (
    packed_fields,
    typed_fields,
    write_neutral,
    write_request,
)
from jspec.models import placement
from jspec.models.decoder import Decoder
from jspec.models.params import padded
from jspec.sampling.margin import margin
from jspec.spec import indexing
from jspec.spec.cache_entry import CacheLayout, Unit
from jspec.speculative.rescore import ChunkScores, TextChunk, rescore_chunk

CHUNK = 64
MAX_EXPLAINED = 64  # differences of one text with a computed margin; a bug causes very many
PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An emitted token that the target alone would not choose."""

    index: int  # of the output
    emitted_id: int
    chosen_id: int
    margin: float  # in logits (`sampling.margin`)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A text's scores. Entry i is for token i; entry 0 is undefined."""

    prompt_len: int
    chosen_ids: np.ndarray  # i32[n], given the tokens before; undefined in the prompt
    logprobs: np.ndarray  # f32[n], of the text's tokens, from the raw logits
    top_ids: np.ndarray  # i32[n, 20]
    top_logprobs: np.ndarray  # f32[n, 20]
    differences: tuple[Difference, ...]  # the first MAX_EXPLAINED of num_differences
    num_differences: int
    hidden: np.ndarray | None = None  # [n, E], if features were requested
    aux: np.ndarray | None = None  # [n, A]


class Rescorer:
    """Scores texts with the target of `served`, or another `target` over the same weights."""

    def __init__(
        self,
        served: ServedWeights,
        *,
        most_tokens: int,
        chunk_size: int = CHUNK,
        target: Decoder | None = None,
    ) -> None:
        self._served, self._mesh = served, served.mesh
        self._target = target or served.models.target
        self._chunk_size = chunk_size
        self._most_tokens = most_tokens
        self._num_pages = indexing.num_pages(most_tokens, PAGE_SIZE)
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        self._num_ranks = Parallel.of(self._mesh).data  # each scores the same text
        self._kv = self._empty_caches()
        self._run = self._program()

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    def score(
        self,
        request: Request,
        output_ids: Sequence[int],
        *,
        first_chunk: int | None = None,  # tokens of the first call, which shifts all chunks
        features: bool = False,
    ) -> Rescored:
        """Score prompt and output of a request. Raises RequestError for a text that is too long or
        has no output, and for a grammar, whose masks are unknown here."""
        grammar = request.sampling.grammar
        if grammar is not None or request.sampling.max_thinking_tokens is not None:
            kind = "budget of reasoning" if grammar is None else grammar.kind.value
            raise RequestError(
                f"the request has a {kind}; expected none: grammar masks are not rescored"
            )
        ids = np.asarray((*request.prompt_ids, *output_ids), np.int32)
        if not 1 < len(ids) <= self._most_tokens:
            raise RequestError(
                f"the text has {len(ids)} tokens; expected from 2 to {self._most_tokens}"
            )
        prompt_len = len(request.prompt_ids)
        rows = self._sampling(request)
        shards = Parallel.of(self._mesh).tensor
        seen = _Counts(ids, prompt_len, padded(self.vocab_size, shards))
        found, differences = [], _Differences(request, ids)
        start, size = 0, min(first_chunk or self._chunk_size, self._chunk_size)
        while start < len(ids):
            size = min(size, len(ids) - start)
            logits, scores = self._call(ids, start, size, prompt_len, rows, seen)
            differences.add(start, np.asarray(scores.chosen_ids)[:size], logits)
            found.append(_on_host(scores, size, features=features))
            start, size = start + size, self._chunk_size
        return _rescored(found, prompt_len, differences)

    def _call(
        self,
        ids: np.ndarray,
        start: int,
        size: int,
        prompt_len: int,
        rows: SamplingBatch,
        seen: _Counts,
    ) -> tuple[jax.Array, ChunkScores]:
        def ints(*values: int, size: int) -> Any:
            found = np.zeros(size, np.int32)
            found[: len(values)] = values
            return found

        following = ids[start + 1 : start + 1 + size]
        chunk = TextChunk(
            token_ids=ints(*ids[start : start + size], size=self._chunk_size),
            following=ints(*following, size=self._chunk_size),
            start=ints(start, size=1),
            num_tokens=ints(size, size=1),
            prompt_len=ints(prompt_len, size=1),
            sampling=rows,
        )
        params = {"target": self._served.params["target"]}
        put = jax.device_put(chunk, self._replicated)
        counts = jax.tree.map(lambda x: np.repeat(x, self._num_ranks, axis=0), seen.before(start))
        self._kv, logits, scores = self._run(params, self._kv, counts, put)
        return logits, scores

    def _sampling(self, request: Request) -> SamplingBatch:
        fields = {name: np.zeros(shape, np.int32) for name, shape in packed_fields(1)}
        write_neutral(fields, vocab_size=self.vocab_size)
        write_request(fields, 0, request, vocab_size=self.vocab_size)
        return SamplingBatch(**typed_fields(fields))

    def _empty_caches(self) -> Caches:
        models = self._served.models
        layout = CacheLayout(
            page_size=PAGE_SIZE,
            dtype=models.config.dtype,
            shards=Parallel.of(self._mesh).model,
            lanes=self._target.ops.lanes,
        )
        groups = self._target.cache_groups
        units = {Unit.PAGE: self._num_pages + 1, Unit.SLOT: 2}
        return empty_caches(
            groups,
            layout=layout,
            num_units=lambda group: self._num_ranks * units[group.entry.unit],
            mesh=self._mesh,
        )

    def _program(self) -> Any:
        """Jit (params, pools, seen, chunk) -> (pools, logits, scores); the pools are donated."""
        params = {"target": self._served.params["target"]}
        tables = {"target": self._target.table}
        pools = cache_specs(self._target.cache_groups)
        in_specs = (placement.param_specs(tables, params), pools, SEEN_SPEC, PartitionSpec())

        def run(params: Any, kv: Any, seen: Seen, chunk: TextChunk) -> Any:
            return rescore_chunk(
                self._target, params["target"], kv, seen, chunk, num_pages=self._num_pages
            )

        step = jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=(pools, SEEN_SPEC, PartitionSpec()),
            check_vma=False,
        )
        place = partial(shardings, self._mesh)
        column_major = self._target.ops.column_major
        return jax.jit(
            step,
            in_shardings=(
                placement.param_places(self._mesh, tables, params, column_major=column_major),
                *(place(spec) for spec in in_specs[1:]),
            ),
            out_shardings=(place(pools), place(SEEN_SPEC), place(PartitionSpec())),
            donate_argnums=(1,),
        )


class _Counts:
    def __init__(self, ids: np.ndarray, prompt_len: int, num_columns: int) -> None:
        self._ids, self._prompt_len, self._num_columns = ids, prompt_len, num_columns
        self._marks: Any = np.zeros((1, num_columns), np.int8)
        self._marks[0, ids[:prompt_len]] = 1

    def before(self, start: int) -> Seen:
        emitted = self._ids[self._prompt_len : start]
        counts: Any = np.bincount(emitted, minlength=self._num_columns).astype(np.int32)
        return Seen(output_counts=counts[None], prompt_marks=self._marks)


class _Differences:
    def __init__(self, request: Request, ids: np.ndarray) -> None:
        self._request, self._ids = request, ids
        self.found: list[Difference] = []
        self.count = 0

    def add(self, start: int, chosen_ids: np.ndarray, logits: jax.Array) -> None:
        prompt_len = len(self._request.prompt_ids)
        for row, chosen in enumerate(chosen_ids):
            position = start + row + 1
            if not prompt_len <= position < len(self._ids):
                continue
            emitted = int(self._ids[position])
            if emitted == chosen:
                continue
            self.count += 1
            if len(self.found) < MAX_EXPLAINED:
                found = margin(
                    np.asarray(logits[row]),
                    emitted,
                    sampling=self._request.sampling,
                    seed=self._request.seed,
                    position=position,
                )
                index = position - prompt_len
                self.found.append(
                    Difference(index=index, emitted_id=emitted, chosen_id=int(chosen), margin=found)
                )


def _on_host(scores: ChunkScores, size: int, *, features: bool) -> dict[str, np.ndarray]:
    names = ["chosen_ids", "logprobs", "top_ids", "top_logprobs"]
    names += ["hidden", "aux"] if features else []
    return {name: np.asarray(getattr(scores, name))[:size] for name in names}


def _rescored(
    found: list[dict[str, np.ndarray]], prompt_len: int, differences: _Differences
) -> Rescored:
    """Join the chunks. Predictions move from a token to the next; features do not."""
    whole = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    for name in ("chosen_ids", "logprobs", "top_ids", "top_logprobs"):
        whole[name] = np.concatenate((np.zeros_like(whole[name][:1]), whole[name][:-1]))
    return Rescored(
        prompt_len=prompt_len,
        differences=tuple(differences.found),
        num_differences=differences.count,
        **whole,
    )
