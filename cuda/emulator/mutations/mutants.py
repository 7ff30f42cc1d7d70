"""The mutants of a kernel: each is the kernel with one synchronisation instruction gone, wrong, early or late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..program.control_flow import is_branch, is_exit
from ..program.registers import registers_of
from ..ptx.syntax import Address, Immediate, Instruction, Kernel, Register, Symbol
from .altered import altered

_BYTES_OFF = 16


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
      change: what was done: "removed", "one more", ...
      family: of the instruction, such as "tcgen05.commit".
      instruction: of the kernel, that was changed.
      kernel: with the fault.
    """

    change: str
    family: str
    instruction: Instruction
    kernel: Kernel

    def __str__(self) -> str:
        return f"{self.family} {self.change}, {self.instruction.where}"


# The opcodes of each family; those that a longer prefix claims are not in the shorter one's.
_FAMILIES = {
    "mbarrier.arrive": "arrive",
    "mbarrier.arrive_drop": "arrive",
    "mbarrier.arrive.expect_tx": "expect",
    "mbarrier.expect_tx": "expect",
    "mbarrier.try_wait": "mbarrier wait",
    "mbarrier.test_wait": "mbarrier wait",
    "mbarrier.init": "mbarrier.init",
    "tcgen05.commit": "tcgen05.commit",
    "tcgen05.wait::ld": "tcgen05.wait::ld",
    "tcgen05.wait::st": "tcgen05.wait::st",
    "tcgen05.mma": "tcgen05.mma",
    "tcgen05.cp": "tcgen05.cp",
    "tcgen05.ld": "tcgen05.ld",
    "tcgen05.st": "tcgen05.st",
    "fence.proxy.async": "fence.proxy.async",
    "fence.mbarrier_init": "fence.mbarrier_init",
    "bar": "bar",
    "barrier": "bar",
    "bar.warp.sync": "bar.warp.sync",
    "barrier.cluster.arrive": "barrier.cluster",
    "barrier.cluster.wait": "barrier.cluster",
    "cp.async.bulk.commit_group": "bulk commit_group",
    "cp.async.bulk.wait_group": "bulk wait_group",
    "cp.async.commit_group": "cp.async commit_group",
    "cp.async.wait_group": "cp.async wait_group",
    "cp.async.wait_all": "cp.async wait_group",
    "cp.async.mbarrier.arrive": "arrive",
    "wgmma.fence": "wgmma.fence",
    "wgmma.commit_group": "wgmma.commit_group",
    "wgmma.wait_group": "wgmma.wait_group",
    "elect.sync": "elect",
}

_REMOVED = {
    "arrive", "expect", "tcgen05.commit", "tcgen05.wait::ld", "tcgen05.wait::st", "fence.proxy.async",
    "fence.mbarrier_init", "bar", "bar.warp.sync", "bulk commit_group", "bulk wait_group", "cp.async commit_group",
    "cp.async wait_group", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group",
}  # fmt: skip
_WEAKER = {"bulk wait_group", "cp.async wait_group", "wgmma.wait_group"}


def family_of(instruction: Instruction) -> str | None:
    """What kind of synchronisation an instruction is."""
    parts = tuple(p for p in instruction.parts if not p.startswith(("shared", "release", "relaxed")) and p != "cta")
    for n in range(len(parts), 0, -1):
        family = _FAMILIES.get(".".join(parts[:n]))
        if family is not None:
            return family
    return None


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """All mutants of a kernel, in the order of its instructions."""
    for instruction in kernel.instructions:
        family = family_of(instruction)
        if family is None:
            continue
        for change, changed in _changes(kernel, instruction, family):
            yield Mutant(change, family, instruction, changed)


def _changes(kernel: Kernel, instruction: Instruction, family: str) -> Iterator[tuple[str, Kernel]]:
    def one(change: str, new: Instruction) -> tuple[str, Kernel]:
        return change, with_instruction(kernel, new)

    if family in _REMOVED:
        yield one("removed", altered(instruction, "nothing"))
    if family in _WEAKER and instruction.operands:
        keep = instruction.operands[0]
        yield one("one group fewer", _with_operand(instruction, 0, Immediate(keep.value + 1)))
    if family == "mbarrier wait":
        yield one("removed", altered(instruction, "passed"))
        if "parity" in instruction.parts:
            yield one("other parity", altered(instruction, "flipped"))
    elif family == "mbarrier.init":
        yield from (one(*change) for change in _off_by(instruction, -1, 1, "count"))
    elif family == "expect":
        yield from (one(*change) for change in _off_by(instruction, -1, _BYTES_OFF, "bytes"))
    elif family == "elect":
        yield one("all lanes", altered(instruction, "everyone"))
    elif family == "barrier.cluster":
        yield from _without_cluster_barrier(kernel, instruction)
    elif family in ("tcgen05.mma", "tcgen05.cp"):
        yield from (one(*change) for change in _other_scale_columns(instruction, family))
    yield from _moves(kernel, instruction, family)


def with_instruction(kernel: Kernel, *changed: Instruction) -> Kernel:
    """The kernel with other instructions at their places."""
    instructions = list(kernel.instructions)
    for instruction in changed:
        instructions[instruction.index] = instruction
    return replace(kernel, instructions=tuple(instructions))


def _with_operand(instruction: Instruction, place: int, operand: object) -> Instruction:
    operands = list(instruction.operands)
    operands[place] = operand
    return replace(instruction, operands=tuple(operands))


def _plus(operand: Register | Immediate | Symbol | Address, amount: int) -> Immediate | Address:
    """The operand and a constant."""
    if isinstance(operand, Immediate):
        return Immediate(operand.value + amount)
    if isinstance(operand, Address):
        return replace(operand, offset=operand.offset + amount)
    return Address(operand, amount)


def _off_by(instruction: Instruction, place: int, amount: int, what: str) -> Iterator[tuple[str, Instruction]]:
    last = instruction.operands[place]
    if isinstance(last, (Immediate, Register)):
        yield f"{what} + {amount}", _with_operand(instruction, place, _plus(last, amount))
        yield f"{what} - {amount}", _with_operand(instruction, place, _plus(last, -amount))


def _without_cluster_barrier(kernel: Kernel, arrive: Instruction) -> Iterator[tuple[str, Kernel]]:
    """An arrival goes with the wait behind it: one without the other is a fault."""
    if arrive.parts[2] != "arrive":
        return
    behind = kernel.instructions[arrive.index + 1 :]
    wait = next((i for i in behind if i.opcode.startswith("barrier.cluster.wait")), None)
    if wait is not None:
        yield "removed", with_instruction(kernel, altered(arrive, "nothing"), altered(wait, "nothing"))


def _other_scale_columns(instruction: Instruction, family: str) -> Iterator[tuple[str, Instruction]]:
    if family == "tcgen05.cp":
        yield "next column", _with_operand(instruction, 0, _plus(instruction.operands[0], 1))
    elif "block_scale" in instruction.parts:
        for place, operand in ((4, "A"), (5, "B")):
            change = f"scale factors of {operand} one column on"
            yield change, _with_operand(instruction, place, _plus(instruction.operands[place], 1))


# ---- moves ----


def moved(kernel: Kernel, source: int, target: int) -> Kernel:
    """The kernel with the instruction at `source` in front of the one at `target`.

    A loop that starts at `target` and ends in front of `source` starts behind the moved instruction.
    """
    order = list(kernel.instructions)
    instruction = order.pop(source)
    order.insert(target if target < source else target - 1, instruction)
    instructions = tuple(i if i.index == at else replace(i, index=at) for at, i in enumerate(order))

    def place(label: str, index: int) -> int:
        if target <= index <= source:
            entered = index == target and not _only_from(kernel, label, range(target, source))
            return index + (0 if entered else 1)
        return index - 1 if source < index < target else index

    labels = {label: place(label, index) for label, index in kernel.labels.items()}
    return replace(kernel, instructions=instructions, labels=labels)


def _only_from(kernel: Kernel, label: str, places: range) -> bool:
    return all(i.index in places for i in kernel.instructions if is_branch(i) and i.operands[0].name == label)


def _touches(instruction: Instruction) -> tuple[set[str], set[str]]:
    """Registers that an instruction reads, and those that it writes or may write."""
    operands = instruction.operands
    written = set(registers_of(operands[0])) if operands and not isinstance(operands[0], Address) else set()
    read = {name for operand in operands for name in registers_of(operand)}
    if instruction.guard is not None:
        read.add(instruction.guard.name)
    return read, written


def _may_pass(instruction: Instruction, others: tuple[Instruction, ...]) -> bool:
    """Whether moving an instruction past others leaves all registers as they are."""
    read, written = _touches(instruction)
    for other in others:
        other_read, other_written = _touches(other)
        if read & other_written or written & (other_read | other_written):
            return False
    return True


def _block_before(kernel: Kernel, index: int) -> Iterator[Instruction]:
    """The instructions in front of one, back to the start of its block."""
    starts = set(kernel.labels.values())
    while index not in starts and index > 0 and not _ends_block(kernel.instructions[index - 1]):
        index -= 1
        yield kernel.instructions[index]


def _block_behind(kernel: Kernel, index: int) -> Iterator[Instruction]:
    starts = set(kernel.labels.values())
    while index + 1 < len(kernel.instructions) and index + 1 not in starts:
        index += 1
        if _ends_block(kernel.instructions[index]):
            return
        yield kernel.instructions[index]


def _ends_block(instruction: Instruction) -> bool:
    return is_branch(instruction) or is_exit(instruction)


def _moves(kernel: Kernel, instruction: Instruction, family: str) -> Iterator[tuple[str, Kernel]]:
    if family == "tcgen05.commit":
        yield from _early_commit(kernel, instruction)
    elif family in ("arrive", "bulk commit_group", "cp.async commit_group", "wgmma.commit_group"):
        yield from _early(kernel, instruction)
    elif family in ("tcgen05.ld", "tcgen05.st"):
        yield from _in_front_of_wait(kernel, instruction)
    elif family in ("tcgen05.wait::st", "tcgen05.wait::ld", "fence.proxy.async", "bulk wait_group", "wgmma.wait_group"):
        yield from _late(kernel, instruction)


def _early_commit(kernel: Kernel, commit: Instruction) -> Iterator[tuple[str, Kernel]]:
    """Before the multiplication that it follows in the text, each of them in a branch for one thread."""
    for index in range(commit.index - 1, -1, -1):
        other = kernel.instructions[index]
        if other.opcode.startswith("tcgen05.mma"):
            if _may_pass(commit, kernel.instructions[index : commit.index]):
                yield "before its tcgen05.mma", moved(kernel, commit.index, index)
            elif _may_pass(other, kernel.instructions[index + 1 : commit.index + 1]):
                yield "before its tcgen05.mma", moved(kernel, index, commit.index + 1)
            return
        if is_exit(other):
            return


def _is_work(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return opcode.startswith(("ld.shared", "st.shared", "tcgen05.ld", "tcgen05.wait", "cp.async", "wgmma.m", "wgmma.w"))


def _early(kernel: Kernel, signal: Instruction) -> Iterator[tuple[str, Kernel]]:
    """In front of the last piece of work of its block that it signals."""
    for other in _block_before(kernel, signal.index):
        if _is_work(other):
            if _may_pass(signal, kernel.instructions[other.index : signal.index]):
                yield f"in front of its {'.'.join(other.parts[:2])}", moved(kernel, signal.index, other.index)
            return


def _in_front_of_wait(kernel: Kernel, access: Instruction) -> Iterator[tuple[str, Kernel]]:
    """In front of the loop of waiting that ends where the block of the access starts."""
    before = list(_block_before(kernel, access.index))
    if any(family_of(i) == family_of(access) for i in before):
        return
    start = before[-1].index if before else access.index
    loop = start
    while loop > 0 and _ends_block(kernel.instructions[loop - 1]):
        loop -= 1
    wait = kernel.instructions[loop - 1] if 0 < loop < start else None
    if wait is None or family_of(wait) != "mbarrier wait":
        return
    between = kernel.instructions[wait.index : access.index]
    if _may_pass(access, between):
        yield "in front of the wait before it", moved(kernel, access.index, wait.index)


def _late(kernel: Kernel, wait: Instruction) -> Iterator[tuple[str, Kernel]]:
    """Behind the last of the signals that come next in its block, or behind the first use of a loaded register."""
    loads = wait.opcode.startswith("tcgen05.wait::ld")
    loaded = {n for i in _block_before(kernel, wait.index) if family_of(i) == "tcgen05.ld" for n in _touches(i)[1]}
    last = None
    for other in _block_behind(kernel, wait.index):
        if family_of(other) in ("arrive", "bar", "tcgen05.commit"):
            last = other
        elif loads and last is None and other.parts[0] != "mov" and _touches(other)[0] & loaded:
            last = other
            break
        elif _is_work(other):
            break
    if last is not None:
        yield f"behind the {last.parts[0]} behind it", moved(kernel, wait.index, last.index + 1)
