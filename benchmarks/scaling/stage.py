"""A part of the study that runs in a process of its own, so that what it may break breaks nothing else."""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.scaling import checks
from benchmarks.scaling.cases import STUDIES, Case, Study
from benchmarks.scaling.measure import Result, measure
from examples.language_model import processes
from examples.language_model.data import Corpus, load_corpus

CASES, CHECKS, PROCESSES = "cases.json", "checks.json", "processes.json"
PROGRAMS = "programs_of_cases"


def run_cases(cases: Sequence[Case], study: Study, corpus: Corpus, file: Path, options: argparse.Namespace) -> None:
    """Measures cases, and writes after each what there is.

    Args:
      cases: Which.
      study: Whose they are.
      corpus: Text.
      file: For the results; only the first process writes.
      options: Recipe, and the time after which no case is begun.
    """
    start = time.perf_counter()
    results: list[Result] = []
    for case in cases:
        begun = time.perf_counter() - start
        if begun > 60 * options.minutes:
            results.append(Result(name=case.name, mesh=str(case.mesh), reason="out of time"))
        else:
            results.append(_measure(case, study, corpus, file.with_name(f"programs_of_{file.stem}"), options))
        if jax.process_index() == 0:
            result, took = results[-1], time.perf_counter() - start - begun
            print(f"[{begun:.0f} s] {case.name}: {result.reason or _summary(result)} ({took:.0f} s)", flush=True)
            write(file, results)


def write(file: Path, items: Sequence[Any]) -> None:
    """Writes dataclasses as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([dataclasses.asdict(item) for item in items], indent=1))


def _measure(case: Case, study: Study, corpus: Corpus, programs: Path, options: argparse.Namespace) -> Result:
    try:
        return measure(
            case, study.model, corpus, programs, recipe=options.recipe, profile=jax.default_backend() == "gpu"
        )
    # Whatever a case raises is its result.
    except Exception as error:
        return Result(name=case.name, mesh=str(case.mesh), reason=_describe(error))


def _checks() -> list[checks.Check]:
    try:
        return checks.run()
    except Exception as error:
        return [checks.Check("all checks could be made", False, _describe(error))]


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _summary(result: Result) -> str:
    return (
        f"{result.tokens / result.seconds:.0f} tokens/s, last loss {result.losses[-1]:.4f}, "
        f"compiled in {result.compile_seconds:.0f} s"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that the study and its stages share."""
    parser.add_argument("--study", choices=list(STUDIES), default="gpu", help="sizes (default: %(default)s)")
    parser.add_argument("--recipe", default="train", help="of attention (default: %(default)s)")
    parser.add_argument("--cases", default="", metavar="A,B", help="only these, by name (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="after which no case is begun (default: %(default)s)"
    )


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line names."""
    names = [name for name in options.cases.split(",") if name]
    return [case for case in STUDIES[options.study].cases if not names or case.name in names]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a stage.

    Args:
      arguments: Command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(description="Runs a part of python -m benchmarks.scaling.")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    processes.add_arguments(parser)
    options = parser.parse_args(arguments)
    processes.start(options)
    study, corpus = STUDIES[options.study], load_corpus()
    cases = chosen(options)
    if options.coordinator is not None:
        shared = [case for case in cases if case.name in study.in_two_processes]
        run_cases(shared, study, corpus, options.out / PROCESSES, options)
        return
    run_cases(cases, study, corpus, options.out / CASES, options)
    write(options.out / CHECKS, _checks())


if __name__ == "__main__":
    main()
