"""Measures how the training of a language model scales from one device to two, and predicts how it would go on.

Usage: python -m benchmarks.scaling [--out DIRECTORY] [--cases "one device,FSDP"] ...
       python -m benchmarks.scaling --study tiny --devices 2 --out DIRECTORY    # two virtual CPU devices
       python -m benchmarks.scaling --report --out DIRECTORY                    # only the tables, from what is there

All cases run in a process of their own; then those in two processes with a device each; then the tables are written.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.scaling import report, stage

RESULTS = Path(__file__).parent / "results"
PROCESSES_SECONDS = 170
"""After which the two processes are taken to hang."""

GRACE_SECONDS = 100
"""For the case that is begun last, and the checks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study.

    Args:
      arguments: Command line; None for the process's own.

    Returns:
      Exit status: 1 if a stage failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description="Measures how training scales from one device to two."
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    parser.add_argument("--devices", type=int, metavar="N", help="use so many virtual CPU devices")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables")
    stage.add_arguments(parser)
    options = parser.parse_args(arguments)
    failed: list[str] = []
    if not options.report:
        options.out.mkdir(parents=True, exist_ok=True)
        if _run_one(options):
            failed.append("one process")
        if _run_two(options):
            failed.append("two processes")
    print(report.write(options.out))
    print(f"Results are in {options.out}." + (f" Failed: {', '.join(failed)}." if failed else ""))
    return int(bool(failed))


def _command(options: argparse.Namespace, devices: int | None) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.scaling.stage", "--out", str(options.out), "--study", options.study]
    command += ["--recipe", options.recipe, "--cases", options.cases, "--minutes", str(options.minutes)]
    return command if devices is None else [*command, "--devices", str(devices)]


def _run_one(options: argparse.Namespace) -> bool:
    """Runs all cases in one process; whether it failed."""
    started = _start(_command(options, options.devices), None, {})
    return _end([started], 60 * options.minutes + GRACE_SECONDS) != [0]


def _run_two(options: argparse.Namespace) -> bool:
    """Runs the cases that two processes share; whether they failed."""
    devices = None if options.devices is None else options.devices // 2
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = []
    for i in range(2):
        place = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(i)]
        log = options.out / f"process_{i}.log"
        environment = {} if devices is not None else {"CUDA_VISIBLE_DEVICES": visible[i]}
        started.append(_start([*_command(options, devices), *place], log, environment))
    return _end(started, PROCESSES_SECONDS) != [0, 0]


def _start(command: list[str], log: Path | None, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **environment}
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _end(started: Sequence["subprocess.Popen[bytes]"], seconds: float) -> list[int | None]:
    """Waits until all have ended, or one has failed, or the time is over; then ends what is left."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            statuses = [process.poll() for process in started]
            if None not in statuses or any(statuses):
                break
            time.sleep(0.2)
        else:
            print(f"ended after {seconds:.0f} s", flush=True)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in started]


if __name__ == "__main__":
    sys.exit(main())
