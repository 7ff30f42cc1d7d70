"""The matrix products of nvidia-cutlass-operators, as the tests record and judge them."""

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.emulator.apart import run_apart
from benchmarks.emulator.errors import Errors, relative_l2
from benchmarks.emulator.subjects import Subject
from cuda.emulator.recording import RecordedLaunch


def subjects(target: str) -> Iterator[Subject]:
    """Every case of a target that the emulator can run."""
    cases = _of_tests("cases")
    launches: Mapping[str, RecordedLaunch] = run_apart(_of_tests("record").record_cases, target)
    for case in cases.cases_of(target):
        if case in cases.UNSUPPORTED:
            continue
        yield Subject(
            kernel=f"GEMM {case.name} {target}",
            shape=f"{case.m}x{case.n}x{case.k}" + (f" L{case.l}" if case.l > 1 else ""),
            launch=launches[cases.key(case)],
            arrays=_of_tests("operands").make_operands(case).arrays,
            outputs=1,
            errors=functools.partial(_errors, case),
            hangs=case in cases.HANGING,
        )


def _of_tests(name: str) -> Any:
    # By name, because the tests depend on the benchmarks: only the program that is run depends on both.
    return importlib.import_module(f"tests.emulator.nvidia.{name}")


def _errors(case: Any, results: Sequence[np.ndarray]) -> Errors:
    """Against the product in float64, within the range of C."""
    tests = _of_tests("operands")
    largest = float(ml_dtypes.finfo(tests.type_of(case.kernel.c)).max)
    exact = np.clip(tests.make_operands(case).product, -largest, largest)
    return Errors(relative_l2(tests.result_of(case, results[0]), exact))
