"""What the assembler made of the kernels of an image."""

import subprocess

import pytest

from tests.cuda_tools import path_of
from tests.native.stand_in.handlers import BUILT, manifest


def of_kernels(target: str, prefix: str) -> dict[str, str]:
    """Machine code as text of the kernels whose name begins so, by name; skips without a disassembler."""
    tool = path_of("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    command = [tool, "-sass", BUILT / f"kernels.{target}.cubin"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions = dict(part.split("\n", 1) for part in text.split("Function : ")[1:])
    entries = {kernel["entry"]: name for name, kernel in manifest(target).items()}
    return {entries[entry]: code for entry, code in functions.items() if entries[entry].startswith(prefix)}
