"""Tensor maps as cuTensorMapEncodeTiled takes them, with the rules that it enforces (cuda.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import DescriptorFaultError

_MAX_RANK = 5
_MAX_BOX = 256
_MAX_DIM = 1 << 32
_MAX_STRIDE = 1 << 40
_MAX_ELEMENT_STRIDE = 8
_PADDED_BOX = 128  # elements of the innermost box dimension of the padded types


@dataclass(frozen=True)
class Element:
    """A CUtensorMapDataType.

    Attributes:
      name: of the type.
      bits: of one element in global memory.
      group_bytes: of 16 packed elements in global memory, where shared memory has 16 bytes for them; otherwise 0.
      is_float: a floating-point type of whole bytes, for which out-of-bounds elements can be NaN.
    """

    name: str
    bits: int
    group_bytes: int = 0
    is_float: bool = False

    @property
    def padded(self) -> bool:
        """Whether 16 elements take 16 bytes of shared memory and fewer of global memory."""
        return self.group_bytes != 0

    def bytes(self, count: int) -> int:
        """Bytes of `count` elements in global memory."""
        return count * self.bits // 8

    def shared_bytes(self, count: int) -> int:
        """Bytes of `count` elements in shared memory."""
        return count if self.padded else self.bytes(count)


# In the order of CUtensorMapDataType.
_ELEMENTS = (
    Element("u8", 8),
    Element("u16", 16),
    Element("u32", 32),
    Element("s32", 32),
    Element("u64", 64),
    Element("s64", 64),
    Element("f16", 16, is_float=True),
    Element("f32", 32, is_float=True),
    Element("f64", 64, is_float=True),
    Element("bf16", 16, is_float=True),
    Element("f32_ftz", 32, is_float=True),
    Element("tf32", 32, is_float=True),
    Element("tf32_ftz", 32, is_float=True),
    Element("fp4_align8", 4),
    Element("fp4_align16", 4, group_bytes=8),
    Element("fp6_align16", 6, group_bytes=12),
)
ELEMENTS = {element.name: element for element in _ELEMENTS}


@dataclass(frozen=True)
class Swizzle:
    """A CUtensorMapSwizzle.

    Attributes:
      name: of the mode.
      span: bytes within which chunks are permuted, 0 for none.
      atom: bytes that stay together.
      flip: whether the halves of each 16 bytes are exchanged in every other 128 bytes.
    """

    name: str
    span: int
    atom: int = 16
    flip: bool = False


# In the order of CUtensorMapSwizzle.
_SWIZZLES = (
    Swizzle("none", 0),
    Swizzle("32B", 32),
    Swizzle("64B", 64),
    Swizzle("128B", 128),
    Swizzle("128B_atom_32B", 128, 32),
    Swizzle("128B_atom_32B_flip_8B", 128, 32, True),
    Swizzle("128B_atom_64B", 128, 64),
)
SWIZZLES = {swizzle.name: swizzle for swizzle in _SWIZZLES}
_PADDED_SWIZZLES = {
    "fp4_align16": ("none", "128B", "128B_atom_32B"),
    "fp6_align16": ("none", "128B", "128B_atom_32B", "128B_atom_64B"),
}

_INTERLEAVES = ("none", "16B", "32B")
_OUT_OF_BOUNDS = ("zero", "nan")
_L2_PROMOTIONS = 4

_DTYPES = {
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int32": "s32",
    "uint64": "u64",
    "int64": "s64",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "int8": "u8",
    "int16": "u16",
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
    "float8_e8m0fnu": "u8",
}


class TensorMap:
    """A tiled tensor map.

    Attributes:
      array: that it points into.
      dims: in elements, innermost first.
      strides: in bytes, of dimensions 1 and up.
      box: elements that are traversed in each dimension.
      counts: elements that are moved in each dimension: box over element stride, rounded up.
      element: its type.
      swizzle: the permutation of shared memory.
      fill_nan: whether out-of-bounds elements are NaN instead of 0.
      element_strides: steps between the elements that are moved.
      offset_bytes: from the start of the array to the first element.
      address: of the first element in global memory, once bound.
      tile_bytes: that a load completes at an mbarrier: elements out of bounds count, padding does not.
      shared_chunks: the 16-byte chunks of a tile by its byte offset in shared memory, once used.
    """

    def __init__(
        self,
        array: np.ndarray,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element: str,
        swizzle: str = "none",
        interleave: str = "none",
        out_of_bounds: str = "zero",
        element_strides: Sequence[int] | None = None,
        offset_bytes: int = 0,
    ) -> None:
        _rule(element in ELEMENTS, f"tensorDataType must be one of {', '.join(ELEMENTS)}, not {element!r}")
        _rule(swizzle in SWIZZLES, f"swizzle must be one of {', '.join(SWIZZLES)}, not {swizzle!r}")
        _rule(interleave in _INTERLEAVES, f"interleave must be one of {', '.join(_INTERLEAVES)}, not {interleave!r}")
        _rule(out_of_bounds in _OUT_OF_BOUNDS, f"oobFill must be zero or nan, not {out_of_bounds!r}")
        self.array, self.offset_bytes = array, offset_bytes
        self.dims, self.strides, self.box = (tuple(int(x) for x in xs) for xs in (dims, strides, box))
        self.element, self.swizzle = ELEMENTS[element], SWIZZLES[swizzle]
        self.fill_nan = out_of_bounds == "nan"
        self.element_strides = tuple(element_strides) if element_strides is not None else (1,) * len(self.dims)
        self.address: int | None = None
        self._check_shape(interleave)
        self._check_element()
        self._check_swizzle(interleave)
        if interleave != "none":
            raise NotImplementedError(f"tensor maps with interleave {interleave} (NC/8HWC8 layouts) are not modelled")
        steps = (1, *self.element_strides[1:])
        self.counts = tuple(-(-n // step) for n, step in zip(self.box, steps, strict=True))
        self.tile_bytes = self.element.bytes(int(np.prod(self.counts)))
        self.shared_chunks: dict[int, np.ndarray] = {}

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    def bind(self, address: int) -> None:
        """Say where the array is in global memory."""
        self.address = address + self.offset_bytes
        alignment = 32 if self.element.padded else 16
        _rule(self.address % alignment == 0, f"globalAddress must be a multiple of {alignment} bytes")

    @classmethod
    def for_array(
        cls,
        array: np.ndarray,
        box: Sequence[int],
        swizzle: str = "none",
        element: str | None = None,
        out_of_bounds: str = "zero",
    ) -> TensorMap:
        """The map of a whole C-contiguous array.

        Args:
          array: its last axis is dimension 0.
          box: elements, innermost first.
          swizzle: as for the class.
          element: by the array's type if None; "fp4_align8", "fp4_align16" and "fp6_align16" want packed uint8.
          out_of_bounds: as for the class.
        """
        if not array.flags.c_contiguous:
            raise ValueError("the array must be C-contiguous")
        name = element or _DTYPES.get(array.dtype.name)
        if name not in ELEMENTS:
            raise ValueError(f"name the element type of an array of {array.dtype}")
        row_bytes = array.shape[-1] * array.itemsize
        dims = (row_bytes * 8 // ELEMENTS[name].bits, *array.shape[-2::-1])
        strides = array.strides[-2::-1]
        return cls(array, dims, strides, box, name, swizzle, out_of_bounds=out_of_bounds)

    @classmethod
    def from_encode_arguments(
        cls,
        array: np.ndarray,
        data_type: int,
        rank: int,
        global_dim: Sequence[int],
        global_strides: Sequence[int],
        box_dim: Sequence[int],
        element_strides: Sequence[int],
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        oob_fill: int,
        offset_bytes: int = 0,
    ) -> TensorMap:
        """The map of a call of cuTensorMapEncodeTiled, by its arguments with the enum values of cuda.h.

        `array` and `offset_bytes` stand for globalAddress; arrays longer than the rank asks for are cut.
        """
        _rule(0 <= data_type < len(_ELEMENTS), f"tensorDataType {data_type} is not a CUtensorMapDataType")
        _rule(0 <= interleave < len(_INTERLEAVES), f"interleave {interleave} is not a CUtensorMapInterleave")
        _rule(0 <= swizzle < len(_SWIZZLES), f"swizzle {swizzle} is not a CUtensorMapSwizzle")
        _rule(0 <= l2_promotion < _L2_PROMOTIONS, f"l2Promotion {l2_promotion} is not a CUtensorMapL2promotion")
        _rule(0 <= oob_fill < len(_OUT_OF_BOUNDS), f"oobFill {oob_fill} is not a CUtensorMapFloatOOBfill")
        return cls(
            array,
            tuple(global_dim)[:rank],
            tuple(global_strides)[: rank - 1],
            tuple(box_dim)[:rank],
            _ELEMENTS[data_type].name,
            _SWIZZLES[swizzle].name,
            _INTERLEAVES[interleave],
            _OUT_OF_BOUNDS[oob_fill],
            tuple(element_strides)[:rank],
            offset_bytes,
        )

    @classmethod
    def im2col(cls, *arguments, **options) -> TensorMap:
        """Not modelled."""
        raise NotImplementedError("im2col tensor maps are not modelled: no attention or GEMM kernel uses them")

    def _check_shape(self, interleave: str) -> None:
        rank, sparse = self.rank, interleave == "32B" or self.element.padded
        _rule(1 <= rank <= _MAX_RANK, f"tensorRank must be 1 to {_MAX_RANK}, not {rank}")
        _rule(interleave == "none" or rank >= 3, "tensorRank must be at least 3 with an interleaved layout")
        for name, values, n in (
            ("globalStrides", self.strides, rank - 1),
            ("boxDim", self.box, rank),
            ("elementStrides", self.element_strides, rank),
        ):
            _rule(len(values) == n, f"{name} must have {n} entries for rank {rank}, not {len(values)}")
        alignment = 32 if sparse else 16
        _rule(self.offset_bytes % alignment == 0, f"globalAddress must be a multiple of {alignment} bytes")
        for i, dim in enumerate(self.dims):
            _rule(1 <= dim <= _MAX_DIM, f"globalDim[{i}] must be 1 to 2**32, not {dim}")
        for i, stride in enumerate(self.strides):
            _rule(stride % alignment == 0, f"globalStrides[{i}] must be a multiple of {alignment} bytes, not {stride}")
            _rule(0 <= stride < _MAX_STRIDE, f"globalStrides[{i}] must be less than 2**40, not {stride}")
        for i, n in enumerate(self.box):
            _rule(1 <= n <= _MAX_BOX, f"boxDim[{i}] must be 1 to {_MAX_BOX}, not {n}")
        for i, step in enumerate(self.element_strides):
            _rule(
                1 <= step <= _MAX_ELEMENT_STRIDE, f"elementStrides[{i}] must be 1 to {_MAX_ELEMENT_STRIDE}, not {step}"
            )
        inner = self.element.bytes(self.box[0])
        exact = self.box[0] * self.element.bits % 128 == 0
        _rule(interleave != "none" or exact, f"boxDim[0] must be a multiple of 16 bytes, not {inner}")

    def _check_element(self) -> None:
        element = self.element
        if element.padded:
            _rule(
                self.dims[0] % 128 == 0, f"globalDim[0] of {element.name} must be a multiple of 128, not {self.dims[0]}"
            )
            _rule(self.box[0] == _PADDED_BOX, f"boxDim[0] of {element.name} must be {_PADDED_BOX}, not {self.box[0]}")
        elif element.bits == 4:
            _rule(self.dims[0] % 2 == 0, f"globalDim[0] of {element.name} must be a multiple of 2, not {self.dims[0]}")
        _rule(not self.fill_nan or element.is_float, f"oobFill nan needs a floating-point type, not {element.name}")

    def _check_swizzle(self, interleave: str) -> None:
        swizzle, element = self.swizzle, self.element
        if interleave == "none" and swizzle.span:
            inner = element.bytes(self.box[0])
            _rule(
                inner <= swizzle.span,
                f"boxDim[0] must be at most {swizzle.span} bytes with swizzle {swizzle.name}, not {inner}",
            )
        _rule(interleave != "32B" or swizzle.name == "32B", "swizzle must be 32B with interleave 32B")
        _rule(interleave == "none" or element.name != "fp6_align16", "interleave must be none for fp6_align16")
        if element.padded:
            modes = _PADDED_SWIZZLES[element.name]
            _rule(
                swizzle.name in modes,
                f"swizzle of {element.name} must be one of {', '.join(modes)}, not {swizzle.name}",
            )


def _rule(holds: bool, text: str) -> None:
    if not holds:
        raise DescriptorFaultError(f"cuTensorMapEncodeTiled: {text}")
