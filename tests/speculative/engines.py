"""Real engines for the identity tests: tiny float32 pairs, the dial drafter, shared executables.

Compiling dominates the cost, so executables are cached by S/K/N, page size and shards; batch, chunk
size and overlap depth are views of the same executables.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config.expert_placement import ExpertMap
from jspec.config.limits import (
    Algorithm,
    ServeLimits,
    SnapshotLimits,
    SpeculativeConfig,
    WindowSpace,
)
from jspec.config.shared_prefixes import SharingLimits
from jspec.device.parallel import Parallel
from jspec.engine.plan_runner import Dispatched
from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.runner import DeviceRunner, init_state, place_state
from jspec.engine.weights.loading import expert_copies, place
from jspec.layers.linear import Shard
from jspec.messages.plan import StepKind, StepPlan, StepResult
from jspec.messages.request import (
    FinishKind,
    PromptToken,
    Request,
    SamplingParams,
    SpecCounters,
    StreamChunk,
    TokenLogprob,
)
from jspec.messages.response import Completion
from jspec.messages.step_options import ALL, SAMPLING, StepOption, StepOptions
from jspec.models.decoder import Decoder
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.pallas_kernels.ops import Ops
from jspec.scheduler.scheduler import Scheduler
from jspec.scheduler.shapes.shape_choice import ShapeChooser
from jspec.serving.loop import EngineLoop
from jspec.serving.trace import TraceEvent
from jspec.spec.axes import MODEL
from jspec.spec.expert_shards import most_experts, on_expert_shards
from jspec.spec.model_spec import ModelSpec, cached_in
from jspec.spec.weight_format import Formats
from jspec.speculative.drafter import Drafter, NoDrafter
from jspec.speculative.drafters.ngram import NgramDrafter, sort_corpus
from jspec.speculative.drafters.ranked import EagleDrafter
from jspec.speculative.step import StepProgram
from tests.models.dense_forward import dense_forward
from tests.support.dial_drafter import DialDrafter, dial_head, dial_params
from tests.support.fake_text import FakeTextStream
from tests.support.flat_limits import flat_limits, with_limits
from tests.support.tiny_models import tiny_draft_config, tiny_target_config

NUM_SLOTS = 8
DENSE_WIDTH = 64
CONTEXT = 320
DIAL_ACCEPTANCE = 0.8
NGRAM_MIN_MATCH, NGRAM_MAX_MATCH = 2, 6
PLAIN = SpeculativeConfig.plain()
TARGET = tiny_target_config()
DRAFT = tiny_draft_config(TARGET)


def spec_of(
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    algorithm: Algorithm = Algorithm.EAGLE3,
    *,
    lookup: bool = False,
) -> SpeculativeConfig:
    """Return S/K/N, or plain decoding for 0/1/1."""
    if num_steps == 0:
        return PLAIN
    return SpeculativeConfig(
        algorithm=algorithm,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        lookup=lookup,
    )


@functools.cache
def tiny_params() -> tuple[Params, Params]:
    """Return target and head, with logits that are neither uniform nor too peaked to sample."""
    target = init_params(table_of(TARGET), seed=0)
    head = init_params(head_params(DRAFT), seed=1)
    ids = np.random.default_rng(0).choice(TARGET.vocab_size, DRAFT.draft_vocab_size, False)
    head["draft_ids"] = jnp.asarray(np.sort(ids), jnp.int32)
    return target, head


def limits_of(
    draft_shape: SpeculativeConfig,
    *,
    page_size: int,
    num_tokens: int = 3200,
    num_rounds: int = 1,
    num_ranks: int = 1,
) -> ServeLimits:
    return flat_limits(
        draft_shape=draft_shape,
        num_slots=NUM_SLOTS,
        num_pages=num_tokens // page_size,
        page_size=page_size,
        context_length=CONTEXT,
        decode_buckets=(NUM_SLOTS,),
        prefill_buckets=(32,),
        prefill_rows=4,
        overlap_depth=2,
        num_rounds=num_rounds,
        num_ranks=num_ranks,
    )


@dataclass(frozen=True)
class Compiled:
    """Executables and the settings that they were compiled for."""

    limits: ServeLimits
    program: StepProgram
    params: dict[str, Any]
    executables: dict[Any, Any]

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return mesh_of(self.program.target.shard.size, self.limits.pool.num_ranks)

    def runner(self, *, dial: Params | None = None, draft: Params | None = None) -> DeviceRunner:
        """Return a runner with fresh state; `dial` replaces the dial's tables, `draft` the
        draft's params."""
        mesh, shards = self.mesh, self.program.target.shard.size
        params = self.params
        if draft is not None:
            params = {**params, **place(mesh, {}, {"draft": draft})}
        if dial is not None:
            placed = place(mesh, {}, {"draft": {"dial": dial}})["draft"]["dial"]
            params = {**params, "draft": {**params["draft"], "dial": placed}}
        state = init_state(self.program, self.limits, shards=shards, kv_dtype=jnp.float32)
        return DeviceRunner(
            limits=self.limits,
            params=params,
            state=place_state(state, self.program, mesh),
            executables=self.executables,
            mesh=mesh,
            vocab_size=self.program.target.vocab_size,
        )


def mesh_of(shards: int, ranks: int = 1, *, experts: int = 1) -> jax.sharding.Mesh:
    """Return a mesh of the default device, or of fake CPU devices (tests/conftest.py makes
    four).

    experts: groups of a rank's shards, each with its own experts.
    """
    count = shards * ranks
    devices = jax.devices() if count <= jax.device_count() else jax.devices("cpu")
    parallel = Parallel(data=ranks, expert=experts, tensor=shards // experts)
    return parallel.mesh(devices[:count])


def build(
    draft_shape: SpeculativeConfig,
    *,
    page_size: int,
    dial: bool = True,
    shards: int = 1,
    ranks: int = 1,
    experts: int = 1,
    ranks_share_experts: bool = False,
    params: tuple[Params, Params] | None = None,
    variants: tuple[StepOptions, ...] = (StepOptions(), SAMPLING),
    num_rounds: int = 1,
    ops: Ops | None = None,
    make: Callable[[Ops, Shard], Drafter] | None = None,
    aux_layer_ids: tuple[int, ...] = (),
    target_spec: ModelSpec = TARGET,
    shapes: tuple[SpeculativeConfig, ...] = (),
    windows: tuple[WindowSpace, ...] = (),
    sharing: SharingLimits | None = None,
    snapshots: SnapshotLimits | None = None,
    formats: Formats = (),
    kv_dtype: str | None = None,
    counts_experts: bool = False,
    expert_map: ExpertMap = (),
) -> Compiled:
    """Compile an engine; `params` (target, head) must already be sharded for `shards`.

    variants: the options of which decode programs. ops: whose kernels (XLA's). make: another
    drafter than the head's, whose params are the second of `params`; aux_layer_ids: its captures.
    target_spec: of TARGET's hidden size, with a head of its vocabulary too; the head reads the
    inputs of its first and last layer and the output. shapes: smaller ones. windows: page spaces of
    the target's, with a prefix cache. sharing: of prefixes, with a prefix cache and one program for
    each of variants. snapshots: of recurrent states, with a prefix cache. formats: of the target's
    weights. kv_dtype: of both models' caches; `params` then have the scales of an FP8 cache.
    experts: groups of a rank's shards, for which the specs of `make` are already split.
    counts_experts: of the target. expert_map: of the target's experts, which `params` have so.
    """
    target_spec = cached_in(target_spec, kv_dtype) if kv_dtype else target_spec
    data_shards = ranks if ranks_share_experts else 1
    spares = spares_of(expert_map, target_spec)
    target_spec = on_expert_shards(
        target_spec, experts * data_shards, data_shards=data_shards, spares=spares
    )
    mesh, shard = mesh_of(shards, ranks, experts=experts), Shard(shards, MODEL)
    target_params, head_params = params or tiny_params()
    has_model = draft_shape.algorithm is Algorithm.EAGLE3
    ops = ops or Ops()
    depth = target_spec.num_layers
    draft = dataclasses.replace(
        DRAFT, layer=cached_in(DRAFT.layer, kv_dtype), aux_layer_ids=(0, depth - 1, depth)
    )
    aux_layer_ids = draft.aux_layer_ids if has_model else aux_layer_ids
    target = Decoder(target_spec, ops, shard, aux_layer_ids, formats, experts=expert_map)
    target_params = {**target_params, **expert_copies(target, mesh=mesh)}
    drafter: Drafter = NoDrafter()
    draft_params: Params = {}
    if draft_shape.algorithm is Algorithm.NGRAM:
        drafter = NgramDrafter(draft_shape, min_match=NGRAM_MIN_MATCH, max_match=NGRAM_MAX_MATCH)
        draft_params = corpus_params([(0,)])
    if has_model:
        head = FeatureHead(draft, ops, shard)
        drafter, draft_params = EagleDrafter(head, draft_shape), head_params
        if dial:
            drafter = DialDrafter(dial_head(head), draft_shape, acceptance=DIAL_ACCEPTANCE)
            empty = dial_params({0: (0,)}, rows=NUM_SLOTS, width=CONTEXT)
            draft_params = {"head": head_params, "dial": empty}
    if make is not None:
        drafter, draft_params = make(ops, shard), head_params
    program = StepProgram(target=target, drafter=drafter, draft_shape=draft_shape)
    limits = limits_of(draft_shape, page_size=page_size, num_rounds=num_rounds, num_ranks=ranks)
    limits = with_limits(
        limits,
        logprobs=ALL in variants,
        other_shapes=shapes,
        windows=windows,
        prefix_cache=bool(windows) or sharing is not None or snapshots is not None,
        sharing=sharing,
        snapshots=snapshots,
        counted_experts=(depth, most_experts(target_spec)) if counts_experts else None,
    )
    params_of_all = {"target": target_params, "draft": draft_params}
    placed = place(mesh, program.tables, params_of_all)
    executables = compile_all(
        program,
        limits,
        mesh=mesh,
        params=placed,
        state=init_state(program, limits, shards=shards, kv_dtype=jnp.float32),
        keys=tuple(
            key
            for key in program_keys(limits)
            if StepOptions(key.options.members - {StepOption.SHARED}) in variants
            or key.kind not in (StepKind.PREFILL, StepKind.DECODE)
            or (key.kind is StepKind.PREFILL and not limits.programs.logprobs)
        ),
    )
    return Compiled(limits=limits, program=program, params=placed, executables=executables)


def spares_of(expert_map: ExpertMap, target: ModelSpec) -> int | None:
    """Return the number of spares of a map; None without a map."""
    placed = [len(row) for row in expert_map if row]
    return placed[0] - most_experts(target) if placed else None


def with_prefix_cache(compiled: Compiled) -> Compiled:
    """Add a prefix cache, which takes one small program more."""
    limits = with_limits(compiled.limits, prefix_cache=True)
    mesh, shards = compiled.mesh, compiled.program.target.shard.size
    state = init_state(compiled.program, limits, shards=shards, kv_dtype=jnp.float32)
    cached = compile_all(
        compiled.program,
        limits,
        mesh=mesh,
        params=compiled.params,
        state=state,
        keys=tuple(
            key for key in program_keys(limits) if key.kind is StepKind.CACHED_DRAFT_PREFILL
        ),
    )
    executables = {**compiled.executables, **cached}
    return dataclasses.replace(compiled, limits=limits, executables=executables)


class ViewRunner:
    """A runner with narrower limits: fewer slots, smaller chunks, less overlap."""

    def __init__(self, runner: DeviceRunner, limits: ServeLimits) -> None:
        self._runner = runner
        self._limits = limits
        self.steps: list[tuple[StepPlan, StepResult]] = []

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def runner(self) -> DeviceRunner:
        return self._runner

    def dispatch(self, plan: StepPlan) -> Dispatched:
        return self._runner.dispatch(plan)

    def collect(self, dispatched: Dispatched) -> StepResult:
        result = self._runner.collect(dispatched)
        self.steps.append((dispatched.plan, result))
        return result

    def restart(self) -> None:
        self._runner.restart()

    def give_up(self) -> None:
        self._runner.give_up()

    def close(self) -> None:
        """Leave the runner as it is: tests inspect its state."""


@dataclass(frozen=True)
class Served:
    """The output of one run.

    accepted[i]: num_accepted of each verification of request i, those after its end included.
    accepted_together: num_accepted of all rows of each round. steps: all that ran.
    """

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: tuple[tuple[PromptToken, ...], ...]
    hidden_states: tuple[tuple[np.ndarray, ...], ...]
    per_request: tuple[SpecCounters, ...]
    counters: SpecCounters
    num_leaked_pages: int
    num_free_pages: int
    num_free_window_pages: tuple[int, ...]
    num_retractions: int
    accepted: tuple[tuple[int, ...], ...]
    accepted_together: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[StepPlan, StepResult], ...]
    trace: tuple[TraceEvent, ...]


def serve(
    compiled: Compiled,
    requests: list[Request],
    *,
    chunk_size: int = 32,
    overlap_depth: int = 1,
    num_slots: int = NUM_SLOTS,
    num_pages: int | None = None,
    dial: Params | None = None,
    draft: Params | None = None,
    shapes: ShapeChooser | None = None,
) -> Served:
    """Run the requests together through scheduler, loop and the real runner."""
    limits = with_limits(
        compiled.limits,
        num_slots=num_slots,
        decode_buckets=(num_slots,),
        prefill_buckets=(chunk_size,),
        prefill_rows=min(4, num_slots),
        overlap_depth=overlap_depth,
        num_pages=num_pages or compiled.limits.pool.num_pages,
    )
    view = ViewRunner(compiled.runner(dial=dial, draft=draft), limits)
    return asyncio.run(serve_view(view, requests, shapes=shapes))


async def serve_view(
    view: ViewRunner, requests: list[Request], *, shapes: ShapeChooser | None = None
) -> Served:
    scheduler = Scheduler(view.limits, make_stream=FakeTextStream.for_request, shapes=shapes)
    trace: list[TraceEvent] = []
    loop = EngineLoop(scheduler, view, trace=trace)
    streams = loop.submit(requests)

    async def drain(i: int) -> Completion:
        completion = Completion(requests[i].request_id)
        async for chunk in streams[i]:
            completion.add(chunk)
        return completion

    drained = await asyncio.gather(*(drain(i) for i in range(len(requests))))
    while scheduler.stats.num_steps_in_flight:
        await asyncio.sleep(0.001)
    stats = scheduler.stats
    await loop.close()
    decodes = [step for step in view.steps if step[0].kind is StepKind.DECODE]
    owner = {
        admission.row: admission.request.request_id
        for plan, _ in view.steps
        for admission in plan.admissions
    }
    accepted: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for plan, result in decodes:
        for of_round in result.rounds:
            for row, emitted in zip(plan.rows, of_round.emitted_ids, strict=True):
                accepted[owner[row]].append(len(emitted) - 1)
    return Served(
        steps=tuple(view.steps),
        accepted=tuple(tuple(accepted[request.request_id]) for request in requests),
        accepted_together=tuple(
            tuple(len(emitted) - 1 for emitted in of_round.emitted_ids)
            for _, result in decodes
            for of_round in result.rounds
        ),
        ids=tuple(tuple(completion.output_ids) for completion in drained),
        logprobs=tuple(tuple(completion.logprobs) for completion in drained),
        prompt_logprobs=tuple(tuple(completion.prompt_logprobs) for completion in drained),
        hidden_states=tuple(tuple(completion.hidden_states) for completion in drained),
        per_request=tuple(completion.counters for completion in drained),
        counters=stats.counters,
        num_leaked_pages=stats.num_leaked_pages,
        num_free_pages=stats.num_free_pages,
        num_free_window_pages=stats.num_free_window_pages,
        num_retractions=stats.num_retractions,
        trace=tuple(trace),
    )


def make_request(i: int, *, prompt_len: int, seed: int, **sampling: Any) -> Request:
    """Return request i with a random prompt; ids never repeat between seeds."""
    rng = np.random.default_rng(seed)
    prompt = tuple(int(x) for x in rng.integers(0, TARGET.vocab_size, prompt_len))
    return Request(
        request_id=f"r{i}", prompt_ids=prompt, sampling=SamplingParams(**sampling), seed=seed
    )


def dial_for(requests: list[Request], plain_ids: list[tuple[int, ...]]) -> Params:
    """Return the dial's tables for plain decoding's output."""
    truths = {r.seed: r.prompt_ids + ids for r, ids in zip(requests, plain_ids, strict=True)}
    return dial_params(truths, rows=NUM_SLOTS, width=CONTEXT)


def corpus_params(texts: list[tuple[int, ...]]) -> Params:
    """Return a corpus of fixed size with these ids, one text after the other, then zeros."""
    ids = np.zeros(NUM_SLOTS * CONTEXT, np.int32)
    flat = np.concatenate(texts)
    ids[: flat.size] = flat
    return {k: jnp.asarray(v) for k, v in sort_corpus(ids, max_match=NGRAM_MAX_MATCH).items()}


@functools.lru_cache(maxsize=4)
def engine(spec: tuple[int, int, int], page_size: int, *, options: StepOptions) -> Compiled:
    """Return a shared engine with the dial drafter and one decode variant."""
    return build(spec_of(*spec), page_size=page_size, variants=(options,))


@functools.cache
def plain_engine() -> Compiled:
    return build(PLAIN, page_size=16, variants=(SAMPLING,))


@functools.cache
def _dense() -> Callable[[jax.Array], jax.Array]:
    params = tiny_params()[0]
    return jax.jit(lambda ids: dense_forward(TARGET, params, ids, aux_layer_ids=())[0])


def dense_logits(ids: tuple[int, ...]) -> np.ndarray:
    """Return f32[T, V] of TARGET after each of at most DENSE_WIDTH ids: no pages, chunks or
    batches."""
    padded = np.zeros(DENSE_WIDTH, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_dense()(jnp.asarray(padded)))[: len(ids)]


@functools.cache
def plain_ids(request: Request) -> tuple[int, ...]:
    """Return the reference: plain decoding, alone in the batch, one chunk per step, no overlap."""
    return serve(plain_engine(), [request], overlap_depth=0).ids[0]


def check_an_abort_ends_one_and_no_other(
    engine: Compiled, requests: list[Request], *, depth: int
) -> None:
    """Abort r5, the last of six, at its third chunk, and check the others.

    Their texts are whole, its own is a prefix, every page is freed, and counters match the output.
    """
    expected = [plain_ids(request) for request in requests]
    limits = with_limits(engine.limits, overlap_depth=depth)
    view = ViewRunner(engine.runner(dial=dial_for(requests, expected)), limits)

    async def run() -> tuple[list[list[StreamChunk]], Scheduler]:
        scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
        loop = EngineLoop(scheduler, view)
        streams = loop.submit(requests)

        async def drain(i: int) -> list[StreamChunk]:
            chunks = []
            async for chunk in streams[i]:
                chunks.append(chunk)
                if i == 5 and len(chunks) == 3:
                    assert loop.abort("r5")
            return chunks

        drained = await asyncio.gather(*(drain(i) for i in range(6)))
        while scheduler.stats.num_steps_in_flight:
            await asyncio.sleep(0.001)
        await loop.close()
        return drained, scheduler

    drained, scheduler = asyncio.run(run())
    ids = [tuple(i for chunk in chunks for i in chunk.new_ids) for chunks in drained]
    assert ids[:5] == expected[:5]
    assert ids[5] == expected[5][: len(ids[5])]
    assert len(ids[5]) < len(expected[5])
    last = drained[5][-1].finish
    assert last is not None
    assert last.kind is FinishKind.ABORT
    stats = scheduler.stats
    assert (stats.num_leaked_pages, stats.num_free_pages) == (0, limits.pool.num_pages)
    assert stats.num_emitted == sum(len(row) for row in ids)
