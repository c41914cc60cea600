"""Checks of the degrees of parallelism, as the arguments give them."""

from __future__ import annotations

from typing import Any

from jspec.errors import ConfigError


def check_parallel(args: Any) -> None:
    """Raise ConfigError for `EngineArgs` whose degrees do not divide each other."""
    if args.tp_size % args.ep_size:
        raise ConfigError(
            f"ep_size is {args.ep_size}; expected a divisor of tp_size {args.tp_size}, whose "
            "devices it groups"
        )
    if args.enable_dp_attention and args.tp_size % args.dp_size:
        raise ConfigError(
            f"tp_size is {args.tp_size}; expected a multiple of dp_size {args.dp_size} with "
            "enable_dp_attention, which splits tp_size devices into dp_size data ranks"
        )
    if args.ep_size % args.expert_ranks:
        raise ConfigError(
            f"ep_size is {args.ep_size}; expected 1 or a multiple of dp_size {args.dp_size} "
            "with enable_dp_attention, since its data ranks share the experts"
        )
    for name, unplaced in (("ep_num_redundant_experts", 0), ("init_expert_location", "trivial")):
        value = getattr(args, name)
        if value != unplaced and args.ep_size == 1:
            raise ConfigError(
                f"{name} is {value!r}, but ep_size is 1; expected {unplaced!r}, or experts that "
                "several groups of devices share"
            )
