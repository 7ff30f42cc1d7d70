"""Turns the manifests of all targets into the table that the launcher is compiled with, and checks that they agree.

usage: python tabulate.py build/native   (writes build/native/kernel_table.inc)
"""

import json
import pathlib
import sys
from typing import Any

_LETTERS = {"pointer": "p", "int32": "i", "float32": "f"}
_FROM_SOURCE = ("name", "entry", "parameters", "threads", "shared_bytes")


def write_table(directory: pathlib.Path) -> None:
    """Writes ``kernel_table.inc``.

    Args:
      directory: Holds the manifests.

    Raises:
      ValueError: If the targets differ in what a launch must know.
    """
    manifests = [json.loads(path.read_text())["kernels"] for path in sorted(directory.glob("kernels.*.json"))]
    launches = [[{key: kernel[key] for key in _FROM_SOURCE} for kernel in kernels] for kernels in manifests]
    if any(other != launches[0] for other in launches[1:]):
        raise ValueError("the manifests differ between targets in more than registers and stack")
    rows = ",\n".join(_row(kernel) for kernel in launches[0])
    text = f"namespace fp4attn {{\nnamespace {{\nconstexpr Kernel kKernels[] = {{\n{rows},\n}};\n}}\n}}\n"
    (directory / "kernel_table.inc").write_text(text)


def _row(kernel: dict[str, Any]) -> str:
    signature = "".join(_LETTERS[parameter.split(": ")[1]] for parameter in kernel["parameters"].split(", "))
    return (
        f'    {{"{kernel["name"]}", "{kernel["entry"]}", "{signature}", {kernel["threads"]}, {kernel["shared_bytes"]}}}'
    )


if __name__ == "__main__":
    write_table(pathlib.Path(sys.argv[1]))
