"""Counts instructions of Blackwell forward kernels and models their cycles, on any machine.

Usage: python -m benchmarks.model [--cubin CUBIN ...] [--flash-attention-4 CUBIN ...] [--out DIRECTORY]

`make native` makes the cubins. Without cubins of FlashAttention-4 its recorded counts are used.
"""

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.model.cases import CUBINS, ours, theirs
from benchmarks.model.check import compare, targets
from benchmarks.model.cycles import model_step
from benchmarks.model.evidence import stalls_between_neighbours, vary
from benchmarks.model.images import savings
from benchmarks.model.machine import rates_of
from benchmarks.model.plot import write_plot
from benchmarks.model.published import FLASH_ATTENTION_4, rows
from benchmarks.model.records import Record, count, exponentials_of, find_kernels, read_csv, write_csv
from benchmarks.model.report import OWN_CODE, RANKED_ON, Findings, markdown
from benchmarks.model.sass import Module, disassemble
from benchmarks.model.warps import Warps

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the model.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 if a cubin is missing.
    """
    options = _parse_arguments(arguments)
    missing = next((cubin for cubin in options.cubin if not cubin.is_file()), None)
    if missing is not None:
        print(f"nothing to model: no {missing}; run make native", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    counted = [_disassemble(cubin, ours, cubin.name) for cubin in options.cubin]
    for cubin in options.flash_attention_4:
        digest = hashlib.sha256(cubin.read_bytes()).hexdigest()[:12]
        counted.append(_disassemble(cubin, theirs, f"flash-attn-4, sha256 {digest}"))
    records = [record for code in counted for record in code.records()]
    notes = [f"{code.name}: {', '.join(code.kernels) or 'no forward kernel'}; counted in this run." for code in counted]
    if not options.flash_attention_4:
        recorded = [x for x in read_csv(RESULTS / "model.csv") if x.kernel == FLASH_ATTENTION_4]
        records += recorded
        notes.append("FlashAttention-4: as recorded in model.csv, from " + _codes(recorded))
    findings = _findings(records, counted, notes)
    text = markdown(findings)
    print(text)
    (options.out / "model.md").write_text(text)
    write_csv(options.out / "model.csv", records)
    write_plot(options.out / "model.png", records, findings.comparisons)
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model", description="Models the cycles of Blackwell forward kernels."
    )
    parser.add_argument(
        "--cubin", type=Path, nargs="+", default=CUBINS, help="of this project (default: those that make native makes)"
    )
    parser.add_argument(
        "--flash-attention-4",
        type=Path,
        nargs="+",
        default=[],
        metavar="CUBIN",
        help="its bfloat16 forward for sm_100a and sm_103a (default: the counts recorded in model.csv)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    return parser.parse_args(arguments)


@dataclasses.dataclass(frozen=True)
class _Code:
    """A cubin.

    Attributes:
      name: Of it.
      target: That it is for.
      kernels: Loops by name for tables.
    """

    name: str
    target: str
    kernels: Mapping[str, Warps]

    def records(self) -> Iterator[Record]:
        """Of every kernel, on every kind of multiprocessor."""
        for kernel, warps in self.kernels.items():
            for exponentials in exponentials_of(self.target):
                x = count(kernel, self.name, self.target, exponentials, warps)
                what = f"{kernel}, {exponentials} exponentials a clock"
                numbers = f"{x.instructions:.1f} instructions a fragment, {x.step.period:.0f} clocks a step"
                print(f"  {what}: {numbers}, modelled", file=sys.stderr)
                yield x


def _disassemble(cubin: Path, names: Callable[[Module], dict[str, str]], name: str) -> _Code:
    print(f"disassembling {cubin}", file=sys.stderr)
    module = disassemble(cubin)
    return _Code(name, module.target, find_kernels(module, names(module)))


def _codes(records: Sequence[Record]) -> str:
    return ", ".join(f"{x.code} ({x.target})" for x in records) or "nothing"


def _findings(records: Sequence[Record], counted: Sequence[_Code], notes: Sequence[str]) -> Findings:
    published = list(rows())
    comparisons = compare(records, published)
    modelled = {x.row.kernel for x in comparisons}
    variations = {
        kernel: vary(warps, rates_of(exponentials_of(code.target)[0]))
        for code in counted
        for kernel, warps in code.kernels.items()
        if exponentials_of(code.target)[0] == RANKED_ON[0].exponentials
    }
    turns = [turn for code in counted for warps in code.kernels.values() for turn in warps.softmax]
    return Findings(
        records,
        comparisons,
        sorted({x.kernel for x in published} - modelled),
        targets(records, RANKED_ON),
        variations,
        savings(records, OWN_CODE, _slow_loads(counted)),
        stalls_between_neighbours(turns),
        notes,
    )


def _slow_loads(counted: Sequence[_Code]) -> dict[str, float]:
    """Periods if loads with maxima took twice as long, of the kernels that are for these multiprocessors alone."""
    rates = dataclasses.replace(rates_of(OWN_CODE.exponentials), maxima=2)
    own = [code for code in counted if exponentials_of(code.target) == (OWN_CODE.exponentials,)]
    return {kernel: model_step(warps, rates).period for code in own for kernel, warps in code.kernels.items()}


if __name__ == "__main__":
    sys.exit(main())
