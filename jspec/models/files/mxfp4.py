"""mxfp4 on the host: blocks of 32 four-bit floats (e2m1) that share one power of two (e8m0). A byte
contains two values, low nibble first; a scale s means 2 ** (s - 127)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jspec.device.mxfp4 import pack, padded_scales
from jspec.errors import CheckpointError
from jspec.models.files.tensor_files import HostArray

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 8 to 15 are the negatives
_NOT_A_NUMBER = 255


def pair_table(dtype: npt.DTypeLike) -> HostArray:
    """Return [65536, 2] in `dtype`: entry 256 s + b has the two values of byte b with scale s."""
    values = np.array((*E2M1, *(-x for x in E2M1)))
    byte = np.arange(256)
    pairs = np.stack((values[byte & 15], values[byte >> 4]), axis=-1)
    table = np.ldexp(pairs, np.arange(256)[:, None, None] - 127)
    with np.errstate(over="ignore"):
        return table.reshape(-1, 2).astype(dtype)


def unpack(blocks: HostArray, scales: HostArray, table: HostArray, *, name: str) -> HostArray:
    """Unpack u8 blocks [R, C, 16] and scales [R, C] to [R, 32 C]. NaN raises CheckpointError."""
    _check_scales(scales, name)
    rows = (scales.astype(np.intp)[..., None] << 8) | blocks
    return table[rows].reshape(scales.shape[0], -1)


def codes_of(blocks: HostArray) -> HostArray:
    """Convert u8 blocks [R, C, 16] to the kernels' codes, u16[R, 32 G] (device/mxfp4.py)."""
    nibbles = np.stack((blocks & 15, blocks >> 4), axis=-1)
    return pack(nibbles.reshape(blocks.shape[0], -1))


def scales_of(scales: HostArray, *, name: str) -> HostArray:
    """Convert u8 scales [R, C] to the kernels' [R, 4 G]. Raises CheckpointError for NaN (255)."""
    _check_scales(scales, name)
    return padded_scales(scales)


def _check_scales(scales: HostArray, name: str) -> None:
    if (scales == _NOT_A_NUMBER).any():
        raise CheckpointError(f"{name} has a scale of 255, which is no number; expected 0 to 254")
