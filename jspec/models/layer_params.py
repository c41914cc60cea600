"""Parameter tables of a layer's parts: norms, products, attention, feed-forwards, the lm_head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jspec.models.params import (
    FLOAT32,
    Form,
    Init,
    Order,
    ParamPath,
    ParamSpec,
    ParamTable,
    Part,
    of_experts,
    prefixed,
)
from jspec.spec.axes import Axes
from jspec.spec.layers.attention import AttentionSpec, HeadGate, LatentAttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, MoESpec
from jspec.spec.weight_format import Op


def norm(path: str, name: str, size: int) -> ParamSpec:
    part = Part(name=f"{name}.weight", shape=(size,), size=size, form=Form.AS_IS)
    return ParamSpec(path=(path, "scale"), shape=(size,), layouts=((part,),), init=Init.ONES)


def product(
    path: ParamPath,
    in_size: int,
    parts: Iterable[tuple[str, int, int]],
    *,
    axes: Axes = (None, None),
    bias: bool = False,
    bias_is_optional: bool = False,
    order: Order = Order.ROWS,
    repeated: tuple[str, ...] = (),
    op: Op | None = Op.LINEAR,
) -> ParamTable:
    """Declare a kernel [in, out] from parts (stored name, size, blocks), and its bias.

    axes: of the kernel; the bias has the second
    repeated: names of parts that may have fewer blocks than shards. op: None: never quantized
    """
    parts = tuple(parts)
    size = sum(rows for _, rows, _ in parts)

    def stored(suffix: str, *widths: int, form: Form) -> tuple[Part, ...]:
        return tuple(
            Part(
                name=f"{name}.{suffix}",
                shape=(rows, *widths),
                size=rows,
                num_blocks=num_blocks,
                repeats=name in repeated,
                form=form,
            )
            for name, rows, num_blocks in parts
        )

    kernel = ParamSpec(
        path=(*path, "kernel"),
        shape=(in_size, size),
        layouts=(stored("weight", in_size, form=Form.OUT_IN),),
        axes=axes,
        order=order,
        op=op,
    )
    if not bias:
        return (kernel,)
    vector = ParamSpec(
        path=(*path, "bias"),
        shape=(size,),
        layouts=(stored("bias", form=Form.AS_IS),),
        axes=axes[-1:],
        init=Init.ZEROS,
        optional=bias_is_optional,
    )
    return kernel, vector


def attention_params(
    spec: AttentionSpec, *, in_size: int, out_size: int, sinks: tuple[str, ...] = ("sinks",)
) -> ParamTable:
    """Declare a layer's `attention` under Hugging Face's names. sinks: their stored names."""
    H, G, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim
    heads: tuple[tuple[str, int, int], ...] = (("q_proj", H * D, H),)
    if spec.kv_of is None:
        heads += (("k_proj", G * D, G),)
        heads += () if spec.k_is_v else (("v_proj", G * Dv, G),)
    table: list[ParamSpec] = [
        *product(
            ("qkv",),
            in_size,
            heads,
            axes=("embed", "heads"),
            bias=spec.qkv_bias,
            repeated=("k_proj", "v_proj"),
        ),
        *product(
            ("out",),
            H * Dv,
            (("o_proj", out_size, 1),),
            axes=("heads", "embed"),
            bias=spec.out_bias,
            bias_is_optional=True,  # some checkpoints with attention_bias lack it on o_proj
        ),
    ]
    if spec.gate is HeadGate.OF_HEADS:
        table += product(("gate",), in_size, (("g_proj", H, H),), axes=("embed", "heads"))
    if spec.gate is HeadGate.OF_NUMBERS:
        table = _with_gate_in_queries(table, spec, in_size=in_size)
    if spec.qk_norm and spec.norms_span_heads:
        table += [_norm_of_heads("q_norm", H, D), _norm_of_heads("k_norm", G, D)]
    elif spec.qk_norm:
        table.append(norm("q_norm", "q_norm", D))
        table += [] if spec.kv_of is not None else [norm("k_norm", "k_norm", D)]
    if spec.sinks:
        layouts = tuple(
            (Part(name=name, shape=(H,), size=H, num_blocks=H, form=Form.AS_IS),) for name in sinks
        )
        table.append(
            ParamSpec(
                path=("sinks",), shape=(H,), layouts=layouts, axes=("heads",), init=Init.ZEROS
            )
        )
    table += kv_scales(spec)
    return prefixed(table, path=("attention",), stored="self_attn.")


def _norm_of_heads(name: str, num_heads: int, head_dim: int) -> ParamSpec:
    """Declare a norm that spans heads, whose scale is sharded, and repeated, like the heads."""
    size = num_heads * head_dim
    part = Part(
        name=f"{name}.weight",
        shape=(size,),
        size=size,
        num_blocks=num_heads,
        repeats=True,
        form=Form.AS_IS,
    )
    return ParamSpec(
        path=(name, "scale"), shape=(size,), layouts=((part,),), axes=("heads",), init=Init.ONES
    )


def kv_scales(spec: AttentionSpec) -> ParamTable:
    """Declare the scales of K and V (of a latent: one) cached in FP8; 1 without a stored tensor."""
    if not spec.has_kv_scales:
        return ()
    names = ("k_scale",) if isinstance(spec, LatentAttentionSpec) else ("k_scale", "v_scale")
    return tuple(
        ParamSpec(
            path=(name,),
            shape=(1,),
            layouts=((Part(name=name, shape=(1,), size=1, form=Form.AS_IS),),),
            init=Init.ONES,
            optional=True,
            format=FLOAT32,
        )
        for name in names
    )


def _with_gate_in_queries(
    table: list[ParamSpec], spec: AttentionSpec, *, in_size: int
) -> list[ParamSpec]:
    """Let q_proj also contain the gate: for each head the rows of its query, then of its gate."""
    H, D = spec.num_heads, spec.head_dim
    gates = product(
        ("gate",), in_size, (("q_proj", H * D, H),), axes=("embed", "heads"), bias=spec.qkv_bias
    )

    def half(whole: ParamSpec, *, first: int) -> ParamSpec:
        query, *others = whole.layouts[0]
        shape = (2 * H * D, *query.shape[1:])
        own = replace(query, shape=shape, first=first, stride=2 * D)
        return replace(whole, layouts=((own, *others),))

    queries = [half(own, first=0) if own.path[0] == "qkv" else own for own in table]
    return [*queries, *(half(own, first=D) for own in gates)]


def dense_params(
    spec: DenseSpec, *, size: int, path: ParamPath = ("mlp",), stored: str = "mlp."
) -> ParamTable:
    inner = spec.inner
    halves = (("gate_proj", inner, inner), ("up_proj", inner, inner))
    down = (("down_proj", size, 1),)
    table = (
        *product(
            ("gate_up",),
            size,
            halves,
            axes=("embed", "mlp"),
            bias=spec.bias,
            order=Order.BACKENDS,
            op=Op.GATED,
        ),
        *product(("down",), inner, down, axes=("mlp", "embed"), bias=spec.bias),
    )
    return prefixed(table, path=path, stored=stored)


def expert_params(spec: MoESpec, *, size: int) -> ParamTable:
    """Declare a layer's `moe` under Qwen3-MoE's names; router bias and shared expert as DeepSeek, a
    gated shared expert as Qwen. Experts are one tensor each, or fused as by transformers 5."""
    X, inner = spec.num_experts, spec.inner
    single = tuple(
        Part(
            name=f"experts.{{}}.{name}.weight",
            shape=(inner, size),
            size=inner,
            num_blocks=inner,
            stack=X,
        )
        for name in ("gate_proj", "up_proj")
    )
    fused = tuple(
        Part(
            name="experts.gate_up_proj",
            shape=(X, 2 * inner, size),
            size=inner,
            num_blocks=inner,
            first=first,
        )
        for first in (0, inner)
    )
    down = Part(name="experts.{}.down_proj.weight", shape=(size, inner), size=size, stack=X)
    down_fused = Part(name="experts.down_proj", shape=(X, size, inner), size=size)
    name = "gate.e_score_correction_bias"
    router_bias = Part(name=name, shape=(X,), size=X, form=Form.AS_IS)
    biased = ParamSpec(
        path=("router", "router_bias"),
        shape=(X,),
        layouts=((router_bias,),),
        init=Init.ZEROS,
        format=FLOAT32,
    )
    table = (
        *product(("router",), size, (("gate", X, 1),), op=None),
        *((biased,) if spec.has_router_bias else ()),
        ParamSpec(
            path=("experts", "gate_up"),
            shape=(X, size, 2 * inner),
            layouts=(single, fused),
            axes=("experts", "embed", "expert_mlp"),
            op=Op.EXPERTS,
        ),
        ParamSpec(
            path=("experts", "down"),
            shape=(X, inner, size),
            layouts=((down,), (down_fused,)),
            axes=("experts", "expert_mlp", "embed"),
            op=Op.EXPERTS,
        ),
    )
    table = (*of_experts(table, spec), *_shared_expert(spec, size=size))
    return prefixed(table, path=("moe",), stored="mlp.")


def _shared_expert(spec: MoESpec, *, size: int) -> ParamTable:
    if spec.shared is None:
        return ()
    stored = "shared_expert." if spec.shared_gate else "shared_experts."
    table = dense_params(spec.shared, size=size, path=("shared",), stored=stored)
    if spec.shared_gate:
        table += product(("shared_gate",), size, (("shared_expert_gate", 1, 1),), op=None)
    return table


def zero_centred(table: Iterable[ParamSpec]) -> ParamTable:
    """Add one to norms' stored scales, in float32 to lose no bit of w: x / rms(x) * (1 + w)."""
    return tuple(
        replace(
            spec,
            format=FLOAT32,
            layouts=tuple(
                tuple(replace(part, plus=1.0) for part in layout) for layout in spec.layouts
            ),
        )
        if spec.path[-1] == "scale"
        else spec
        for spec in table
    )


def ffn_params(spec: FeedForward, *, size: int) -> ParamTable:
    if isinstance(spec, DenseSpec):
        return dense_params(spec, size=size)
    return expert_params(spec, size=size)


def lm_head(size: int, vocab_size: int, *, tied: bool, name: str = "lm_head.weight") -> ParamSpec:
    """Declare lm_head [E, V], sharded by vocabulary; tied: the transposed embedding table."""
    part = Part(
        name=name, shape=(vocab_size, size), size=vocab_size, num_blocks=vocab_size, pads=True
    )
    return ParamSpec(
        path=("lm_head", "kernel"),
        shape=(size, vocab_size),
        layouts=((part,),),
        axes=("embed", "vocab"),
        tied_to=("embed", "table") if tied else None,
        op=Op.LOGITS,
    )
