"""Reference arrays written by another program."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)
