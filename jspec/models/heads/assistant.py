"""Gemma 4's assistants: a draft model that attends to the target's K and V, and its files.

The input is x = pre_projection([the target's embedding of the token; h]), where h is the target's
last hidden, or post_projection of the model's output for the token before. Its layers have only
queries. All rows of a draft are at the root's position and see the committed tokens, never each
other. With ordered embeddings the tokens are in groups of equal size, and only those of the best
groups, by the products of `centroids` with the output, are scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from jspec.errors import CheckpointError, ConfigError
from jspec.files.json_files import Fields, in_file, read_fields
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.norm import Residual, norm
from jspec.models.decoder import KVPool, paged_layer, shard_ids
from jspec.models.families.gemma4 import kinds_of, read_layers
from jspec.models.families.gemma4_params import layer_params
from jspec.models.family import SLIDING
from jspec.models.files.stored.layouts import check_names
from jspec.models.files.stored.param_reads import ParamRead, Place, param_reads
from jspec.models.files.tensor_files import HostArray, Tensors
from jspec.models.files.w8a8 import open_tensors
from jspec.models.layer import LayerSettings, Params
from jspec.models.layer_params import lm_head, product
from jspec.models.layer_params import norm as norm_params
from jspec.models.params import INTEGERS, Init, ParamSpec, ParamTable, prefixed, with_formats
from jspec.models.placement import nested
from jspec.models.registry import ASSISTANTS
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.assistant_spec import AssistantSpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.sandwich import SandwichSpec, cache_indices
from jspec.spec.weight_format import Formats

ORDER, GROUPS = "masked_embedding.token_ordering", ("groups",)


@dataclass(frozen=True, slots=True)
class Assistant:
    spec: AssistantSpec
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    formats: Formats = ()  # of products whose weights are not dense

    @property
    def table(self) -> ParamTable:
        return with_formats(assistant_params(self.spec), self.formats)

    def forward(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        hidden: Float[Array, "T E"],
        target_kv: KVPool,
        rows: AttentionMetadata,
    ) -> tuple[Float[Array, "T A"], Float[Array, "T E"]]:
        """Run one query per row. Return (outputs to score, h of the tokens after them)."""
        embedded, scale = embed(params["embed"], token_ids), self.spec.embed_scale
        if scale is not None:
            embedded = embedded * jnp.asarray(scale, embedded.dtype)
        pair = jnp.concatenate((embedded, hidden.astype(embedded.dtype)), axis=-1)
        stream = Residual(x=linear(params["pre"], pair, ops=self.ops))
        settings = LayerSettings(self.ops, self.shard.alone, queries_per_row=1)
        for i, (layer, cache) in enumerate(
            zip(self.spec.layer.layers, self.spec.caches, strict=True)
        ):
            stream, *_ = paged_layer(
                params["layers"][i],
                stream,
                target_kv[cache],
                rows.of_window(layer.attention.window),
                spec=layer,
                settings=settings,
            )
        out = norm(params["norm"], stream.sum(), eps=self.spec.layer.rms_norm_eps)
        return out, linear(params["post"], out, ops=self.ops)

    def logits(self, params: Params, out: Float[Array, "*b A"]) -> Float[Array, "*b V"]:
        logits = logits_of(out, params["lm_head"]["kernel"])
        if not self.spec.num_groups:
            return logits
        scores = logits_of(out, params["centroids"]["kernel"])
        _, best = jax.lax.top_k(scores, self.spec.top_groups)
        each = jnp.arange(self.spec.num_groups)
        chosen = jnp.any(best[..., None] == each, axis=-2)
        is_scored = jnp.take(chosen, params["groups"], axis=-1, mode="clip")
        return jnp.where(is_scored, logits, -jnp.inf)

    def token_ids(self) -> Int[Array, "V"]:
        return shard_ids(self.spec.layer.vocab_size, self.shard)


def assistant_params(spec: AssistantSpec) -> ParamTable:
    """Declare the weights under transformers' names. The target's embedding has no layout."""
    V, A, E = spec.layer.vocab_size, spec.layer.hidden_size, spec.target_size
    head = lm_head(A, V, tied=False, name="lm_head.weight")
    (part,) = head.layouts[0]
    tied = (replace(part, name="model.embed_tokens.weight"),)
    table: list[ParamSpec] = [
        ParamSpec(path=("embed", "table"), shape=(V, E), init=Init.TABLE),
        *product(("pre",), 2 * E, (("pre_projection", A, 1),)),
        *product(("post",), A, (("post_projection", E, 1),)),
        norm_params("norm", "model.norm", A),
        replace(head, layouts=(tied, *head.layouts)),
    ]
    for i, layer in enumerate(spec.layer.layers):
        assert isinstance(layer, SandwichSpec)
        own = layer_params(layer, size=A)
        table += prefixed(own, path=("layers", i), stored=f"model.layers.{i}.")
    if spec.num_groups:
        name = "masked_embedding.centroids"
        table += product(("centroids",), A, ((name, spec.num_groups, 1),), op=None)
        table.append(_groups(V))
    return tuple(table)


def _groups(vocab_size: int) -> ParamSpec:
    return ParamSpec(
        path=GROUPS, shape=(vocab_size,), axes=("vocab",), init=Init.ZEROS, format=INTEGERS
    )


def load_assistant_config(path: Path, *, target: ModelSpec) -> AssistantSpec:
    """Read config.json. Raises ConfigError or CheckpointError if it does not fit the target."""
    fields = read_fields(path / "config.json")
    with in_file(fields.path):
        return read_assistant(fields, target=target)


def read_assistant(fields: Fields, *, target: ModelSpec) -> AssistantSpec:
    text = fields.table("text_config")
    ours = text.integer("vocab_size"), fields.integer("backbone_hidden_size", 1536)
    if ours != (target.vocab_size, target.hidden_size):
        raise ConfigError(
            f"{fields.path}: vocab_size and backbone_hidden_size are {ours}; expected the target's "
            f"{(target.vocab_size, target.hidden_size)}"
        )
    for name, allowed in (
        ("enable_moe_block", (False,)),
        ("hidden_size_per_layer_input", (0,)),
        ("use_double_wide_mlp", (False,)),
        ("num_kv_shared_layers", (0, text.get("num_hidden_layers"))),
    ):
        text.refuse(name, allowed=allowed, why="all layers of an assistant read the target's cache")
    plain = Fields(fields.path, {**text.values, "hidden_size_per_layer_input": 0})
    kinds = kinds_of(plain)
    owners = {
        is_windowed: i
        for i, layer in enumerate(target.layers)
        if layer.attention.kv_of is None
        for is_windowed in (layer.attention.window is not None,)
    }
    sources = tuple(owners.get(kind == SLIDING) for kind in kinds)
    if None in sources:
        raise ConfigError(
            f"{fields.path}: layer_types has {sorted(set(kinds))}; expected kinds of layers that "
            "the target has, too, whose caches are read"
        )
    is_unified = fields.architecture() == ASSISTANTS[1]
    layers = read_layers(plain, kinds, sources, is_unified=is_unified)
    is_ordered = fields.flag("use_ordered_embeddings", False)
    indices = cache_indices(target)
    return AssistantSpec(
        layer=ModelSpec(
            vocab_size=ours[0],
            hidden_size=plain.integer("hidden_size"),
            layers=tuple(_over(layer, target, fields) for layer in layers),
            rms_norm_eps=layers[0].eps,
            max_position=target.max_position,
            family=target.family,
        ),
        target_size=ours[1],
        embed_scale=target.embed_scale,
        caches=tuple(indices[layer.attention.kv_of or 0] for layer in layers),
        num_groups=fields.integer("num_centroids", 2048) if is_ordered else 0,
        top_groups=fields.integer("centroid_intermediate_top_k", 32) if is_ordered else 0,
    )


def _over(layer: SandwichSpec, target: ModelSpec, fields: Fields) -> SandwichSpec:
    """Return the layer with the kv heads of the cache that it reads, whose width must be equal."""
    own, source = layer.softmax_attention, layer.attention.kv_of
    cached = target.layers[source or 0].softmax_attention
    ours, theirs = ((each.head_dim, each.window) for each in (own, cached))
    if ours != theirs:
        raise ConfigError(
            f"{fields.path}: head_dim and window of a layer are {ours}; expected {theirs}, those "
            f"of the target's layer {source}, whose cache it reads"
        )
    return replace(layer, attention=replace(own, num_kv_heads=cached.num_kv_heads))


def check_assistant(path: Path, spec: AssistantSpec) -> None:
    """Raise CheckpointError if the headers do not fit `spec`."""
    with open_tensors(path) as tensors:
        _check(tensors, spec)


def _check(tensors: Tensors, spec: AssistantSpec) -> None:
    wanted = {ORDER: (spec.layer.vocab_size,)} if spec.num_groups else {}
    for name, shape in wanted.items():
        if name not in tensors or tensors.shape(name) != shape:
            found = tensors.shape(name) if name in tensors else "absent"
            raise CheckpointError(f"{tensors.path}: {name} is {found}; expected shape {shape}")
    check_names(tensors, assistant_params(spec), is_stray=lambda name: _is_stray(name, wanted))


def _is_stray(name: str, wanted: dict[str, Any]) -> bool:
    """Match lm_head if an equal embedding is stored too, and K and V, which no layer has."""
    kv = ("k_proj", "v_proj", "k_norm", "v_norm")
    is_kv = name.startswith("model.layers.") and name.split(".")[-2] in kv
    return name in wanted or name == "lm_head.weight" or is_kv


def load_assistant(
    path: Path,
    spec: AssistantSpec,
    *,
    target_params: Params,
    dtype: npt.DTypeLike,
    place: Place,
    shards: int,
    formats: Formats,
) -> Params:
    with open_tensors(path) as tensors:
        _check(tensors, spec)
        table = with_formats(assistant_params(spec), formats)
        own = tuple(each for each in table if each.layouts)
        reads = param_reads(tensors, own, dtype=dtype, shards=shards)
        if spec.num_groups:
            groups = read_groups(tensors, spec)
            reads.append(
                ParamRead(spec=_groups(groups.size), host_bytes=groups.nbytes, read=lambda: groups)
            )
        return {**nested(place(reads).items()), "embed": target_params["embed"]}


def read_groups(tensors: Tensors, spec: AssistantSpec) -> HostArray:
    """Return i32[V], each token's group, from the file's token order, group after group.

    In:  token_ordering [2 0 3 1], two groups
    Out: [0 1 0 1]
    """
    order, size = tensors.read(ORDER), spec.layer.vocab_size
    if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(size)):
        raise CheckpointError(
            f"{tensors.path}: {ORDER} is no order of the {size} tokens; expected each once"
        )
    groups = np.empty(size, np.int32)
    groups[order] = np.arange(size, dtype=np.int32) // (size // spec.num_groups)
    return groups
