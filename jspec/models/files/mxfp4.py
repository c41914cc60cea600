"""mxfp4 on the host: blocks of 32 four-bit floats (e2m1) that share one power of two (e8m0). A byte
contains two values, low nibble first; a scale s means 2 ** (s - 127)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jspec.device.mxfp4 import GROUPS, MOST_SCALE, MXFP4Weight, pack, pack_scales
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


class Packed(NamedTuple):
    """Columns of one matrix, as device/mxfp4.py stores them."""

    codes: HostArray  # u16[S, N, 64]
    scales: HostArray  # u32[S, 2 * N]

    def put(self, weight: MXFP4Weight, rows: slice, columns: slice) -> None:
        """Copy `rows` of these columns to `columns` of a weight. Both are whole blocks of 32."""
        weight.codes[:, columns] = self.codes[:, rows]
        of_scales, of_rows = (
            slice(GROUPS * each.start, GROUPS * each.stop) for each in (columns, rows)
        )
        weight.scales[:, of_scales] = self.scales[:, of_rows]


def packed(blocks: HostArray, scales: HostArray, *, name: str) -> Packed:
    """Pack u8 blocks [N, C, 16] and scales [N, C]. Raises CheckpointError for NaN (255) and for
    scales above 2 ** 1, which kernels cannot apply in one multiplication."""
    _check_scales(scales, name)
    if scales.max() > MOST_SCALE:
        raise CheckpointError(
            f"{name} has a scale of 2 ** {scales.max() - 127}; expected at most 2 ** "
            f"{MOST_SCALE - 127} where mxfp4 stays packed (--quantization none unpacks it)"
        )
    nibbles = np.stack((blocks & 15, blocks >> 4), axis=-1)
    return Packed(pack(nibbles.reshape(blocks.shape[0], -1)), pack_scales(scales))


def _check_scales(scales: HostArray, name: str) -> None:
    if (scales == _NOT_A_NUMBER).any():
        raise CheckpointError(f"{name} has a scale of 255, which is no number; expected 0 to 254")
