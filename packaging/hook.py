"""Builds the native library into a wheel and gives the wheel the tag of what the library needs."""

import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_LIBRARY = "jax_fp4attn/native/libjax_fp4attn.so"


def has_native_library() -> bool:
    """Whether wheels for this platform hold the library; elsewhere they are pure Python."""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64")


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
        subprocess.run([sys.executable, "cuda/build.py", "--install"], cwd=self.root, check=True)
        build_data["artifacts"].append(_LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(pathlib.Path(self.root, _LIBRARY))}"


def _platform_tag(library: pathlib.Path) -> str:
    """The manylinux tag of the newest glibc symbol that the library uses."""
    symbols = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
    major, minor = max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))
    return f"manylinux_{major}_{minor}_x86_64"
