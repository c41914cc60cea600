"""A runner without a device: deterministic tokens, and a check of every plan.

It plays the device's part (true lengths, page tables, order of steps) in plain integers and raises
PlanError as soon as the host plans something that a device could not run safely. A step is computed
at dispatch and its result handed over at collect, so the host knows no more than with a device.

The token at position p of a request is token_at(request, p), whatever the batch, the chunking or
the acceptance; a round at length L accepts accepted_at(request, L) drafts. `FakeRunner` lists the
checks.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from jspec.config.limits import ServeLimits
from jspec.errors import EngineClosedError
from jspec.messages.plan import (
    Admission,
    PageGrant,
    PrefillChunk,
    RoundResult,
    RowRef,
    StepPlan,
    StepResult,
)
from jspec.messages.request import Request
from jspec.messages.seeds import MAX_SEED, split_mix
from jspec.messages.step_options import PLAIN, StepOptions
from jspec.scheduler.pages import budget
from tests.support.fake_limits import small_limits as small_limits
from tests.support.fake_pages import FakePages
from tests.support.fake_rows import FakeRow, FakeWindows, require
from tests.support.fake_runs import check_runs
from tests.support.fake_snapshots import FakeSnapshots
from tests.support.fake_text import VOCAB_SIZE

TokenAt = Callable[[Request, int], int]
Handle = tuple[StepPlan, StepResult]
LOOKAHEAD = 1  # tokens that any fake drafter sees past what is written


def hash_token(request: Request, position: int) -> int:
    """Return a token from (seed, position) alone, but never a masked stop id.

    Like on the device, stop ids are masked while fewer than min_new_tokens are out.
    """
    num_out = position - len(request.prompt_ids)
    masked = request.stop_ids if num_out < request.sampling.min_new_tokens else ()
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in masked]
    return allowed[split_mix(request.seed, position) % len(allowed)]


def scripted_tokens(scripts: dict[str, tuple[int, ...]]) -> TokenAt:
    """Return a token_at that reads output token i of a request from scripts[request_id][i].

    Past the script's end it returns zeros: tokens that a device emits past a stop are arbitrary.
    """

    def token_at(request: Request, position: int) -> int:
        index = position - len(request.prompt_ids)
        script = scripts[request.request_id]
        return script[index] if index < len(script) else 0

    return token_at


def random_acceptance(rate: float, num_steps: int, *, salt: int = 0) -> TokenAt:
    """Return an accepted_at that accepts each further draft with probability `rate`, by a hash."""

    def accepted_at(request: Request, seq_len: int) -> int:
        for level in range(num_steps):
            coin = split_mix(request.seed ^ (salt << 8) ^ (level + 1), seq_len) / MAX_SEED
            if coin >= rate:
                return level
        return num_steps

    return accepted_at


class FakeRunner:
    """Runner for tests; raises PlanError unless every dispatched plan obeys these rules.

    - Runs: those of its rows' needs, once and in order.
    - Messages survive pickling; all calls come from one thread; steps count up by one; at most
      overlap_depth steps are unread at a dispatch; a plan has only the fields of its kind.
    - Rows: real slots, no slot twice, the epoch of the slot's current tenant; a slot gets a new
      tenant, of a higher epoch, only when no step in flight names the old one.
    - Pages: real ids; two rows own the same page only if the old owner's steps are all
        collected, and then the old owner never runs again; never past the width of the table,
        never more at once than the packed transfer can carry. Cached pages have what their
        reader would have written and are read-only (`FakePages`). Window spaces: `FakeWindows`.
    - Prefill: within rows and tokens of the largest bucket; admitted with the first chunk;
        chunks contiguous; next_id right; every write on an own page; the fill is the prompt and
        then tokens that the request would really emit.
    - Decode: its shape is one of the engine's; at most W tokens of a row are pending, none when
        it drafts; the final chunk is dispatched; some token is left to emit; for each useful
        round, the reservation covers what the host can have read, and the device's true length
        stays within it; rounds after a row's end stay within the table; no unneeded page is
        granted. Rows that share a prefix have the same pages there, fully written.
    """

    def __init__(
        self,
        limits: ServeLimits,
        *,
        token_at: TokenAt = hash_token,
        accepted_at: TokenAt | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self._limits = limits
        self._token_at = token_at
        self._accepted_at = accepted_at or random_acceptance(0.7, limits.draft_shape.num_steps)
        self._step_seconds = step_seconds
        self._rows: dict[int, FakeRow] = {}
        self._pages = FakePages(limits)
        self._windows = FakeWindows(limits)
        self._snapshots = FakeSnapshots(limits)
        self._last_epochs: Counter[int] = Counter()
        self._in_flight: deque[Handle] = deque()
        self._thread: int | None = None
        self._last_step = 0
        self.plans: list[StepPlan] = []
        self.is_closed = False

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, plan: StepPlan) -> Handle:
        self._check_thread()
        require(pickle.loads(pickle.dumps(plan)) == plan, "plan changed by pickling")
        self._check_frame(plan)
        if plan.is_prefill:
            for admission in plan.admissions:
                self._admit(admission, plan)
            self._grant_windows(plan)
            self._snapshots.restore(plan, self._rows)
            by_row = [self._prefill(chunk) for chunk in plan.chunks]
            self._snapshots.save(plan, self._rows)
        else:
            self._grant(plan)
            self._grant_windows(plan)
            self._tell(plan)
            self._pages.check_shared(plan, self._rows)
            by_row = [self._decode(row, plan) for row in plan.rows]
        for ref in plan.row_refs:
            self._rows[ref.slot].steps_in_flight += 1
        self._last_step = plan.step
        rounds = tuple(self._round(plan, ids) for ids in zip(*by_row, strict=True))
        self._in_flight.append((plan, StepResult(step=plan.step, rounds=rounds)))
        self.plans.append(plan)
        return self._in_flight[-1]

    def idle(self, plan: StepPlan) -> Handle:
        """Run a step that no row takes part in."""
        require(not plan.grants and not plan.admissions, f"grants {plan.grants} without a row")
        self._last_step = plan.step
        self._in_flight.append((plan, StepResult(step=plan.step, rounds=())))
        return self._in_flight[-1]

    def _round(self, plan: StepPlan, ids: tuple[tuple[int, ...], ...]) -> RoundResult:
        """Return one round's result; a subclass may add what else a step reports."""
        del plan
        return RoundResult.of(ids)

    def collect(self, dispatched: Handle) -> StepResult:
        self._check_thread()
        is_next = bool(self._in_flight) and self._in_flight[0] is dispatched
        require(is_next, f"collect of step {dispatched[0].step}, which is not the oldest in flight")
        if self._step_seconds:
            time.sleep(self._step_seconds)
        plan, result = dispatched
        self._in_flight.popleft()
        for ref in plan.row_refs:
            self._rows[ref.slot].steps_in_flight -= 1
        for of_round in result.rounds:
            for ref, ids in zip(plan.row_refs, of_round.emitted_ids, strict=True):
                row = self._rows[ref.slot]
                row.num_read += len(ids)
                if not plan.is_prefill:
                    row.unread_rounds -= 1
                    row.unread_tokens -= plan.shape.max_emitted
                    row.read_len += len(ids)
        return result

    def restart(self) -> None:
        raise EngineClosedError(f"a fake runner is not begun anew after step {self._last_step}")

    def give_up(self) -> None: ...

    def close(self) -> None:
        self._check_thread()
        self.is_closed = True

    def _check_thread(self) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        require(self._thread == here, f"thread {here} calls; expected only {self._thread}")

    def _check_frame(self, plan: StepPlan) -> None:
        check_runs(self._limits, plan)
        limits, refs = self._limits, plan.row_refs
        require(plan.step == self._last_step + 1, f"step {plan.step} after {self._last_step}")
        unread = len(self._in_flight)
        require(unread <= limits.scheduling.overlap_depth, f"{unread} unread steps at a dispatch")
        slots = [ref.slot for ref in refs]
        require(bool(slots) and len(set(slots)) == len(slots), f"slots {slots} of one plan")
        require(all(1 <= slot <= limits.pool.num_slots for slot in slots), f"slots {slots}")
        if plan.is_prefill:
            slots_in = [admission.row.slot for admission in plan.admissions]
            slots_of = [grant.slot for grant in plan.grants if grant.space == 0]
            require(slots_of == slots_in, f"pages of {slots_of} for {slots_in}")
            require(not plan.rows, "a prefill with rows")
            require(len(slots) <= limits.programs.prefill_rows, f"{len(slots)} rows of a prefill")
            num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
            require(num_tokens <= limits.programs.chunk_size, f"{num_tokens} tokens of a prefill")
            begun = {chunk.row: chunk.start for chunk in plan.chunks}
            admitted = {admission.row: admission.cached_len for admission in plan.admissions}
            for row in (*admitted, *(row for row, start in begun.items() if start == 0)):
                is_first = row in admitted and begun.get(row) == admitted[row]
                require(is_first, f"admitted {admitted} with chunks from {begun}")
        else:
            require(not plan.chunks and not plan.admissions, "a decode with chunks")
            require(not plan.restores and not plan.saves, "a decode with copies of states")
            require(
                len(slots) <= limits.programs.decode_buckets[-1], f"{len(slots)} rows of a decode"
            )
        needed = self.options_of(plan)
        require(plan.options == needed, f"options are {plan.options}; expected {needed}")

    def options_of(self, plan: StepPlan) -> StepOptions:
        """Return the options that the rows of a plan need."""
        new = {admission.row: admission.request for admission in plan.admissions}
        refs = plan.row_refs
        requests = [new[ref] if ref in new else self._row(ref).admission.request for ref in refs]
        return PLAIN.union(request.sampling.options for request in requests)

    def _row(self, ref: RowRef) -> FakeRow:
        row = self._rows.get(ref.slot)
        require(row is not None and row.admission.row == ref, f"{ref} is not the slot's tenant")
        assert row is not None
        return row

    def _admit(self, admission: Admission, plan: StepPlan) -> None:
        ref, request = admission.row, admission.request
        old, epoch = self._rows.get(ref.slot), self._last_epochs[ref.slot]
        require(epoch < ref.epoch, f"{ref} follows epoch {epoch}")
        require(old is None or old.steps_in_flight == 0, f"{ref} before its slot is collected")
        self._last_epochs[ref.slot] = ref.epoch
        require(admission.prompt_len == len(request.prompt_ids), f"prompt_len of {ref}")
        (grant,) = (g for g in plan.grants if (g.slot, g.space) == (ref.slot, 0))
        require(grant.index == 0, f"{grant}, of a new row")
        require(len(grant.pages) <= self._limits.pages_per_row, f"many pages for {ref}")
        self._rows[ref.slot] = FakeRow(
            admission=admission, page_ids=[], window_pages=[{} for _ in self._limits.pool.windows]
        )
        row = self._rows[ref.slot]
        row.num_filled = admission.cached_len
        fill_ids, text = admission.fill_ids, self._text(row, len(admission.fill_ids))
        require(fill_ids == tuple(text), f"fill {fill_ids} not {text}")
        self._pages.share(row, text, grant.pages)
        for page in grant.pages[len(row.page_ids) :]:
            self._pages.own(page, ref, self._rows)

    def _text(self, row: FakeRow, length: int) -> list[int]:
        """Return at least `length` of the row's tokens: its prompt, then what it emits."""
        request = row.admission.request
        row.text = row.text or list(request.prompt_ids)
        row.text += [self._token_at(request, p) for p in range(len(row.text), length)]
        return row.text

    def _prefill(self, chunk: PrefillChunk) -> tuple[tuple[int, ...], ...]:
        row = self._row(chunk.row)
        fill_ids, end = row.admission.fill_ids, chunk.start + len(chunk.token_ids)
        require(chunk.start == row.num_filled, f"chunk at {chunk.start} after {row.num_filled}")
        require(len(chunk.token_ids) > 0, f"empty chunk of {chunk.row}")
        require(chunk.token_ids == fill_ids[chunk.start : end], f"chunk tokens of {chunk.row}")
        require(end <= self._num_owned(row), f"{chunk.row} writes {end} of {self._num_owned(row)}")
        self._windows.check(row, first=chunk.start, end=end)
        text = self._text(row, end + LOOKAHEAD)
        self._pages.write(row, text, first=chunk.start, end=end, scratch=0)
        self._windows.write(row, text, first=chunk.start, end=end, scratch=0)
        row.num_filled = row.seq_len = end
        row.read_len = len(fill_ids)  # the host's assumption after dispatching the fill
        next_id = None if row.is_filled else fill_ids[end]
        require(chunk.next_id == next_id, f"next_id {chunk.next_id} not {next_id}")
        if not row.is_filled:
            return ((),)
        row.num_emitted = 1
        return ((self._token_at(row.admission.request, row.seq_len),),)

    def _grant(self, plan: StepPlan) -> None:
        refs = {ref.slot: ref for ref in plan.rows}
        grants = [grant for grant in plan.grants if grant.space == 0]
        per_slot = Counter(grant.slot for grant in grants for _ in grant.pages)
        for slot, count in per_slot.items():
            require(slot in refs, f"grant to slot {slot}, which does not run")
            require(count <= self._limits.grants_per_row, f"{count} grants to slot {slot}")
        for grant in grants:
            self._check_grant(grant, self._row(refs[grant.slot]))
            for page in grant.pages:
                self._pages.own(page, refs[grant.slot], self._rows)
        for slot in per_slot:
            row = self._rows[slot]
            needed, without = self._needed(row), self._num_owned(row) - self._limits.pool.page_size
            require(needed > without, f"slot {slot} needs {needed} and had {without} granted")

    def _grant_windows(self, plan: StepPlan) -> None:
        refs, limits = {ref.slot: ref for ref in plan.row_refs}, self._limits
        grants = [grant for grant in plan.grants if grant.space > 0]
        room = limits.window_grants_of_prefill(sum(len(chunk.token_ids) for chunk in plan.chunks))
        room = len(plan.rows) * limits.grants_per_row if plan.rows else room
        for space, count in Counter(g.space for g in grants for _ in g.pages).items():
            require(count <= room, f"{count} grants in space {space}; room for {room}")
        for grant in grants:
            require(grant.slot in refs, f"grant to slot {grant.slot}, which does not run")
            self._windows.grant(grant, refs[grant.slot], self._rows)

    def _check_grant(self, grant: PageGrant, row: FakeRow) -> None:
        require(grant.index == len(row.page_ids), f"{grant} after {len(row.page_ids)} pages")
        end = grant.index + len(grant.pages)
        require(end <= self._limits.pages_per_row, f"{grant} past the page table")

    def _needed(self, row: FakeRow) -> int:
        """Positions that the useful rounds of the next step may write."""
        draft_shape = self._limits.draft_shape
        first = row.read_len + row.unread_tokens
        final = first + (self._limits.scheduling.num_rounds - 1) * draft_shape.max_emitted
        return max(first, min(final, self._last(row))) + draft_shape.num_scratch_slots

    def _last(self, row: FakeRow) -> int:
        """Length at which the request's last token may still be missing."""
        admission, sampling = row.admission, row.admission.request.sampling
        most = budget.clip_max_new_tokens(
            self._limits, admission.prompt_len, sampling.max_new_tokens
        )
        return budget.last_committed(admission.prompt_len, most)

    def _tell(self, plan: StepPlan) -> None:
        """Track pending tokens by row; none are pending unless some shape is plain."""
        limits, rows = self._limits, [self._row(ref) for ref in plan.rows]
        require(plan.shape in limits.shapes, f"shape {plan.shape} of {limits.shapes}")
        if plan.pending:
            found = tuple(row.pending for row in rows)
            require(plan.pending == found, f"pending are {plan.pending}; expected {found}")
        for row in rows:
            if plan.pending and row.pending:  # the drafter reads and writes from there on
                self._windows.check(row, first=row.seq_len - row.pending, end=row.seq_len)
                row.pending = 0
            if limits.max_pending and plan.shape.is_plain:
                row.pending += plan.num_rounds(limits.scheduling)
                require(row.pending <= limits.max_pending, f"{row.pending} tokens wait")
            else:
                require(row.pending == 0, f"a row drafts while {row.pending} tokens wait")

    def _decode(self, ref: RowRef, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        row = self._row(ref)
        require(row.is_filled, f"{ref} decodes before its final chunk")
        reserved = row.read_len + row.unread_tokens
        reserved += self._limits.draft_shape.num_scratch_slots
        owned = self._num_owned(row)
        require(reserved <= owned, f"{ref} needs {reserved} positions and owns {owned}")
        require(
            row.seq_len + self._limits.draft_shape.num_scratch_slots <= reserved, f"{ref} ran ahead"
        )
        self._check_tokens_left(row)
        return tuple(self._run_round(row, plan) for _ in range(self._limits.scheduling.num_rounds))

    def _run_round(self, row: FakeRow, plan: StepPlan) -> tuple[int, ...]:
        shape = plan.shape
        draft_shape, ref, request = (
            self._limits.draft_shape,
            row.admission.row,
            row.admission.request,
        )
        last, owned = self._last(row), self._num_owned(row)
        written = row.seq_len + draft_shape.num_scratch_slots
        if row.seq_len <= last:
            start = min(row.read_len + row.unread_tokens, last)
            reserved = start + draft_shape.num_scratch_slots
            require(reserved <= owned, f"{ref} needs {reserved} positions and owns {owned}")
            require(written <= reserved, f"{ref} writes up to {written} of {reserved} reserved")
            self._windows.check(row, first=row.seq_len, end=reserved)
        width = self._limits.pages_per_row * self._limits.pool.page_size
        require(written <= width, f"{ref} writes up to {written}, past a table of {width}")
        is_drafting = request.sampling.speculative
        num_accepted = self._accepted_at(request, row.seq_len) if is_drafting else 0
        require(0 <= num_accepted <= draft_shape.num_steps, f"accepted_at gave {num_accepted}")
        num_accepted = min(num_accepted, shape.num_steps)
        first = row.seq_len + 1  # the root is at seq_len; the first draft's position is next
        emitted = tuple(self._token_at(request, first + i) for i in range(num_accepted + 1))
        start, end = row.seq_len, row.seq_len + len(emitted)
        text = self._text(row, end + LOOKAHEAD)
        self._pages.write(row, text, first=start, end=end, scratch=written - end)
        self._windows.write(row, text, first=start, end=end, scratch=written - end)
        row.seq_len = end
        row.num_emitted += len(emitted)
        row.unread_rounds += 1
        row.unread_tokens += shape.max_emitted
        return emitted

    def _check_tokens_left(self, row: FakeRow) -> None:
        """Check that the tokens read (an unread final chunk is one) and the unread rounds fit."""
        admission = row.admission
        before = len(admission.fill_ids) - admission.prompt_len
        known = before + max(row.num_read, 1) + row.unread_rounds
        most = admission.request.sampling.wanted_tokens
        require(known < most, f"{admission.row} decodes with {known} of {most} tokens out")

    def _num_owned(self, row: FakeRow) -> int:
        return len(row.page_ids) * self._limits.pool.page_size
