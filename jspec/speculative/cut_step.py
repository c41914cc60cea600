"""A decode step in three programs, for rows whose grammar masks are computed on the host.

propose_step   draft the tree; the host reads it while the target scores it (decision 23)
score_step     the target's logits and features at every node; both stay on the device
settle_step    with a mask for every node: choose, accept, advance
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.device.batch import DecodeBatch, DraftTree, Scored, SettleBatch
from jspec.device.state import EngineState
from jspec.speculative.step import StepProgram, propose_tree, score_tree, settle_tree
from jspec.speculative.target import Params


def propose_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, Int[Array, "3 B N"]]:
    """Return the state with new pages, and the trees' tokens, parents and depths."""
    state, tree = propose_tree(program, params, state, batch)
    return state, jnp.stack((tree.tokens, tree.parents, tree.depths))


def score_step(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    slots: Int[Array, "B"],
    tree: Int[Array, "3 B N"],
) -> tuple[EngineState, Scored]:
    return score_tree(program, params, state, slots, _unpacked(tree))


def settle_step(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    batch: SettleBatch,
    tree: Int[Array, "3 B N"],
    scored: Scored,
) -> tuple[EngineState, Int[Array, "B M1"]]:
    return settle_tree(
        program, params, state, batch.slots, _unpacked(tree), scored, allowed=batch.allowed
    )


def _unpacked(tree: Int[Array, "3 B N"]) -> DraftTree:
    return DraftTree(tokens=tree[0], parents=tree[1], depths=tree[2])
