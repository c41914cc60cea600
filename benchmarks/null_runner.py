"""A runner whose device computes nothing, so that a step costs only the host's work.

Plans are packed and results unpacked as for a real device, with random ids as the output. The
device is a clock: a step takes a fixed time, starts once it is dispatched and the previous step has
ended, and is ready when it ends. Its idle time is therefore known exactly.
"""

from __future__ import annotations

import time

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.engine.steps.step_def import Host, ProgramKey
from jspec.engine.steps.table import STEPS
from jspec.engine.transfer import Packer, unpack_result
from jspec.messages import layout
from jspec.messages.plan import StepKind, StepPlan, StepResult
from jspec.messages.step_options import ALL
from jspec.spec import indexing

Handle = tuple[StepPlan, float]  # and when it ends
NUM_TABLES = 16  # of random ids, made once


class NullRunner:
    """A `messages.protocols.Runner`. step_seconds: of every step, including prefills.

    acceptance: mean ids per verification. busy_seconds, idle_seconds: of the device since its first
    step; decode_idle_seconds: directly before a decode, with no prompt waiting;
    decode_busy_seconds. pack_seconds, unpack_seconds: CPU time of the engine's thread.
    """

    def __init__(
        self,
        limits: ServeLimits,
        *,
        vocab_size: int,
        step_seconds: float = 0.0,
        acceptance: float = 3.0,
    ) -> None:
        self._limits = limits
        self.vocab_size = vocab_size
        self.device_kind = "a clock"
        self.num_programs = self.num_programs_wanted = 0
        self._step_seconds = step_seconds
        self._packer = Packer(Host(limits, vocab_size))
        self._free_at = 0.0
        self.reset()
        rng = np.random.default_rng(0)
        rows = limits.pool.num_slots * limits.scheduling.num_rounds
        self._outputs = {
            StepKind.DECODE: self._tables(rng, rows, limits.draft_shape.max_emitted, acceptance),
            StepKind.PREFILL: self._tables(rng, max(limits.programs.prefill_rows, 1), 1, 1.0),
        }

    def _tables(
        self, rng: np.random.Generator, rows: int, most: int, acceptance: float
    ) -> list[np.ndarray]:
        columns = layout.output_columns(most)
        low = int(np.floor(acceptance))
        tables = []
        for _ in range(NUM_TABLES):
            counts = low + (rng.random(rows) < acceptance - low)
            ids = rng.integers(0, self.vocab_size, (rows, most))
            table = np.concatenate([np.minimum(counts, most)[:, None], ids], axis=1)
            assert table.shape[1] == columns.width
            tables.append(table.astype(np.int32))
        return tables

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    def dispatch(self, plan: StepPlan) -> Handle:
        """Pack the plan, and start the step on the clock."""
        began = time.thread_time()
        is_decode = not plan.is_prefill
        buckets = (
            self._limits.programs.decode_buckets
            if is_decode
            else self._limits.programs.prefill_buckets
        )
        size = STEPS[plan.kind].size(plan, plan.runs[-1])
        key = ProgramKey(plan.kind, indexing.bucket(size, buckets), ALL)
        self._packer.pack((plan,), -1, key)
        self.pack_seconds += time.thread_time() - began
        now = time.monotonic()
        idle = max(now - self._free_at, 0.0) if self._free_at else 0.0
        self.idle_seconds += idle
        self._free_at = max(now, self._free_at) + self._step_seconds
        self.busy_seconds += self._step_seconds
        if is_decode:
            self.decode_idle_seconds += idle
            self.decode_busy_seconds += self._step_seconds
        return plan, self._free_at

    def collect(self, dispatched: Handle) -> StepResult:
        """Sleep until the step has ended."""
        plan, ready_at = dispatched
        left = ready_at - time.monotonic()
        if left > 0:
            time.sleep(left)
        began = time.thread_time()
        tables = self._outputs[plan.kind]
        output = tables[plan.step % len(tables)]
        if plan.is_prefill:
            output = output.copy()
            is_final = [chunk.is_final for chunk in plan.chunks]
            output[: len(is_final), 0] = is_final
        result = unpack_result(plan, output[None], self._limits)
        self.unpack_seconds += time.thread_time() - began
        self.num_steps += 1
        return result

    def reset(self) -> None:
        """Reset the counters."""
        self.busy_seconds = self.idle_seconds = 0.0
        self.decode_busy_seconds = self.decode_idle_seconds = 0.0
        self.pack_seconds = self.unpack_seconds = 0.0
        self.num_steps = 0

    def restart(self) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> None: ...
