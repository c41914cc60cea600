"""Many replicas in virtual time: throughput, first tokens, routing, a lost host, prefill apart.

    python -m benchmarks.scale [--replicas 1 8 64 512] [--seconds 10] [--out FILE]

Replicas are cards of benchmarks/virtual_card.py (measured step costs of an H200, Llama-3.1-8B with
a chain that emits 3 tokens a step). Conversations arrive as a Poisson process, in proportion to the
replicas. A turn's prompt is a text that all share, the conversation so far and a new question. A
replica alternates a chunk of prompts with a decode step of all its rows, and caches conversations,
the least recently used of which it forgets. The router is that of Ray replicas
(jspec/distributed/prefix_routes.py), or the less loaded of two replicas. At half time a host is
lost: its streams go on elsewhere, and its replicas come back cold. With `prefill_share`, a part of
the replicas only prefills and sends the KV to the others.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import json
import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.virtual_card import Card
from jspec.distributed.prefix_routes import PrefixRoutes
from jspec.distributed.replica_args import ReplicaArgs

TOKENS_A_STEP = 3.0  # of each row
SLOTS, CHUNK = 64, 2048
CACHE_TOKENS = 800_000  # of KV on an H200 beside an 8B (jspec info --devices H200)
KV_BYTES, LINK_BYTES = 131_072, 50e9  # of a token; per second, between hosts
HOST = 8  # replicas of a host
BLOCKS = 16384  # of a replica's cache that the router remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    replicas: int
    seconds: float = 10.0
    rate: float = 30.0  # turns a second for each replica
    shared: int = 512  # tokens that all prompts begin with
    question: int = 128
    answer: int = 192
    conversations: int = 400  # for each replica, at the start
    follows: float = 0.75  # share of turns that continue a conversation
    most_history: int = 4096
    by_prefix: bool = True
    most_blocks: int = ReplicaArgs().most_blocks
    lost: int = 0  # replicas lost at half time
    restart: float = 25.0  # seconds
    prefill_share: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Turn:
    conversation: int
    prompt: int
    output: float
    arrived: float
    cached: int = 0
    left: int = 0  # prompt tokens to compute
    is_first: bool = True  # no token is out yet
    lost_at: float | None = None


@dataclass(slots=True)
class Replica:
    name: str
    prefills: bool = True
    decodes: bool = True
    is_alive: bool = True
    epoch: int = 0  # of its life: events of an earlier one are void
    is_busy: bool = False
    was_prefill: bool = False
    waiting: deque[Turn] = field(default_factory=deque)
    running: list[tuple[float, int, Turn]] = field(default_factory=list)  # by `emitted` at the end
    emitted: float = 0.0  # tokens of each row since the start
    last_decode: float | None = None
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def keep(self, conversation: int, tokens: int) -> None:
        self.cached_tokens += tokens - self.cache.pop(conversation, 0)
        self.cache[conversation] = tokens
        while self.cached_tokens > CACHE_TOKENS:
            self.cached_tokens -= self.cache.popitem(last=False)[1]


class Simulation:
    def __init__(self, setting: Setting, card: Card) -> None:
        self.setting, self.card, self.now = setting, card, 0.0
        self._random = random.Random(setting.seed)
        self._routes = PrefixRoutes(
            most_ahead=ReplicaArgs().most_ahead, most_blocks=setting.most_blocks
        )
        self._order = itertools.count()
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        apart = round(setting.prefill_share * setting.replicas)
        self.replicas = [
            Replica(str(i), prefills=not apart or i < apart, decodes=not apart or i >= apart)
            for i in range(setting.replicas)
        ]
        self._loads: dict[str, int] = {}  # of live replicas that prefill
        self._alive: list[Replica] = []
        self._count_alive()
        self._homeless: list[Turn] = []  # while no replica is alive
        self._idle: list[tuple[int, int]] = []  # (conversation, tokens so far)
        self._names = itertools.count(1)
        self.tokens = 0.0
        self.first_seconds: list[float] = []
        self.gaps: Counter[int] = Counter()  # tenths of milliseconds
        self.prompt_tokens = self.cached_tokens = 0
        self.pauses: list[float] = []
        self.num_moved = 0

    def run(self) -> dict[str, Any]:
        setting = self.setting
        prefillers = [each for each in self.replicas if each.prefills]
        for i in range(setting.conversations * setting.replicas):
            history = self._random.randrange(setting.most_history // 2)
            conversation, home = next(self._names), prefillers[i % len(prefillers)]
            home.keep(conversation, history)
            self._note(conversation, history, home)
            self._idle.append((conversation, history))
        self._at(self._pause(), self._arrive)
        if setting.lost:
            self._at(setting.seconds / 2, self._lose)
        while self._events and self._events[0][0] <= setting.seconds:
            self.now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        return self._report()

    def _at(self, time: float, act: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), act, arguments))

    def _pause(self) -> float:
        setting = self.setting
        return self.now + self._random.expovariate(setting.rate * setting.replicas)

    def _arrive(self) -> None:
        setting = self.setting
        conversation, history = next(self._names), 0
        if self._idle and self._random.random() < setting.follows:
            at = self._random.randrange(len(self._idle))
            self._idle[at], self._idle[-1] = self._idle[-1], self._idle[at]
            conversation, history = self._idle.pop()
        prompt = setting.shared + history + setting.question
        self._route(Turn(conversation, prompt, setting.answer, self.now))
        self._at(self._pause(), self._arrive)

    def _ids(self, conversation: int, history: int) -> tuple[int, ...]:
        return (0,) * self.setting.shared + (conversation,) * history

    def _note(self, conversation: int, history: int, replica: Replica) -> None:
        if self.setting.by_prefix:
            self._routes.note(self._ids(conversation, history), replica.name)

    def _count_alive(self) -> None:
        self._alive = [each for each in self.replicas if each.is_alive and each.prefills]
        self._loads = {each.name: each.load for each in self._alive}

    def _route(self, turn: Turn) -> None:
        if not self._alive:
            self._homeless.append(turn)
            return
        history = turn.prompt - self.setting.shared
        name = None
        if self.setting.by_prefix:
            name = self._routes.choose(self._ids(turn.conversation, history), self._loads)
        replica = self._lighter(self._alive) if name is None else self.replicas[int(name)]
        self._note(turn.conversation, history, replica)
        own = replica.cache.get(turn.conversation, 0)
        turn.cached = min(self.setting.shared + own, turn.prompt - 1)
        turn.left = turn.prompt - turn.cached
        self.prompt_tokens += turn.prompt
        self.cached_tokens += turn.cached
        replica.keep(turn.conversation, history)
        replica.waiting.append(turn)
        self._loads[replica.name] = replica.load
        self._wake(replica)

    def _lighter(self, replicas: list[Replica]) -> Replica:
        two = self._random.sample(replicas, min(2, len(replicas)))
        return min(two, key=lambda each: each.load)

    def _wake(self, replica: Replica) -> None:
        if not replica.is_busy and replica.is_alive:
            self._step(replica)

    def _step(self, replica: Replica) -> None:
        """Start the next step: prompts and decodes alternate."""
        replica.is_busy = True
        if replica.prefills:
            self._loads[replica.name] = replica.load
        room = len(replica.running) < SLOTS
        if replica.waiting and room and not (replica.was_prefill and replica.running):
            budget, done = CHUNK, []
            while replica.waiting and budget and len(replica.running) + len(done) < SLOTS:
                turn = replica.waiting[0]
                taken = min(turn.left, budget)
                turn.left -= taken
                budget -= taken
                if not turn.left:
                    done.append(replica.waiting.popleft())
            seconds = self.card.prefill_step(CHUNK - budget) / 1e3
            self._at(self.now + seconds, self._prefilled, replica, replica.epoch, done)
        elif replica.running:
            seconds = self.card.decode_step(len(replica.running)) / 1e3
            self._at(self.now + seconds, self._decoded, replica, replica.epoch)
        else:
            replica.is_busy, replica.last_decode = False, None

    def _prefilled(self, replica: Replica, epoch: int, done: list[Turn]) -> None:
        if epoch != replica.epoch:
            for turn in done:
                self._move(turn)
            return
        replica.was_prefill = True
        for turn in done:
            if turn.is_first:
                delay = (self.card.arrive + self.card.deliver) / 1e3
                self.first_seconds.append(self.now - turn.arrived + delay)
                turn.is_first = False
                self.tokens += 1
                turn.output -= 1
            if turn.lost_at is not None:
                self.pauses.append(self.now - turn.lost_at)
                turn.lost_at = None
            if replica.decodes:
                self._run(replica, turn)
            else:
                seconds = turn.prompt * KV_BYTES / LINK_BYTES
                self._at(self.now + seconds, self._sent, turn)
        self._step(replica)

    def _sent(self, turn: Turn) -> None:
        """Give a turn whose KV has come to a replica that decodes, when it has a slot."""
        free = [r for r in self.replicas if r.decodes and r.is_alive and len(r.running) < SLOTS]
        if not free:
            self._at(self.now + 1e-3, self._sent, turn)
            return
        replica = self._lighter(free)
        self._run(replica, turn)
        self._wake(replica)

    def _run(self, replica: Replica, turn: Turn) -> None:
        heapq.heappush(replica.running, (replica.emitted + turn.output, next(self._order), turn))

    def _decoded(self, replica: Replica, epoch: int) -> None:
        if epoch != replica.epoch:
            return
        replica.was_prefill = False
        if replica.last_decode is not None:
            tenths = round((self.now - replica.last_decode) * 1e4)
            self.gaps[tenths] += len(replica.running)
        replica.last_decode = self.now
        self.tokens += TOKENS_A_STEP * len(replica.running)
        replica.emitted += TOKENS_A_STEP
        while replica.running and replica.running[0][0] <= replica.emitted:
            turn = heapq.heappop(replica.running)[2]
            history = turn.prompt - self.setting.shared + self.setting.answer
            if history < self.setting.most_history:
                self._idle.append((turn.conversation, history))
            if replica.prefills:
                replica.keep(turn.conversation, history)
        self._step(replica)

    def _lose(self) -> None:
        moved: list[Turn] = []
        for replica in self.replicas[: self.setting.lost]:
            turns = [*replica.waiting]
            for end, _, turn in replica.running:
                emitted = turn.output - (end - replica.emitted)
                turn.prompt += int(emitted)
                turn.output -= emitted
                turns.append(turn)
            replica.epoch += 1
            replica.is_alive = replica.is_busy = False
            replica.waiting, replica.running, replica.last_decode = deque(), [], None
            replica.cache, replica.cached_tokens = OrderedDict(), 0
            self._at(self.now + self.setting.restart, self._restart, replica)
            moved += turns
        self._count_alive()
        self._routes.keep(self._loads)
        for turn in moved:
            self._move(turn)

    def _move(self, turn: Turn) -> None:
        turn.lost_at = self.now
        self.num_moved += 1
        self._route(turn)

    def _restart(self, replica: Replica) -> None:
        replica.is_alive = True
        self._count_alive()
        waited, self._homeless = self._homeless, []
        for turn in waited:
            self._route(turn)

    def _report(self) -> dict[str, Any]:
        tokens_per_second = self.tokens / self.setting.seconds
        chunks = tokens_per_second / TOKENS_A_STEP
        return {
            "setting": asdict(self.setting),
            "tokens_per_second": round(tokens_per_second),
            "first_token_ms": quantiles(1e3 * x for x in self.first_seconds),
            "gap_ms": quantiles({x / 10: count for x, count in self.gaps.items()}),
            "hit_rate": round(self.cached_tokens / max(self.prompt_tokens, 1), 3),
            # Text and events of a row take the host's time for every chunk.
            "ingress_processes": round(chunks * self.card.row / 1e3, 1),
            "moved": self.num_moved,
            "pause_ms": quantiles(1e3 * x for x in self.pauses),
        }


def quantiles(values: Mapping[float, int] | Iterable[float]) -> dict[str, float] | None:
    """Return the median and the highest values, given with their counts or one by one."""
    ordered = sorted((values if isinstance(values, Mapping) else Counter(values)).items())
    if not ordered:
        return None
    total = list(itertools.accumulate(count for _, count in ordered))
    at = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {
        name: round(ordered[bisect.bisect_left(total, x * total[-1])][0], 1)
        for name, x in at.items()
    }


def settings(sizes: Iterable[int], seconds: float) -> list[Setting]:
    """Return what is simulated: each size, then a host of eight with prompts of 2,048 tokens."""
    found = []
    for count in sizes:
        lost = HOST if count > HOST else 1
        base = {"replicas": count, "seconds": seconds / (10 if count >= 512 else 1)}
        table = max(BLOCKS * count, ReplicaArgs().most_blocks)
        found += [Setting(**base), Setting(**base, by_prefix=False)]
        found += [Setting(**base, most_blocks=table)] if count > HOST else []
        found += [Setting(**base, most_blocks=table, lost=lost)]
    for rate in (8.0, 14.0):
        found += [
            Setting(
                replicas=HOST,
                seconds=seconds,
                rate=rate,
                question=2048,
                answer=256,
                most_history=8192,
                conversations=100,
                follows=0.3,
                prefill_share=share / HOST,
            )
            for share in (0, 2, 3, 4, 5)
        ]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=10.0, help="of virtual time")
    parser.add_argument("--out", type=Path, help="where the JSON goes; the standard output")
    args = parser.parse_args(argv)
    cells = []
    for setting in settings(args.replicas, args.seconds):
        cells.append(Simulation(setting, Card()).run())
        print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    text = json.dumps({"card": asdict(Card()), "cells": cells}, indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
