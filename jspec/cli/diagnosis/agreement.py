"""Teacher-forced agreement of a draft head with its target: at every token of texts that the target
generated, the guesses up to S tokens ahead. The head runs in its training form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cli.diagnosis.texts import Text
from jspec.device import noise
from jspec.engine.rescorer import Rescored, Rescorer
from jspec.models.layer import Params
from jspec.training.heads.draft_head import DraftHead, TargetFeatures

ROWS_AT_ONCE = 4
MULTIPLE = 64  # texts are padded to a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """R texts of at most T tokens, and the target's results on them."""

    token_ids: np.ndarray  # i32[R, T]
    lens: np.ndarray  # i32[R]
    prompt_lens: np.ndarray  # i32[R]
    chosen_ids: np.ndarray  # i32[R, T], the target's choice for each token
    seeds: np.ndarray  # u32[R, 2]
    temperatures: np.ndarray  # f32[R]
    prompt_loss: float  # mean of -log p over the prompts' tokens
    hidden: np.ndarray = field(repr=False)  # [R, T, E], after the final norm
    layers: Mapping[int, np.ndarray] = field(repr=False)  # [R, T, E] each, at a layer's input

    def aux(self, layer_ids: Sequence[int]) -> np.ndarray:
        if not layer_ids:
            return self.hidden[..., :0]
        return np.concatenate([self.layers[i] for i in layer_ids], axis=-1)

    def of_texts(self, rows: Sequence[int]) -> Evidence:
        arrays = {
            field.name: getattr(self, field.name)[list(rows)]
            for field in fields(self)
            if field.name not in ("prompt_loss", "layers")
        }
        layers = {i: x[list(rows)] for i, x in self.layers.items()}
        return Evidence(prompt_loss=self.prompt_loss, layers=layers, **arrays)

    def anchors(self, num_steps: int) -> np.ndarray:
        """Return bool[R, T - 1 - S]: positions t whose root t + 1 and guesses are output tokens."""
        t = np.arange(self.token_ids.shape[1] - 1 - num_steps)[None, :]
        return (t >= self.prompt_lens[:, None] - 1) & (t + 1 + num_steps < self.lens[:, None])


def gather(rescorer: Rescorer, texts: Sequence[Text], layer_ids: Sequence[int]) -> Evidence:
    scores = [rescorer.score(text.request, text.ids, features=True) for text in texts]
    width = -(-max(len(score.chosen_ids) for score in scores) // MULTIPLE) * MULTIPLE

    def table(rows: Sequence[Any]) -> np.ndarray:
        arrays = [np.asarray(row) for row in rows]
        pads = [[(0, width - len(a)), *[(0, 0)] * (a.ndim - 1)] for a in arrays]
        return np.stack([np.pad(a, pad) for a, pad in zip(arrays, pads, strict=True)])

    aux = table([score.aux for score in scores])
    parts = np.split(aux, len(layer_ids), axis=-1) if layer_ids else []
    words = [(text.request.seed >> 32, text.request.seed & 0xFFFFFFFF) for text in texts]
    return Evidence(
        token_ids=table([(*text.request.prompt_ids, *text.ids) for text in texts]),
        lens=np.array([len(score.chosen_ids) for score in scores]),
        prompt_lens=np.array([score.prompt_len for score in scores]),
        chosen_ids=table([score.chosen_ids for score in scores]),
        seeds=np.array(words, np.uint32),
        temperatures=np.array([text.request.sampling.temperature for text in texts], np.float32),
        prompt_loss=prompt_loss(scores),
        hidden=table([score.hidden for score in scores]),
        layers=dict(zip(layer_ids, parts, strict=True)),
    )


def prompt_loss(scores: Sequence[Rescored]) -> float:
    known = np.concatenate([score.logprobs[1 : score.prompt_len] for score in scores])
    return -float(known.mean()) if len(known) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of guesses with the target's choices."""

    # bool[R, T - 1 - S, S]; [r, t, i]: the guess at depth i + 1 after t + 1 tokens is right.
    hits: np.ndarray
    anchors: np.ndarray  # bool[R, T - 1 - S]
    confidence: float  # mean probability that the head gives to its depth-1 guesses

    @property
    def by_depth(self) -> list[float]:
        return [float(x) for x in self.hits[self.anchors].mean(axis=0)]

    @property
    def mean(self) -> float:
        return float(self.hits[self.anchors].mean())

    @property
    def num_accepted(self) -> np.ndarray:
        """Drafts that a verification at each position accepts, i64[R, T - 1 - S]."""
        return np.cumprod(self.hits, axis=-1).sum(axis=-1)


@cache
def _guesser(head: Any, num_depths: int, dtype: str) -> Callable[..., Any]:
    def guess(
        params: Params,
        ids: jax.Array,
        hidden: jax.Array,
        aux: jax.Array,
        seeds: jax.Array,
        temperatures: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        features = TargetFeatures(hidden=hidden, aux=aux)
        guesses = head.guesses(params, ids, features, num_depths=num_depths, dtype=jnp.dtype(dtype))
        num_rows = ids.shape[1] - 1 - num_depths
        draft_ids = params.get("draft_ids", jnp.arange(guesses[0].logits.shape[-1]))
        found = []
        for i, each in enumerate(guesses):
            positions = jnp.broadcast_to(jnp.arange(num_rows) + 2 + i, (ids.shape[0], num_rows))
            g = noise.gumbel(
                jnp.broadcast_to(seeds[:, None], (*positions.shape, 2)), positions, draft_ids
            )
            noisy = each.logits[:, :num_rows] + temperatures[:, None, None] * g
            best = jnp.argmax(noisy, axis=-1)
            found.append(jnp.take(draft_ids, best, mode="clip"))
        sure = jax.nn.softmax(guesses[0].logits[:, :num_rows], axis=-1).max(axis=-1)
        return jnp.stack(found, axis=-1), sure

    return jax.jit(guess)


def measure(
    head: DraftHead,
    params: Params,
    evidence: Evidence,
    *,
    layer_ids: Sequence[int],
    num_steps: int,
    dtype: str,
    shift: int = 0,
) -> Agreement:
    """Measure on all texts. shift: use the features of this many tokens later (< 0: earlier)."""
    run = partial(_guesser(cast(Any, head), num_steps, dtype), params)
    guessed, sure = [], []
    roll = partial(np.roll, shift=-shift, axis=1)
    aux, hidden = roll(evidence.aux(layer_ids)), roll(evidence.hidden)
    num_texts = len(evidence.lens)
    for start in range(0, num_texts, ROWS_AT_ONCE):
        # Wraps around to the first texts, so that the last batch has the same size.
        part = np.arange(start, start + ROWS_AT_ONCE) % num_texts
        rows = (evidence.token_ids[part], hidden[part], aux[part])
        ids, confidence = run(*rows, evidence.seeds[part], evidence.temperatures[part])
        guessed.append(np.asarray(ids))
        sure.append(np.asarray(confidence))
    found = np.concatenate(guessed)[:num_texts]
    num_rows = found.shape[1]
    wanted = np.stack(
        [evidence.chosen_ids[:, 2 + i : 2 + i + num_rows] for i in range(num_steps)], axis=-1
    )
    anchors = evidence.anchors(num_steps)
    return Agreement(
        hits=found == wanted,
        anchors=anchors,
        confidence=float(np.concatenate(sure)[:num_texts][anchors].mean()),
    )


def gain(trial: Agreement, base: Agreement) -> tuple[float, float]:
    difference = trial.hits[base.anchors].sum(-1) - base.hits[base.anchors].sum(-1).astype(float)
    error = float(np.sqrt(np.sum(difference**2)))
    return trial.mean - base.mean, float(difference.sum()) / error if error else 0.0
