"""The kernels in NVIDIA's nvidia-cutlass-operators, without what the package does when it is imported.

Its `__init__` wants PyTorch; the modules that hold the kernels do not.
"""

import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from typing import Any

_KERNELS = "cutlass.operators.providers.cutedsl.gemm.implementations"
_DESIGNS = "cutlass.operators.metadata.design"


def implementation(name: str) -> Any:
    """A module of the package, such as "sm90_static_persistent_impl".

    Raises:
      ModuleNotFoundError: nvidia-cutlass-operators is not installed.
    """
    for package in (_KERNELS, _DESIGNS):
        _declare(package, _root())
    return importlib.import_module(f"{_KERNELS}.{name}")


@functools.cache
def _root() -> pathlib.Path:
    spec = importlib.util.find_spec("cutlass.operators")
    if spec is None:
        raise ModuleNotFoundError("No module named 'cutlass.operators'", name="cutlass.operators")
    return pathlib.Path(spec.origin).parent


def _declare(package: str, root: pathlib.Path) -> None:
    """Makes a package and those above it importable without running their `__init__`."""
    parts = package.split(".")
    for n in range(2, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:n]))
        module.__path__ = [str(root.joinpath(*parts[2:n]))]
        sys.modules.setdefault(module.__name__, module)
