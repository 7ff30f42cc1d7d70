"""Builds the native library into a wheel and gives the wheel the tag of what the library needs."""

import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LIBRARY = "jax_fp4attn/native/libjax_fp4attn.so"
_BUILD = "build/wheel"
_PURE = "JAX_FP4ATTN_NATIVE=0 makes a wheel without the native library"

# What the manylinux policy of glibc 2.34 allows of the C++ runtime.
_NEWEST_CPP = {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}


def has_native_library() -> bool:
    """Whether a wheel that is built here holds the library; otherwise it is pure Python."""
    wanted = os.environ.get("JAX_FP4ATTN_NATIVE", "1") != "0"
    return wanted and (platform.system(), platform.machine()) == ("Linux", "x86_64")


class NativeLibraryHook(BuildHookInterface):
    """Runs before a wheel is packed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the library.

        Args:
          version: "standard", or "editable", which leaves the library to `make native`.
          build_data: Of hatchling; gets the library and the tag.
        """
        if version == "editable" or not has_native_library():
            return
        _check_tools()
        # Not into the package: an editable installation of the same tree has a library of its own there.
        subprocess.run([sys.executable, "cuda/build.py", "--out", _BUILD], cwd=self.root, check=True)
        library = pathlib.Path(self.root, _BUILD, pathlib.Path(_LIBRARY).name)
        build_data["force_include"][str(library)] = _LIBRARY
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(library)}"


def _check_tools() -> None:
    for tool in (shlex.split(os.environ.get("CXX", "g++"))[0], "objdump"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"{tool}: needed to build the native library, and not on the path; {_PURE}")


def _platform_tag(library: pathlib.Path) -> str:
    """The manylinux tag of the newest glibc symbol that the library uses."""
    symbols = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
    for name, newest in _NEWEST_CPP.items():
        found = _newest(symbols, name)
        if found > newest:
            raise RuntimeError(
                f"the compiler's C++ runtime is too new for a wheel: expected {name} of at most {newest}, got {found}; "
                f"use g++ 12 or older, or {_PURE}"
            )
    major, minor, *_ = _newest(symbols, "GLIBC")
    return f"manylinux_{major}_{minor}_x86_64"


def _newest(symbols: str, name: str) -> tuple[int, ...]:
    versions = re.findall(rf"\b{name}_([\d.]+)", symbols)
    return max((tuple(map(int, version.split("."))) for version in versions), default=())
