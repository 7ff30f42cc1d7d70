"""Turns the manifests of all targets into the table that the launcher is compiled with, and checks that they agree.

usage: python tabulate.py build/native   (writes build/native/kernel_table.inc)
"""

import json
import pathlib
import re
import sys
from typing import Any

_LETTERS = {"pointer": "p", "int32": "i", "float32": "f", "tensor_map": "t"}
_FROM_SOURCE = ("parameters", "threads", "shared_bytes")
_BITS = {"sm_90a": 1, "sm_100f": 2, "sm_103a": 4}


def write_table(directory: pathlib.Path) -> None:
    """Writes ``kernel_table.inc``, with a row for each name that a kernel's entry has in one image or several.

    Args:
      directory: Holds the manifests.

    Raises:
      ValueError: If targets that have the same kernel differ in what a launch must know.
    """
    launches: dict[str, dict[str, Any]] = {}
    images: dict[tuple[str, str], int] = {}
    for path in sorted(directory.glob("kernels.*.json")):
        manifest = json.loads(path.read_text())
        for kernel in manifest["kernels"]:
            name, launch = kernel["name"], {key: kernel[key] for key in _FROM_SOURCE}
            if launches.setdefault(name, launch) != launch:
                raise ValueError(f"{name}: the manifests differ between targets in more than registers and stack")
            entry = name, kernel["entry"]
            images[entry] = images.get(entry, 0) | _BITS[manifest["target"]]
    rows = ",\n".join(_row(name, entry, launches[name], bits) for (name, entry), bits in images.items())
    text = f"namespace fp4attn {{\nnamespace {{\nconstexpr Kernel kKernels[] = {{\n{rows},\n}};\n}}\n}}\n"
    (directory / "kernel_table.inc").write_text(text)


def _row(name: str, entry: str, kernel: dict[str, Any], images: int) -> str:
    kinds = re.findall(r"\w+: (\w+)", kernel["parameters"])
    signature = "".join(_LETTERS[kind] for kind in kinds)
    launch = f'"{name}", "{entry}", "{signature}", {kernel["threads"]}, {kernel["shared_bytes"]}'
    return f"    {{{launch}, {images}}}"


if __name__ == "__main__":
    write_table(pathlib.Path(sys.argv[1]))
