"""A launch as it was recorded: the kernel, its shape, and the bytes of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..front import Struct
from ..tensor_map import TensorMap

# Array i of a recording is at (_FIRST_SLOT + i) << 32: addresses of 47 bits, like those of the driver, that no
# size or stride of a parameter is mistaken for.
_FIRST_SLOT = 0x5A5A
_SLOTS = 256


@dataclass(frozen=True)
class Place:
    """Where an address points: an array by its number, and the bytes behind its start."""

    array: int
    offset: int


def address_of(array: int) -> int:
    """The address that stands for an array while its launch is recorded."""
    if not 0 <= array < _SLOTS:
        raise ValueError(f"a recording has at most {_SLOTS} arrays")
    return (_FIRST_SLOT + array) << 32


def place_of(address: int) -> Place | None:
    """What an address stands for, or None when it stands for nothing."""
    array = (address >> 32) - _FIRST_SLOT
    return Place(array, address & 0xFFFFFFFF) if 0 <= array < _SLOTS else None


@dataclass(frozen=True)
class Encoding:
    """The arguments of cuTensorMapEncodeTiled, with the enum values of cuda.h.

    Attributes:
      place: for globalAddress.
      data_type: a CUtensorMapDataType.
      dims: in elements, innermost first.
      strides: in bytes, of dimensions 1 and up.
      box: in elements.
      element_strides: one for each dimension.
      interleave: a CUtensorMapInterleave.
      swizzle: a CUtensorMapSwizzle.
      l2_promotion: a CUtensorMapL2promotion.
      fill: a CUtensorMapFloatOOBfill.
    """

    place: Place
    data_type: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    fill: int = 0

    def tensor_map(self, array: np.ndarray) -> TensorMap:
        """The tensor map of an array."""
        return TensorMap.from_encode_arguments(
            array,
            self.data_type,
            len(self.dims),
            self.dims,
            self.strides,
            self.box,
            self.element_strides,
            self.interleave,
            self.swizzle,
            self.l2_promotion,
            self.fill,
            offset_bytes=self.place.offset,
        )


@dataclass(frozen=True)
class Parameter:
    """One parameter of a recorded launch.

    Attributes:
      bytes: as passed.
      pointers: byte offset of each 8-byte address, and where it points.
      tensor_maps: byte offset of each 128-byte tensor map, and how it was encoded.
    """

    bytes: bytes
    pointers: Mapping[int, Place] = field(default_factory=dict)
    tensor_maps: Mapping[int, Encoding] = field(default_factory=dict)

    def argument(self, arrays: Sequence[Any]) -> Any:
        """What `emulate` takes for it, given the arrays (or Outputs) by number."""
        pieces: dict[int, Any] = {}
        for offset, place in self.pointers.items():
            if place.offset:
                raise NotImplementedError(f"the pointer at byte {offset} points {place.offset} bytes into its array")
            pieces[offset] = arrays[place.array]
        for offset, encoding in self.tensor_maps.items():
            array = arrays[encoding.place.array]
            pieces[offset] = encoding.tensor_map(getattr(array, "array", array))
        if not pieces:
            return self.bytes
        if 0 in pieces and len(self.bytes) == (128 if 0 in self.tensor_maps else 8):
            return pieces[0]
        return Struct(self.bytes, pieces)


@dataclass(frozen=True)
class RecordedLaunch:
    """Everything that a launch gave to the driver.

    Attributes:
      ptx: the module.
      entry: the kernel in it.
      parameters: in order of declaration.
      grid: in CTAs.
      block: in threads.
      cluster: in CTAs.
      shared_bytes: of dynamic shared memory.
    """

    ptx: str
    entry: str
    parameters: tuple[Parameter, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int

    def arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments of `emulate`, given the arrays (or Outputs) in the order of their numbers."""
        return [parameter.argument(arrays) for parameter in self.parameters]

    @property
    def array_numbers(self) -> list[int]:
        """The arrays' numbers in the order in which the arguments name them, which is that of `Result.arrays`."""
        places: dict[int, None] = {}
        for parameter in self.parameters:
            places |= {place.array: None for place in parameter.pointers.values()}
            places |= {encoding.place.array: None for encoding in parameter.tensor_maps.values()}
        return list(places)

    def options(self) -> dict[str, Any]:
        """The keywords of `emulate`."""
        return {
            "grid": self.grid,
            "block": self.block,
            "cluster": self.cluster,
            "shared_bytes": self.shared_bytes,
            "entry": self.entry,
        }
