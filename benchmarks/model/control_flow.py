"""Basic blocks of a function, its loops, and the way through a loop that most of its turns take."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from benchmarks.model.sass import Function, Instruction

_ENDS = ("EXIT", "RET", "BRX", "JMX", "BPT", "JMP")
"""Nothing that is known follows these, if no predicate guards them."""

Graph = Mapping[int, Sequence[int]]
"""Successors of each block; a block is known by the address of its first instruction."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """Blocks that reach each other.

    Attributes:
      header: Block that it is entered at.
      blocks: All of them, those of inner loops included.
      inner: Loops inside.
    """

    header: int
    blocks: frozenset[int]
    inner: tuple["Loop", ...]

    def innermost_first(self) -> Iterator["Loop"]:
        """The loops inside, then this one."""
        for loop in self.inner:
            yield from loop.innermost_first()
        yield self


@dataclasses.dataclass(frozen=True)
class ControlFlow:
    """The control flow of a function.

    Attributes:
      blocks: Instructions of each block.
      graph: Successors of each block.
      loops: Outermost loops.
    """

    blocks: Mapping[int, tuple[Instruction, ...]]
    graph: Graph
    loops: tuple[Loop, ...]

    def all_loops(self) -> Iterator[Loop]:
        """Inner loops before those around them."""
        for loop in self.loops:
            yield from loop.innermost_first()

    def steady_turn(self, loop: Loop, work: Callable[[Instruction], int]) -> tuple[Instruction, ...]:
        """Instructions of one turn of a loop, each block at most once.

        Of the ways from the header back to it, the one with the most work, and of these the one with the fewest
        instructions: waits succeed at once, and what is done for some turns alone, as masks are, is left out.

        Args:
          loop: The loop.
          work: How much of what the loop is there for an instruction does.

        Returns:
          The instructions in order.
        """
        backward = set(self._back_edges(loop))
        forward = {x: [y for y in self.graph[x] if y in loop.blocks and (x, y) not in backward] for x in loop.blocks}
        best: dict[int, tuple[tuple[int, int], int | None]] = {loop.header: (self._cost(loop.header, work), None)}
        for block in _topological_order(loop.header, forward):
            cost, _ = best[block]
            for successor in forward[block]:
                step = self._cost(successor, work)
                total = (cost[0] + step[0], cost[1] + step[1])
                if successor not in best or total < best[successor][0]:
                    best[successor] = (total, block)
        last = min((x for x in best if loop.header in self.graph[x]), key=lambda x: best[x][0])
        return tuple(x for block in _trace(best, last) for x in self.blocks[block])

    def _cost(self, block: int, work: Callable[[Instruction], int]) -> tuple[int, int]:
        instructions = self.blocks[block]
        return -sum(map(work, instructions)), len(instructions)

    def _back_edges(self, loop: Loop) -> Iterator[tuple[int, int]]:
        for inner in loop.innermost_first():
            yield from ((x, inner.header) for x in inner.blocks if inner.header in self.graph[x])


def analyze(function: Function) -> ControlFlow:
    """The control flow of a function.

    Targets that are computed when it runs are not followed, so that blocks may have no predecessor.

    Args:
      function: The function.

    Returns:
      Blocks and loops.
    """
    blocks = _split(function.instructions)
    graph = {block: _successors(code, blocks) for block, code in blocks.items()}
    return ControlFlow(blocks, graph, tuple(_find_loops(graph, blocks.keys())))


def _split(instructions: Sequence[Instruction]) -> dict[int, tuple[Instruction, ...]]:
    starts = {x.target for x in instructions if _jumps(x)}
    starts |= {after.address for x, after in itertools.pairwise(instructions) if _ends_block(x)}
    blocks: dict[int, list[Instruction]] = {}
    block: list[Instruction] = []
    for x in instructions:
        if x.address in starts or not blocks:
            block = blocks.setdefault(x.address, [])
        block.append(x)
    return {address: tuple(code) for address, code in blocks.items()}


def _jumps(x: Instruction) -> bool:
    return x.operation == "BRA"


def _ends_block(x: Instruction) -> bool:
    return _jumps(x) or x.operation in _ENDS


def _always(x: Instruction) -> bool:
    """Whether a jump has no condition: neither a guard nor a predicate before its target."""
    return x.predicate in ("", "@PT", "@UPT") and x.operands.startswith("`")


def _successors(code: tuple[Instruction, ...], blocks: Mapping[int, tuple[Instruction, ...]]) -> list[int]:
    last = code[-1]
    addresses = sorted(blocks)
    after = next((x for x in addresses if x > last.address), None)
    found = []
    if _jumps(last) and last.target is not None:
        found.append(last.target)
    falls = not (_jumps(last) and _always(last)) and not (last.operation in _ENDS and not last.predicate)
    if falls and after is not None and after not in found:
        found.append(after)
    return found


def _find_loops(graph: Graph, blocks: Collection[int]) -> Iterator[Loop]:
    """Loops of a part of a graph: its components without, in turn, the edges to their headers."""
    for component in _strong_components({x: [y for y in graph[x] if y in blocks] for x in blocks}):
        if len(component) > 1 or any(x in graph[x] for x in component):
            header = _header(graph, component)
            yield Loop(header, frozenset(component), tuple(_find_loops(graph, component - {header})))


def _header(graph: Graph, component: Collection[int]) -> int:
    entries = {y for x, successors in graph.items() if x not in component for y in successors if y in component}
    return min(entries or component)


def _strong_components(graph: Graph) -> Iterator[set[int]]:
    """Sets of blocks that reach each other, by two searches in depth (Kosaraju)."""
    order: list[int] = []
    seen: set[int] = set()
    for root in sorted(graph):
        order += _search(root, graph, seen)
    reverse: dict[int, list[int]] = {x: [] for x in graph}
    for x, successors in graph.items():
        for y in successors:
            reverse[y].append(x)
    seen = set()
    for root in reversed(order):
        if component := set(_search(root, reverse, seen)):
            yield component


def _search(root: int, graph: Graph, seen: set[int]) -> list[int]:
    """What is reached from a block and was not seen, each after what it leads to."""
    if root in seen:
        return []
    seen.add(root)
    finished = []
    stack = [(root, iter(graph[root]))]
    while stack:
        block, successors = stack[-1]
        following = next((x for x in successors if x not in seen), None)
        if following is None:
            stack.pop()
            finished.append(block)
        else:
            seen.add(following)
            stack.append((following, iter(graph[following])))
    return finished


def _topological_order(root: int, graph: Graph) -> list[int]:
    return _search(root, graph, set())[::-1]


def _trace(best: Mapping[int, tuple[tuple[int, int], int | None]], last: int) -> list[int]:
    path: list[int] = []
    block: int | None = last
    while block is not None:
        path.append(block)
        block = best[block][1]
    return path[::-1]
