"""Compiles the kernels for one target, on any machine: a cubin, its PTX, and a manifest of what a launch must know.

usage: python cuda/compile.py --target sm_90a --out build/native
"""

import argparse
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any


def compile_target(target: str, out: pathlib.Path) -> None:
    """Writes ``kernels.<target>.cubin``, ``.ptx`` and ``.json``.

    Args:
      target: sm_90a, sm_100f or sm_103a.
      out: Directory to write to.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Read when the compiler is imported.
        os.environ |= {"CUTE_DSL_ARCH": target, "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": scratch}
        ptx, cubin, shared_bytes = _compile(target)
    path = out / f"kernels.{target}.cubin"
    path.write_bytes(cubin)
    path.with_suffix(".ptx").write_text(ptx)
    manifest = {"target": target, "kernels": _manifest(target, ptx, shared_bytes, _resources(path))}
    path.with_suffix(".json").write_text(json.dumps(manifest, indent=1) + "\n")


def _compile(target: str) -> tuple[str, bytes, dict[str, int]]:
    """PTX, cubin, and the shared memory of each kernel."""
    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr
    from cutlass.experimental.cuda import create_tensor_map_tiled
    from kernels import catalog, shared

    shared_bytes = {}

    @cute.jit
    def launch_all(
        stream: driver.CUstream, pointer: cute.Pointer, integer: cutlass.Int32, number: cutlass.Float32
    ) -> None:
        # Only the type of an argument counts here: the library makes its own tensor maps.
        tensor_map = create_tensor_map_tiled(
            global_address=pointer.toint(),
            dtype=cutlass.Uint8,
            global_dims=[16, 1],
            global_strides=[1],
            box_dims=[16, 1],
        )
        values = {
            cutlass.Pointer: pointer.raw_ptr(),
            cutlass.Int32: integer,
            cutlass.Float32: number,
            _tensor_map(): tensor_map,
        }
        for variant in catalog.variants(target):
            kernel = variant.function
            kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            arguments = _arguments(kernel, values)
            with shared.counting() as count:
                launcher = kernel(*arguments, *variant.constants.values())
                capped = {"min_blocks_per_mp": 1} if variant.capped else {}
                launcher.launch(grid=(1, 1, 1), block=(variant.threads, 1, 1), stream=stream, **capped)
            shared_bytes[variant.name] = count[0]

    pointer = make_ptr(cutlass.Uint32, 0, cute.AddressSpace.gmem, assumed_align=16)
    arguments = (make_fake_stream(), pointer, cutlass.Int32(1), cutlass.Float32(1))
    compiled = cute.compile(launch_all, *arguments)
    return compiled.__ptx__, compiled.__cubin__, shared_bytes


def _parameters(kernel: Any) -> dict[str, Any]:
    return {name: parameter.annotation for name, parameter in inspect.signature(kernel).parameters.items()}


def _arguments(kernel: Any, values: dict[Any, Any]) -> list[Any]:
    """A value of the right type for every run-time parameter."""
    return [values[kind] for kind in _parameters(kernel).values() if kind in values]


def _resources(cubin: pathlib.Path) -> dict[str, dict[str, int]]:
    """Registers and stack bytes of each entry."""
    tool = shutil.which("cuobjdump") or _packaged("cuobjdump")
    text = subprocess.run([tool, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {name: {"registers": int(reg), "stack_bytes": int(stack) + int(local)} for name, reg, stack, local in found}


def _packaged(tool: str) -> str:
    """The tool in NVIDIA's Python package, which does not put it on the path."""
    for directory in map(pathlib.Path, sys.path):
        for path in directory.glob(f"nvidia/*/bin/{tool}"):
            return str(path)
    raise FileNotFoundError(f"{tool}: not on the path; install the extra 'build'")


def _tensor_map() -> Any:
    """The annotation of a tensor map."""
    import cutlass
    from cutlass.experimental.cuda import TensorMap

    return cutlass.GridConstant[TensorMap]


def _manifest(
    target: str, ptx: str, shared_bytes: dict[str, int], resources: dict[str, dict[str, int]]
) -> list[dict[str, Any]]:
    from kernels import catalog

    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    kernels = []
    for variant, entry in zip(catalog.variants(target), entries, strict=True):
        assert re.fullmatch(rf"{variant.name}_\d+", entry), (variant.name, entry)
        kernels.append(
            {
                "name": variant.name,
                "entry": entry,
                "parameters": _parameter_list(variant),
                "threads": variant.threads,
                "shared_bytes": shared_bytes[variant.name],
                **resources[entry],
            }
        )
    return kernels


def _parameter_list(variant: Any) -> str:
    """Names and types of the run-time parameters, in order."""
    import cutlass

    names = {cutlass.Pointer: "pointer", cutlass.Int32: "int32", cutlass.Float32: "float32"}
    parameters = []
    for name, kind in _parameters(variant.function).items():
        if name in variant.tensor_maps:
            parameters.append(f"{name}: {variant.tensor_maps[name]}")
        elif kind in names:
            parameters.append(f"{name}: {names[kind]}")
    return ", ".join(parameters)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    compile_target(arguments.target, arguments.out)
