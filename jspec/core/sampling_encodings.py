"""What of a request reaches the device, where that is not the parameter itself: (request, V) -> it.

Named by the fields of `SamplingParams` (core/request.py), whose values they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jspec.core.request import Request

MAX_INT = 2**31 - 1  # token ids and lengths are i32 on the device


def vocab_size(vocab_size: int) -> int:
    """The neutral top_k (all are kept), and the id that is no token's."""
    return vocab_size


def kept_ids(request: Request, vocab_size: int) -> int:
    top_k = request.sampling.top_k
    return vocab_size if top_k < 0 else min(top_k, vocab_size)


def seed_words(request: Request, _: int) -> tuple[int, int]:
    """High and low word of the final seed, not of the `sampling_seed` that was asked for."""
    return request.seed >> 32, request.seed & 0xFFFFFFFF


def masked_ids(request: Request, _: int) -> tuple[int, ...]:
    """Nothing is masked without a minimum length, and then the host alone knows what ends a row."""
    return request.stop_ids if request.sampling.min_new_tokens else ()


def biases(request: Request, _: int) -> np.ndarray:
    """i32[n, 2]: each id and the bits of its bias."""
    pairs = request.sampling.logit_bias
    ids = np.array([token_id for token_id, _ in pairs], np.int32)
    biases = np.array([bias for _, bias in pairs], np.float32)
    return np.stack([ids, biases.view(np.int32)], axis=1)


def logprob_start(request: Request, _: int) -> int:
    """The first prompt token whose log-probability is asked for; beyond every prompt for none."""
    sampling = request.sampling
    return sampling.logprob_start_len if sampling.wants_prompt_logprobs else MAX_INT
