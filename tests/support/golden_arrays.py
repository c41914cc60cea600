"""Arrays that another program wrote, as the tests compare with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, which is closed again."""
    with np.load(path) as file:
        return dict(file)
