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
from tests.native.stand_in.handlers import (
    BUILT,
    NO_BUILD,
    ROOT,
    TARGETS,
    TENSOR_MAP_BYTES,
    manifest,
    parameters_of,
)

MANIFESTS = ROOT / "cuda" / "manifest"
LIBRARY = BUILT / "libjax_fp4attn.so"
REGISTERS = 65536  # of a multiprocessor, which a block cannot exceed
SHARED_BYTES = 227 << 10
LETTERS = {"pointer": "p", "int32": "i", "float32": "f"}  # of the table's signatures; "t" is a tensor map

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


# What kernels keep on the stack that use all registers of a multiprocessor.
STACK_BYTES = {"forward_h128_affine_mixed_anchor32": 8, "backward_h128": 16}


@each_target
def test_kernels_fit_and_spill_little(target):
    for name, kernel in manifest(target).items():
        assert kernel["stack_bytes"] == STACK_BYTES.get(name, 0), name
        # A warp gets registers by 256.
        warp_registers = -(-kernel["registers"] * 32 // 256) * 256
        assert 0 < kernel["threads"] // 32 * warp_registers <= REGISTERS, name
        assert kernel["threads"] % 32 == 0, name
        assert kernel["shared_bytes"] <= SHARED_BYTES, name


def test_common_kernels_have_the_same_launches():
    launch = ("entry", "parameters", "threads", "shared_bytes")
    hopper, blackwell, ultra = (
        {name: [kernel[key] for key in launch] for name, kernel in manifest(target).items()} for target in TARGETS
    )
    common = hopper.keys() & blackwell.keys()
    assert {name: hopper[name] for name in common} == {name: blackwell[name] for name in common}
    assert any("quantize" in name for name in common)
    assert any(name.startswith("forward_") for name in hopper.keys() - common)
    assert all(re.match("blackwell_forward_|order_key_", name) for name in blackwell.keys() - common)
    # Entries are numbered in each image for itself.
    assert {name: row[1:] for name, row in ultra.items()} == {name: blackwell[name][1:] for name in ultra}
    assert ultra.keys() == {name for name in blackwell if name.startswith("blackwell_forward_")}


def test_table_of_the_launcher():
    """Every kernel once an image, whose bits are in the order of the targets."""
    rows = re.findall(r'\{"(\w+)", "(\w+)", "(\w+)", (\d+), (\d+), (\d+)\}', (BUILT / "kernel_table.inc").read_text())
    for bit, target in enumerate(TARGETS):
        kernels = manifest(target)
        of_image = [row for row in rows if int(row[-1]) >> bit & 1]
        assert sorted(name for name, *_ in of_image) == sorted(kernels)
        for name, entry, signature, threads, shared_bytes, _ in of_image:
            kernel = kernels[name]
            expected = [LETTERS.get(kind, "t") for kind in parameters_of(kernel).values()]
            assert (entry, list(signature)) == (kernel["entry"], expected)
            assert (int(threads), int(shared_bytes)) == (kernel["threads"], kernel["shared_bytes"])


@each_target
def test_every_variant_of_the_catalog_is_there(target):
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("the catalog needs CuTe DSL, the extra 'build'")
    program = f"from kernels import catalog\nfor v in catalog.variants({target!r}): print(v.name, v.threads)"
    command = [sys.executable, "-c", program]
    listed = subprocess.run(command, cwd=ROOT / "cuda", check=True, capture_output=True, text=True).stdout.splitlines()
    assert [f"{name} {kernel['threads']}" for name, kernel in manifest(target).items()] == listed


@each_target
def test_ptx(target):
    ptx = (BUILT / f"kernels.{target}.ptx").read_text()
    assert re.findall(r"^\.target (.+)$", ptx, re.MULTILINE) == [target]
    signatures = dict(re.findall(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL))
    kernels = manifest(target).values()
    assert list(signatures) == [kernel["entry"] for kernel in kernels]
    kinds = {"u64": "pointer", "u32": "int32", "f32": "float32", f"b8[{TENSOR_MAP_BYTES}]": "tensor_map"}
    for kernel in kernels:
        parameters = signatures[kernel["entry"]].split(",")
        found = [kinds["".join(re.findall(r"(?<=\.)[bfu]\d+(?= )|\[\d+\]", text))] for text in parameters]
        assert found == [kind.split("(")[0] for kind in parameters_of(kernel).values()], kernel["name"]


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
    others = {"jax_fp4attn_initialize", "jax_fp4attn_image", "jax_fp4attn_ffi_major", "jax_fp4attn_ffi_minor"}
    assert others <= set(defined)


@pytest.mark.parametrize(
    ("capability", "images"),
    [
        ((8, 9), ()),
        ((9, 0), ("sm_90a",)),
        ((10, 0), ("sm_100f",)),
        ((10, 1), ()),
        ((10, 3), ("sm_103a", "sm_100f")),
        ((11, 0), ()),
        ((12, 0), ()),
    ],
    ids=str,
)
def test_images_of_a_gpu(capability, images, monkeypatch):
    monkeypatch.setattr(library, "PATH", LIBRARY)
    assert library.load().images(capability) == images
