"""The results as a table for people, a table for programs, and a plot."""

import csv
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from benchmarks.emulator.measure import Measurement

_COLUMNS = (
    "kernel",
    "shape",
    "warp instructions",
    "making, s",
    "k instr/s, races off",
    "k instr/s, races on",
    "peak, MB: first, all runs",
    "seeds",
    "findings",
    "outputs vary",
    "rel-L2",
    "lse, nats",
)
_COLORS = {False: "#1b9e77", True: "#d95f02"}


def markdown_table(measurements: Sequence[Measurement]) -> str:
    """One row a kernel and shape."""
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *map(_cells, measurements)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cells(x: Measurement) -> tuple[str, ...]:
    return (
        x.kernel,
        x.shape,
        f"{np.median([run.instructions for run in x.runs]):.0f}" if x.runs else "",
        f"{x.making:.2f}",
        _spread(x.rates(races=False)),
        _spread(x.rates(races=True)),
        f"{x.first_peak_bytes / 1e6:.0f}, {x.peak_bytes / 1e6:.0f}",
        str(len({run.seed for run in x.runs})) if x.runs else "",
        _findings(x),
        "" if not x.runs else "yes" if x.varies else "no",
        "" if x.errors is None else f"{x.errors.relative_l2:.1e}",
        "" if x.errors is None or x.errors.lse is None else f"{x.errors.lse:.1e}",
    )


def _findings(x: Measurement) -> str:
    """The fault, or how many findings of each kind."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(x.findings_by_kind.items()))
    return x.fault.partition(":")[0] or kinds or "none"


def _spread(rates: np.ndarray) -> str:
    """Median, and the range, in thousands."""
    if not rates.size:
        return ""
    return f"{np.median(rates) / 1e3:.0f} ({rates.min() / 1e3:.0f} to {rates.max() / 1e3:.0f})"


def markdown(measurements: Sequence[Measurement], sources: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """The report.

    Args:
      measurements: In order.
      sources: Hash of each example, by its path in the checkout.
      versions: Of packages, by name.
    """
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    files = "; ".join(f"`{path}` (git blob {blob})" for path, blob in sources.items())
    return f"""# NVIDIA's kernels on the emulator

Written by `python -m benchmarks.emulator`; do not edit. No GPU was used: the kernels were compiled and their launches
recorded ([cuda/emulator/recording](../../../cuda/emulator/recording)), and the PTX was executed on a CPU.

Python {platform.python_version()}, {packages}; {_processor()}, one thread.
FMHA is causal, with 128 channels: {files} of CUTLASS. GEMMs are those of nvidia-cutlass-operators; names are of
`tests/emulator/nvidia/cases.py`.

- making: CPU time in which the text is parsed and the program made; a run of the same program again does not need it.
- instr/s: warp instructions a second of CPU time (`time.process_time`), median of the seeds and from the slowest to the
  fastest; with races on, happens-before is checked for every access. Other work on the machine still shows in caches
  and shared cores.
- peak: of the memory of a process that does nothing else, the interpreter and its libraries included: after one run
  without and one with checks of races, and after all runs. For FMHA in bfloat16 the difference was seen to be
  memory that the C library's allocator keeps: `malloc_trim` gives it back.
- findings: different ones over all seeds, by kind. Known are "issue", a TMA store that all threads of a warp issue,
  "lifetime", a TMA store that reads shared memory and is not waited for before its CTA ends, and "register", a store to
  tensor memory of registers that the text never writes (columns that nothing reads, as the results show).
- outputs vary: between any two runs, bit for bit.
- rel-L2, lse: the largest errors of all runs against NumPy in float64, which has no rounding of probabilities to
  bfloat16 or e4m3 and none of the output.

{markdown_table(measurements)}

{_verdict(measurements)}{_hangs(measurements)}
![instructions a second](results.png)
"""


def _verdict(measurements: Sequence[Measurement]) -> str:
    lines = [f"- {x.kernel}, {x.shape}: {text}" for x in measurements for text in x.unexpected]
    if not lines:
        return "No finding but the known ones under any seed, and no output that depends on the seed.\n"
    return "\n".join(["NOT AS EXPECTED:", "", *lines, ""])


def _hangs(measurements: Sequence[Measurement]) -> str:
    found = [x for x in measurements if x.expects_hang and not x.unexpected]
    if not found:
        return ""
    names = " and ".join(x.kernel for x in found)
    report = found[0].fault.replace("DeadlockError: ", "", 1)
    return f"""
{names} hang: one elected thread of each epilogue warp arrives on a barrier that counts all threads. The emulator says:

```
{report}
```
"""


def _processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """Writes every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kernel", "shape", "seed", "races", "instructions", "cpu_seconds"))
        for x in measurements:
            for run in x.runs:
                races = "on" if run.races else "off"
                writer.writerow((x.kernel, x.shape, run.seed, races, run.instructions, f"{run.seconds:.4f}"))


def write_plot(path: Path, measurements: Sequence[Measurement]) -> None:
    """Draws the medians as bars, from the slowest to the fastest run as lines on them."""
    shown = [x for x in measurements if x.runs]
    canvas = Canvas(figsize=(9, 1.2 + 0.3 * len(shown)), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    places = np.arange(len(shown))
    for races, color in _COLORS.items():
        rates = [x.rates(races) / 1e3 for x in shown]
        medians = np.array([np.median(r) for r in rates])
        lines = [medians - [r.min() for r in rates], [r.max() for r in rates] - medians]
        where = places + (0.2 if races else -0.2)
        label = "races checked" if races else "races not checked"
        axes.barh(where, medians, 0.4, xerr=lines, color=color, label=label, error_kw={"lw": 0.8})
    axes.set_yticks(places, [f"{x.kernel}, {x.shape}" for x in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("thousand warp instructions a second of CPU time")
    axes.legend(loc="lower right")
    canvas.savefig(path, dpi=110)
