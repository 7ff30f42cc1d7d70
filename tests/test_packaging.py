"""Wheels: what building one needs, what is in it, and the tag that it gets."""

import importlib.util
import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

pytest.importorskip("hatchling", reason="needs the build backend, hatchling")

ROOT = pathlib.Path(__file__).parents[1]
BUILT = ROOT / "build" / "native" / "libjax_fp4attn.so"
LIBRARY = "jax_fp4attn/native/libjax_fp4attn.so"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD_EXTRA = PROJECT["optional-dependencies"]["build"]

needs_tools = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64")
    or not (shutil.which("cc") and shutil.which("objdump")),
    reason="needs Linux on x86_64, a C compiler and objdump",
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "packaging" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook():
    return load("hook")


@pytest.fixture
def backend(hook, monkeypatch):
    """The build backend, in the root of the project, where build frontends call it."""
    monkeypatch.setitem(sys.modules, "hook", hook)
    monkeypatch.chdir(ROOT)
    return load("backend")


@pytest.fixture(autouse=True)
def linux(monkeypatch):
    set_machine(monkeypatch, "Linux", "x86_64")


def set_machine(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)


OTHER_MACHINES = [("Darwin", "arm64"), ("Darwin", "x86_64"), ("Linux", "aarch64"), ("Windows", "AMD64")]
on_other_machines = pytest.mark.parametrize("machine", OTHER_MACHINES, ids="-".join)


class TestRequirements:
    def test_a_wheel_needs_what_compiles_the_kernels(self, backend):
        requirements = backend.get_requires_for_build_wheel()
        assert set(BUILD_EXTRA) < set(requirements)
        assert [name for name in BUILD_EXTRA if name.startswith("nvidia-cutlass-dsl==")] != []
        assert len(requirements) == len(BUILD_EXTRA) + 1

    def test_the_oldest_jaxlib_that_the_package_takes(self, backend):
        (oldest,) = (x.removeprefix("jaxlib>=") for x in PROJECT["dependencies"] if x.startswith("jaxlib"))
        assert [x for x in backend.get_requires_for_build_wheel() if x.startswith("jaxlib")] == [f"jaxlib=={oldest}"]

    @on_other_machines
    def test_a_wheel_without_the_library_needs_nothing(self, machine, backend, monkeypatch):
        set_machine(monkeypatch, *machine)
        assert backend.get_requires_for_build_wheel() == []

    def test_settings_are_passed_on(self, backend, monkeypatch):
        settings = {"key": "value"}
        monkeypatch.setattr(backend.hatchling, "get_requires_for_build_wheel", lambda given: [given])
        assert backend.get_requires_for_build_wheel(settings)[0] is settings

    def test_an_editable_installation_and_a_source_distribution_need_what_hatchling_does(self, backend):
        for kind in ("editable", "sdist"):
            requirements = getattr(backend, f"get_requires_for_build_{kind}")()
            assert requirements == getattr(backend.hatchling, f"get_requires_for_build_{kind}")()
            assert set(requirements) <= {"editables~=0.3"}


SYMBOLS = """
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.2.5) malloc
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.9)   pipe2
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.17) clock_gettime
0000000000000000      DF *UND*  0000000000000000 (GLIBCXX_3.4.29) _ZSt28__throw_bad_array_new_lengthv
0000000000000000      DF *UND*  0000000000000000 (GLIBC_PRIVATE) _dl_sym
"""


class TestHook:
    @pytest.fixture
    def runs(self, hook, monkeypatch):
        """The commands that are run, of which only objdump writes something."""
        commands = []

        def run(command, **options):
            commands.append((command, options))
            return subprocess.CompletedProcess(command, 0, stdout=SYMBOLS)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    def initialize(self, hook, version, root=ROOT):
        build_data = {"force_include": {}, "pure_python": True}
        hook.NativeLibraryHook(str(root), {}, None, None, "", "wheel").initialize(version, build_data)
        return build_data

    def test_is_the_hook_that_pyproject_names(self, hook):
        assert hook.NativeLibraryHook.PLUGIN_NAME == "custom"

    def test_a_wheel_gets_the_library_and_its_tag(self, hook, runs):
        library = ROOT / "build" / "wheel" / "libjax_fp4attn.so"
        assert self.initialize(hook, "standard") == {
            "force_include": {str(library): LIBRARY},
            "pure_python": False,
            "tag": "py3-none-manylinux_2_17_x86_64",
        }
        (build, options), (read, _) = runs
        assert build == [sys.executable, "cuda/build.py", "--out", "build/wheel"]
        assert options["cwd"] == str(ROOT)
        assert read == ["objdump", "-T", library]

    @pytest.mark.parametrize("machine", [("Linux", "x86_64"), *OTHER_MACHINES], ids="-".join)
    def test_an_editable_installation_is_left_alone(self, machine, hook, runs, monkeypatch):
        set_machine(monkeypatch, *machine)
        assert self.initialize(hook, "editable") == {"force_include": {}, "pure_python": True}
        assert runs == []

    @on_other_machines
    def test_other_machines_get_pure_python(self, machine, hook, runs, monkeypatch):
        set_machine(monkeypatch, *machine)
        assert self.initialize(hook, "standard") == {"force_include": {}, "pure_python": True}
        assert runs == []

    def test_a_wheel_is_not_made_without_the_library(self, hook, tmp_path):
        (tmp_path / "cuda").mkdir()
        (tmp_path / "cuda" / "build.py").write_text("raise SystemExit(3)")
        with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
            self.initialize(hook, "standard", tmp_path)

    def test_pure_python_can_be_asked_for(self, hook, runs, monkeypatch):
        monkeypatch.setenv("JAX_FP4ATTN_NATIVE", "0")
        assert self.initialize(hook, "standard") == {"force_include": {}, "pure_python": True}
        assert runs == []

    @pytest.mark.parametrize("missing", ["objdump", "g++"])
    def test_a_missing_tool_is_named_before_anything_is_built(self, missing, hook, runs, monkeypatch):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/bin/{tool}")
        with pytest.raises(FileNotFoundError, match=rf"{re.escape(missing)}: needed to build .*JAX_FP4ATTN_NATIVE=0"):
            self.initialize(hook, "standard")
        assert runs == []

    @pytest.mark.parametrize("symbol", ["GLIBCXX_3.4.30", "CXXABI_1.3.14"])
    def test_a_newer_c_plus_plus_runtime_is_refused(self, symbol, hook, runs, monkeypatch):
        symbols = subprocess.CompletedProcess([], 0, stdout=f"{SYMBOLS}\n0 DF *UND* 0 ({symbol}) f")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: symbols)
        with pytest.raises(RuntimeError, match="C\\+\\+ runtime is too new for a wheel"):
            self.initialize(hook, "standard")

    @pytest.mark.skipif(not BUILT.is_file(), reason=f"needs {BUILT.name}, from python cuda/build.py")
    def test_tag_of_the_real_library(self, hook):
        for tool in ("objdump", "readelf"):
            if shutil.which(tool) is None:
                pytest.skip(f"there is no {tool}")
        needed = subprocess.run(["readelf", "--version-info", BUILT], check=True, capture_output=True, text=True).stdout
        newest = max(int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", needed))
        assert hook._platform_tag(BUILT) == f"manylinux_2_{newest}_x86_64"


# Stands in for cuda/build.py, which takes minutes.
BUILD_SCRIPT = """
import pathlib, subprocess, sys
assert sys.argv[1:] == ["--out", "build/wheel"]
source = b"#include <stdlib.h>\\nvoid* f(void) { return malloc(1); }"
library = "build/wheel/libjax_fp4attn.so"
pathlib.Path(library).parent.mkdir(parents=True)
subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", library], input=source, check=True)
"""


class TestDistributions:
    """What hatchling makes of it, in a project with our pyproject.toml and little else."""

    @pytest.fixture
    def build(self, tmp_path):
        files = {
            ".gitignore": "/jax_fp4attn/native/*.so\n",
            "LICENSE": "",
            "README.md": "",
            "cuda/build.py": BUILD_SCRIPT,
            "jax_fp4attn/__init__.py": '__version__ = "1.2.3"\n',
            "jax_fp4attn/BUILD": "",
            "jax_fp4attn/native/__init__.py": "",
            "jax_fp4attn/py.typed": "",
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        shutil.copytree(ROOT / "packaging", tmp_path / "packaging", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "out").mkdir()

        def build(kind, root=tmp_path):
            """Path of the distribution, made in a process of its own, as build frontends do."""
            out = tmp_path / "out"
            program = f"import backend, json; print(json.dumps(backend.build_{kind}({str(out)!r})))"
            command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'packaging'); {program}"]
            finished = subprocess.run(command, cwd=root, capture_output=True, text=True)
            assert finished.returncode == 0, finished.stderr
            return out / json.loads(finished.stdout.splitlines()[-1])

        return build

    @needs_tools
    def test_wheel(self, build):
        path = build("wheel")
        assert re.fullmatch(r"jax_fp4attn-1\.2\.3-py3-none-manylinux_2_\d+_x86_64\.whl", path.name)
        names, metadata = read_wheel(path)
        assert names == {
            "jax_fp4attn/__init__.py",
            "jax_fp4attn/native/__init__.py",
            "jax_fp4attn/py.typed",
            LIBRARY,
        }
        assert "Root-Is-Purelib: false" in metadata

    def test_editable(self, build):
        pytest.importorskip("editables", reason="needs editables, which hatchling takes for editable installations")
        path = build("editable")
        assert path.name == "jax_fp4attn-1.2.3-py3-none-any.whl"
        names, metadata = read_wheel(path)
        assert [name for name in names if not name.endswith(".pth")] == []
        assert "Root-Is-Purelib: true" in metadata

    @needs_tools
    def test_wheel_from_a_source_distribution(self, build):
        path = build("sdist")
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # The first Python 3.11 have none.
        shutil.unpack_archive(path, path.parent, **options)
        root = path.parent / "jax_fp4attn-1.2.3"
        assert not (root / LIBRARY).exists()
        names, _ = read_wheel(build("wheel", root))
        assert LIBRARY in names


def read_wheel(path):
    """Names of the files in a wheel, without its metadata, and the text of WHEEL."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
        return names, wheel.read(metadata).decode()
