import ctypes
import functools
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_fp4attn
from jax_fp4attn import native
from jax_fp4attn.native import calls, library
from tests.native import pretended

_SYMBOLS = ("jax_fp4attn_initialize", "jax_fp4attn_image")
QUANTIZE, ROW_OPERANDS = "jax_fp4attn_quantize_v1", "jax_fp4attn_row_operands_v1"


@pytest.fixture
def compile_library(tmp_path, monkeypatch):
    """Makes a shared object of C source the native library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def compile_library(source, *flags):
        path, source_path = tmp_path / "libjax_fp4attn.so", tmp_path / "library.c"
        source_path.write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", *flags, source_path, "-o", path], check=True)
        monkeypatch.setattr(library, "PATH", path)

    return compile_library


def source(version, *handlers):
    """C source of a library for a version of the FFI."""
    functions = [f"int {name}(void) {{ return 0; }}" for name in (*_SYMBOLS, *handlers)]
    functions += [
        f"int jax_fp4attn_ffi_{part}(void) {{ return {x}; }}"
        for part, x in zip(("major", "minor"), version, strict=True)
    ]
    return "\n".join(functions)


@pytest.fixture
def registered(monkeypatch):
    """What is registered with XLA: (target, capsules, platform), by a process that had registered nothing before."""
    found = []
    monkeypatch.setattr(library, "register", functools.cache(library.register.__wrapped__))
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda name, fn, platform, **_: found.append((name, fn, platform))
    )
    return found


class TestLoad:
    @pytest.mark.parametrize("is_directory", [False, True])
    def test_no_file(self, is_directory, tmp_path, monkeypatch):
        path = tmp_path / "libjax_fp4attn.so"
        if is_directory:
            path.mkdir()
        monkeypatch.setattr(library, "PATH", path)
        assert library.load() == (
            "this installation has no native library (libjax_fp4attn.so); install a wheel that has it, "
            "or run make native"
        )

    @pytest.mark.parametrize("content", [b"", b"no shared object", b"\x7fELF\x02\x01\x01"], ids=repr)
    def test_no_shared_object(self, content, tmp_path, monkeypatch):
        path = tmp_path / "libjax_fp4attn.so"
        path.write_bytes(content)
        monkeypatch.setattr(library, "PATH", path)
        reason = library.load()
        assert reason.startswith(f"the native library does not load ({path}: ")
        assert reason.endswith("); build it again with make native")

    @pytest.mark.parametrize("symbol", ["jax_fp4attn_ffi_major", "jax_fp4attn_ffi_minor", *_SYMBOLS])
    def test_a_shared_object_without_a_symbol(self, symbol, compile_library):
        compile_library(source((0, 0)).replace(symbol, "another"))
        reason = library.load()
        assert reason.startswith("the native library does not load (")
        assert symbol in reason
        assert reason.endswith("; build it again with make native")

    @pytest.mark.parametrize(
        ("built", "running"), [((0, 4), (0, 3)), ((0, 10), (0, 9)), ((1, 0), (0, 9)), ((2, 1), (1, 2))], ids=str
    )
    def test_built_for_a_newer_ffi(self, built, running, compile_library, monkeypatch):
        compile_library(source(built))
        monkeypatch.setattr(library, "running_ffi_version", lambda: running)
        assert library.load() == (
            f"the native library was built for XLA FFI {built[0]}.{built[1]}, and the installed jaxlib has "
            f"{running[0]}.{running[1]}; install a newer jaxlib, or run make native with this one"
        )

    @pytest.mark.parametrize(
        ("built", "running"), [((0, 3), (0, 3)), ((0, 9), (0, 10)), ((0, 9), (1, 0)), ((1, 2), (2, 1))], ids=str
    )
    def test_built_for_this_ffi_or_an_older_one(self, built, running, compile_library, monkeypatch):
        compile_library(source(built))
        monkeypatch.setattr(library, "running_ffi_version", lambda: running)
        loaded = library.load()
        assert isinstance(loaded, library.Library)
        assert loaded.ffi_version == built
        assert loaded.handle.jax_fp4attn_initialize() == 0

    def test_once_a_process(self, compile_library, monkeypatch):
        opened = []
        original = ctypes.CDLL
        monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: opened.append(name) or original(name, *rest))
        compile_library(source((0, 0)))
        assert library.load() is library.load()
        assert opened == [str(library.PATH)]

    def test_path_is_in_the_package(self):
        package = pathlib.Path(jax_fp4attn.__file__).parent
        assert library.PATH.relative_to(package).parts == ("native", "libjax_fp4attn.so")


def test_running_version_is_that_of_the_header_that_a_compiler_reads(compile_library):
    program = """
        #include "xla/ffi/api/c_api.h"
        int jax_fp4attn_initialize(void) { return 0; }
        const char* jax_fp4attn_image(int major, int minor, int rank) { return 0; }
        int jax_fp4attn_ffi_major(void) { return XLA_FFI_API_MAJOR; }
        int jax_fp4attn_ffi_minor(void) { return XLA_FFI_API_MINOR; }
    """
    compile_library(program, "-isystem", jax.ffi.include_dir())
    loaded = library.load()
    assert isinstance(loaded, library.Library)
    assert loaded.ffi_version == library.running_ffi_version()


class TestRegister:
    def test_all_handlers_for_a_process_that_traces_nothing(self, compile_library, registered):
        compile_library(source((0, 0), *(calls.target_name(step) for step in calls.STEPS_WITH_HANDLERS)))
        for _ in range(2):
            native.register()
        assert [name for name, *_ in registered] == [calls.target_name(step) for step in calls.STEPS_WITH_HANDLERS]

    def test_no_library_is_an_error_where_it_is_asked_for(self, tmp_path, monkeypatch, registered):
        monkeypatch.setattr(library, "PATH", tmp_path / "none.so")
        with pytest.raises(RuntimeError, match="no native library"):
            native.register()
        assert registered == []

    def test_both_stages_once_for_each_target(self, compile_library, registered):
        compile_library(source((0, 0), QUANTIZE, ROW_OPERANDS))
        for target in (QUANTIZE, ROW_OPERANDS, QUANTIZE):
            library.register(target)
        assert [(name, platform) for name, _, platform in registered] == [(QUANTIZE, "CUDA"), (ROW_OPERANDS, "CUDA")]
        for target, capsules, _ in registered:
            expected = {"initialize": "jax_fp4attn_initialize", "execute": target}
            assert {stage: pointer(capsule) for stage, capsule in capsules.items()} == {
                stage: ctypes.cast(getattr(library.load().handle, symbol), ctypes.c_void_p).value
                for stage, symbol in expected.items()
            }

    def test_nothing_without_a_library(self, registered, tmp_path, monkeypatch):
        monkeypatch.setattr(library, "PATH", tmp_path / "libjax_fp4attn.so")
        library.register(QUANTIZE)
        assert registered == []

    def test_a_library_of_another_version(self, compile_library, registered):
        compile_library(source((0, 0), QUANTIZE))
        with pytest.raises(RuntimeError, match=f"native library has no {ROW_OPERANDS}; build it again"):
            library.register(ROW_OPERANDS)
        assert registered == []

    def test_what_a_program_calls_before_it_is_lowered(self, compile_library, registered, monkeypatch):
        forward = "jax_fp4attn_forward_v1"
        compile_library(source((0, 0), QUANTIZE, forward))
        pretended.set_gpus(monkeypatch, "9.0")
        self.lower()
        assert [name for name, *_ in registered] == [QUANTIZE, forward]
        self.lower()
        assert len(registered) == 2

    def test_nothing_while_cross_compiling(self, compile_library, registered):
        compile_library(source((0, 0), QUANTIZE))
        with jax_fp4attn.cross_compile((9, 0)):
            assert QUANTIZE in self.lower()
        assert registered == []

    def lower(self):
        x = jnp.ones((1, 8, 1, 64), jnp.bfloat16)
        attend = jax.jit(lambda x: jax_fp4attn.attention(x, x, x))
        return attend.trace(x).lower(lowering_platforms=("cuda",)).as_text()


def pointer(capsule):
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))


IMPORT = """
import ctypes, json
import jax
from jax._src import xla_bridge

done = []
load, register = ctypes.CDLL.__init__, jax.ffi.register_ffi_target
ctypes.CDLL.__init__ = lambda self, name, *rest, **options: done.append(f"loads {name}") or load(
    self, name, *rest, **options)
jax.ffi.register_ffi_target = lambda name, *rest, **options: done.append(f"registers {name}")
import jax_fp4attn
if xla_bridge.backends_are_initialized():
    done.append("starts a backend")
print(json.dumps(done))
jax_fp4attn.native.library.load()
print(json.dumps(done))
jax_fp4attn.native.info()
print(json.dumps(xla_bridge.backends_are_initialized()))
"""


def test_import_loads_and_registers_nothing_and_starts_no_backend():
    finished = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    at_import, at_load, has_backend = map(json.loads, finished.stdout.splitlines())
    assert at_import == []
    # What would have been seen.
    assert at_load == ([f"loads {library.PATH}"] if library.PATH.is_file() else [])
    assert has_backend
