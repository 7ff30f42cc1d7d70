"""What the build wrote: manifests, PTX, cubins and the library's symbols."""

import importlib.util
import re
import shutil
import struct
import subprocess
import sys

import pytest

from jax_fp4attn.native import library
from jax_fp4attn.native.calls import target_name
from jax_fp4attn.native.coverage import STEPS_WITH_KERNELS
from tests.native.stand_in.handlers import BUILT, NO_BUILD, ROOT, TARGETS, manifest

MANIFESTS = ROOT / "cuda" / "manifest"
LIBRARY = BUILT / "libjax_fp4attn.so"
REGISTERS = 65536  # of a multiprocessor, which a block cannot exceed
SHARED_BYTES = 227 << 10

# What every Linux has that can run jaxlib; nothing of CUDA.
SYSTEM_LIBRARIES = {
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libstdc++.so.6",
}

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason=NO_BUILD)
each_target = pytest.mark.parametrize("target", TARGETS)


@each_target
def test_manifest_on_file_is_that_of_the_build(target):
    name = f"kernels.{target}.json"
    assert (MANIFESTS / name).read_bytes() == (BUILT / name).read_bytes(), (
        "the kernels have changed: run python cuda/build.py --update-manifest and look at the difference"
    )


def test_the_installed_library_is_that_of_the_build():
    if not library.PATH.is_file():
        pytest.skip("no library is installed: run make native")
    assert library.PATH.read_bytes() == LIBRARY.read_bytes(), "an old build is installed: run make native"


@each_target
def test_kernels_fit_and_spill_nothing(target):
    for name, kernel in manifest(target).items():
        assert kernel["stack_bytes"] == 0, name
        # A warp gets registers by 256.
        warp_registers = -(-kernel["registers"] * 32 // 256) * 256
        assert 0 < kernel["threads"] // 32 * warp_registers <= REGISTERS, name
        assert kernel["threads"] % 32 == 0, name
        assert kernel["shared_bytes"] <= SHARED_BYTES, name


def test_targets_have_the_same_launches():
    launch = ("entry", "parameters", "threads", "shared_bytes")
    first, *others = (
        {name: [kernel[key] for key in launch] for name, kernel in manifest(target).items()} for target in TARGETS
    )
    assert len(first) > 0
    assert others == [first] * len(others)


def test_every_variant_of_the_catalog_is_there():
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("the catalog needs CuTe DSL, the extra 'build'")
    program = "from kernels import catalog\nfor v in catalog.variants(): print(v.name, v.threads)"
    command = [sys.executable, "-c", program]
    listed = subprocess.run(command, cwd=ROOT / "cuda", check=True, capture_output=True, text=True).stdout.splitlines()
    assert [f"{name} {kernel['threads']}" for name, kernel in manifest().items()] == listed


@each_target
def test_ptx(target):
    ptx = (BUILT / f"kernels.{target}.ptx").read_text()
    assert re.findall(r"^\.target (.+)$", ptx, re.MULTILINE) == [target]
    signatures = dict(re.findall(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL))
    kernels = manifest(target).values()
    assert list(signatures) == [kernel["entry"] for kernel in kernels]
    kinds = {"u64": "pointer", "u32": "int32", "f32": "float32"}
    for kernel in kernels:
        found = [kinds[kind] for kind in re.findall(r"\.param \.(\w+)", signatures[kernel["entry"]])]
        assert found == [parameter.split(": ")[1] for parameter in kernel["parameters"].split(", ")], kernel["name"]


@each_target
def test_cubin_is_inside_the_library(target):
    cubin = (BUILT / f"kernels.{target}.cubin").read_bytes()
    assert struct.unpack_from("<4sB", cubin) == (b"\x7fELF", 2)
    assert cubin in LIBRARY.read_bytes()


def binutil(tool, *arguments):
    if shutil.which(tool) is None:
        pytest.skip(f"there is no {tool}")
    return subprocess.run([tool, *arguments, LIBRARY], check=True, capture_output=True, text=True).stdout


def test_library_needs_no_cuda():
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", binutil("readelf", "-dW")))
    assert "libc.so.6" in needed
    assert needed <= SYSTEM_LIBRARIES


def test_symbols():
    defined = re.findall(r"^\w+ T (\w+)$", binutil("nm", "-D", "--defined-only"), re.MULTILINE)
    assert [name for name in defined if not name.startswith("jax_fp4attn_")] == []
    handlers = {name for name in defined if re.search(r"_v\d+$", name)}
    assert handlers == {target_name(step) for step in STEPS_WITH_KERNELS}
    assert {"jax_fp4attn_initialize", "jax_fp4attn_ffi_major", "jax_fp4attn_ffi_minor"} <= set(defined)
