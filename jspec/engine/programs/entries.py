"""The jitted entry of each kind of step: unpack the flat batch and call the step.

Every entry takes the flat batch of one data rank after params and state, and returns the next state
and an output. Only the programs of a cut step pass arrays from one to the next (`arrays_between`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jspec.device.batch import (
    DraftPrefillBatch,
    Features,
    RecallBatch,
    Scored,
    decode_batch,
    prefill_batch,
    settle_batch,
)
from jspec.device.parallel import partition_spec
from jspec.messages.layout import PackedLayout
from jspec.messages.plan import StepKind
from jspec.speculative.cut_step import propose_step, score_step, settle_step
from jspec.speculative.drafters.pending import draft_prefill_step
from jspec.speculative.recall import recall_step
from jspec.speculative.step import StepProgram, prefill_step, speculative_rounds


def _decode(
    program: StepProgram,
    packed: PackedLayout,
    params: Any,
    state: Any,
    flat: jax.Array,
    *,
    num_rounds: int,
) -> Any:
    batch = decode_batch(packed.unpack(flat))
    return speculative_rounds(program, params, state, batch, num_rounds=num_rounds)


def _prefill(
    program: StepProgram, packed: PackedLayout, params: Any, state: Any, flat: jax.Array
) -> Any:
    return prefill_step(program, params, state, prefill_batch(packed.unpack(flat)))


def _recall(
    program: StepProgram, packed: PackedLayout, params: Any, state: Any, flat: jax.Array
) -> Any:
    return recall_step(program, params, state, RecallBatch(**packed.unpack(flat)))


def _propose(
    program: StepProgram, packed: PackedLayout, params: Any, state: Any, flat: jax.Array
) -> Any:
    return propose_step(program, params, state, decode_batch(packed.unpack(flat)))


def _score(
    program: StepProgram,
    packed: PackedLayout,
    params: Any,
    state: Any,
    flat: jax.Array,
    tree: jax.Array,
) -> Any:
    return score_step(program, params, state, packed.unpack(flat)["slots"], tree)


def _settle(
    program: StepProgram,
    packed: PackedLayout,
    params: Any,
    state: Any,
    flat: jax.Array,
    tree: jax.Array,
    scored: Scored,
) -> Any:
    return settle_step(program, params, state, settle_batch(packed.unpack(flat)), tree, scored)


def _draft_prefill(
    program: StepProgram, packed: PackedLayout, params: Any, state: Any, flat: jax.Array
) -> Any:
    return draft_prefill_step(
        program.drafter, params, state, DraftPrefillBatch(**packed.unpack(flat))
    )


ENTRIES: Mapping[StepKind, Callable[..., Any]] = {
    StepKind.DECODE: _decode,
    StepKind.PREFILL: _prefill,
    StepKind.RECALL: _recall,
    StepKind.PROPOSE: _propose,
    StepKind.SCORE: _score,
    StepKind.SETTLE: _settle,
    StepKind.DRAFT_PREFILL: _draft_prefill,
}


def of_rank(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Run an entry inside a shard_map on its data rank's part of arrays [data, ...].

    These are the arrays after params and state, and the output.
    """

    def run(params: Any, state: Any, *arrays: Any) -> Any:
        own = jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), arrays)
        state, output = entry(params, state, *own)
        return state, jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), output)

    return run


BY_RANK: Any = partition_spec(("rank",))
# Each shard keeps the logits of its part of the vocabulary.
_LOGITS: Any = partition_spec(("rank", None, None, "vocab"))
_HIDDEN: Any = BY_RANK
_SCORED = Scored(logits=_LOGITS, features=Features(hidden=_HIDDEN, aux_hidden=_HIDDEN))


@dataclass(frozen=True, slots=True)
class ArraysBetween:
    """Shardings of the arrays between programs, as pytrees of PartitionSpec.

    taken: arguments after the flat batch.
    given: the output; i32 and whole on every device of a data rank except for SCORE.
    """

    taken: tuple[Any, ...] = ()
    given: Any = BY_RANK


def arrays_between(kind: StepKind) -> ArraysBetween:
    """Return the shardings of what programs of this kind take from earlier ones, and give."""
    if kind is StepKind.SCORE:
        return ArraysBetween(taken=(BY_RANK,), given=_SCORED)
    if kind is StepKind.SETTLE:
        return ArraysBetween(taken=(BY_RANK, _SCORED))
    return ArraysBetween()
