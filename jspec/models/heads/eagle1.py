"""The EAGLE-1 draft head (Li et al., 2024, arXiv:2401.15077), which EAGLE-2 uses too.

slot i of the draft's KV cache is of the pair (token i + 1, the target's last hidden at position i)
x = fc([embed(token); h])                       h after the final norm; input 2E, embedding first
h1 = x + attention(x)                           the first layer's attention has no norm before it
out = h1 + mlp(post_norm(h1))                   through further decoder layers, if any
logits = lm_head(out)                           the target's lm_head, no norm before it

`out` is fed back. HASS's `add_para_norm` norms embedding and h before fc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from jspec.errors import ConfigError
from jspec.files.json_files import Fields, in_file, read_fields
from jspec.layers.attention import Attend, attention, take_kept
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm, norm_of_sum
from jspec.models.decoder import (
    KVPool,
    LayerSettings,
    PagedAttend,
    Params,
    feed_forward,
    paged_layer,
)
from jspec.models.family import read_attention, read_decoder, read_dense, refuse_windows
from jspec.models.files.fp8 import check_quantization, open_tensors
from jspec.models.files.stored import (
    ParamRead,
    Place,
    check_names,
    on_host,
    param_reads,
    stored_tensors,
)
from jspec.models.files.tensor_files import HostArray, Tensors, write_checkpoint
from jspec.models.heads.head_files import (
    LAYER,
    canonical_name,
    check_target,
    further_layers,
    head_layers,
    is_stray,
    num_stored_layers,
    plain_layer,
    refuse_unknown,
    shared_embed,
    shared_head,
    stored_embed,
    stored_names,
)
from jspec.models.layer_params import lm_head, product
from jspec.models.layer_params import norm as norm_param
from jspec.models.params import INTEGERS, Init, ParamSpec, ParamTable, prefixed
from jspec.models.placement import nested
from jspec.models.registry import family_named
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import Eagle1Config, LayerSpec, ModelSpec

ARCHITECTURES = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2ForCausalLMEagle",
)
KNOWN = frozenset(
    ("rms_norm_eps", "bias", "qkv_bias", "attention_bias", "mlp_bias", "add_para_norm")
)


def load_eagle1_config(
    path: Path,
    *,
    target: ModelSpec,
    hot_vocab_size: int | None = None,
    draft_rope_theta: float | None = None,
    reads_names: bool = True,
) -> Eagle1Config:
    """Read an EAGLE-1 head's shape from `path`/config.json and check it against its target.

    fc has a bias unless config.json or the tensors' names (if reads_names) show otherwise; q, k and
        v have one if either shows it. RoPE comes from the head's own config, with theta 10000 by
        default.
    hot_vocab_size: U, if only some of the target's ids are drafted. Raise ConfigError for what is
        not served, CheckpointError for a head of another target.
    """
    fields = read_fields(path / "config.json")
    names = stored_names(path) if reads_names else {}
    _check_kind(fields)
    has_fc_bias = fields.flag("bias", True) and (not names or "fc.bias" in names)
    with in_file(fields.path):
        layer = _read_layers(fields, names, target)
    if draft_rope_theta is not None:
        spec = layer.one_layer
        rope = replace(spec.softmax_attention.rope, theta=draft_rope_theta)
        spec = replace(spec, attention=replace(spec.softmax_attention, rope=rope))
        layer = replace(layer, layers=(spec,) * layer.num_layers)
    check_target(fields, layer, target, hidden_size=layer.hidden_size)
    return Eagle1Config(
        layer=layer,
        draft_vocab_size=hot_vocab_size or layer.vocab_size,
        fc_bias=has_fc_bias,
        norms_inputs=fields.flag("add_para_norm", False),
    )


def _check_kind(fields: Fields) -> None:
    if fields.get("draft_vocab_size") is not None or fields.get("eagle_config") is not None:
        name = "draft_vocab_size" if "draft_vocab_size" in fields.values else "eagle_config"
        fields.refuse(name, allowed=(), why="an EAGLE-3 head: use --speculative-algorithm EAGLE3")
    is_eagle3 = fields.get("speculators_model_type") == "eagle3"
    why = "use --speculative-algorithm EAGLE3" if is_eagle3 else "speculators' layout is not read"
    fields.refuse("speculators_model_type", allowed=(), why=why)
    architecture = fields.architecture()
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.path}: draft architecture is {architecture!r}; expected one of "
            f"{', '.join(ARCHITECTURES)} for an EAGLE-1 or EAGLE-2 head"
        )
    check_quantization(fields)
    refuse_windows(fields)
    refuse_unknown(fields, known=KNOWN)


def _read_layers(fields: Fields, names: Mapping[str, str], target: ModelSpec) -> ModelSpec:
    """Read the head's layers; tensor names decide about biases that config.json leaves open."""
    bias = fields.flag("attention_bias", False)
    qkv_bias = bias or fields.flag("qkv_bias", f"{LAYER}self_attn.q_proj.bias" in names)
    spec = read_attention(fields, qkv_bias=qkv_bias, out_bias=bias)
    dense = read_dense(fields, bias=fields.flag("mlp_bias", False))
    count = num_stored_layers(fields, names, target=target)
    layer = read_decoder(
        fields, family="llama", attention=spec, ffn=lambda _: dense, windows=(None,) * count
    )
    return replace(layer, tie_word_embeddings=False)


def eagle1_params(config: Eagle1Config) -> ParamTable:
    """Declare a head; `load_eagle1` reads embed, lm_head and draft_ids in its own way."""
    model = config.layer
    E, U = model.hidden_size, config.draft_vocab_size
    first = plain_layer(model.one_layer, size=E, input_norm=False)
    layers = (*prefixed(first, path=("layers", 0), stored=LAYER), *further_layers(model))
    norms = (
        norm_param("embed_norm", "embedding_layernorm", E),
        norm_param("hidden_norm", "hidden_states_layernorm", E),
    )
    return (
        ParamSpec(path=("embed", "table"), shape=(model.vocab_size, E), init=Init.TABLE),
        *(norms if config.norms_inputs else ()),
        *product(("fc",), 2 * E, (("fc", E, 1),), bias=config.fc_bias),
        *head_layers(layers),
        replace(lm_head(E, U, tied=False), layouts=()),
        ParamSpec(path=("draft_ids",), shape=(U,), axes=("vocab",), init=Init.IDS, format=INTEGERS),
    )


def run_first_layer(
    params: Params,
    x: Float[Array, "*b E"],
    positions: Int[Array, "*b"],
    attend: Attend,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "*r E"]:
    """Run a decoder layer without a norm before its attention. kept: see `run_layer`."""
    mixed = attention(
        params["attention"],
        x,
        positions,
        attend,
        spec=spec.softmax_attention,
        eps=spec.eps,
        shard=settings.shard,
        kept=kept,
    )
    stream = Residual(x=take_kept(x, kept), delta=mixed)
    x, normed = norm_of_sum(params["post_norm"], stream, eps=spec.eps, ops=settings.ops)
    return x + feed_forward(params, normed, spec=spec, settings=settings)


@partial(jax.jit, static_argnames=("spec", "settings"), inline=False)
def _paged_first_layer(
    params: Params,
    x: jax.Array,
    pages: jax.Array,
    rows: AttentionMetadata,
    kept: jax.Array | None,
    *,
    spec: LayerSpec,
    settings: LayerSettings,
) -> tuple[jax.Array, jax.Array]:
    attend = PagedAttend(pages, rows, spec.softmax_attention, settings)
    out = run_first_layer(
        params, x, rows.q_positions, attend, spec=spec, settings=settings, kept=kept
    )
    return out, attend.cache


@dataclass(frozen=True, slots=True)
class Eagle1Head:
    """An EAGLE-1 head over its own KV pools, one per layer."""

    config: Eagle1Config
    ops: Ops
    shard: Shard = field(default_factory=Shard)

    @property
    def table(self) -> ParamTable:
        return eagle1_params(self.config)

    def features(self, params: Params, given: Float[Array, "*b E"], /) -> Float[Array, "*b E"]:
        """Return the target's last hidden unchanged: fc joins it with a token in every forward."""
        del params
        return given

    def joined(
        self, params: Params, embedded: Float[Array, "*b E"], hidden: Float[Array, "*b E"]
    ) -> Float[Array, "*b E"]:
        """Return fc([embedding; hidden]), the first layer's input."""
        if self.config.norms_inputs:
            eps = self.config.layer.rms_norm_eps
            embedded = norm(params["embed_norm"], embedded, eps=eps)
            hidden = norm(params["hidden_norm"], hidden, eps=eps)
        return linear(params["fc"], jnp.concatenate((embedded, hidden), axis=-1))

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        hidden: Float[Array, "T E"],
        kv: KVPool,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R E"], KVPool]:
        """Return (output to feed back and score, updated pools). kept: see `Decoder.forward`."""
        settings = LayerSettings(self.ops, self.shard, queries_per_row)
        layer, last = self.config.layer, self.config.layer.num_layers - 1
        x = self.joined(params, embed(params["embed"], token_ids), hidden)
        x, first = _paged_first_layer(
            params["layers"][0],
            x,
            kv[0],
            rows,
            kept if last == 0 else None,
            spec=layer.layers[0],
            settings=settings,
        )
        pages, stream = [first], Residual(x=x)
        for i, spec in enumerate(layer.layers[1:], start=1):
            stream, after = paged_layer(
                params["layers"][i],
                stream,
                kv[i],
                rows,
                kept if i == last else None,
                spec=spec,
                settings=settings,
            )
            pages.append(after)
        return stream.sum(), tuple(pages)

    def logits(self, params: Params, hidden: Float[Array, "*b E"]) -> Float[Array, "*b U"]:
        """Return f32 logits over this device's shard of the draft vocabulary."""
        return logits_of(hidden, params["lm_head"]["kernel"])


def check_eagle1(path: Path, config: Eagle1Config) -> bool:
    """Return whether the head's embedding is the target's: its file has none.

    Raise CheckpointError if the headers show that `load_eagle1` would fail; needs no target.
    """
    with open_tensors(path, canonical=canonical_name) as tensors:
        _check(tensors, config)
        return "embed_tokens.weight" not in tensors


def load_eagle1(
    path: Path,
    config: Eagle1Config,
    *,
    hot_ids: HostArray | None = None,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int = 1,
    place: Place = on_host,
) -> Params:
    """Load a head's params (`dtype`; draft_ids int32[U]) to where `place` puts them.

    `lm_head.kernel` is the target's own array, or its columns hot_ids i32[U]; so is `embed.table`
    if the file has none. On the host, all others are numpy. Raise CheckpointError for a file that
    is unreadable or does not fit `config`.
    """
    specs = {spec.path: spec for spec in eagle1_params(config)}
    with open_tensors(path, canonical=canonical_name) as tensors:
        own = list(_check(tensors, config))
        kernel = shared_head(tensors, config.layer, target_params)
        shared: dict[Any, Any] = {
            ("lm_head", "kernel"): kernel if hot_ids is None else _columns(kernel, hot_ids)
        }
        if "embed_tokens.weight" in tensors:
            own.append(stored_embed(specs["embed", "table"]))
        else:
            shared["embed", "table"] = shared_embed(tensors, config.layer, target_params)
        ids = np.arange(config.draft_vocab_size) if hot_ids is None else hot_ids
        ids = ids.astype(np.int32)
        reads = param_reads(tensors, tuple(own), dtype=dtype, shards=shards)
        reads.append(ParamRead(spec=specs["draft_ids",], host_bytes=ids.nbytes, read=lambda: ids))
        return nested({**place(reads), **shared}.items())


def save_eagle1(path: Path, config: Eagle1Config, params: Params, *, dtype: npt.DTypeLike) -> None:
    """Write unsharded params as a LlamaForCausalLMEagle; embedding and lm_head are the target's."""
    written = eagle1_config_json(config, dtype=np.dtype(dtype).name)
    own = tuple(spec for spec in eagle1_params(config) if spec.layouts)
    write_checkpoint(path, written, stored_tensors(own, params, dtype=dtype))


def eagle1_config_json(config: Eagle1Config, *, dtype: str) -> dict[str, Any]:
    """Return config.json as a LlamaForCausalLMEagle; raise ConfigError if q and k are normed."""
    attention = config.layer.one_layer.softmax_attention
    if attention.qk_norm:
        raise ConfigError(
            "the head norms q and k; expected it not to: the layout has no key for it"
        )
    written = family_named("llama").to_json(replace(config.layer, tie_word_embeddings=False)) | {
        "torch_dtype": dtype,
        "architectures": ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"],  # SGLang's, vLLM's
        "attention_bias": attention.out_bias,
    }
    if not config.fc_bias:  # vLLM would read a true `bias` as attention's
        written["bias"] = False
    unusual = {
        "qkv_bias": attention.qkv_bias and not attention.out_bias,
        "add_para_norm": config.norms_inputs,
    }
    return written | {k: v for k, v in unusual.items() if v}


def _check(tensors: Tensors, config: Eagle1Config) -> ParamTable:
    """Check the file and return the weights it must have; any lm_head in it is ignored."""
    required = tuple(spec for spec in eagle1_params(config) if spec.layouts)
    table = (config.layer.vocab_size, config.layer.hidden_size)
    check_names(
        tensors,
        required,
        optional={"embed_tokens.weight": table},
        is_stray=lambda name: is_stray(name) or name.startswith("lm_head") or name in _UNREAD,
    )
    return required


# EAGLE's first layer has no such norm; files made from a decoder's template have its weight anyway.
_UNREAD = (f"{LAYER}input_layernorm.weight",)


def with_hot_columns(hot_ids: HostArray, target_params: Params, params: Params) -> Params:
    """Return the head's params after a change of the target's lm_head."""
    kernel = _columns(target_params["lm_head"]["kernel"], hot_ids)
    return {**params, "lm_head": {"kernel": kernel}}


def _columns(kernel: Any, ids: HostArray) -> Any:
    chosen = jnp.take(jnp.asarray(kernel), jnp.asarray(ids), axis=1, mode="clip")
    return jax.device_put(chosen, kernel.sharding) if isinstance(kernel, jax.Array) else chosen
