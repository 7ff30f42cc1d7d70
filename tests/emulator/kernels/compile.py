"""Compiles the matrix products for sm_90a on any machine: for each its PTX and cubin, and one manifest.

usage: python -m tests.emulator.kernels.compile OUT
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from tests.cuda_tools import path_of

TARGET = "sm_90a"
MANIFEST = "manifest.json"
_SOURCES = ("gemm.py", "gemm_bf16.py", "gemm_fp8.py", "wgmma.py")


def sources_digest() -> str:
    """SHA-256 of the kernels' sources, by which a test knows whether compiled kernels are still theirs."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(pathlib.Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def compile_kernels(folder: pathlib.Path) -> None:
    """Writes ``NAME.ptx`` and ``NAME.cubin`` for every kernel, and ``manifest.json``.

    Args:
      folder: Directory to write to.

    Raises:
      ImportError: nvidia-cutlass-dsl is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Read when the compiler is imported.
        os.environ |= {"CUTE_DSL_ARCH": TARGET, "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": scratch}
        from tests.emulator.kernels import gemm_bf16, gemm_fp8

        forms = gemm_bf16.FORMS | gemm_fp8.FORMS
        kernels = {name: _compile(name, form, folder) for name, form in forms.items()}
    manifest = {"target": TARGET, "sources": sources_digest(), "kernels": kernels}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _compile(name: str, form: Any, folder: pathlib.Path) -> dict[str, Any]:
    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    from tests.emulator.kernels import gemm

    maps = _maps(form)

    @cute.jit
    def launch(
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        stream: driver.CUstream,
    ) -> None:
        arrays = ((a, [k, m]), (b, [k, n]), (d, [n, m]))
        encoded = [_encode(map_, *array) for map_, array in zip(maps, arrays, strict=True)]
        gemm.gemm(*encoded, m, n, k, form).launch(
            grid=(1, 1, 1), block=(gemm.THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    gemm.gemm.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    pointers = [make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=16)] * 3
    compiled = cute.compile(launch, *pointers, *[cutlass.Int32(1)] * 3, make_fake_stream())
    cubin = folder / f"{name}.cubin"
    cubin.write_bytes(compiled.__cubin__)
    cubin.with_suffix(".ptx").write_text(compiled.__ptx__)
    (entry,) = re.findall(r"\.visible \.entry (\w+)\(", compiled.__ptx__)
    return {
        "entry": entry,
        "parameters": [*maps, "int32", "int32", "int32"],
        "threads": gemm.THREADS,
        "shared_bytes": form.shared_bytes,
        "cluster": [1, 1, 1],
        "tile": [gemm.ROWS, form.columns, form.stage_k],
        "types": [*form.types, form.output],
        **_resources(cubin),
    }


def _maps(form: Any) -> list[dict[str, Any]]:
    """What the tensor maps of A, B and D must be, innermost dimension first."""
    from tests.emulator.kernels import gemm

    source = {1: "uint8", 2: "bfloat16"}[form.element_bytes]
    output = {"f32": "float32", "bf16": "bfloat16"}[form.output]
    return [
        {"dtype": source, "box": [form.stage_k, gemm.ROWS], "swizzle": 128},
        {"dtype": source, "box": [form.stage_k, form.columns], "swizzle": 128},
        {"dtype": output, "box": [form.chunk_columns, gemm.CONSUMER_ROWS], "swizzle": 128},
    ]


def _encode(map_: dict[str, Any], pointer: Any, dims: list[Any]) -> Any:
    import cutlass
    import cutlass.experimental.cuda as cuda

    types = {"uint8": cutlass.Uint8, "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32}
    return cuda.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=types[map_["dtype"]],
        global_dims=dims,
        global_strides=[1],
        box_dims=map_["box"],
        swizzle=cuda.TensorMapSwizzle.s128b,
    )


def _resources(cubin: pathlib.Path) -> dict[str, int]:
    """Registers and stack bytes of the only entry."""
    tool = path_of("cuobjdump")
    if tool is None:
        raise FileNotFoundError("cuobjdump: not on the path; install nvidia-cuda-cuobjdump")
    text = subprocess.run([tool, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {"registers": int(registers), "stack_bytes": int(stack) + int(local)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    compile_kernels(parser.parse_args().out)
