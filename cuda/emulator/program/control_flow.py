"""Basic blocks of a kernel, and which of them dominate which."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property

from ..ptx.syntax import Instruction, Kernel


@dataclass
class Block:
    """Instructions `start` to `stop - 1`, of which only the last may branch."""

    number: int
    start: int
    stop: int
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


def is_branch(instruction: Instruction) -> bool:
    return instruction.parts[0] == "bra"


def is_exit(instruction: Instruction) -> bool:
    return instruction.parts[0] in ("ret", "exit")


class ControlFlow:
    """The blocks of a kernel in the order of its text. The exit is the block behind the last one."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        count = len(kernel.instructions)
        starts = {0, count}
        for instruction in kernel.instructions:
            if is_branch(instruction):
                starts |= {self.target(instruction), instruction.index + 1}
            elif is_exit(instruction):
                starts.add(instruction.index + 1)
        ordered = sorted(starts)
        self.blocks = [Block(i, a, b) for i, (a, b) in enumerate(zip(ordered, [*ordered[1:], count], strict=True))]
        self.exit = len(self.blocks) - 1
        self.block_at = {block.start: block for block in self.blocks}
        for block in self.blocks[:-1]:
            self._connect(block)

    def of(self, kernel: Kernel) -> ControlFlow:
        """That of a kernel with the same blocks and branches."""
        new = copy.copy(self)
        new.kernel = kernel
        return new

    def target(self, branch: Instruction) -> int:
        """The instruction index that a branch goes to."""
        return self.kernel.labels[branch.operands[0].name]

    def _connect(self, block: Block) -> None:
        last = self.kernel.instructions[block.stop - 1]
        following = []
        if is_branch(last):
            following.append(self.block_at[self.target(last)].number)
        elif is_exit(last):
            following.append(self.exit)
        if last.guard is not None or not (is_branch(last) or is_exit(last)):
            following.append(block.number + 1)
        for number in dict.fromkeys(following):
            block.successors.append(number)
            self.blocks[number].predecessors.append(block.number)

    @cached_property
    def post_dominators(self) -> list[int]:
        """For each block the set of blocks through which every way to the exit goes, itself among them, as bits.

        Lanes that only exit are not waited for, so a way straight to an exit does not count where there is another.
        """
        forward = self._without_early_exits()
        return _dominators(self.exit, forward, self._order(self.exit, _reversed(forward)))

    def _without_early_exits(self) -> list[list[int]]:
        """The successors, but for those that only exit, unless nothing else leads out."""
        kept = [[s for s in b.successors if not self._only_exits(s)] or b.successors for b in self.blocks]
        leads_out = set(self._order(self.exit, _reversed(kept)))
        return [k if b.number in leads_out else b.successors for b, k in zip(self.blocks, kept, strict=True)]

    def _only_exits(self, number: int) -> bool:
        block = self.blocks[number]
        if number == self.exit:
            return True
        instruction = self.kernel.instructions[block.start]
        return block.stop - block.start == 1 and is_exit(instruction) and instruction.guard is None

    @staticmethod
    def _order(root: int, edges: list[list[int]]) -> list[int]:
        """Reverse postorder from the root."""
        order, seen, stack = [], {root}, [(root, iter(edges[root]))]
        while stack:
            node, following = stack[-1]
            for other in following:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(edges[other])))
                    break
            else:
                order.append(node)
                stack.pop()
        return order[::-1]

    @cached_property
    def reconvergence(self) -> list[int | None]:
        """For each block its immediate post-dominator, where lanes that part at its end meet; None at the exit."""
        result: list[int | None] = []
        for block in self.blocks:
            strict = self.post_dominators[block.number] & ~(1 << block.number)
            nearest = None
            for number in _bits(strict):
                # The nearest one is post-dominated by all others.
                if self.post_dominators[number] == strict:
                    nearest = number
            result.append(nearest)
        return result

    def region(self, start: int, stop: int | None) -> int:
        """The blocks reachable from `start` without passing `stop`, as bits."""
        seen, stack = 0, [start]
        while stack:
            number = stack.pop()
            if number == stop or seen >> number & 1:
                continue
            seen |= 1 << number
            stack.extend(self.blocks[number].successors)
        return seen


def _reversed(edges: list[list[int]]) -> list[list[int]]:
    backward: list[list[int]] = [[] for _ in edges]
    for number, following in enumerate(edges):
        for other in following:
            backward[other].append(number)
    return backward


def _bits(value: int):
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _dominators(root: int, before: list[list[int]], order: list[int]) -> list[int]:
    everything = (1 << len(before)) - 1
    sets = [everything] * len(before)
    sets[root] = 1 << root
    changed = True
    while changed:
        changed = False
        for node in order:
            if node == root:
                continue
            new = everything
            for other in before[node]:
                new &= sets[other]
            new |= 1 << node
            if new != sets[node]:
                sets[node], changed = new, True
    return sets
