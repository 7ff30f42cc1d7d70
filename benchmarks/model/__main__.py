"""Counts instructions of Blackwell forward kernels and models their cycles, on any machine.

Usage: python -m benchmarks.model [--cubin CUBIN] [--flash-attention-4 CUBIN ...] [--out DIRECTORY]

`make native` makes the cubin. Without cubins of FlashAttention-4 its recorded counts are used.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.model.cases import CUBIN, ours, theirs
from benchmarks.model.check import compare, targets
from benchmarks.model.plot import write_plot
from benchmarks.model.published import FLASH_ATTENTION_4, rows
from benchmarks.model.records import Record, count, read_csv, write_csv
from benchmarks.model.report import RANKED_ON, markdown
from benchmarks.model.sass import disassemble

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the model.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 if there is no cubin.
    """
    options = _parse_arguments(arguments)
    if not options.cubin.is_file():
        print(f"nothing to model: no {options.cubin}; run make native", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    records, notes = [], []
    for found, note in (_count_ours(options.cubin), _count_theirs(options.flash_attention_4, options.out)):
        records += found
        notes.append(note)
    comparisons = compare(records, rows())
    text = markdown(records, comparisons, targets(records, RANKED_ON), notes)
    print(text)
    (options.out / "model.md").write_text(text)
    write_csv(options.out / "model.csv", records)
    write_plot(options.out / "model.png", records, comparisons)
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model", description="Models the cycles of Blackwell forward kernels."
    )
    parser.add_argument("--cubin", type=Path, default=CUBIN, help="of this project (default: %(default)s)")
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


def _count_ours(cubin: Path) -> tuple[list[Record], str]:
    print(f"disassembling {cubin}", file=sys.stderr)
    module = disassemble(cubin)
    found = list(_with_progress(count(module, ours(module), cubin.name)))
    return found, f"Ours: {cubin.name}, " + ("counted in this run." if found else "which has no forward kernel yet.")


def _count_theirs(cubins: Sequence[Path], out: Path) -> tuple[list[Record], str]:
    found: list[Record] = []
    for cubin in cubins:
        print(f"disassembling {cubin}", file=sys.stderr)
        module = disassemble(cubin)
        code = f"flash-attn-4, sha256 {hashlib.sha256(cubin.read_bytes()).hexdigest()[:12]}"
        found += _with_progress(count(module, theirs(module), code))
    how = "counted in this run"
    if not cubins:
        recorded = read_csv(out / "model.csv") or read_csv(RESULTS / "model.csv")
        found, how = [x for x in recorded if x.kernel == FLASH_ATTENTION_4], "as recorded in model.csv"
    codes = ", ".join(dict.fromkeys(x.code for x in found)) or "not recorded"
    return found, f"{FLASH_ATTENTION_4}: {how} ({codes})."


def _with_progress(records: Iterator[Record]) -> Iterator[Record]:
    for x in records:
        what = f"{x.kernel}, {x.exponentials} exponentials a clock"
        print(f"  {what}: {x.instructions:.1f} instructions a fragment, {x.step.period:.0f} clocks", file=sys.stderr)
        yield x


if __name__ == "__main__":
    sys.exit(main())
