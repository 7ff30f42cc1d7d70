"""Where the programs of CUDA's toolkit are."""

import pathlib
import shutil
import sys


def path_of(tool: str) -> str | None:
    """Of CUDA's toolkit, or of NVIDIA's Python package, which does not put it on the path; None if there is neither."""
    packaged = (path for entry in map(pathlib.Path, sys.path) for path in entry.glob(f"nvidia/*/bin/{tool}"))
    return shutil.which(tool) or next(map(str, packaged), None)
