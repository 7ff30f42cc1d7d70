"""Compiled programs, kept beside the results, and what they communicate."""

import dataclasses
import gzip
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.scaling import collectives
from benchmarks.scaling.collectives import Array, Collective

SPLITTING = "spmd-partitioning"
"""The compiler's pass that splits a program over devices."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is read from a compiled program.

    Attributes:
      collectives: That run on it.
      sent_bytes: What a device sends when it runs once, by kind of collective.
      split_bytes: The same of the program as it was split over the devices, before the backend changed it. A CPU, for
        one, gathers and sums bfloat16 as float32. Empty if its text was not kept.
      gathered: Activations or operands of attention that are gathered.
      custom_calls: Number of calls of native kernels.
    """

    collectives: list[Collective]
    sent_bytes: dict[str, float]
    split_bytes: dict[str, float]
    gathered: list[Array]
    custom_calls: int


def compile_program(lowered: jax.stages.Lowered, directory: Path, name: str) -> jax.stages.Compiled:
    """Compiles a case's program and keeps its text, as it is compiled and as it was split over the devices.

    Args:
      lowered: The program.
      directory: For the texts.
      name: Of the case.

    Returns:
      The compiled program.
    """
    with tempfile.TemporaryDirectory() as dump:
        options: dict[str, str | bool] = {"xla_dump_to": dump, "xla_dump_hlo_pass_re": SPLITTING}
        compiled = lowered.compile(compiler_options=options | {"xla_dump_hlo_as_text": True})
        split = [path.read_text() for path in Path(dump).glob(f"*.after_{SPLITTING}.*.txt")]
    _write(directory, name, compiled.as_text() or "")
    if split:
        _write(directory, f"{name} split", split[0])
    return compiled


def read_program(directory: Path, name: str, parameter_sizes: Sequence[int]) -> Program:
    """Reads a case's program.

    Args:
      directory: Where :func:`compile_program` wrote.
      name: Of the case.
      parameter_sizes: Number of elements of each parameter, as a device computes with it.

    Returns:
      What it communicates.
    """
    text, split = _read(directory, name), f"{name} split"
    found = collectives.find(text)
    return Program(
        collectives=found,
        sent_bytes=_by_kind(found),
        split_bytes=_by_kind(collectives.find(_read(directory, split))) if _path(directory, split).is_file() else {},
        gathered=collectives.gathered(found, parameter_sizes),
        custom_calls=text.count('custom_call_target="jax_fp4attn_'),
    )


def _by_kind(found: Sequence[Collective]) -> dict[str, float]:
    return {kind: sum(x.sent_bytes for x in found if x.kind == kind) for kind in sorted({x.kind for x in found})}


def _write(directory: Path, name: str, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _path(directory, name).write_bytes(gzip.compress(text.encode(), mtime=0))


def _read(directory: Path, name: str) -> str:
    return gzip.decompress(_path(directory, name).read_bytes()).decode()


def _path(directory: Path, name: str) -> Path:
    return directory / f"{name.replace(' ', '_')}.txt.gz"
