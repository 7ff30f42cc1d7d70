"""Kernels by their manifest: the file beside a cubin by which the library launches them, too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .configuration import Shape
from .front import Output, Result, emulate
from .program.program import Program
from .tensor_map import TensorMap

# `tensor_map(bf16, 64x128, 128B)`: element type, box with the innermost dimension first, swizzle.
_TENSOR_MAP = re.compile(r"tensor_map\((\w+), (\d+(?:x\d+)*), (\w+)\)")
_SCALARS = {"int32": np.int32, "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64, "float32": np.float32}
_NULL = np.uint64(0)


@dataclass(frozen=True)
class KernelEntry:
    """A kernel of a manifest.

    Attributes:
      name: by which the library knows it.
      entry: in the PTX and the cubin.
      parameters: name to type: "pointer", a scalar type, or a tensor map.
      threads: of a CTA.
      shared_bytes: of dynamic shared memory.
      cluster: CTAs of a cluster.
    """

    name: str
    entry: str
    parameters: Mapping[str, str]
    threads: int
    shared_bytes: int
    cluster: Shape = (1, 1, 1)

    def arguments(self, **values: Any) -> list[Any]:
        """The arguments of `emulate`, from a value for each parameter.

        Pointers take arrays, Outputs, or None for a null pointer; tensor maps take the array that they are of, or a
        TensorMap where its rows are not simply those of the array.

        Raises:
          TypeError: parameters are missing, or there are none of some names.
          ValueError: a TensorMap is of another type than the parameter.
        """
        missing, unknown = self.parameters.keys() - values.keys(), values.keys() - self.parameters.keys()
        if missing or unknown:
            raise TypeError(f"{self.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return [_argument(kind, values[name]) for name, kind in self.parameters.items()]

    def emulate(self, ptx: str | Program, grid: Shape | int, values: Mapping[str, Any], **options: Any) -> Result:
        """Run it on the emulator, launched as the library launches it.

        Args:
          ptx: text that has the kernel, or its program.
          grid: CTAs along x, y, z.
          values: of its parameters, see `arguments`.
          **options: of `emulate`.
        """
        return emulate(
            ptx,
            self.arguments(**values),
            grid,
            block=self.threads,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            entry=None if isinstance(ptx, Program) else self.entry,
            **options,
        )


def _argument(kind: str, value: Any) -> Any:
    if kind == "pointer":
        return _NULL if value is None else value
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    match = _TENSOR_MAP.fullmatch(kind)
    if match is None:
        raise ValueError(f"the parameter type {kind!r} is not supported")
    if isinstance(value, TensorMap):
        found = f"tensor_map({value.element.name}, {'x'.join(map(str, value.box))}, {value.swizzle.name})"
        if found != kind:
            raise ValueError(f"expected a {kind}, got a {found}")
        return value
    array = value.array if isinstance(value, Output) else value
    box = [int(extent) for extent in match[2].split("x")]
    return TensorMap.for_array(array, box, match[3], element=match[1])


def read_manifest(path: str | Path) -> dict[str, KernelEntry]:
    """The kernels of a manifest, by name."""
    content = json.loads(Path(path).read_text())
    return {kernel["name"]: _entry(kernel) for kernel in content["kernels"]}


def _entry(kernel: Mapping[str, Any]) -> KernelEntry:
    # Types may have commas in parentheses.
    parameters = re.findall(r"(\w+): (\w+(?:\([^)]*\))?)", kernel["parameters"])
    return KernelEntry(
        kernel["name"],
        kernel["entry"],
        dict(parameters),
        kernel["threads"],
        kernel["shared_bytes"],
        tuple(kernel.get("cluster", (1, 1, 1))),
    )
