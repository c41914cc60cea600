"""Engines of every drafter for the laws, each with a scripted drafter and one decode variant."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jspec.engine.weights.loading import place
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING
from jspec.models.layer import Params
from jspec.models.registry import table_of
from tests.speculative.engines import (
    CONTEXT,
    NUM_SLOTS,
    TARGET,
    Compiled,
    build,
    make_request,
    plain_engine,
    serve,
    tiny_params,
)
from tests.speculative.every_drafter import KINDS, sharded
from tests.support.scripted_drafter import ScriptedDrafter, Told, script_params

ACCEPTANCE = 0.8


@dataclass(frozen=True)
class Setting:
    """The settings that an engine is compiled for. others: further shapes; 0/1/1 is a plain
    step."""

    kind: str
    shape: tuple[int, int, int]
    page_size: int
    rounds: int = 1
    shards: int = 1
    others: tuple[tuple[int, int, int], ...] = ()
    ranks: int = 1

    @property
    def name(self) -> str:
        s, k, n = self.shape
        dp = f"_dp{self.ranks}" * (self.ranks > 1)
        return f"{self.kind}_{s}-{k}-{n}_p{self.page_size}_r{self.rounds}_tp{self.shards}{dp}"


OF_SHAPES = Setting("recurrent", (2, 1, 3), 4, others=((0, 1, 1), (1, 1, 2)))
# One engine an algorithm, of chains or of whole trees: the path that is right is among the nodes.
FAST = (
    Setting("eagle1", (2, 2, 7), 4),
    Setting("eagle3", (2, 2, 7), 1),
    Setting("standalone", (2, 1, 3), 16, shards=2),
    Setting("multi_layer_not_chained", (3, 1, 4), 64),
    Setting("ngram", (3, 3, 10), 16, shards=4),
    OF_SHAPES,
    Setting("dflash", (3, 2, 11), 4),
    Setting("frozen_kv", (2, 1, 3), 16),
)
REST = (
    Setting("eagle1_ngram", (2, 2, 7), 4),
    Setting("multi_layer_chained", (3, 1, 4), 16, rounds=3),
    Setting("multi_layer_hidden_first", (2, 3, 13), 4),
    Setting("standalone", (2, 2, 7), 4, shards=2),
    Setting("eagle3", (2, 2, 7), 16, rounds=2, shards=2),
    Setting("eagle1", (3, 1, 4), 1, shards=2),
    Setting("multi_layer_not_chained", (3, 2, 11), 4, shards=2),
    Setting("recurrent", (2, 2, 7), 16, shards=2),
    Setting("dflash", (3, 1, 4), 1, rounds=2, shards=2),
    Setting("dspark", (3, 2, 11), 4, shards=2),
    Setting("dflash2", (2, 3, 13), 16, shards=2),
    Setting("p_eagle", (3, 2, 11), 4, rounds=2, shards=2),
    Setting("frozen_kv", (3, 2, 11), 4, rounds=2, shards=2),
)


def engine(setting: Setting) -> Compiled:
    """Return an engine with a scripted drafter and one decode variant, which serves all."""
    return _engine(setting) if setting in FAST else _last_engine(setting)


@functools.lru_cache(maxsize=1)
def _last_engine(setting: Setting) -> Compiled:
    return _engine.__wrapped__(setting)


@functools.cache
def _engine(setting: Setting) -> Compiled:
    kind = KINDS[setting.kind]
    spec = kind.spec(setting.shape)
    target, own = laid_out(setting, tiny_params()[0], kind.params())
    return build(
        spec,
        page_size=setting.page_size,
        params=(target, {"own": own, "script": no_script()}),
        variants=(SAMPLING,),
        num_rounds=setting.rounds,
        shards=setting.shards,
        ranks=setting.ranks,
        make=lambda ops, shard: ScriptedDrafter(
            kind.make(spec, ops, shard), spec, TARGET.vocab_size
        ),
        aux_layer_ids=kind.aux_layer_ids,
        shapes=tuple(kind.spec(other) for other in setting.others),
    )


def laid_out(setting: Setting, target: Params, own: Params) -> tuple[Params, Params]:
    """Return the weights of target and drafter, sharded for the engine."""
    drafter = KINDS[setting.kind].drafter((1, 1, 2))
    return sharded(table_of(TARGET), target, setting.shards), sharded(
        drafter.table, own, setting.shards
    )


def no_script() -> Params:
    return script_params({}, rows=NUM_SLOTS, width=CONTEXT)


def with_script(
    compiled: Compiled, script: Params, *, own: Params | None = None, target: Params | None = None
) -> Compiled:
    """Replace the guesses; own, target: other weights, sharded."""
    params = {"target": target or compiled.params["target"]}
    params["draft"] = {"own": own or compiled.params["draft"]["own"], "script": script}
    placed = place(compiled.mesh, compiled.program.tables, params)
    return dataclasses.replace(compiled, params=placed)


def scripted(requests: list[Request], texts: list[tuple[int, ...]]) -> Params:
    """Alternate: a row is right half of the time, gets garbage, or keeps its drafter's guesses."""
    right = list(zip(requests, texts, strict=True))[::3]
    told = {r.seed: Told(r.prompt_ids + ids, ACCEPTANCE) for r, ids in right}
    garbage = [request.seed for request in requests[1::3]]
    return script_params(told, rows=NUM_SLOTS, width=CONTEXT, garbage=garbage)


def requests_of(
    batch: int,
    *,
    num_tokens: int,
    seed: int,
    longest: int = 40,
    by_row: Sequence[Mapping[str, Any]] = ({},),
    **sampling: Any,
) -> list[Request]:
    """Return requests with unequal prompts, the second of one token. by_row: further sampling in
    turn."""
    lengths = (11, 1, longest, 3, 17, 29, 8, 23)
    return [
        make_request(
            i,
            prompt_len=lengths[i],
            seed=seed + i,
            max_new_tokens=max(num_tokens - 3 * i, 4),
            ignore_eos=True,
            **sampling,
            **by_row[i % len(by_row)],
        )
        for i in range(batch)
    ]


@functools.cache
def plain_texts(requests: tuple[Request, ...], target: str = "") -> list[tuple[int, ...]]:
    """Return plain decoding's texts, without overlap; target: the one of a kind."""
    compiled = plain_engine()
    if target:
        params = {**compiled.params, "target": KINDS[target].right_target()}
        compiled = dataclasses.replace(compiled, params=params)
    return list(serve(compiled, list(requests), overlap_depth=0).ids)
