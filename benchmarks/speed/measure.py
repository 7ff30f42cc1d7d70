"""One case: every contender is built, checked against exact values, and timed in turns with the others."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accuracy.metrics import Accuracy
from benchmarks.quantizers.device_time import device_time
from benchmarks.speed.cases import Case
from benchmarks.speed.contenders import Contender, Program
from benchmarks.speed.exact import agreement, expected
from benchmarks.speed.inputs import Arrays, Sample, cotangent_of_rows, sample_of
from benchmarks.speed.timing import TURN_SECONDS, Timing, seconds_a_call, take_turns

PROFILED_RUNS = 3

XLA_FIRST_CALLS = 45.0
"""Seconds of compiling after which plain XLA, which tunes its products for every shape, is left out."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A contender in a case.

    Attributes:
      case: What is computed.
      kind: Of the contender.
      recipe: Of the contender.
      label: Of the contender.
      agreement: Of its results with exact values; None if it has none.
      first_call: Seconds of the first call, compiling included.
      timing: Its times; None if there are none.
      device_seconds: Seconds of its kernels by the profiler, or None.
      reason: Why there are no times, or "".
    """

    case: Case
    kind: str
    recipe: str
    label: str
    agreement: Accuracy | None = None
    first_call: float = 0.0
    timing: Timing | None = None
    device_seconds: float | None = None
    reason: str = ""

    @property
    def tflops(self) -> float | None:
        """10^12 operations a second."""
        return None if self.timing is None else self.case.flops / self.timing.median * 1e-12


def measure(
    case: Case,
    contenders: Sequence[Contender],
    arrays: Arrays,
    *,
    seconds: float,
    turn_seconds: float = TURN_SECONDS,
    earlier: Sequence[Result] = (),
    profile: bool = False,
) -> list[Result]:
    """Measures a case.

    Args:
      case: What is computed.
      contenders: Who computes it.
      arrays: Arguments.
      seconds: About how long the timing may take.
      turn_seconds: About how long a turn takes.
      earlier: Results of other cases.
      profile: Whether to add the times of kernels by the profiler.

    Returns:
      A result for each contender, in their order.
    """
    sample = sample_of(case.shape)
    wanted = expected(case, arrays, sample)
    results: dict[str, Result] = {}
    programs: dict[str, Program] = {}
    culprit = ""
    for contender in contenders:
        result = Result(case, contender.kind, contender.recipe, contender.label)
        _say(f"  {contender.label}:", end="")
        try:
            if culprit:
                raise NotImplementedError(f"not tried: {culprit} took the device with it")
            _check_patience(contender, earlier)
            result, program = _first_call(result, contender, arrays)
            result = dataclasses.replace(result, agreement=_agreement(case, program, arrays, wanted, sample))
            result = dataclasses.replace(result, reason=_complaint(result.agreement, contender.limits))
            if not result.reason:
                programs[contender.label] = program
            _say(f" first call {result.first_call:.1f} s; {result.reason or 'sound'}")
        # Whatever a contender raises is its result.
        except Exception as error:
            result = dataclasses.replace(result, reason=describe(error))
            _say(f" {result.reason}")
            culprit = culprit or ("" if device_answers() else contender.label)
        results[contender.label] = result
    for label, timing in take_turns(programs, seconds, turn_seconds).items():
        if isinstance(timing, Exception):
            results[label] = dataclasses.replace(results[label], reason=describe(timing))
        else:
            results[label] = dataclasses.replace(
                results[label], timing=timing, device_seconds=_profiled(programs[label]) if profile else None
            )
            _say(f"  {label}: {timing.median * 1e3:.3f} ms, {results[label].tflops:.3g} TFLOP/s")
    return list(results.values())


def launch_seconds() -> float:
    """Seconds of a call that does next to nothing: no time below it says anything of a kernel.

    Returns:
      Seconds.
    """
    function, x = jax.jit(lambda x: x + 1), jnp.zeros(())
    jax.block_until_ready(function(x))
    return min(seconds_a_call(lambda: function(x), 100) for _ in range(5))


def device_answers() -> bool:
    """Whether the device still computes: after some failures of a kernel it does not, in this process.

    Returns:
      Whether it does.
    """
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return False
    return True


def describe(error: Exception) -> str:
    """An error in a line.

    Args:
      error: The error.

    Returns:
      Its type, unless it says that something is not implemented, and the beginning of its message.
    """
    text = " ".join(str(error).split())
    if not isinstance(error, NotImplementedError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else text[:197] + "..."


def _check_patience(contender: Contender, earlier: Sequence[Result]) -> None:
    spent = sum(result.first_call for result in earlier if result.kind == "xla")
    if contender.kind == "xla" and spent > XLA_FIRST_CALLS:
        raise NotImplementedError(f"left out: its first calls have taken {spent:.0f} s")


def _first_call(result: Result, contender: Contender, arrays: Arrays) -> tuple[Result, Program]:
    program = contender.build(result.case, arrays)
    start = time.perf_counter()
    jax.block_until_ready(program())
    return dataclasses.replace(result, first_call=time.perf_counter() - start), program


def _agreement(case: Case, program: Program, arrays: Arrays, wanted: Sequence[Any], sample: Sample) -> Accuracy:
    arguments = program.arguments
    if case.has_gradients:
        arguments = (*arguments[:-1], cotangent_of_rows(sample, arrays.d_output))
    return agreement(jax.tree.leaves(program.function(*arguments))[: len(wanted)], wanted, sample)


def _complaint(found: Accuracy | None, limits: Accuracy) -> str:
    if found is not None and found.cosine >= limits.cosine and found.rel_l2 <= limits.rel_l2:
        return ""
    return "wrong" if found is None else f"wrong: cosine {found.cosine:.4f}, rel-L2 {found.rel_l2:.4f}"


def _profiled(program: Program) -> float | None:
    try:
        return device_time(program, PROFILED_RUNS)
    except Exception as error:
        _say(f"  no times of kernels: {describe(error)}")
        return None


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
