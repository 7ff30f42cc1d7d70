"""Global and shared memory: bytes, whether they were written, and who accessed them last.

Accesses without an actor are not checked for races.

Shared addresses carry the CTA's rank in the cluster in bits 24 and up, so a shared::cta address is a valid
shared::cluster address too. The first KiB of a CTA's window is reserved, as on the hardware.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..checks.lifetime import Lifetime
from ..checks.races import WORD, Actor, Monitor, Shadow, ValueSync
from ..errors import BarrierFaultError, MemoryFaultError
from ..ptx.syntax import Instruction
from .barriers import MBarrier

SHARED_BASE = 1024
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
CHUNK = 16  # bytes; what the asynchronous engines move at a time
_CHUNK_TYPE = np.dtype(f"V{CHUNK}")
_WRITTEN_CHUNK = np.ones(CHUNK, np.uint8).view(_CHUNK_TYPE)[0]

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ALL_WRITTEN = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}

# Where the parameters are for generic addresses.
PARAMETER_BASE = 0x7000_0000_0000

# Each buffer owns a slot of this many bytes of the address space.
SLOT_SHIFT = 36
_SLOT_MASK = (1 << SLOT_SHIFT) - 1


class _Vectors:
    """A memory as aligned vectors of `count` elements of `size` bytes."""

    __slots__ = ("_all", "_written", "data", "nbytes", "shift")

    def __init__(self, data: np.ndarray, written: np.ndarray, size: int, count: int) -> None:
        self.nbytes = size * count
        self.shift = self.nbytes.bit_length() - 1
        end = data.size // self.nbytes * self.nbytes
        # At most 8 bytes of the map of what was written can be compared at once.
        unit = min(self.nbytes, 8)
        self.data = data[:end].view(_UINT[size])
        self._written = written[:end].view(_UINT[unit])
        self._all = _ALL_WRITTEN[unit]
        if count > 1:
            self.data = self.data.reshape(-1, count)
        if self.nbytes > unit:
            self._written = self._written.reshape(-1, self.nbytes // unit)

    def were_written(self, index: np.ndarray) -> bool:
        return self._written.take(index, axis=0).min() == self._all

    def store(self, index: np.ndarray, values: np.ndarray) -> None:
        self.data[index] = values
        self._written[index] = self._all

    def hold(self, index: np.ndarray, values: np.ndarray) -> bool:
        return bool((self.data.take(index, axis=0) == values).all())

    def words(self, index: np.ndarray) -> np.ndarray:
        """The cells of race checking."""
        if self.nbytes <= WORD:
            return index if self.nbytes == WORD else index >> (WORD // self.nbytes).bit_length() - 1
        steps = self.nbytes // WORD
        return (index[:, None] * steps + np.arange(steps)).reshape(-1)

    def part(self, index: np.ndarray) -> np.ndarray | None:
        """The bytes of accesses narrower than a word."""
        return _part(index * self.nbytes, self.nbytes) if self.nbytes < WORD else None


class GlobalMemory:
    """Arrays at device addresses. All accesses are little-endian and aligned to their size."""

    def __init__(self) -> None:
        self._buffers: dict[int, np.ndarray] = {}
        self._written: dict[int, np.ndarray] = {}
        self._shadows: dict[int, Shadow] = {}
        self._names: dict[int, str] = {}
        self.monitor: Monitor | None = None
        self.syncs: dict[int, ValueSync] = {}
        self._vectors: dict[tuple[int, int, int], _Vectors] = {}

    def bind(self, array: np.ndarray, name: str = "", written: bool = True) -> int:
        """Map a C-contiguous array, used in place, and return its address.

        Args:
          array: of any type.
          name: for messages.
          written: False for an output: reading a byte before it is written is then a fault.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"{name or 'the array'} must be C-contiguous")
        slot = len(self._buffers) + 1
        data = array.reshape(-1).view(np.uint8)
        self._buffers[slot], self._names[slot] = data, name or f"buffer {slot}"
        self._written[slot] = np.full(data.size, written, bool)
        self._shadows[slot] = Shadow(f"global memory ({self._names[slot]})", data.size // WORD + 1)
        return slot << SLOT_SHIFT

    def slot(self, address: int, where: str) -> int:
        """The buffer of an address."""
        slot = address >> SLOT_SHIFT
        if slot not in self._buffers:
            raise MemoryFaultError(f"{where}: global address {address:#x} is in no buffer")
        return slot

    def _locate(self, addresses: np.ndarray, nbytes: int, instruction: Instruction) -> tuple[int, np.ndarray]:
        slot = self.slot(int(addresses[0]), instruction.where)
        offsets = (addresses - np.uint64(slot << SLOT_SHIFT)).astype(np.int64)
        data = self._buffers[slot]
        if offsets.min() < 0 or offsets.max() + nbytes > data.size:
            bad = int(offsets.min()) if offsets.min() < 0 else int(offsets.max())
            raise MemoryFaultError(
                f"{instruction.where}: {nbytes} bytes at offset {bad} of {self._names[slot]}, which has {data.size}"
            )
        if nbytes & (nbytes - 1) == 0 and (offsets & (nbytes - 1)).any():
            raise MemoryFaultError(f"{instruction.where}: a global access of {nbytes} bytes is misaligned")
        return slot, offsets

    def read(
        self,
        addresses: np.ndarray,
        nbytes: int,
        actor: Actor | None,
        instruction: Instruction,
        generic: bool = True,
        strong: bool = False,
    ) -> np.ndarray:
        """(lanes, nbytes) uint8 from uint64 addresses in one buffer."""
        slot, offsets = self._locate(addresses, nbytes, instruction)
        index = offsets[:, None] + np.arange(nbytes)
        if not self._written[slot][index].all():
            raise MemoryFaultError(f"{instruction.where}: reads bytes of {self._names[slot]} that were never written")
        if self.monitor is not None and actor is not None:
            part = _part(offsets, nbytes)
            self.monitor.read(self._shadows[slot], _words(offsets, nbytes), actor, instruction, generic, strong, part)
        return self._buffers[slot][index]

    def write(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        nbytes: int,
        actor: Actor | None,
        instruction: Instruction,
        generic: bool = True,
        strong: bool = False,
    ) -> None:
        """Store (lanes, nbytes) uint8 at uint64 addresses in one buffer; of equal addresses the highest lane wins."""
        slot, offsets = self._locate(addresses, nbytes, instruction)
        index = offsets[:, None] + np.arange(nbytes)
        if self.monitor is not None and actor is not None:
            part = _part(offsets, nbytes)
            self.monitor.write(self._shadows[slot], _words(offsets, nbytes), actor, instruction, generic, strong, part)
        self._buffers[slot][index] = values
        self._written[slot][index] = True
        if (
            not strong
            and self.monitor is not None
            and actor is not None
            and (self._buffers[slot][index] != values).any()
        ):
            self.monitor.lanes_collide(actor, instruction)

    def check_constant(self, addresses: np.ndarray, nbytes: int, actor: Actor, instruction: Instruction) -> None:
        """Check that the kernel has not written what it reads as constant, from uint64 addresses in one buffer."""
        slot, offsets = self._locate(addresses, nbytes, instruction)
        if self.monitor is not None:
            part = _part(offsets, nbytes)
            self.monitor.read_constant(self._shadows[slot], _words(offsets, nbytes), actor, instruction, part)

    def _vectors_at(self, addresses: np.ndarray, size: int, count: int) -> tuple[int, _Vectors, np.ndarray] | None:
        """The buffer of aligned addresses and the places of their vectors; None if not all are in one buffer."""
        slot = int(addresses[0]) >> SLOT_SHIFT
        vectors = self._vectors.get((slot, size, count))
        if vectors is None:
            if slot not in self._buffers:
                return None
            written = self._written[slot].view(np.uint8)
            vectors = self._vectors[slot, size, count] = _Vectors(self._buffers[slot], written, size, count)
        index = (addresses - np.uint64(slot << SLOT_SHIFT)) >> np.uint64(vectors.shift)
        return (slot, vectors, index.view(np.int64)) if index.max() < len(vectors.data) else None

    def read_lanes(
        self, addresses: np.ndarray, size: int, count: int, actor: Actor | None, instruction: Instruction, strong: bool
    ) -> np.ndarray | None:
        """(lanes, count), or (lanes,) of one, elements from aligned uint64 addresses; None where `read` would fault."""
        found = self._vectors_at(addresses, size, count)
        if found is None:
            return None
        slot, vectors, index = found
        if not vectors.were_written(index):
            return None
        if self.monitor is not None and actor is not None:
            words, part = vectors.words(index), vectors.part(index)
            self.monitor.read(self._shadows[slot], words, actor, instruction, True, strong, part)
        return vectors.data.take(index, axis=0)

    def write_lanes(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        size: int,
        count: int,
        actor: Actor | None,
        instruction: Instruction,
        strong: bool,
    ) -> bool:
        """Store what `read_lanes` would read; of equal addresses the highest lane wins. False where `write` faults."""
        found = self._vectors_at(addresses, size, count)
        if found is None:
            return False
        slot, vectors, index = found
        if self.monitor is not None and actor is not None:
            words, part = vectors.words(index), vectors.part(index)
            self.monitor.write(self._shadows[slot], words, actor, instruction, True, strong, part)
        vectors.store(index, values)
        if self.monitor is not None and actor is not None and not strong and not vectors.hold(index, values):
            self.monitor.lanes_collide(actor, instruction)
        return True

    def discard(self, address: int, nbytes: int, actor: Actor | None, instruction: Instruction) -> None:
        """Make bytes undefined."""
        self.write(np.array([address], np.uint64), np.zeros(nbytes, np.uint8), nbytes, actor, instruction)
        slot, offsets = self._locate(np.array([address], np.uint64), nbytes, instruction)
        self._written[slot][offsets[0] : offsets[0] + nbytes] = False

    def write_bytes(
        self, address: int, offsets, values, actor: Actor | None, instruction: Instruction, strong: bool = False
    ) -> None:
        """Store bytes at byte offsets from a base address, by an asynchronous engine; `strong` for a reduction."""
        slot, index = self._locate_bytes(address, offsets, instruction)
        if self.monitor is not None and actor is not None and index.size:
            words, part = _words_of_bytes(index)
            self.monitor.write(self._shadows[slot], words, actor, instruction, False, strong, part)
        self._buffers[slot][index] = values
        self._written[slot][index] = True

    def read_window(self, address: int, shape: tuple, strides: tuple, actor: Actor | None, instruction: Instruction):
        """(*shape) uint8, innermost last, of which `strides` are the byte strides of all dimensions but the last.

        By an asynchronous engine. The result is a view of the memory.
        """
        slot, offset = self._locate_window(address, shape, strides, instruction)
        if not self._written_window(slot, offset, shape, strides).all():
            raise MemoryFaultError(f"{instruction.where}: reads bytes of {self._names[slot]} that were never written")
        if self.monitor is not None and actor is not None:
            words, part = _window_words(offset, shape, strides)
            self.monitor.read(self._shadows[slot], words, actor, instruction, False, part=part)
        return np.ndarray(shape, np.uint8, self._buffers[slot], offset, (*strides, 1))

    def write_window(self, address: int, strides: tuple, values, actor: Actor | None, instruction: Instruction) -> None:
        """Store bytes (values of uint8, innermost last) where `read_window` would read them."""
        slot, offset = self._locate_window(address, values.shape, strides, instruction)
        if self.monitor is not None and actor is not None:
            words, part = _window_words(offset, values.shape, strides)
            self.monitor.write(self._shadows[slot], words, actor, instruction, False, part=part)
        np.ndarray(values.shape, np.uint8, self._buffers[slot], offset, (*strides, 1))[...] = values
        self._written_window(slot, offset, values.shape, strides)[...] = True

    def update_window(
        self, address: int, shape: tuple, strides: tuple, function, actor: Actor | None, instruction: Instruction
    ) -> None:
        """Replace bytes by `function` of them, atomically with other updates, by an asynchronous engine."""
        slot, offset = self._locate_window(address, shape, strides, instruction)
        if not self._written_window(slot, offset, shape, strides).all():
            raise MemoryFaultError(f"{instruction.where}: adds to bytes of {self._names[slot]} that were never written")
        if self.monitor is not None and actor is not None:
            words, part = _window_words(offset, shape, strides)
            self.monitor.write(self._shadows[slot], words, actor, instruction, False, True, part)
        window = np.ndarray(shape, np.uint8, self._buffers[slot], offset, (*strides, 1))
        window[...] = function(np.ascontiguousarray(window))

    def _locate_window(self, address: int, shape, strides, instruction: Instruction) -> tuple[int, int]:
        slot = self.slot(address, instruction.where)
        offset = address & _SLOT_MASK
        end = offset + shape[-1] + sum((n - 1) * stride for n, stride in zip(shape[:-1], strides, strict=True))
        size = self._buffers[slot].size
        if end > size:
            raise MemoryFaultError(
                f"{instruction.where}: reaches bytes {offset}..{end - 1} of {self._names[slot]}, which has {size}"
            )
        return slot, offset

    def _written_window(self, slot: int, offset: int, shape, strides) -> np.ndarray:
        return np.ndarray(shape, np.bool_, self._written[slot], offset, (*strides, 1))

    def _locate_bytes(self, address: int, offsets: np.ndarray, instruction: Instruction) -> tuple[int, np.ndarray]:
        slot = self.slot(address, instruction.where)
        index = offsets + (address & _SLOT_MASK)
        size = self._buffers[slot].size
        if index.size and (index.min() < 0 or index.max() >= size):
            raise MemoryFaultError(
                f"{instruction.where}: reaches bytes {index.min()}..{index.max()} of {self._names[slot]}, "
                f"which has {size}"
            )
        return slot, index


def _part(offsets: np.ndarray, nbytes: int) -> np.ndarray | None:
    """The bytes of accesses narrower than a word."""
    return (offsets[:, None] + np.arange(nbytes)).reshape(-1) if nbytes < WORD else None


def _words(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    words = offsets // WORD
    return words if nbytes <= WORD else (words[:, None] + np.arange(nbytes // WORD)).reshape(-1)


def _words_of_bytes(index: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The words of some bytes, and the bytes where they are not whole words."""
    words = np.unique(index // WORD)
    return words, (np.unique(index) if words.size * WORD != index.size else None)


@lru_cache(maxsize=1024)
def _window_words(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]):
    """The words of a strided window, and its bytes where they are not whole words.

    Cached because a tile is usually read by many.
    """
    whole = not any(n % WORD for n in (offset, shape[-1], *strides))
    unit = WORD if whole else 1
    cells = np.arange(offset // unit, (offset + shape[-1]) // unit)
    for n, stride in zip(shape[-2::-1], strides[::-1], strict=True):
        cells = (np.arange(n)[:, None] * (stride // unit) + cells).reshape(-1)
    if not whole:
        return None, cells
    return (slice(int(cells[0]), int(cells[-1]) + 1) if (np.diff(cells) == 1).all() else cells), None


class SharedMemory:
    """One CTA's shared memory, its mbarriers among it."""

    def __init__(self, rank: int, nbytes: int, monitor: Monitor | None = None, name: str = "") -> None:
        self.rank, self.limit, self.monitor = rank, SHARED_BASE + nbytes, monitor
        self.lifetime = Lifetime(name, monitor.report if monitor is not None else None)
        size = -(-self.limit // CHUNK) * CHUNK
        self.data = np.full(size, 0xCD, np.uint8)
        self.written = np.zeros(size, np.uint8)
        self.shadow = Shadow(f"shared memory of CTA rank {rank}", size // WORD)
        self.barriers: dict[int, MBarrier] = {}
        self.syncs: dict[int, ValueSync] = {}
        self._first_barrier, self._barriers_end = size, 0
        self._chunks = self.data.view(_CHUNK_TYPE)
        self._written_chunks = self.written.view(_CHUNK_TYPE)
        self._views = {n: self.data[: size // n * n].view(t) for n, t in _UINT.items()}
        self._written_views = {n: self.written[: size // n * n].view(t) for n, t in _UINT.items()}
        self._vectors: dict[tuple[int, int], _Vectors] = {}

    @property
    def base(self) -> int:
        """The shared address at which the kernel's variables start."""
        return self.rank << RANK_SHIFT | SHARED_BASE

    def _check(self, low: int, high: int, instruction: Instruction) -> None:
        if low < SHARED_BASE or high > self.limit:
            raise MemoryFaultError(
                f"{instruction.where}: shared bytes {low - SHARED_BASE}..{high - SHARED_BASE - 1} of CTA rank "
                f"{self.rank}, which has {self.limit - SHARED_BASE}"
            )

    def place_barrier(self, offset: int, barrier: MBarrier) -> None:
        """From now on a store to the 8 bytes at this offset is a fault."""
        self.barriers[offset] = barrier
        self._first_barrier = min(self._first_barrier, offset)
        self._barriers_end = max(self._barriers_end, offset + 8)

    def _spare_barriers(self, offsets: np.ndarray, nbytes: int, instruction: Instruction) -> None:
        for offset, barrier in self.barriers.items():
            if ((offsets < offset + 8) & (offsets + nbytes > offset)).any():
                raise BarrierFaultError(f"{instruction.where}: overwrites {barrier}")

    def read(
        self, offsets: np.ndarray, nbytes: int, actor: Actor | None, instruction: Instruction, strong: bool = False
    ) -> np.ndarray:
        """One aligned element of 1, 2, 4 or 8 bytes a lane, through the generic proxy."""
        self._check(int(offsets.min()), int(offsets.max()) + nbytes, instruction)
        if nbytes > 1 and (offsets & (nbytes - 1)).any():
            raise MemoryFaultError(f"{instruction.where}: a shared access of {nbytes} bytes is misaligned")
        index = offsets // nbytes
        if (self._written_views[nbytes][index] != _ALL_WRITTEN[nbytes]).any():
            bad = int(offsets[np.argmax(self._written_views[nbytes][index] != _ALL_WRITTEN[nbytes])])
            raise MemoryFaultError(
                f"{instruction.where}: reads shared byte {bad - SHARED_BASE}, which was never written"
            )
        if self.monitor is not None and actor is not None:
            part = _part(offsets, nbytes)
            self.monitor.read(self.shadow, _words(offsets, nbytes), actor, instruction, True, strong, part)
            self.lifetime.use(actor, instruction)
        return self._views[nbytes][index]

    def write(
        self,
        offsets: np.ndarray,
        values,
        nbytes: int,
        actor: Actor | None,
        instruction: Instruction,
        strong: bool = False,
    ) -> None:
        """Store one aligned element a lane, through the generic proxy."""
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        self._check(low, high, instruction)
        if low < self._barriers_end and high > self._first_barrier:
            self._spare_barriers(offsets, nbytes, instruction)
        if nbytes > 1 and (offsets & (nbytes - 1)).any():
            raise MemoryFaultError(f"{instruction.where}: a shared access of {nbytes} bytes is misaligned")
        index = offsets // nbytes
        if self.monitor is not None and actor is not None:
            part = _part(offsets, nbytes)
            self.monitor.write(self.shadow, _words(offsets, nbytes), actor, instruction, True, strong, part)
            self.lifetime.use(actor, instruction)
        self._views[nbytes][index] = values
        self._written_views[nbytes][index] = _ALL_WRITTEN[nbytes]
        if (
            not strong
            and self.monitor is not None
            and actor is not None
            and (self._views[nbytes][index] != values).any()
        ):
            self.monitor.lanes_collide(actor, instruction)

    def _vectors_of(self, size: int, count: int) -> _Vectors:
        vectors = self._vectors.get((size, count))
        if vectors is None:
            vectors = self._vectors[size, count] = _Vectors(self.data, self.written, size, count)
        return vectors

    def read_lanes(
        self, offsets: np.ndarray, size: int, count: int, actor: Actor | None, instruction: Instruction, strong: bool
    ) -> np.ndarray | None:
        """(lanes, count), or (lanes,) of one, elements at aligned byte offsets; None where `read` would fault."""
        vectors = self._vectors_of(size, count)
        index = offsets >> vectors.shift
        # What is reserved or beyond the limit was never written.
        if index.max() >= len(vectors.data) or not vectors.were_written(index):
            return None
        if self.monitor is not None and actor is not None:
            words, part = vectors.words(index), vectors.part(index)
            self.monitor.read(self.shadow, words, actor, instruction, True, strong, part)
            self.lifetime.use(actor, instruction)
        return vectors.data.take(index, axis=0)

    def write_lanes(
        self,
        offsets: np.ndarray,
        values: np.ndarray,
        size: int,
        count: int,
        actor: Actor | None,
        instruction: Instruction,
        strong: bool,
    ) -> bool:
        """Store what `read_lanes` would read; of equal offsets the highest lane wins. False where `write` may fault."""
        vectors = self._vectors_of(size, count)
        low, high = int(offsets.min()), int(offsets.max()) + vectors.nbytes
        if low < SHARED_BASE or high > self.limit or (low < self._barriers_end and high > self._first_barrier):
            return False
        index = offsets >> vectors.shift
        if self.monitor is not None and actor is not None:
            words, part = vectors.words(index), vectors.part(index)
            self.monitor.write(self.shadow, words, actor, instruction, True, strong, part)
            self.lifetime.use(actor, instruction)
        vectors.store(index, values)
        if self.monitor is not None and actor is not None and not strong and not vectors.hold(index, values):
            self.monitor.lanes_collide(actor, instruction)
        return True

    def read_chunks(self, chunks: np.ndarray, actor: Actor | None, instruction: Instruction) -> np.ndarray:
        """(*chunks.shape, 16) uint8 of 16-byte chunks (byte offset // 16), by an asynchronous engine."""
        self._check(int(chunks.min()) * CHUNK, (int(chunks.max()) + 1) * CHUNK, instruction)
        self._check_written(chunks, instruction)
        if self.monitor is not None and actor is not None:
            self.monitor.read(self.shadow, _chunk_words(chunks), actor, instruction, False)
            self.lifetime.use(actor, instruction)
        return self._chunks[chunks].view(np.uint8).reshape(*chunks.shape, CHUNK)

    def write_chunks(
        self, chunks: np.ndarray, values: np.ndarray, actor: Actor | None, instruction: Instruction
    ) -> None:
        """Store 16-byte chunks, by an asynchronous engine."""
        low, high = int(chunks.min()) * CHUNK, (int(chunks.max()) + 1) * CHUNK
        self._check(low, high, instruction)
        if low < self._barriers_end and high > self._first_barrier:
            self._spare_barriers(chunks * CHUNK, CHUNK, instruction)
        if self.monitor is not None and actor is not None:
            self.monitor.write(self.shadow, _chunk_words(chunks), actor, instruction, False)
            self.lifetime.use(actor, instruction)
        self._chunks[chunks] = (
            np.ascontiguousarray(values, np.uint8).reshape(-1).view(_CHUNK_TYPE).reshape(chunks.shape)
        )
        self._written_chunks[chunks] = _WRITTEN_CHUNK

    def update_chunks(self, chunks: np.ndarray, function, actor: Actor | None, instruction: Instruction) -> None:
        """Replace 16-byte chunks by `function` of them, atomically with other updates, by an asynchronous engine."""
        self._check(int(chunks.min()) * CHUNK, (int(chunks.max()) + 1) * CHUNK, instruction)
        self._check_written(chunks, instruction)
        if self.monitor is not None and actor is not None:
            self.monitor.write(self.shadow, _chunk_words(chunks), actor, instruction, False, strong=True)
            self.lifetime.use(actor, instruction)
        old = self._chunks[chunks].view(np.uint8).reshape(*chunks.shape, CHUNK)
        self._chunks[chunks] = function(old).reshape(-1).view(_CHUNK_TYPE).reshape(chunks.shape)

    def _check_written(self, chunks: np.ndarray, instruction: Instruction) -> None:
        written = self._written_chunks[chunks].view(np.uint8)
        if not written.all():
            bad = int(chunks.reshape(-1)[~written.reshape(-1, CHUNK).all(-1)].min()) * CHUNK
            raise MemoryFaultError(
                f"{instruction.where}: reads shared memory of CTA rank {self.rank} at byte {bad - SHARED_BASE}, "
                "which was never written"
            )


def _chunk_words(chunks: np.ndarray):
    """The words of some chunks: a slice where they are one range, which is much cheaper to index with."""
    flat = chunks.reshape(-1)
    low, high = int(flat.min()), int(flat.max())
    if high - low + 1 == flat.size:
        return slice(low * 4, (high + 1) * 4)
    return (flat[:, None] * 4 + np.arange(4)).reshape(-1)
