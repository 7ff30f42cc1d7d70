"""Builds the native library on any machine, with or without a GPU: kernels to cubins, cubins into a shared object.

usage: python cuda/build.py [--out build/native] [--install]

It needs the extra `build` of the package, jaxlib's headers and a C++17 compiler. `--install` puts the library where the
package looks for it, and `--update-manifest` takes the new manifests under version control.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import tabulate

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = "libjax_fp4attn.so"
INSTALLED = HERE.parent / "jax_fp4attn" / "native" / LIBRARY
MANIFESTS = HERE / "manifest"
TARGETS = ("sm_90a", "sm_100f", "sm_103a")
"""Hopper, the Blackwell family of compute capabilities 10.x, and of it 10.3 alone."""

_FLAGS = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
)
_LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-ldl")


def build(out: pathlib.Path) -> pathlib.Path:
    """Builds everything.

    Args:
      out: Directory for cubins, PTX, manifests and the library.

    Returns:
      Path of the library.
    """
    compile_kernels(out)
    sources = sorted((HERE / "ffi").glob("*.cc"))
    return link(sources, out, out / LIBRARY)


def compile_kernels(out: pathlib.Path) -> None:
    """Writes cubin, PTX and manifest of every target, and the launcher's table of kernels."""
    out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for target, finished in zip(TARGETS, pool.map(lambda target: _compile(target, out), TARGETS), strict=True):
            if finished.returncode:
                sys.exit(f"{target}: the kernels did not compile\n{finished.stdout}")
            print(f"compiled the kernels for {target}")
    tabulate.write_table(out)


def _compile(target: str, out: pathlib.Path) -> subprocess.CompletedProcess[str]:
    # A process for each, since the compiler takes its target from the environment when it is imported.
    command = [sys.executable, HERE / "compile.py", "--target", target, "--out", out]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def link(sources: list[pathlib.Path], kernels: pathlib.Path, library: pathlib.Path) -> pathlib.Path:
    """Compiles C++ sources with the kernels into a shared object.

    Args:
      sources: The sources.
      kernels: Directory that :func:`compile_kernels` wrote.
      library: To be written.

    Returns:
      ``library``.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    includes = [f"-I{kernels}", f"-I{HERE / 'ffi'}"]
    for directory in (ffi_headers(), driver_headers()):
        includes += ["-isystem", str(directory)]
    define = f'-DFP4ATTN_IMAGES="{kernels.resolve()}"'
    subprocess.run([*compiler, *_FLAGS, define, *includes, *sources, *_LINK_FLAGS, "-o", library], check=True)
    return library


def ffi_headers() -> pathlib.Path:
    """Directory of XLA's FFI headers, in the installed jaxlib."""
    import jaxlib

    return pathlib.Path(jaxlib.__file__).parent / "include"


def driver_headers() -> pathlib.Path:
    """Directory of ``cuda.h``: NVIDIA's Python package, else the toolkit."""
    candidates = [path for entry in sys.path for path in pathlib.Path(entry).glob("nvidia/*/include")]
    candidates += [pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    for candidate in candidates:
        if (candidate / "cuda.h").is_file():
            return candidate
    raise FileNotFoundError("cuda.h: not found; install the package's extra 'build' or set CUDA_HOME")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parent / "build" / "native")
    parser.add_argument("--install", action="store_true", help="copy the library into the package")
    parser.add_argument("--update-manifest", action="store_true", help="copy the manifests into cuda/manifest")
    arguments = parser.parse_args()
    library = build(arguments.out)
    print(f"built {library} ({library.stat().st_size / 1e6:.1f} MB)")
    if arguments.install:
        shutil.copy2(library, INSTALLED)
        print(f"installed {INSTALLED}")
    if arguments.update_manifest:
        for target in TARGETS:
            shutil.copy2(arguments.out / f"kernels.{target}.json", MANIFESTS)
        print(f"updated {MANIFESTS}")


if __name__ == "__main__":
    _main()
