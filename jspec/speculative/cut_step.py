"""A step cut where the host says what grammars allow: three programs instead of one.

    propose_step   the drafter's tree, which the host reads while the target scores it
    score_step     the target's logits and features at every node; both stay on the device
    settle_step    with a mask for every node: choose, accept, advance

They are made of the parts of `speculative_step`. A jit's outputs can be read only when it ends: so
the tree leaves before the scoring begins, and the masks come after it (decision 23).
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
    """The state with the rows' new pages, and tokens, parents and depths of their trees."""
    state, tree = propose_tree(program, params, state, batch)
    return state, jnp.stack((tree.tokens, tree.parents, tree.depths))


def score_step(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    slots: Int[Array, "B"],
    tree: Int[Array, "3 B N"],
) -> tuple[EngineState, Scored]:
    """The state with the nodes' KV, and what the target says of them."""
    return score_tree(program, params, state, slots, _unpacked(tree))


def settle_step(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    batch: SettleBatch,
    tree: Int[Array, "3 B N"],
    scored: Scored,
) -> tuple[EngineState, Int[Array, "B M1"]]:
    """Returns what `speculative_step` does."""
    return settle_tree(
        program, params, state, batch.slots, _unpacked(tree), scored, allowed=batch.allowed
    )


def _unpacked(tree: Int[Array, "3 B N"]) -> DraftTree:
    return DraftTree(tokens=tree[0], parents=tree[1], depths=tree[2])
