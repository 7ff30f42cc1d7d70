"""Compiled programs, kept beside the results, and what they communicate."""

import dataclasses
import gzip
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scaling import collectives
from benchmarks.scaling.collectives import Array, Collective


@dataclasses.dataclass(frozen=True)
class Program:
    """What is read from a compiled program.

    Attributes:
      collectives: That run on it.
      sent_bytes: What a device sends when it runs once, by kind of collective.
      gathered: Activations or operands of attention that are gathered.
      custom_calls: Number of calls of native kernels.
    """

    collectives: list[Collective]
    sent_bytes: dict[str, float]
    gathered: list[Array]
    custom_calls: int


def write_program(directory: Path, name: str, text: str) -> None:
    """Writes the text of a case's program."""
    directory.mkdir(parents=True, exist_ok=True)
    _path(directory, name).write_bytes(gzip.compress(text.encode(), mtime=0))


def read_program(directory: Path, name: str, parameter_sizes: Sequence[int]) -> Program:
    """Reads a case's program.

    Args:
      directory: Where :func:`write_program` wrote.
      name: Of the case.
      parameter_sizes: Number of elements of each parameter, as a device computes with it.

    Returns:
      What it communicates.
    """
    text = gzip.decompress(_path(directory, name).read_bytes()).decode()
    found = collectives.find(text)
    return Program(
        collectives=found,
        sent_bytes={
            kind: sum(x.sent_bytes for x in found if x.kind == kind) for kind in sorted({x.kind for x in found})
        },
        gathered=collectives.gathered(found, parameter_sizes),
        custom_calls=text.count('custom_call_target="jax_fp4attn_'),
    )


def _path(directory: Path, name: str) -> Path:
    return directory / f"{name.replace(' ', '_')}.txt.gz"
