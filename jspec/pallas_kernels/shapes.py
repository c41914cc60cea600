"""Shapes of published models: the one list for which kernels are tuned, compiled and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jspec.spec.layers.attention import AttentionSpec, LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, Gate, MoESpec, Routing
from jspec.spec.model_spec import Mixer
from jspec.spec.weight_format import FP8, MXFP4, Formats, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One layer of a model, without window and RoPE, and its vocabulary."""

    hidden_size: int  # E
    vocab_size: int  # V
    attention: AttentionSpec
    ffn: FeedForward
    formats: Formats = ()  # of products whose weights the checkpoint packs
    mixer: Mixer | None = None  # of layers that cache something other than K and V

    @property
    def heads(self) -> tuple[int, int, int]:
        """(H, G, D)."""
        return self.attention.num_heads, self.attention.num_kv_heads, self.attention.head_dim

    @property
    def widths(self) -> tuple[int, int]:
        """(E, I), I of the MLP or of one expert."""
        return self.hidden_size, self.ffn.inner

    @property
    def moe_params(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of an MoE's weights without a shared expert's, as `Ops.moe_of_sum` takes them.
        Raises TypeError."""
        if not isinstance(self.ffn, MoESpec):
            raise TypeError("the model has a dense MLP; expected an MoE")
        X, (E, inner) = self.ffn.num_experts, self.widths
        router: dict[str, tuple[int, ...]] = {"kernel": (E, X)}
        experts: dict[str, tuple[int, ...]] = {"gate_up": (X, E, 2 * inner), "down": (X, inner, E)}
        if self.ffn.has_router_bias:
            router["router_bias"] = (X,)
        if self.ffn.bias:
            router["bias"] = (X,)
            experts |= {"gate_up_bias": (X, 2 * inner), "down_bias": (X, E)}
        return {"router": router, "experts": experts}

    def shard(self, num: int) -> ModelShape:
        """Return the shape of one of `num` tensor-parallel shards; num divides heads and I."""
        num_heads, num_kv, _ = self.heads
        attention = replace(self.attention, num_heads=num_heads // num, num_kv_heads=num_kv // num)
        return replace(
            self, attention=attention, ffn=replace(self.ffn, inner=self.ffn.inner // num)
        )


LLAMA_3_2_1B = ModelShape(
    hidden_size=2048,
    vocab_size=128256,
    attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64),
    ffn=DenseSpec(inner=8192),
)
LLAMA_3_1_8B = ModelShape(
    hidden_size=4096,
    vocab_size=128256,
    attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128),
    ffn=DenseSpec(inner=14336),
)
LLAMA_3_1_70B = ModelShape(
    hidden_size=8192,
    vocab_size=128256,
    attention=AttentionSpec(num_heads=64, num_kv_heads=8, head_dim=128),
    ffn=DenseSpec(inner=28672),
)
QWEN3_8B = ModelShape(
    hidden_size=4096,
    vocab_size=151936,
    attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=True),
    ffn=DenseSpec(inner=12288),
)
QWEN3_30B_A3B = ModelShape(
    hidden_size=2048,
    vocab_size=151936,
    attention=AttentionSpec(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
    ffn=MoESpec(num_experts=128, top_k=8, inner=768),
)
QWEN3_30B_A3B_FP8 = replace(QWEN3_30B_A3B, formats=((Op.EXPERTS, FP8(has_blocks=True)),))
GPT_OSS_20B = ModelShape(
    hidden_size=2880,
    vocab_size=201088,
    attention=AttentionSpec(
        num_heads=64, num_kv_heads=8, head_dim=64, sinks=True, qkv_bias=True, out_bias=True
    ),
    ffn=MoESpec(
        num_experts=32,
        top_k=4,
        inner=2880,
        routing=Routing.TOP_THEN_SOFTMAX,
        gate=Gate.CLAMPED,
        bias=True,
    ),
)
GPT_OSS_20B_MXFP4 = replace(GPT_OSS_20B, formats=((Op.EXPERTS, MXFP4()),))

QWEN3_5_9B = ModelShape(  # every fourth layer is full attention, the others are delta nets
    hidden_size=4096,
    vocab_size=248320,
    attention=AttentionSpec(
        num_heads=16, num_kv_heads=4, head_dim=256, qk_norm=True, rotary_dim=64
    ),
    ffn=DenseSpec(inner=12288),
    mixer=DeltaNetSpec(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128),
)
GLM_4_7_FLASH = ModelShape(  # all layers cache latents
    hidden_size=2048,
    vocab_size=154880,
    attention=AttentionSpec(num_heads=20, num_kv_heads=20, head_dim=256),
    ffn=MoESpec(
        num_experts=64,
        top_k=4,
        inner=1536,
        routing=Routing.SIGMOID_THEN_TOP_NORMALIZED,
        weight_scale=1.8,
        shared=DenseSpec(inner=1536),
    ),
    mixer=LatentAttentionSpec(
        num_heads=20,
        num_kv_heads=20,
        head_dim=256,
        v_dim=256,
        rotary_dim=64,
        kv_rank=512,
        q_rank=768,
        interleaved=True,
    ),
)

MODELS: Mapping[str, ModelShape] = {
    "llama-3.2-1b": LLAMA_3_2_1B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.1-70b": LLAMA_3_1_70B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": QWEN3_30B_A3B_FP8,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b-mxfp4": GPT_OSS_20B_MXFP4,
    "qwen3.5-9b": QWEN3_5_9B,
    "glm-4.7-flash": GLM_4_7_FLASH,
}
