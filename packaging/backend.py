"""The build backend: hatchling, which for a wheel also gets what compiling the kernels needs.

An editable installation is pure Python and needs none of it; there `make native` builds the library.
"""

import pathlib
import tomllib
from typing import Any

from hatchling import build as hatchling
from hatchling.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
)
from hook import has_native_library

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

# Hatchling has them where a frontend can use them; without them one would have to build a wheel to read its metadata.
for _name in ("prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable"):
    if hasattr(hatchling, _name):
        globals()[_name] = getattr(hatchling, _name)
        __all__.append(_name)

# Handlers run on this version of XLA's FFI and on newer ones, so a wheel is built for the oldest that is supported.
_OLDEST_JAXLIB = "jaxlib==0.9.1"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """See PEP 517."""
    requirements = hatchling.get_requires_for_build_wheel(config_settings)
    if not has_native_library():
        return requirements
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    return [*requirements, *project["optional-dependencies"]["build"], _OLDEST_JAXLIB]
