"""What a compiled program communicates: its collectives, their sizes, and how often they run."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLEES = re.compile(r"\b(calls|to_apply|body|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program, on one device.

    Attributes:
      dtype: As the compiler writes it.
      shape: Sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def bytes(self) -> int:
        """Its size."""
        bits = 8 if self.dtype == "pred" else int(re.sub(r"\D", " ", self.dtype).split()[0])
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
      kind: One of :data:`KINDS`.
      results: What a device has afterwards.
      devices: How many take part in a group.
      runs: How often it runs when the program runs once.
      source: The operation of the program as it was written, as far as the compiler knows it.
    """

    kind: str
    results: tuple[Array, ...]
    devices: int
    runs: int
    source: str

    @property
    def sent_bytes(self) -> float:
        """What a device sends when the program runs once, by the algorithms that send least."""
        size, n = sum(array.bytes for array in self.results), self.devices
        factor = {
            "all-gather": (n - 1) / n,
            "all-to-all": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": float(n - 1),
            "collective-permute": 1.0,
        }[self.kind]
        return self.runs * factor * size


def find(program: str) -> list[Collective]:
    """The collectives of a program.

    Args:
      program: Text of the compiled program.

    Returns:
      In order; those that connect a device with itself alone are left out.
    """
    bodies, entry = _computations(program)
    partitions = re.search(r"num_partitions=(\d+)", program)
    devices = int(partitions[1]) if partitions else 1
    return [found for found in _visit(bodies, entry, 1, devices) if found.devices > 1]


def gathered(collectives: Collection[Collective], parameter_sizes: Collection[int]) -> list[Array]:
    """What is gathered though it is no parameter: activations, or operands of attention.

    Args:
      collectives: Of the program.
      parameter_sizes: Number of elements of each parameter, as one device computes with it.

    Returns:
      The arrays, of all-gather and all-to-all.
    """
    return [
        array
        for collective in collectives
        if collective.kind in ("all-gather", "all-to-all")
        for array in collective.results
        if math.prod(array.shape) not in parameter_sizes
    ]


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation by name, and the name of the one where the program starts."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in program.splitlines():
        if line.endswith("{") and " -> " in line and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%").split("(")[0]
            entry = name if line.startswith("ENTRY ") else entry
            current = bodies.setdefault(name, [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    if not entry:
        raise ValueError("program: expected the text of a compiled program, got one without an entry")
    return bodies, entry


def _visit(bodies: dict[str, list[str]], name: str, runs: int, devices: int) -> Iterator[Collective]:
    for line in bodies.get(name, []):
        if match := _COLLECTIVE.search(line):
            yield _collective(line, match, runs, devices)
        elif not re.search(r"(?:-done|-update)\(", line):
            trips = _TRIPS.search(line)
            for _, names in _CALLEES.findall(line):
                for callee in re.findall(r"[\w.-]+", names):
                    yield from _visit(bodies, callee, runs * (int(trips[1]) if trips else 1), devices)


def _collective(line: str, match: re.Match[str], runs: int, devices: int) -> Collective:
    kind = match[2]
    arrays = [Array(dtype, _sizes(sizes)) for dtype, sizes in _ARRAY.findall(match[1])]
    # Those that only start have their operands first, all-reduce on some backends alone, and sometimes counters last.
    if match[3] and (kind in ("all-gather", "collective-permute") or match[1].startswith("((")):
        arrays = [array for array in arrays if array != Array("u32", ())]
        arrays = arrays[len(arrays) // 2 :]
    source = re.search(r'op_name="([^"]*)"', line)
    return Collective(kind, tuple(arrays), _group(line, devices), runs, source[1] if source else "")


def _group(line: str, devices: int) -> int:
    """How many devices take part in a group, all where nothing says it."""
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", line):
        return 2 if any(source != target for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs[1])) else 1
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if groups := re.search(r"replica_groups=\[([\d,]+)\]<=", line):
        return _sizes(groups[1])[-1]
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(_sizes(groups[1]))
    return devices


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
