"""The tables as markdown."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.model.check import Comparison, Target
from benchmarks.model.cycles import seconds
from benchmarks.model.evidence import VARIATIONS, WITHOUT_ARITHMETIC
from benchmarks.model.images import Saving, taken
from benchmarks.model.machine import B200, B300, MACHINES, RATES
from benchmarks.model.pipes import PIPES
from benchmarks.model.published import DESIGN_FRAGMENT
from benchmarks.model.records import UNITS, Record
from benchmarks.model.shapes import Shape

RANKED_ON = (B200, B300)
"""One GPU of each kind of multiprocessor."""

OWN_CODE = B300
"""Has an image of its own besides that of the family."""

_FEWEST_PAIRS = 8

RANKED_SHAPE = Shape(1, 32768, 24)

_INTRODUCTION = """# Modelled cycles of the forward on Blackwell

`python -m benchmarks.model`. **Nothing here was measured**: instructions are counted in machine code, clocks are \
modelled from them and from published rates. [docs/blackwell_model.md](../../../docs/blackwell_model.md) has the \
formulas and their limits."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """What the report is about.

    Attributes:
      records: Of kernels.
      comparisons: With published times.
      unknown: Published kernels that there is no record of.
      targets: Asked of our kernels.
      variations: Clocks of a step of each kernel counted in this run, by name of the change of rates.
      savings: Of the code for :data:`OWN_CODE` alone.
      stalls: Stall counts between neighbours of an operation in the code counted in this run.
      notes: Where the counts come from.
    """

    records: Sequence[Record]
    comparisons: Sequence[Comparison]
    unknown: Sequence[str]
    targets: Sequence[Target]
    variations: Mapping[str, Mapping[str, float]]
    savings: Sequence[Saving]
    stalls: Mapping[str, Mapping[int, int]]
    notes: Sequence[str]


def markdown(found: Findings) -> str:
    """The report.

    Args:
      found: What to report.

    Returns:
      Markdown.
    """
    records, comparisons = found.records, found.comparisons
    parts = [_INTRODUCTION, "\n".join(f"- {note}" for note in found.notes)]
    parts.append("## Instructions of a fragment, counted\n\n" + _FRAGMENT_NOTE + "\n\n" + _fragments(records))
    parts.append("## Clocks of a step, modelled\n\n" + _STEP_NOTE)
    for machine in RANKED_ON:
        title = f"### {machine.exponentials} exponentials a clock ({_names(machine.exponentials)})"
        parts.append(f"{title}\n\n" + _steps([x for x in records if x.runs_on(machine)]))
    if found.savings:
        title = f"## Code for {OWN_CODE.name} alone, counted and modelled"
        parts.append(f"{title}\n\n{_SAVING_NOTE}\n\n" + _savings(found.savings))
    if found.targets:
        parts.append("## Targets\n\n" + _targets(found.targets))
    parts.append(f"## Ranking, modelled, {RANKED_SHAPE}\n\n" + _ranking(records))
    parts.append(
        "## Clocks of a step if rates were others, modelled, 16 exponentials a clock\n\n"
        + _variations(found.variations)
    )
    parts.append("## Published times beside modelled ones\n\n" + _ERROR_NOTE + "\n\n" + _errors(comparisons))
    if found.unknown:
        parts.append(f"Without a kernel to model: {', '.join(found.unknown)}.")
    parts.append(_comparisons(comparisons))
    parts.append("## Rates\n\n" + table(("of a multiprocessor, a clock", "rate", "source"), RATES))
    parts.append(_STALL_NOTE + "\n\n" + _stalls(found.stalls))
    return "\n\n".join(parts) + "\n"


_FRAGMENT_NOTE = """A fragment is 32 scores of one row, which a thread of a softmax warp makes into probabilities. \
Conversions are issued to the ALU. "Direct-P's design" is its arithmetic alone, written out and assembled apart."""

_PATH = ("load", "compute", "store", "first_output", "total")

_STEP_NOTE = """A step is two query tiles of 128 rows against 128 keys. Columns of units are busy clocks of the \
sub-partition that also has the issuing warp; "first P V" and "path" are of one query tile that has it to itself, from \
scores to the first product that may use its probabilities, and to its next scores; "period" is from step to step."""

_SAVING_NOTE = """The family's code and their own, whose loads of scores take the maxima of 32 columns, on the same \
multiprocessors. Instructions are of a fragment, clocks of a step. "Slow loads" has clocks of their own code if loads \
with maxima took two clocks a column; as assumed they take one, like other loads."""

_STALL_NOTE = """Stall counts that the assembler wrote between two neighbours of one operation, in the loops counted \
in this run: how many clocks apart it takes a pipe to accept them. Greater ones are dependencies."""

_ERROR_NOTE = """Error: modelled over published time, less one. The modelled clock is the GPU's highest. Only the rows \
of FlashAttention-4 compare a kernel with itself; in the others ours stands in for the published one of the same \
recipe, so that they also hold the difference of the two."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def _names(exponentials: int) -> str:
    return ", ".join(x.name for x in MACHINES if x.exponentials == exponentials)


def _fragments(records: Sequence[Record]) -> str:
    rows = {}
    for x in records:
        cells = [f"{x.fragment[pipe]:.4g}" for pipe in PIPES]
        rows[x.kernel, x.target] = [x.kernel, x.target, f"{x.instructions:.4g}", f"{x.arithmetic:.4g}", *cells]
    found = list(rows.values())
    for kernel, fragment in DESIGN_FRAGMENT.items():
        cells = [str(fragment.get(pipe, "")) for pipe in PIPES]
        found.append([f"Direct-P's design, {kernel}", "sm_100a", "", str(sum(fragment.values())), *cells])
    return table(("kernel", "code", "all", "arithmetic", *PIPES), found)


def _steps(records: Sequence[Record]) -> str:
    rows = []
    for x in records:
        step = x.step
        clocks = [step.units[unit] for unit in UNITS] + [getattr(step.path, name) for name in _PATH] + [step.period]
        busy = f"{step.busiest}, {step.units[step.busiest] / step.period:.0%}"
        rows.append([x.kernel, x.target, *(f"{number:.0f}" for number in clocks), busy, step.bound])
    path = ("load", "compute", "store", "first P V", "path")
    return table(("kernel", "code", *UNITS, *path, "period", "busiest", "bound by"), rows)


def _savings(savings: Sequence[Saving]) -> str:
    rows = []
    for x in savings:
        counts = [f"{record.instructions:.4g}" for record in (x.family, x.own)]
        alu = [f"{record.fragment['alu']:.4g}" for record in (x.family, x.own)]
        clocks = [f"{period:.0f}" for period in (x.family.step.period, x.own.step.period, x.slow_loads)]
        rows.append([x.own.kernel, *counts, *alu, *clocks[:2], f"{x.time:.3f}", clocks[2]])
    family, own = (record.target for record in (savings[0].family, savings[0].own))
    header = [f"{what}, {target}" for what in ("instructions", "alu", "clocks") for target in (family, own)]
    return table(("kernel", *header, "time", "clocks, slow loads"), rows)


def _targets(targets: Sequence[Target]) -> str:
    rows = [[x.what, f"{x.limit:.4g}", f"{x.value:.4g}", "met" if x.met else "**missed**"] for x in targets]
    return table(("target", "limit", "ours", ""), rows)


def _ranking(records: Sequence[Record]) -> str:
    rows = []
    for machine in RANKED_ON:
        of_machine = [(seconds(x.step, machine, RANKED_SHAPE), x) for x in taken(records, machine)]
        for time, x in sorted(of_machine, key=lambda pair: pair[0]):
            rate = RANKED_SHAPE.flop / time / 1e12
            rows.append([machine.name, x.kernel, x.target, f"{time * 1e3:.3f}", f"{rate:.0f}", x.step.bound])
    return table(("GPU", "kernel", "code", "ms, modelled", "TFLOP/s, modelled", "bound by"), rows)


def _errors(comparisons: Sequence[Comparison]) -> str:
    groups: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for x in comparisons:
        groups[x.row.kernel, x.row.machine.name].append(x.error)
    rows = [
        [
            kernel,
            machine,
            str(len(errors)),
            f"{sum(errors) / len(errors):+.1%}",
            f"{min(errors):+.1%}",
            f"{max(errors):+.1%}",
        ]
        for (kernel, machine), errors in groups.items()
    ]
    return table(("kernel", "GPU", "rows", "mean error", "least", "most"), rows)


def _comparisons(comparisons: Sequence[Comparison]) -> str:
    rows = []
    for x in comparisons:
        times = [f"{x.row.seconds * 1e3:.4g}", f"{x.seconds * 1e3:.4g}", f"{x.error:+.1%}"]
        rows.append([x.row.kernel, x.row.machine.name, str(x.row.shape), *times, x.row.source])
    return table(("kernel", "GPU", "batch x keys x heads", "published, ms", "modelled, ms", "error", "source"), rows)


def _variations(variations: Mapping[str, Mapping[str, float]]) -> str:
    rows = [[kernel, *(f"{clocks:.0f}" for clocks in of_kernel.values())] for kernel, of_kernel in variations.items()]
    return table(("kernel", *VARIATIONS, WITHOUT_ARITHMETIC), rows)


def _stalls(stalls: Mapping[str, Mapping[int, int]]) -> str:
    rows = [
        [operation, ", ".join(f"{stall}: {pairs}" for stall, pairs in sorted(counts.items()))]
        for operation, counts in sorted(stalls.items(), key=lambda item: -sum(item[1].values()))
        if sum(counts.values()) >= _FEWEST_PAIRS
    ]
    return table(("operation", "stall count: pairs"), rows)
