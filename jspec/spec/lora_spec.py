"""The space for LoRA adapters in a target's programs: their number, rank and modules."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LORAS = 8
ALL_MODULES = "all"  # SGLang's word for every module that can be adapted


@dataclass(frozen=True, slots=True)
class LoRASpec:
    """Adapters (Hu et al., 2021): a product x W becomes x W + x A B, with each token's A and B.

    The weights are stacked: A [in, parts * width] and B [width, out] for each part of a fused
    product. Adapter `slot`, from 1, has the columns (slot - 1) * rank to slot * rank; slot 0 is no
    adapter.
    """

    num_loras: int
    rank: int  # the largest; smaller ones are padded with zeros
    modules: tuple[str, ...]  # last parts of the adapted modules' names, such as q_proj

    @property
    def width(self) -> int:
        return self.num_loras * self.rank
