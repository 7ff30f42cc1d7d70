"""The results as a report for people and a table for programs."""

import collections
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.speed.cases import MASKS, PASSES, Case, Shape
from benchmarks.speed.contenders import KINDS
from benchmarks.speed.measure import Result
from benchmarks.speed.ratios import BASELINES, LONG, find, labels, means, ratio

CSV_COLUMNS = (
    *("batch", "length", "heads", "kv_heads", "head_size", "mask", "passes"),
    *("contender", "kind", "recipe", "reason", "cosine", "rel_l2", "first_call_seconds"),
    *("median_seconds", "p10_seconds", "p90_seconds", "turns", "calls_a_turn", "tflops"),
    *(f"ratio_to_{baseline}" for baseline in BASELINES),
    *("device_seconds", "turn_seconds"),
)

_NOTES = """Times are wall times of a call, with many calls in flight; contenders of a case take turns. TFLOP/s count \
4 B H S S D forward, half of it if causal, 3.5 times with the backward. Ratios are how many times as fast as the \
baseline. The output (and gradients) of every contender are checked against exact values in float32 on a sample, and \
one that fails is not timed."""


def markdown(results: Sequence[Result], environment: Mapping[str, str]) -> str:
    """The whole report.

    Args:
      results: Of all contenders.
      environment: Facts about the machine and the run, by name.

    Returns:
      Markdown.
    """
    parts = [summary(results, environment), "## Every measurement"]
    for passes, mask in _groups(results):
        parts.append(f"{_title(passes, mask)}\n\n" + "\n".join(_measurements(results, passes, mask)))
    return "\n\n".join(parts) + "\n"


def summary(results: Sequence[Result], environment: Mapping[str, str]) -> str:
    """What fits on a few screens: rates of all shapes, what was not measured, and mean ratios.

    Args:
      results: Of all contenders.
      environment: Facts about the machine and the run, by name.

    Returns:
      Markdown.
    """
    kinds = {x.kind for x in results}
    parts = [
        f"# Speed on one {environment.get('device', 'device')}",
        "`python -m benchmarks.speed`: "
        + ", ".join(f"{name} {value}" for name, value in environment.items() if name != "device")
        + ".",
        _NOTES,
        "\n".join(f"- {kind}: {text}" for kind, text in KINDS.items() if kind in kinds),
    ]
    for passes, mask in _groups(results):
        parts.append(f"## TFLOP/s, {_title(passes, mask)}\n\n" + "\n".join(_rates(results, passes, mask)))
    if reasons := _reasons(results):
        parts.append("## Not measured\n\n" + "\n".join(reasons))
    parts.append(f"## Geometric means of the ratios, S >= {LONG}\n\n" + "\n".join(_means(results)))
    return "\n\n".join(parts)


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Writes one line for each contender in each case.

    Args:
      path: File.
      results: Of all contenders.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        writer.writerows(_cells(results, x) for x in results)


def _cells(results: Sequence[Result], x: Result) -> list[str]:
    shape = x.case.shape
    sizes = (shape.batch, shape.length, shape.heads, shape.kv_heads, shape.head_size)
    cells = [*(str(size) for size in sizes), x.case.mask, x.case.passes, x.label, x.kind, x.recipe, x.reason]
    cells += ["", ""] if x.agreement is None else [f"{x.agreement.cosine:.6f}", f"{x.agreement.rel_l2:.6f}"]
    cells += [f"{x.first_call:.2f}"]
    timing, turns = ["", "", "", "", ""], ""
    if x.timing is not None:
        seconds = (x.timing.median, *x.timing.spread)
        timing = [*(f"{y:.4e}" for y in seconds), str(len(x.timing.times)), str(x.timing.calls)]
        turns = " ".join(f"{y:.4e}" for y in x.timing.times)
    cells += [*timing, _number(x.tflops, ".5g")]
    cells += [_number(ratio(results, x, baseline), ".4f") for baseline in BASELINES]
    return [*cells, _number(x.device_seconds, ".4e"), turns]


def _number(x: float | None, form: str) -> str:
    return "" if x is None else f"{x:{form}}"


def _rate(x: Result | None) -> str:
    rate = None if x is None else x.tflops
    return _number(rate, ".0f" if rate is not None and rate >= 100 else ".3g")


def _groups(results: Sequence[Result]) -> list[tuple[str, str]]:
    present = {(x.case.passes, x.case.mask) for x in results}
    return [(passes, mask) for passes in PASSES for mask in MASKS if (passes, mask) in present]


def _title(passes: str, mask: str) -> str:
    return f"{passes}, {mask} mask"


def _of_group(results: Sequence[Result], passes: str, mask: str) -> list[Result]:
    return [x for x in results if (x.case.passes, x.case.mask) == (passes, mask)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def _rates(results: Sequence[Result], passes: str, mask: str) -> list[str]:
    group = _of_group(results, passes, mask)
    columns = labels(group)
    rows = []
    for shape in _shapes(group):
        found = [find(group, Case(shape, mask, passes), label) for label in columns]
        rows.append([str(shape), *(_rate(x) for x in found)])
    return _table(["shape", *columns], rows)


def _shapes(results: Sequence[Result]) -> list[Shape]:
    return list(dict.fromkeys(x.case.shape for x in results))


def _measurements(results: Sequence[Result], passes: str, mask: str) -> list[str]:
    rows = []
    for x in _of_group(results, passes, mask):
        cells = [str(x.case.shape), x.label]
        if x.timing is None:
            rows.append([*cells, x.reason.replace("|", "/"), *[""] * (3 + len(BASELINES))])
            continue
        low, high = x.timing.spread
        device = "" if x.device_seconds is None else f" (kernels {x.device_seconds * 1e3:.3f})"
        rows.append(
            [
                *cells,
                f"{x.timing.median * 1e3:.3f}{device}",
                f"{low * 1e3:.3f} to {high * 1e3:.3f}",
                _rate(x),
                *(_number(ratio(results, x, baseline), ".2f") for baseline in BASELINES),
                "" if x.agreement is None else f"{x.agreement.cosine:.4f} / {x.agreement.rel_l2:.4f}",
            ]
        )
    ratios = [f"to {baseline}" for baseline in BASELINES]
    return _table(["shape", "contender", "ms", "10 to 90 %", "TFLOP/s", *ratios, "cosine / rel-L2"], rows)


def _reasons(results: Sequence[Result]) -> list[str]:
    """A line for each reason of a contender, and which cases it holds for."""
    cases: dict[tuple[str, str], list[str]] = {}
    for x in results:
        if x.reason:
            cases.setdefault((x.label, x.reason), []).append(str(x.case))
    count = collections.Counter(x.label for x in results)
    return [
        f"- {label}: {reason} ({'always' if len(of) == count[label] else '; '.join(of)})"
        for (label, reason), of in cases.items()
    ]


def _means(results: Sequence[Result]) -> list[str]:
    rows = []
    for x in means(results):
        ratios = [
            "" if (found := x.ratios[baseline]) is None else f"{found[0]:.3f} ({found[1]})" for baseline in BASELINES
        ]
        rows.append([x.passes, x.mask, str(x.head_size), x.label, *ratios])
    header = ["passes", "mask", "head size", "contender", *(f"to {baseline} (shapes)" for baseline in BASELINES)]
    return _table(header, rows)
