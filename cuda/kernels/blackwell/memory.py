"""Shared memory of the forward: rings of key and value tiles with their scale factors, query tiles, factors."""

import dataclasses

import cutlass
from kernels import ring, shared, tile
from kernels.blackwell import barriers
from kernels.blackwell.tensor_memory import STAGES
from kernels.words import Float32, Uint8, view

Int32, Pointer = cutlass.Int32, cutlass.Pointer

_ALIGNMENT = 1024  # of swizzled rows; pages fill whole units of it
_PAGE_BYTES = 512
_RING_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of a tile.

    Attributes:
      row: Of a query or key row.
      query_pages: Scale factors of query or key rows.
      value_row: Keys of one channel.
      value_pages: Scale factors of a value tile; 0 for E4M3.
      channels: Rows of a value tile.
    """

    row: int
    query_pages: int
    value_row: int
    value_pages: int
    channels: int

    @property
    def query(self) -> int:
        """Rows of a query or key tile."""
        return tile.ROWS * self.row

    @property
    def value(self) -> int:
        """Of a value tile."""
        return self.channels * self.value_row


def sizes_of(head_size: int, is_mxfp4: bool) -> Sizes:
    """Sizes for a head size and a format of the values."""
    pages = head_size // 64 * _PAGE_BYTES
    if is_mxfp4:
        return Sizes(head_size // 2, pages, tile.ROWS // 2, _PAGE_BYTES, head_size)
    return Sizes(head_size // 2, pages, tile.ROWS, 0, head_size)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where everything is.

    Attributes:
      query: Query tiles, one a stage.
      keys: Ring of key tiles.
      values: Ring of value tiles.
      query_pages: Scale factors of the query tiles.
      key_pages: Of the key tiles of the ring.
      value_pages: Of the value tiles of the ring; None for E4M3.
      factors: A number for each row of each stage, from softmax to correction.
      barriers: See :mod:`kernels.blackwell.barriers`.
      tensor_address: Where the allocation of tensor memory leaves its address.
      sizes: Of the tiles.
    """

    query: Pointer
    keys: ring.Ring
    values: ring.Ring
    query_pages: Pointer
    key_pages: Pointer
    value_pages: Pointer | None
    factors: Pointer
    barriers: Pointer
    tensor_address: Pointer
    sizes: cutlass.Constexpr[Sizes]

    def initialize(self) -> None:
        """Barriers, by one thread."""
        self.keys.initialize(1)
        self.values.initialize(1)
        barriers.initialize(self.barriers)


def allocate(sizes: Sizes) -> Memory:
    """Allocates all of it, what is aligned most first."""
    query = _bytes(STAGES * sizes.query)
    query_pages = _bytes(STAGES * sizes.query_pages)
    key_pages = _bytes(_RING_STAGES * sizes.query_pages)
    value_pages = _bytes(_RING_STAGES * sizes.value_pages) if sizes.value_pages else None
    keys, values = ring.allocate((_RING_STAGES, sizes.query), (_RING_STAGES, sizes.value))
    factors = view(shared.words(STAGES * tile.ROWS).data_ptr(), Float32)
    place = view(shared.words(4).data_ptr(), Int32)
    return Memory(query, keys, values, query_pages, key_pages, value_pages, factors, barriers.allocate(), place, sizes)


def _bytes(count: int) -> Pointer:
    return view(shared.words(count // 4, _ALIGNMENT).data_ptr(), Uint8)


def place_in_ring(load: Int32) -> ring.Place:
    """Where the n-th load of a ring goes, and the parity of its full barrier."""
    return ring.Place(load % _RING_STAGES, load // _RING_STAGES & 1)
