"""Where an address is, access to it by the lanes of a warp, and the order that strong accesses make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..checks.races import ValueSync
from ..errors import MemoryFaultError
from ..machine.memory import OFFSET_MASK, PARAMETER_BASE, RANK_SHIFT, SLOT_SHIFT, GlobalMemory, SharedMemory
from ..ptx.syntax import TYPE_BYTES, Address, Instruction, Register
from .handler import Value, unsupported

UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Generic addresses below this are in the shared window.
SHARED_WINDOW = 1 << 32

_SPACES = ("global", "shared", "param", "const", "local")
_SEMANTICS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "sc")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


@dataclass(frozen=True)
class Form:
    """The modifiers of a load, store or atomic.

    Attributes:
      space: "global", "shared::cta", "shared::cluster", "param" or "generic".
      type: of an element.
      size: bytes of an element.
      count: elements a lane.
      strong: takes part in synchronisation; does not race with other strong accesses.
      acquire: what the value read carries is acquired.
      release: the value written carries what the warp knows.
      of_cta: whether it does so for the threads of its CTA alone.
      rest: modifiers with another meaning, in the order written.
    """

    space: str
    type: str
    size: int
    count: int
    strong: bool
    acquire: bool
    release: bool
    of_cta: bool
    rest: tuple[str, ...]


def form_of(instruction: Instruction, semantics: str) -> Form:
    """The modifiers of an instruction; `semantics` where it has none, "weak" or "relaxed"."""
    space, count, rest = "generic", 1, []
    *modifiers, element = instruction.parts[1:]
    for part in modifiers:
        if part.split("::")[0] in _SPACES:
            space = part
        elif part in _SEMANTICS:
            semantics = part
        elif part in _VECTORS:
            count = _VECTORS[part]
        elif part not in _SCOPES and not part.startswith(("L1::", "L2::")):
            rest.append(part)
    if element not in TYPE_BYTES or element == "b128":
        raise unsupported(instruction, f"elements of type {element}")
    space = {"shared": "shared::cta", "param::entry": "param"}.get(space, space)
    if space in ("const", "local", "param::func"):
        raise unsupported(instruction, f"the {space} space")
    return Form(
        space=space,
        type=element,
        size=TYPE_BYTES[element],
        count=count,
        strong=semantics != "weak",
        acquire=semantics in ("acquire", "acq_rel", "sc"),
        release=semantics in ("release", "acq_rel", "sc"),
        of_cta="cta" in modifiers,
        rest=tuple(rest),
    )


def address_value(address: Address) -> Value:
    """The input for `[base + offset]`."""
    base = address.base
    return Value(base, base.kind if isinstance(base, Register) else "b64", address.offset)


def lane_addresses(address, mask: np.ndarray | None) -> np.ndarray:
    """(n,) uint64 addresses of the lanes that run; n = 1 where the address is the same in all."""
    if isinstance(address, int):
        return np.array([address], np.uint64)
    return (address if mask is None else address[mask]).astype(np.uint64)


# Memory, which of the lanes' addresses are in it, and where: byte offsets in shared memory, else addresses.
Part = tuple[GlobalMemory | SharedMemory | np.ndarray, slice | np.ndarray, np.ndarray]


def parts_of(warp, space: str, addresses: np.ndarray, instruction: Instruction) -> Iterator[Part]:
    """The memories that the addresses are in."""
    if space == "generic":
        yield from _parts_of_generic(warp, addresses, instruction)
    elif space == "global":
        for chosen in _alike(addresses >> np.uint64(SLOT_SHIFT)):
            yield warp.machine.global_memory, chosen, addresses[chosen]
    elif space == "param":
        yield warp.machine.parameter_bytes, slice(None), addresses
    else:
        for chosen in _alike(addresses >> np.uint64(RANK_SHIFT)):
            cta, _ = warp.cta.shared_target(int(addresses[chosen][0]), instruction)
            if space == "shared::cta" and cta is not warp.cta:
                raise MemoryFaultError(f"{instruction.where}: reaches into CTA rank {cta.rank} without ::cluster")
            yield cta.shared, chosen, (addresses[chosen] & np.uint64(OFFSET_MASK)).astype(np.int64)


def _parts_of_generic(warp, addresses: np.ndarray, instruction: Instruction) -> Iterator[Part]:
    kinds = np.where(addresses < SHARED_WINDOW, 0, np.where(addresses >= PARAMETER_BASE, 1, 2))
    for chosen in _alike(kinds):
        index = np.arange(len(addresses))[chosen]
        space = ("shared::cluster", "param", "global")[kinds[index[0]]]
        for memory, some, positions in parts_of(warp, space, addresses[chosen], instruction):
            yield memory, index[some], positions


def _alike(keys: np.ndarray) -> list[slice | np.ndarray]:
    """Indices of equal keys."""
    if (keys == keys[0]).all():
        return [slice(None)]
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]


def _elements(positions: np.ndarray, form: Form, instruction: Instruction) -> np.ndarray:
    """The (count * n,) positions of all elements."""
    if (positions & positions.dtype.type(form.size * form.count - 1)).any():
        nbytes = form.size * form.count
        raise MemoryFaultError(f"{instruction.where}: an access of {nbytes} bytes is misaligned")
    if form.count == 1:
        return positions
    steps = np.arange(form.count, dtype=positions.dtype) * positions.dtype.type(form.size)
    return (steps[:, None] + positions).reshape(-1)


def _shared_memory(warp, space: str, addresses: np.ndarray, union: int) -> SharedMemory | None:
    """The shared memory that all addresses, whose disjunction is `union`, are in; None if there may be several."""
    rank = int(addresses[0]) >> RANK_SHIFT
    if union >> RANK_SHIFT != rank or rank >= len(warp.cta.cluster):
        return None
    if rank and int(np.bitwise_and.reduce(addresses)) >> RANK_SHIFT != rank:
        return None
    cta = warp.cta.cluster[rank]
    return None if space == "shared::cta" and cta is not warp.cta else cta.shared


def quick_read(warp, addresses: np.ndarray, form: Form, instruction: Instruction) -> np.ndarray | None:
    """(n, count) elements, or (n,) of one, by weak reads of one memory; None where it takes `parts_of` and `read`."""
    union = int(np.bitwise_or.reduce(addresses))
    if form.strong or union & form.size * form.count - 1:
        return None
    if form.space == "global" or (form.space == "generic" and union >= SHARED_WINDOW):
        memory = warp.machine.global_memory
        return memory.read_lanes(addresses, form.size, form.count, warp.actor, instruction, False)
    shared = _shared_memory(warp, form.space, addresses, union) if form.space != "param" else None
    if shared is None:
        return None
    offsets = addresses.view(np.int64)
    offsets = offsets & OFFSET_MASK if union >> RANK_SHIFT else offsets
    return shared.read_lanes(offsets, form.size, form.count, warp.actor, instruction, False)


def quick_write(warp, addresses: np.ndarray, values: np.ndarray, form: Form, instruction: Instruction) -> bool:
    """Store (count, n) elements by weak writes to one memory; False where it takes `parts_of` and `write`."""
    union = int(np.bitwise_or.reduce(addresses))
    if form.strong or union & form.size * form.count - 1:
        return False
    vectors = values.T if form.count > 1 else values[0]
    if form.space == "global" or (form.space == "generic" and union >= SHARED_WINDOW):
        memory = warp.machine.global_memory
        return memory.write_lanes(addresses, vectors, form.size, form.count, warp.actor, instruction, False)
    shared = _shared_memory(warp, form.space, addresses, union)
    if shared is None:
        return False
    offsets = addresses.view(np.int64)
    offsets = offsets & OFFSET_MASK if union >> RANK_SHIFT else offsets
    return shared.write_lanes(offsets, vectors, form.size, form.count, warp.actor, instruction, False)


def read(memory, positions: np.ndarray, form: Form, warp, instruction: Instruction) -> np.ndarray:
    """(count, n) elements, as unsigned integers."""
    if isinstance(memory, SharedMemory):
        elements = _elements(positions, form, instruction)
        return memory.read(elements, form.size, warp.actor, instruction, form.strong).reshape(form.count, -1)
    nbytes = form.size * form.count
    if isinstance(memory, GlobalMemory):
        data = memory.read(positions, nbytes, warp.actor, instruction, strong=form.strong)
    else:
        data = _parameters(memory, positions, nbytes, instruction)
    rows = data.view(UINT[form.size])
    return rows.reshape(1, -1) if form.count == 1 else rows.T.copy()


def _parameters(memory: np.ndarray, positions: np.ndarray, nbytes: int, instruction: Instruction) -> np.ndarray:
    offsets = (positions - np.uint64(PARAMETER_BASE)).astype(np.int64)
    if offsets.min() < 0 or offsets.max() + nbytes > len(memory):
        raise MemoryFaultError(f"{instruction.where}: {nbytes} bytes at {offsets.max()} of {len(memory)} of parameters")
    if (offsets & (nbytes - 1)).any():
        raise MemoryFaultError(f"{instruction.where}: an access of {nbytes} bytes is misaligned")
    return memory[offsets[:, None] + np.arange(nbytes)]


def write(memory, positions: np.ndarray, values: np.ndarray, form: Form, warp, instruction: Instruction) -> None:
    """Store (count, n) elements; of equal addresses the highest lane wins."""
    if isinstance(memory, SharedMemory):
        elements = _elements(positions, form, instruction)
        memory.write(elements, values.reshape(-1), form.size, warp.actor, instruction, form.strong)
    elif isinstance(memory, GlobalMemory):
        nbytes = form.size * form.count
        data = np.ascontiguousarray(values.T).view(np.uint8).reshape(-1, nbytes)
        memory.write(positions, data, nbytes, warp.actor, instruction, strong=form.strong)
    else:
        raise MemoryFaultError(f"{instruction.where}: writes to the parameters")


def acquire(memory, positions: np.ndarray, form: Form, warp, instruction: Instruction) -> None:
    """The warp has read values by strong reads: it learns what they carry, or will by its next fence."""
    if warp.actor is None or not form.strong or isinstance(memory, np.ndarray) or not memory.syncs:
        return
    for position in np.unique(positions).tolist():
        sync = memory.syncs.get(position)
        if sync is None:
            continue
        warp.machine.monitor.acquire(sync, warp.actor, relaxed=not form.acquire)
        if any(cta != warp.cta.index and (of_cta or form.of_cta) for cta, of_cta in sync.releases):
            warp.machine.report(
                "race",
                f"{warp.name} acquires at {instruction.where} what another CTA released, one of them with .cta scope",
            )


def release(memory, positions: np.ndarray, form: Form, warp, replace: bool) -> None:
    """The warp has written values by strong writes, in place of the ones before or (an atomic) made from them."""
    nothing = not form.release and warp.actor is not None and warp.actor.fenced == (0, 0)
    if warp.actor is None or not form.strong or (nothing and not memory.syncs):
        return
    for position in np.unique(positions).tolist():
        sync = memory.syncs.setdefault(position, ValueSync())
        warp.machine.monitor.leave(sync, warp.actor, relaxed=not form.release, replace=replace)
        if replace:
            sync.releases.clear()
        if not nothing:
            sync.releases.add((warp.cta.index, form.of_cta))
