"""Ways to split a model over devices, with bytes per device and a lower bound of step times.

A step is one token of plain decoding for each row: the larger of the times for reading (weights
once, used experts, KV) and for products, plus the all-reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from jspec.errors import ConfigError
from jspec.models.params import Init, ParamSpec, ParamTable
from jspec.spec.accelerators import GIB, DeviceGroup
from jspec.spec.axes import mesh_axis
from jspec.spec.cache_entry import CacheLayout, Latent, bytes_per_unit
from jspec.spec.cache_groups import CacheGroup, cache_bytes, slot_groups
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.weight_format import itemsize, num_bytes

CLOSE = 1.03  # among times within this factor, the one with fewer devices per engine is chosen
NOT_READ = (Init.TABLE, Init.IDS)  # tables, which are indexed


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    spec: ModelSpec
    groups: tuple[CacheGroup, ...]  # of both models
    tables: Callable[[int], tuple[ParamTable, ParamTable]]  # of both, by the tensor degree
    dtype: str

    @property
    def moe(self) -> MoESpec | None:
        found = (ffn for layer in self.spec.layers for ffn in layer.ffns)
        return next((ffn for ffn in found if isinstance(ffn, MoESpec)), None)

    @property
    def num_kv_heads(self) -> int:
        """The smallest number of KV heads of a layer, 1 for latents. More shards repeat heads."""
        mixers = (layer.attention for layer in self.spec.layers)
        attentions = (each for each in mixers if isinstance(each, AttentionSpec))
        heads = (1 if isinstance(a.cache_entry, Latent) else a.num_kv_heads for a in attentions)
        return min(heads, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that decode at the same time, over all engines, and the tokens of each."""

    requests: int
    context: int

    def __post_init__(self) -> None:
        for name, value in (("--requests", self.requests), ("--context-length", self.context)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The split of one engine over tensor * data devices."""

    tensor: int = 1  # shards of heads, MLPs and the vocabulary
    data: int = 1  # ranks, each with its own rows
    whole_experts: bool = False  # each device has some of the experts, not a part of each

    @property
    def num_devices(self) -> int:
        return self.tensor * self.data

    def flags(self, *, num_hosts: int) -> str:
        """Return flags of jspec serve. Each of several hosts also needs its own --node-rank."""
        words = [f"--tp-size {self.num_devices}"]
        words += [f"--dp-size {self.data} --enable-dp-attention"] * (self.data > 1)
        words += [f"--ep-size {self.num_devices}"] * self.whole_experts
        words += [f"--nnodes {num_hosts}"] * (num_hosts > 1)
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One layout. Sizes are per device or engine, rates over all engines at the given load."""

    flags: str
    devices: int  # of an engine
    replicas: int
    weight_bytes: int  # of each device
    kv_tokens: int  # of each engine
    rows: int  # requests that decode at the same time in each engine
    one_row_ms: float
    step_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    choices: tuple[Choice, ...]  # those that fit, fewest devices per engine first
    fastest: Choice  # most tokens per second of all requests
    quickest: Choice  # least milliseconds per token of a single request


def advise(served: Served, group: DeviceGroup, load: Load, *, fraction: float) -> Advice:
    """Compare all layouts. fraction: of the memory, for weights and caches, as in EngineArgs.
    Raises ConfigError if the model does not fit the devices."""
    found, least = [], math.inf
    for size in (n for n in range(1, group.num_devices + 1) if group.num_devices % n == 0):
        for split in splits(served, size):
            try:
                engine = Engine(served, split, group)
                least = min(least, engine.weight_bytes)
            except ConfigError:  # heads or widths are not divisible
                continue
            if engine.kv_tokens(fraction) >= split.data * load.context:
                found.append(_choice(engine, load, fraction))
    if not found:
        raise ConfigError(
            f"--devices is {group}; expected more or larger ones, or a smaller --context-length: "
            f"the weights take at least {least / GIB:.1f} GiB of each, and {load.context} tokens "
            f"have no room beside them in {fraction * group.usable_bytes / GIB:.1f} GiB"
        )
    return Advice(
        choices=tuple(found),
        fastest=_best(found, lambda choice: 1 / choice.tokens_per_second),
        quickest=_best(found, lambda choice: choice.one_row_ms),
    )


def _best(found: list[Choice], cost: Callable[[Choice], float]) -> Choice:
    least = min(map(cost, found))
    return next(choice for choice in found if cost(choice) <= CLOSE * least)


def splits(served: Served, num_devices: int) -> Iterator[Split]:
    """Yield the ways to split one engine, the simplest first."""
    yield Split(tensor=num_devices)
    moe, heads = served.moe, served.num_kv_heads
    if moe is None or num_devices == 1 or moe.num_experts % num_devices:
        return
    yield Split(tensor=num_devices, whole_experts=True)
    for tensor in sorted({1, heads}):  # no KV head is repeated
        if tensor < num_devices and num_devices % tensor == 0:
            yield Split(tensor=tensor, data=num_devices // tensor, whole_experts=True)


def _choice(engine: Engine, load: Load, fraction: float) -> Choice:
    size, room = engine.split.num_devices, engine.kv_tokens(fraction)
    replicas = engine.group.num_devices // size
    ranks = engine.split.data
    rows = min(-(-load.requests // replicas), ranks * (room // ranks // load.context))
    step = engine.step_seconds(rows, load.context)
    busy = min(load.requests, replicas * rows)
    return Choice(
        flags=engine.split.flags(num_hosts=-(-size // engine.group.host_devices)),
        devices=size,
        replicas=replicas,
        weight_bytes=engine.weight_bytes,
        kv_tokens=room,
        rows=rows,
        one_row_ms=1e3 * engine.step_seconds(1, load.context),
        step_ms=1e3 * step,
        tokens_per_second=busy / step,
    )


@dataclass(frozen=True)
class Engine:
    """Bytes and times of one engine. Raises ConfigError if the model cannot be split like this."""

    served: Served
    split: Split
    group: DeviceGroup

    @cached_property
    def tables(self) -> tuple[ParamTable, ParamTable]:
        return self.served.tables(self.split.tensor)

    @cached_property
    def weight_bytes(self) -> int:
        of_draft = sum(self._part(weight)[0] for weight in self.tables[1])
        return of_draft + sum(size for _, size, _ in self._parts)

    def _part(self, weight: ParamSpec) -> tuple[int, float]:
        tensor, format = self.split.tensor, weight.format_in(self.served.dtype)
        if "experts" in weight.axes and self.split.whole_experts:
            shape, ways = weight.shape, self.split.num_devices
        else:
            shape = weight.physical_shape(tensor)
            is_split = any(mesh_axis(axis) for axis in weight.axes if axis != "experts")
            ways = tensor if is_split else 1
        return num_bytes(format, shape) // ways, math.prod(shape) / ways

    @cached_property
    def _parts(self) -> list[tuple[ParamSpec, int, float]]:
        return [(weight, *self._part(weight)) for weight in self.tables[0]]

    def _layout(self, shards: int = 1) -> CacheLayout:
        return CacheLayout(
            page_size=1,
            dtype=self.served.dtype,
            shards=shards,
            lanes=self.group.accelerator.lanes,
        )

    def kv_tokens(self, fraction: float) -> int:
        """Return the tokens of all ranks, if window layers kept everything."""
        states = slot_groups(self.served.groups)
        paged = tuple(each for each in self.served.groups if each not in states)
        layout, tensor = self._layout(self.split.tensor), self.split.tensor
        room = fraction * self.group.usable_bytes - self.weight_bytes
        room -= cache_bytes(states, layout) / tensor  # of one row at least
        of_token = cache_bytes(paged, layout) / tensor
        return self.split.data * int(max(room, 0) // of_token) if of_token else int(room > 0)

    def step_seconds(self, rows: int, context: int) -> float:
        """Return a lower bound of the target's step time with `rows` over all ranks."""
        local = -(-rows // self.split.data)  # rows of a device
        read, flops = float(local * self._cache_read(context)), 0.0
        for weight, size, numbers in self._parts:
            if weight.init in NOT_READ:
                continue
            if "experts" in weight.axes:
                moe = self._moe_of(weight)
                share = self._used_experts(moe, rows) / moe.num_experts
                read += size * share
                flops += 2 * numbers * rows * moe.top_k / moe.num_experts
            else:
                read += size
                flops += 2 * numbers * local
        own = self.group.accelerator
        return max(read / own.read_bytes, flops / own.flops) + self._sum_seconds(rows, local)

    def _moe_of(self, weight: ParamSpec) -> MoESpec:
        ffns = self.served.spec.layers[int(weight.path[1])].ffns
        return next(ffn for ffn in ffns if isinstance(ffn, MoESpec))

    def _used_experts(self, moe: MoESpec, tokens: int) -> float:
        """Return the number of experts read if all devices read as many as the busiest one."""
        # Uniformly drawn tokens use a mean m of each device's experts, and the busiest of n devices
        # about m + sqrt(2 m log n).
        used = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
        if not self.split.whole_experts:
            return used
        n = self.split.num_devices
        mean = used / n
        return n * min(mean + math.sqrt(2 * mean * math.log(n)), moe.num_experts / n)

    def _cache_read(self, context: int) -> float:
        layout, tensor = self._layout(self.split.tensor), self.split.tensor
        return (
            sum(
                each.num_layers
                * bytes_per_unit(each.entry, layout)
                * (1 if each in slot_groups((each,)) else min(context, each.window or context))
                for each in self.served.groups
            )
            / tensor
        )

    def _sum_seconds(self, rows: int, local: int) -> float:
        """Return the time of all-reduces: two per layer, over the devices that share it."""
        spec, width = self.served.spec, itemsize(self.served.dtype)
        total = 0.0
        for layer in spec.layers:
            total += self._sum(self.split.tensor, local * spec.hidden_size * width)
            is_moe = any(isinstance(ffn, MoESpec) for ffn in layer.ffns)
            over, tokens = self.split.tensor, local
            if is_moe and self.split.whole_experts:
                over, tokens = self.split.num_devices, rows
            total += self._sum(over, tokens * spec.hidden_size * width)
        return total

    def _sum(self, over: int, size: int) -> float:
        own = self.group.accelerator
        if over == 1:
            return 0.0
        link = own.link_bytes if over <= self.group.host_devices else own.between_hosts
        is_few = self.split.tensor == self.split.num_devices <= own.few
        delay = own.few_sum_seconds if is_few else own.sum_seconds
        return delay + 2 * (over - 1) / over * size / link
