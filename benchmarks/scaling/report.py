"""The tables: speed, losses, communication, checks, and what more devices would give."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling import predict, stage
from benchmarks.scaling.cases import STUDIES
from benchmarks.scaling.checks import Check
from benchmarks.scaling.collectives import KINDS
from benchmarks.scaling.least import least_bytes
from benchmarks.scaling.measure import UNTIMED_STEPS, Result
from benchmarks.scaling.programs import Program, read_program
from examples._tables import markdown_table

PREDICTED_DEVICES = (8, 64)
ASSUMED_BANDWIDTHS = (
    f"Assumed: a device sends {predict.NVLINK / 1e9:.0f} GB/s over NVLink within hosts of {predict.GPUS_A_HOST} and "
    f"{predict.INFINIBAND / 1e9:.0f} GB/s over InfiniBand beyond, of which collectives reach {predict.ATTAINED:.0%}."
)

Results = Mapping[str, Result]
Programs = Mapping[str, Program]


def write(directory: Path) -> str:
    """Writes tables from what the stages left.

    Args:
      directory: With their files, and for the tables.

    Returns:
      The report, markdown.
    """
    results = _read(directory / stage.CASES, Result)
    checks = _read(directory / stage.CHECKS, Check)
    in_processes = _read(directory / stage.PROCESSES, Result)
    by_name = {result.name: result for result in results}
    programs = {
        result.name: read_program(directory / stage.PROGRAMS, result.name, result.parameter_sizes)
        for result in results
        if not result.reason
    }
    text = markdown(by_name, programs, {result.name: result for result in in_processes}, checks)
    (directory / "scaling.md").write_text(text)
    _write_losses(directory / "losses.csv", results, in_processes)
    _write_collectives(directory / "collectives.csv", programs)
    return text


def markdown(results: Results, programs: Programs, in_processes: Results, checks: Sequence[Check]) -> str:
    """The report.

    Args:
      results: By name, of one process.
      programs: By name, likewise.
      in_processes: By name, of two processes.
      checks: Outcomes.

    Returns:
      Markdown.
    """
    measured = {name: x for name, x in results.items() if not x.reason}
    shared = {name: x for name, x in in_processes.items() if not x.reason}
    failed = [x for x in (*results.values(), *in_processes.values()) if x.reason]
    parts = [
        _software(results),
        "## Cases",
        _about_times(measured),
        _cases(measured, programs, shared),
        "## Losses",
        "Differences from one device on the same batches. Rounding: what rounding the first parameters to bfloat16 "
        "does to the losses of one device.",
        _losses(measured, shared),
        "## Communication",
        "Megabytes that a device sends in a step, from the collectives of the compiled program, loops included. As "
        "split: of the program before the backend changed it; a CPU gathers and sums bfloat16 as float32. Least: what "
        "the way to split has to send.",
        _communication(measured, programs),
        _gathered(programs),
    ]
    if checks:
        rows = [[x.name, {True: "yes", False: "NO", None: "-"}[x.passed], x.found] for x in checks]
        parts += ["## Calls on two devices", markdown_table(["check", "holds", "found"], rows)]
    if timed := {name: x for name, x in measured.items() if x.is_timed}:
        parts += ["## Predicted, not measured", _assumptions(), _predictions(timed, programs)]
    if failed:
        parts += ["## Not measured", "\n".join(f"- {x.name}: {x.reason}" for x in failed)]
    return "\n\n".join(parts) + "\n"


def _software(results: Results) -> str:
    return "`python -m benchmarks.scaling`: " + "; ".join(sorted({x.software for x in results.values() if x.software}))


def _read(file: Path, kind: Callable[..., Any]) -> list[Any]:
    return [kind(**item) for item in json.loads(file.read_text())] if file.is_file() else []


def _against(name: str) -> str:
    return next((c.against for study in STUDIES.values() for c in study.cases if c.name == name), "")


def _about_times(measured: Results) -> str:
    if not all(x.is_timed for x in measured.values()):
        return "Virtual devices share the cores of one CPU, so there are no times and nothing is predicted from them."
    return (
        f"Wall time of a step, the first {UNTIMED_STEPS} left out. TFLOP/s count 6 operations for each parameter of a "
        "product and token, and causal attention; those of a device."
    )


def _cases(measured: Results, programs: Programs, shared: Results) -> str:
    timed = all(x.is_timed for x in measured.values())
    times = ["tokens/s", "TFLOP/s", "times as fast"] if timed else []
    header = ["case", "devices", "parameters", "tokens a step", "against", *times, "native calls", "MB a device"]
    rows = [
        [
            result.name,
            result.devices,
            str(result.parameters),
            str(result.tokens),
            _against(result.name),
            *(_times(result, measured.get(_against(result.name))) if timed else []),
            str(programs[result.name].custom_calls),
            f"{result.memory / 1e6:.1f}",
        ]
        for result in (*measured.values(), *shared.values())
    ]
    return markdown_table(header, rows)


def _times(result: Result, one: Result | None) -> list[str]:
    speed = result.tokens / result.seconds
    return [
        f"{speed:.0f}",
        f"{result.flops / result.seconds / int(result.devices.split()[0]) / 1e12:.3g}",
        "" if one is None else f"{speed * one.seconds / one.tokens:.2f}",
    ]


def _losses(measured: Results, shared: Results) -> str:
    header = ["case", "processes", "steps", "first loss", "last loss", "largest difference", "at step", "rounding"]
    rows = []
    for processes, results in (("1", measured), ("2", shared)):
        for result in results.values():
            one = measured.get(_against(result.name))
            if one is None:
                continue
            differences = np.abs(np.subtract(result.losses, one.losses))
            rounding = _rounding(measured, result)
            rows.append(
                [
                    result.name,
                    processes,
                    str(len(result.losses)),
                    f"{result.losses[0]:.4f}",
                    f"{result.losses[-1]:.4f}",
                    f"{differences.max():.2g}",
                    str(differences.argmax() + 1),
                    rounding,
                ]
            )
    return markdown_table(header, rows)


def _rounding(measured: Results, result: Result) -> str:
    for one in measured.values():
        if one.rounded_losses and (one.tokens, one.length) == (result.tokens, result.length):
            return f"{np.abs(np.subtract(one.rounded_losses, one.losses)).max():.2g}"
    return ""


def _communication(measured: Results, programs: Programs) -> str:
    header = ["case", *KINDS, "together", "as split", "least", "operations a byte", "NCCL, ms a step"]
    rows = []
    for result in measured.values():
        program = programs[result.name]
        if not program.sent_bytes:
            continue
        sent = sum(program.sent_bytes.values())
        least = least_bytes(result)
        seconds = result.communication_seconds
        rows.append(
            [
                result.name,
                *(f"{program.sent_bytes.get(kind, 0) / 1e6:.4g}" for kind in KINDS),
                f"{sent / 1e6:.4g}",
                f"{sum(program.split_bytes.values()) / 1e6:.4g}" if program.split_bytes else "",
                f"{least / 1e6:.4g}",
                f"{result.flops / 2 / sent:.3g}",
                "" if seconds is None else f"{1e3 * seconds:.2f}",
            ]
        )
    return markdown_table(header, rows)


def _gathered(programs: Programs) -> str:
    found = {name: program.gathered for name, program in programs.items() if program.gathered}
    if not found:
        return "No program gathers an activation or an operand of attention: all it gathers are parameters."
    texts = (f"{name}: {', '.join(sorted({str(x) for x in arrays}))}" for name, arrays in found.items())
    return f"Gathered besides parameters: {'; '.join(texts)}."


def _assumptions() -> str:
    return (
        "Computation as measured on one device, divided evenly; bytes as counted for two devices, scaled as the way to "
        f"split does. {ASSUMED_BANDWIDTHS} Efficiency: tokens a second and device against one device, with "
        "communication not hidden at all and hidden as far as it can be. Strong: the measured step, split. Weak: a "
        "step that grows with the devices, by its batch or, for the ring, by its sequence."
    )


def _predictions(measured: Results, programs: Programs) -> str:
    header = ["case", "devices", "scaling", "computing, ms", "sent, MB", "sending, ms", "efficiency"]
    rows = []
    for result in measured.values():
        one = measured.get(_against(result.name))
        if one is None:
            continue
        for devices in PREDICTED_DEVICES:
            for scaling in ("strong", "weak"):
                x = predict.predict(result, one, programs[result.name].sent_bytes, devices, scaling)
                rows.append(
                    [
                        result.name,
                        str(devices),
                        scaling,
                        f"{1e3 * x.compute:.3g}",
                        f"{x.sent_bytes / 1e6:.4g}",
                        f"{1e3 * x.communication:.3g}",
                        f"{x.efficiency(overlapped=False):.0%} to {x.efficiency(overlapped=True):.0%}",
                    ]
                )
    return markdown_table(header, rows)


def _write_losses(path: Path, results: Sequence[Result], in_processes: Sequence[Result]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "processes", "step", "loss"])
        for processes, group in ((1, results), (2, in_processes)):
            for result in group:
                writer.writerows(
                    [result.name, processes, step, f"{loss:.9g}"] for step, loss in enumerate(result.losses, start=1)
                )


def _write_collectives(path: Path, programs: Programs) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "kind", "arrays", "runs", "sent_bytes", "source"])
        for name, program in programs.items():
            for x in program.collectives:
                arrays = " ".join(str(array) for array in x.results)
                writer.writerow([name, x.kind, arrays, x.runs, f"{x.sent_bytes:.0f}", x.source[-160:]])
