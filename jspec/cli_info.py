"""`jspec info [DIR]`: what a model is and what serving it takes, without reading its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jspec.cli_terminal import ENGINE_GROUPS
from jspec.core.engine_args import EngineArgs
from jspec.core.model_spec import LayerSpec, ModelSpec, MoESpec
from jspec.server.flags import FlagParser, add_flags, named_model, parse_flags

if TYPE_CHECKING:
    from jspec.models.params import ParamTable

GIB = 2**30
KIB = 2**10
Fact = tuple[str, str]


def run_info(argv: Sequence[str]) -> int:
    """Exit status 0 for a model, or a model and its draft, that can be served."""
    parser = FlagParser(
        prog="jspec info",
        allow_abbrev=False,
        description="What a model is, and what serving it takes: configs are read and checked "
        "against the tensors' names and shapes, no weight is. With the flags of jspec serve for a "
        "draft, that too. DIR is --model-path; unset: the bundled pair.",
    )
    add_flags(parser, groups=ENGINE_GROUPS)
    args = parse_flags(parser, named_model(argv))[1].engine_args
    facts = list(facts_of(args))
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        print(f"{name:<{width}}  {text}")
    return 0


def facts_of(args: EngineArgs) -> Iterator[Fact]:
    """Names and values. Raises ConfigError and CheckpointError for what cannot be served."""
    from jspec.engine.loading import check_divisible, resolve_paths
    from jspec.models.checkpoint import check_target, load_model_spec, load_sampling_defaults
    from jspec.models.registry import FAMILIES, table_of
    from jspec.speculative.registry import DRAFTERS
    from jspec.speculative.source import DraftRequest

    paths = resolve_paths(args)
    spec = load_model_spec(paths.target)
    check_divisible(spec, shards=args.tp_size)
    yield "model", str(paths.target)
    yield from _shape(spec)
    if args.load_format != "dummy":
        check_target(paths.target, spec, FAMILIES)
        yield "on disk", _stored(paths.target)
    table = table_of(spec)
    yield from _sizes("weights held", table, shards=args.tp_size)
    yield "KV a token", _kv_text(spec)
    yield from _texts(args, paths.tokenizer)
    defaults = load_sampling_defaults(paths.target)
    yield "sampling", ", ".join(f"{k} {v:g}" for k, v in defaults.items()) or "temperature 1"
    request = DraftRequest(
        args=args,
        path=paths.draft,
        target=spec,
        target_path=paths.target,
        tokenizer=paths.tokenizer,
        shards=args.tp_size,
        families=FAMILIES,
    )
    source = DRAFTERS[args.algorithm](request)
    shape = args.speculative
    yield (
        "drafts",
        (source.algorithm or args.algorithm).value
        + (f" {shape.num_steps}/{shape.topk}/{shape.num_draft_tokens}" if shape.num_steps else ""),
    )
    if paths.draft is not None:
        yield "draft", str(paths.draft)
        yield "draft on disk", _stored(paths.draft)


def _shape(spec: ModelSpec) -> Iterator[Fact]:
    yield "family", spec.family
    kinds = Counter(map(_layer, spec.layers))
    yield "layers", "; ".join(f"{count} of {kind}" for kind, count in kinds.items())
    tied = ", embedding and head are one" if spec.tie_word_embeddings else ""
    yield "hidden, vocabulary", f"{spec.hidden_size}, {spec.vocab_size}{tied}"
    yield "context", f"{spec.max_position} tokens"


def _layer(layer: LayerSpec) -> str:
    attention, ffn = layer.attention, layer.ffn
    window = "" if attention.window is None else f", window {attention.window}"
    size = (
        f"{ffn.top_k} of {ffn.num_experts} experts"
        if isinstance(ffn, MoESpec)
        else f"MLP {ffn.inner}"
    )
    heads = f"{attention.num_heads}/{attention.num_kv_heads} heads of {attention.head_dim}"
    return f"{heads}{window}, {size}"


def _stored(path: Path) -> str:
    """Tensors and their types, as the files' headers tell."""
    from jspec.models.hf_weights import open_tensors

    with open_tensors(path) as tensors:
        names = list(tensors.sources)
        types = Counter(tensors.dtype(name) for name in names)
    listed = ", ".join(f"{count} {kind}" for kind, count in types.most_common())
    return f"{len(names)} tensors ({listed})"


def _sizes(name: str, table: ParamTable, *, shards: int) -> Iterator[Fact]:
    count = sum(math.prod(spec.shape) for spec in table)
    each = f", {2 * count / shards / GIB:.2f} GiB a device" if shards > 1 else ""
    yield name, f"{count:,} numbers: {2 * count / GIB:.2f} GiB in bfloat16{each}"


def _kv_text(spec: ModelSpec) -> str:
    """K and V of one token in bfloat16, all layers."""
    width = sum(
        layer.attention.num_kv_heads * (layer.attention.head_dim + layer.attention.value_dim)
        for layer in spec.layers
    )
    windows = [layer for layer in spec.layers if layer.attention.window is not None]
    kept = f"; {len(windows)} layers keep their window only" if windows else ""
    return f"{2 * width / KIB:g} KiB in bfloat16{kept}"


def _texts(args: EngineArgs, directory: Path) -> Iterator[Fact]:
    from jspec.text.chat_template import ChatTemplate
    from jspec.text.tokenizer import Tokenizer

    if not args.skip_tokenizer_init:
        tokenizer = Tokenizer.from_directory(directory)
        ends = ", ".join(str(tokenizer.id_to_token(i)) for i in tokenizer.eos_token_ids)
        yield "tokenizer", f"{tokenizer.vocab_size} tokens, ends with {ends or 'none'}"
    template = ChatTemplate.find(directory, named=args.chat_template)
    shows = "" if template is None else ", with tools" * ("tools" in template.source)
    yield "chat template", "none" if template is None else f"{Path(template.where).name}{shows}"
