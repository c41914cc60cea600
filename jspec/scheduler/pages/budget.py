"""Page counts and length limits of sequences: arithmetic over `spec.indexing`.

It knows the static limits of the engine, not the current state of the pool or queue.

    worked example: S/K/N = 3/1/4, so M = 4 and scratch = 4; page_size 4, num_pages 6
    max_total_tokens   (6 - 1) * 4 = 20: one page is for the 3 scratch tokens after the last token
    prompt of 10       fill 10 → first decode needs 10 + 4 = 14 positions = 4 pages
    one unread decode  10 + 1 * 4 + 4 = 18 positions = 5 pages
    longest output     the last token's KV is not written: max_new_tokens <= 20 - 10 + 1 = 11, and
                       the last decode, at L = 10 + 11 - 2 with nothing unread, needs 19 + 4 <= 24
    3 rounds a step    the last round starts at 10 + 2 * 4 = 18 at most: 18 + 4 positions, 6 pages;
                       with max_new_tokens 5 the last useful one at 13: 13 + 4 positions, 5 pages
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jspec.config.limits import PriorityOrder, ServeLimits
from jspec.errors import ContextLengthError, QueueFullError, RequestError
from jspec.messages.request import DEFAULT_NEW_TOKENS, Request, SamplingParams
from jspec.spec import indexing

# A request admitted while rows run must leave them pages for this many more rounds. Otherwise it
# would soon be retracted and its prefill wasted.
HEADROOM_ROUNDS = 8


def pages_for_decode(limits: ServeLimits, committed: int, *, unread_tokens: int, last: int) -> int:
    """Return the pages that a row must have before a decode step of any shape.

    unread_tokens: the sum of M over its unread rounds. Covers rounds that start at `last`
    (`last_committed`) or before; a later one emits nothing that is kept and writes to page 0.
    """
    first = committed + unread_tokens
    final = first + (limits.scheduling.num_rounds - 1) * limits.draft_shape.max_emitted
    start = max(first, min(final, last))
    positions = limits.draft_shape.reserved_tokens(start, unread_rounds=0)
    return indexing.num_pages(positions, limits.pool.page_size)


def pages_for_admission(limits: ServeLimits, fill_len: int, *, num_tokens_left: int) -> int:
    """Return the pages for the fill of a row and the scratch of its first decode."""
    # A row with one token left needs no scratch, since the prefill emits that token.
    if num_tokens_left <= 1:
        return indexing.num_pages(fill_len, limits.pool.page_size)
    last = fill_len + num_tokens_left - 2
    return pages_for_decode(limits, fill_len, unread_tokens=0, last=last)


def last_committed(prompt_len: int, max_new_tokens: int) -> int:
    """Return the largest L at which a decode with nothing unread can start, at least prompt_len: L
    - prompt_len + 1 tokens are emitted by then, and at least one must be to come."""
    return max(prompt_len + max_new_tokens - 2, prompt_len)


def pages_at_most(limits: ServeLimits, *, last: int, keep: int | None) -> int:
    """Return the most pages that a row has between two plans. last: `last_committed`. keep: keys
    that a query of the space's layers sees; None: all."""
    whole = indexing.num_pages(limits.reserved_tokens_at_most(last), limits.pool.page_size)
    return min(limits.pages_per_row if keep is None else limits.window_pages_per_row(keep), whole)


def pages_ahead(limits: ServeLimits, committed: int, *, last: int) -> int:
    """Return the pages of a row after HEADROOM_ROUNDS more rounds, or at its end."""
    rounds = (
        HEADROOM_ROUNDS + (limits.scheduling.overlap_depth + 1) * limits.scheduling.num_rounds - 1
    )
    goal = min(committed + rounds * limits.draft_shape.max_emitted, max(last, committed))
    positions = limits.draft_shape.reserved_tokens(goal, unread_rounds=0)
    return indexing.num_pages(positions, limits.pool.page_size)


def check_batch(
    limits: ServeLimits, requests: Sequence[Request], *, in_use: Collection[str], num_queued: int
) -> list[int]:
    """Return max_new_tokens of each request, clipped.

    in_use: ids of the unfinished requests. Raises RequestError for a request that can never run,
    QueueFullError if not all fit into the queue.
    """
    names: set[str] = set()
    for request in requests:
        name = request.request_id
        if name in in_use or name in names:
            raise RequestError(f"request_id is {name!r}; expected one that is not in use")
        names.add(name)
    found = [check_request(limits, request) for request in requests]
    check_number(limits, len(requests))
    if num_queued + len(requests) > limits.scheduling.max_queued_requests:
        raise QueueFullError(
            f"requests: {num_queued} waiting, {len(requests)} new; expected at most "
            f"max_queued_requests {limits.scheduling.max_queued_requests} together"
        )
    return found


def check_request(limits: ServeLimits, request: Request) -> int:
    """Return max_new_tokens, clipped. Raises RequestError for a request that can never run here."""
    if request.priority and limits.scheduling.priority_order is PriorityOrder.OFF:
        raise RequestError(
            f"priority is {request.priority}, but requests run in order of arrival; expected 0, or "
            f"an engine with enable_priority_scheduling"
        )
    if request.sampling.grammar is not None and request.grammar is None:
        kind = request.sampling.grammar.kind.value
        raise RequestError(f"{kind} is given and was not compiled; expected Request.grammar")
    if request.sampling.max_thinking_tokens is not None and request.grammar is None:
        raise RequestError(
            f"max_thinking_tokens is {request.sampling.max_thinking_tokens} and nothing counts "
            f"them; expected Request.grammar"
        )
    most = check_prompt(limits, len(request.prompt_ids), request.sampling)
    if request.former_ids and len(request.former_ids) >= most:
        raise RequestError(
            f"former_ids has {len(request.former_ids)} ids; expected fewer than the {most} that "
            f"the request may emit here"
        )
    return most


def check_prompt(limits: ServeLimits, prompt_len: int, sampling: SamplingParams) -> int:
    """Return max_new_tokens, clipped (`clip_max_new_tokens`). Raises RequestError for an impossible
    length or parameters that no program supports."""
    if sampling.return_logprob and not limits.programs.logprobs:
        raise RequestError(
            "return_logprob is true; expected false, since the engine was started with "
            "disable_logprobs"
        )
    if sampling.return_hidden_states and limits.programs.hidden is None:
        raise RequestError(
            "return_hidden_states is true; expected false, since this engine has no programs for it"
        )
    return clip_max_new_tokens(limits, prompt_len, sampling.max_new_tokens)


def check_number(limits: ServeLimits, num_requests: int) -> None:
    if num_requests > limits.scheduling.max_queued_requests:
        raise RequestError(
            f"{num_requests} sequences at once; expected at most max_queued_requests "
            f"{limits.scheduling.max_queued_requests}"
        )


def clip_max_new_tokens(limits: ServeLimits, prompt_len: int, max_new_tokens: int | None) -> int:
    """Return max_new_tokens clipped to the pool; None: the default, clipped to the context too.

    The result is at least 1, since the prefill alone emits one token; 0 stays 0. As in SGLang, an
    explicit value beyond the context is an error. Raises RequestError for a prompt that is empty,
    is longer than the pool, or leaves no space in the context for a token or for max_new_tokens.
    Every other request can run, at worst alone.
    """
    if prompt_len < 1:
        raise RequestError("the prompt has 0 tokens; expected at least 1")
    emits_nothing = max_new_tokens == 0
    if prompt_len >= limits.pool.context_length + emits_nothing:
        expected = "no more" if emits_nothing else "fewer"
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens; expected {expected}",
            context_length=limits.pool.context_length,
        )
    if prompt_len > limits.max_total_tokens:
        raise RequestError(
            f"the prompt has {prompt_len} tokens; expected at most {limits.max_total_tokens}, the "
            f"size of the whole KV pool (max_total_tokens)"
        )
    in_context = limits.pool.context_length - prompt_len
    if max_new_tokens is not None and max_new_tokens > in_context:
        raise ContextLengthError(
            f"max_new_tokens is {max_new_tokens} after a prompt of {prompt_len} tokens; expected "
            f"at most {in_context}",
            context_length=limits.pool.context_length,
        )
    wanted = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    in_pool = limits.max_total_tokens - prompt_len + 1  # the last token's KV is not written
    return min(wanted, in_context, in_pool)
