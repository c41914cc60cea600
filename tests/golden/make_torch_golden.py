"""Write tests/golden/torch: tiny files as torch.save makes them; the tests read only those.

Run by hand where torch is installed:

    python tests/golden/make_torch_golden.py
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

OUT = Path(__file__).parent / "torch"


def main() -> None:
    OUT.mkdir(exist_ok=True)
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 4
    weights = OrderedDict(
        (
            ("f16", numbers.half()),
            ("bf16", numbers.bfloat16()),
            ("f32", torch.nn.Parameter(numbers)),
            ("f64", numbers.double()),
            ("rows", numbers[1:3]),  # part of the storage of f32
            ("i64", torch.arange(5) * 7 - 3),
            ("bool", torch.arange(6) % 2 == 0),
            ("scalar", torch.tensor(2.5)),
        )
    )
    torch.save(weights, OUT / "pytorch_model.bin")
    torch.save({"state_dict": weights, "epoch": 3}, OUT / "checkpoint.bin")
    torch.save({"turned": numbers.T}, OUT / "turned.bin")
    torch.save(torch.nn.Linear(2, 2), OUT / "module.bin")
    torch.save(weights, OUT / "old.bin", _use_new_zipfile_serialization=False)
    torch.save(torch.tensor([300, 5, 17, 4]), OUT / "map.pt")
    torch.save([300, 5, 17, 4], OUT / "list.pt")


if __name__ == "__main__":
    main()
