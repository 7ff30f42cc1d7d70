"""Operands of probes: their codes, their places in shared and tensor memory, and the products, by NumPy.

The values are few powers of two, so that sums are exact in whatever width the hardware adds.
"""

import dataclasses

import numpy as np

from tests.emulator.blackwell.probe import IMAGE
from tests.emulator.tensor_core import layouts

LANES, QUADRANT = 128, 32
_VALUES = np.array([0.0, 1.0, -1.0, 2.0, -2.0])
_SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B/32B": 128}


@dataclasses.dataclass(frozen=True)
class Form:
    """A block-scaled kind.

    Attributes:
      kind: without "kind::".
      vector: scale vector size of the opcode.
      block: elements of a scale factor.
      scale: type of the scale factors.
      element: type of A and B.
      k: extent.
    """

    kind: str
    vector: str
    block: int
    scale: str
    element: str
    k: int

    @property
    def factors(self) -> int:
        return self.k // self.block

    @property
    def dense(self) -> bool:
        return self.kind != "mxf8f6f4"

    def descriptor(self, m: int, n: int, ids: tuple[int, int] = (0, 0)) -> int:
        code = 1 if self.dense else layouts.FORMAT_FIELDS[self.element]
        return layouts.scaled_descriptor(m, n, code, code, scale=self.scale, ids=ids, k96=int(self.k == 96))


NVF4 = Form("mxf4nvf4", "block16", 16, "ue4m3", "e2m1", 64)
NVF4_UE8M0 = Form("mxf4nvf4", "block16", 16, "ue8m0", "e2m1", 64)
NVF4_BLOCK32 = Form("mxf4nvf4", "block32", 32, "ue8m0", "e2m1", 64)
MXF4 = Form("mxf4", "block32", 32, "ue8m0", "e2m1", 64)
MXF8 = Form("mxf8f6f4", "block32", 32, "ue8m0", "e4m3", 32)


def codes_of(values: np.ndarray, element: str) -> np.ndarray:
    """Codes of exact values."""
    kind = np.dtype(layouts.TYPES[element])
    return values.astype(kind).view(f"u{kind.itemsize}")


def random_codes(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> np.ndarray:
    """Codes of 0, 1, 2 and their negatives."""
    return codes_of(rng.choice(_VALUES if element != "u8" else np.abs(_VALUES), shape), element)


def power(exponents: np.ndarray | int, scale: str) -> np.ndarray:
    """Codes of powers of two as scale factors."""
    exponents = np.asarray(exponents)
    return ((exponents + 7) << 3 if scale == "ue4m3" else exponents + 127).astype(np.uint8)


def scale_values(codes: np.ndarray, scale: str) -> np.ndarray:
    return codes.view(layouts.SCALES[scale]).astype(np.float64)


def product(a: np.ndarray, b: np.ndarray, sfa: np.ndarray | None = None, sfb: np.ndarray | None = None) -> np.ndarray:
    """A B^T in float64, of values (M, K) and (N, K), and of the scale factors (M, factors) and (N, factors)."""
    if sfa is not None:
        a = a * np.repeat(sfa, a.shape[1] // sfa.shape[1], axis=1)
    if sfb is not None:
        b = b * np.repeat(sfb, b.shape[1] // sfb.shape[1], axis=1)
    return a @ b.T


def words_of(values: np.ndarray) -> np.ndarray:
    """Accumulators (rows, columns) as (columns, rows) float32."""
    return np.ascontiguousarray(values.T.astype(np.float32))


class Image:
    """What a probe puts into shared memory from IMAGE on; addresses count from the start of shared memory."""

    def __init__(self) -> None:
        self._bytes, self._end = np.full(200 << 10, 0xA5, np.uint8), 0
        self._taken = np.zeros(len(self._bytes), bool)

    @property
    def data(self) -> np.ndarray:
        """(bytes,) uint8, a multiple of 512 of them."""
        return self._bytes[: -(-self._end // 512) * 512].copy()

    @property
    def size(self) -> int:
        return -(-self._end // 512) * 512

    def put(self, addresses: np.ndarray, values: np.ndarray) -> None:
        assert addresses.shape == values.shape
        assert len(np.unique(addresses)) == addresses.size and not self._taken[addresses - IMAGE].any()
        self._taken[addresses - IMAGE] = True
        self._bytes[addresses - IMAGE] = values
        self._end = max(self._end, int(addresses.max()) + 1 - IMAGE)

    def k_major(
        self,
        codes: np.ndarray,
        element: str,
        mode: str,
        start: int,
        *,
        dense: bool = False,
        leading: int = 0,
        stride: int = 0,
    ) -> int:
        """Put an operand of (rows, K) codes; returns its descriptor. Strides are the smallest unless given."""
        raw = layouts.packed(codes, element, dense)
        stride = stride or 8 * _SPAN[mode]
        if mode == "none":
            leading = leading or stride * -(-len(codes) // 8)
        self.put(layouts.k_major(*raw.shape, mode, start, leading, stride), raw)
        return layouts.matrix_descriptor(mode, start, leading, stride)

    def mn_major(self, codes: np.ndarray, element: str, mode: str, start: int) -> int:
        """Put an operand of (rows, K) codes with the rows contiguous; returns its descriptor."""
        raw = layouts.packed(np.ascontiguousarray(codes.T), element)
        rows, k = codes.shape
        span, period = _SPAN[mode], 4 if mode == "128B/32B" else 8
        # Groups of K are neighbours; the next chunk of M or N follows the last of them.
        near, far = span * period, span * k
        leading, stride = (near, far) if mode == "none" else (far, near)
        self.put(layouts.mn_major(rows, k, raw.shape[1] // rows, mode, start, leading, stride), raw)
        return layouts.matrix_descriptor(mode, start, leading, stride)


class Tensor:
    """What a probe puts into tensor memory, by column and lane."""

    def __init__(self, columns: int, fill: int = 0) -> None:
        self.words = np.full((columns, LANES), fill, np.uint32)

    def operand(
        self, codes: np.ndarray, element: str, column: int, lanes: np.ndarray | None = None, dense: bool = False
    ) -> None:
        """Put A: (rows, K) codes, K along the columns; 4- and 6-bit elements in bytes of their own unless dense."""
        if element == "e2m1" and not dense:
            raw = (codes.astype(np.uint8) << 2).astype(np.uint8)
        elif element in ("e2m3", "e3m2"):
            raw = codes.astype(np.uint8)
        else:
            raw = layouts.packed(codes, element, dense)
        words = np.ascontiguousarray(raw).view(np.uint32).T
        lanes = np.arange(len(codes)) if lanes is None else lanes
        self.words[column : column + len(words), lanes] = words

    def scales(self, codes: np.ndarray, column: int, first: int = 0, quadrants: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Put (rows, factors) scale factors into some of the lane quadrants."""
        layouts.place_scales(self.words, column, codes, first, quadrants)


def ones(rows: int, k: int, element: str) -> np.ndarray:
    return codes_of(np.ones((rows, k)), element)
