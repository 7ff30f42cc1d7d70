"""BUILD files cover the whole tree: no module is left out of a library, no test is left unrun.

Bazel itself is not needed. Starlark is close enough to a subset of Python to evaluate BUILD files
here, with stand-ins for the rules that record what they are called with.
"""

import ast
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_DIRS = ("benchmarks", "cuda/emulator", "examples", "jax_fp4attn", "tests")


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of a BUILD file, with labels made absolute and files relative to the root."""

    rule: str
    label: str
    srcs: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    deps: frozenset[str] = frozenset()
    main: str | None = None
    args: tuple[str, ...] = ()


def evaluate_build_files(root: Path) -> dict[str, Target]:
    """Returns the targets of all BUILD files in a repository, by label."""
    targets: dict[str, Target] = {}
    packages = [path.parent for path in _find(root, "BUILD")]
    for package in packages:
        _Evaluator(root, package, packages, targets).run()
    return targets


class _Evaluator:
    """Evaluates one BUILD file."""

    def __init__(self, root: Path, package: Path, packages: list[Path], targets: dict[str, Target]):
        self.root, self.package, self.targets = root, package, targets
        self.inner_packages = [p for p in packages if package in p.parents]
        self.rules = {
            rule: functools.partial(self.record, rule) for rule in ("filegroup", "py_binary", "py_library", "py_test")
        }

    def run(self) -> None:
        self.execute(
            self.package / "BUILD",
            glob=self.glob,
            package=lambda **_: None,
            exports_files=lambda *_, **__: None,
            filegroup=self.rules["filegroup"],
        )

    def execute(self, path: Path, **names: Any) -> dict[str, Any]:
        names["load"] = lambda label, *symbols: names.update(self.load(label, symbols))
        exec(compile(path.read_text(), path, "exec"), names)
        return names

    def load(self, label: str, symbols: tuple[str, ...]) -> dict[str, Any]:
        loaded: dict[str, Any] = self.rules
        if label.startswith("//"):
            loaded = self.execute(self.root / self.file(label))
        return {symbol: loaded[symbol] for symbol in symbols}

    def record(self, rule: str, name: str, **attributes: Any) -> None:
        label = self.label(":" + name)
        assert label not in self.targets, f"{label} is defined twice"

        def files(attribute: str) -> frozenset[str]:
            return frozenset(self.file(x) for x in attributes.get(attribute, ()))

        main = attributes.get("main")
        self.targets[label] = Target(
            rule=rule,
            label=label,
            srcs=files("srcs"),
            data=files("data"),
            deps=frozenset(self.label(x) for x in attributes.get("deps", ())),
            main=None if main is None else self.file(main),
            args=tuple(attributes.get("args", ())),
        )

    def glob(self, include: Iterable[str], exclude: Iterable[str] = (), allow_empty: bool = True) -> list[str]:
        """Like Bazel's: sorted, and without the files of packages further in."""

        def matches(path: str, patterns: Iterable[str]) -> bool:
            return any(re.match(_glob_regex(pattern), path) for pattern in patterns)

        return sorted(
            relative
            for path in _find(self.package, "*")
            if not any(inner in path.parents for inner in self.inner_packages)
            and matches(relative := path.relative_to(self.package).as_posix(), include)
            and not matches(relative, exclude)
        )

    def label(self, label: str) -> str:
        """Makes `:x`, `x` and `//x` absolute: `//package:x`."""
        if not label.startswith("//"):
            package = self.package.relative_to(self.root).as_posix()
            label = f"//{'' if package == '.' else package}:{label.removeprefix(':')}"
        if ":" not in label:
            label += ":" + label.rpartition("/")[2]
        return label

    def file(self, label: str) -> str:
        """Returns the path of the file that a label names, relative to the root."""
        return self.label(label).removeprefix("//").replace(":", "/").removeprefix("/")


def _find(directory: Path, pattern: str) -> Iterable[Path]:
    """Yields files, without those of hidden directories and Bazel's links."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            if not path.name.startswith((".", "bazel-", "__pycache__")):
                yield from _find(path, pattern)
        elif fnmatch.fnmatchcase(path.name, pattern):
            yield path


def _glob_regex(pattern: str) -> str:
    translations = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return "".join(translations.get(part) or re.escape(part) for part in parts) + r"\Z"


def _python_files(root: Path, directory: str) -> set[str]:
    return {path.relative_to(root).as_posix() for path in _find(root / directory, "*.py")}


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def _dependencies(targets: dict[str, Target], target: Target) -> set[str]:
    """Returns the labels that a target depends on, itself and indirect ones included."""
    seen: set[str] = set()
    todo = [target.label]
    while todo:
        label = todo.pop()
        if label not in seen:
            seen.add(label)
            todo.extend(targets[label].deps if label in targets else ())
    return seen


def uncovered_modules(root: Path) -> set[str]:
    """Returns the modules, tests apart, that no py_library holds."""
    libraries = [t for t in evaluate_build_files(root).values() if t.rule == "py_library"]
    covered = {path for library in libraries for path in library.srcs}
    files = {path for directory in SOURCE_DIRS for path in _python_files(root, directory)}
    return {path for path in files if not _is_test(path)} - covered


def uncovered_tests(root: Path) -> set[str]:
    """Returns the test modules that no py_test both holds and passes to pytest."""
    tests = [t for t in evaluate_build_files(root).values() if t.rule == "py_test"]
    covered = {path for test in tests for path in test.srcs & set(test.args)}
    return {path for path in _python_files(root, "tests") if _is_test(path)} - covered


def dangling_references(root: Path) -> set[str]:
    """Returns what BUILD files name and is not there: targets, files and arguments of tests."""
    targets = evaluate_build_files(root)
    dangling = set()
    for target in targets.values():
        dangling |= {label for label in target.deps if label not in targets}
        files = target.srcs | target.data | ({target.main} if target.main else set())
        if target.rule == "py_test":
            files |= set(target.args)
        labels = {"//{0}:{2}".format(*path.rpartition("/")): path for path in files}
        dangling |= {path for label, path in labels.items() if label not in targets and not (root / path).exists()}
    return dangling


def incomplete_tests(root: Path) -> set[str]:
    """Returns the tests whose dependencies lack some module of the package."""
    targets = evaluate_build_files(root)
    modules = _python_files(root, "jax_fp4attn")
    return {
        test.label
        for test in targets.values()
        if test.rule == "py_test" and modules - {f for d in _dependencies(targets, test) for f in targets[d].srcs}
    }


def undeclared_imports(root: Path) -> set[str]:
    """Returns the imports, as `importer -> imported`, of modules from outside the dependencies.

    This holds the package to the layers that its BUILD file declares. A package's `__init__.py`
    belongs to its own layer: importing `jax_fp4attn` itself is for what lies above it.
    """
    targets = evaluate_build_files(root)
    return {
        f"{path} -> {imported}"
        for target in targets.values()
        if target.rule == "py_library"
        for available in [{f for d in _dependencies(targets, target) for f in targets[d].srcs}]
        for path in target.srcs
        if (root / path).exists()
        for imported in _imports(root, path)
        if imported not in available
    }


def _imports(root: Path, path: str) -> set[str]:
    """Returns the modules of the repository that a module imports, as paths."""
    modules = set()
    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            names = {f"{module}.{alias.name}" for alias in node.names}
            submodules = {name for name in names if _module_path(root, name)}
            # `from package import submodule` needs no more of the package than any import does.
            modules |= submodules or {module}
    return {imported for module in modules if (imported := _module_path(root, module))}


def _module_path(root: Path, module: str) -> str | None:
    stem = module.replace(".", "/")
    if any(stem == directory or stem.startswith(directory + "/") for directory in SOURCE_DIRS):
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if (root / path).exists():
                return path
    return None


def scripts_without_binary(root: Path) -> set[str]:
    """Returns the scripts, examples and `__main__` modules, that no py_binary runs."""
    binaries = [t for t in evaluate_build_files(root).values() if t.rule == "py_binary"]
    scripts = {
        path
        for directory in ("benchmarks", "examples")
        for path in _python_files(root, directory)
        if 'if __name__ == "__main__":' in (root / path).read_text()
    }
    return scripts - {binary.main for binary in binaries}


CHECKS: list[Callable[[Path], set[str]]] = [
    uncovered_modules,
    uncovered_tests,
    dangling_references,
    incomplete_tests,
    undeclared_imports,
    scripts_without_binary,
]


@pytest.mark.parametrize("check", CHECKS)
def test_repository(check):
    assert check(ROOT) == set()


class TestChecks:
    """The checks find what they look for."""

    FILES: ClassVar = {
        "BUILD": "",
        "jax_fp4attn/BUILD": (
            'load("@rules_python//python:defs.bzl", "py_library")\n'
            'py_library(name = "jax_fp4attn", srcs = glob(["**/*.py"]))\n'
        ),
        "jax_fp4attn/api.py": "",
        "jax_fp4attn/formats/codes.py": "",
        "bazel/BUILD": "",
        "bazel/pytest.bzl": (
            'load("@rules_python//python:defs.bzl", "py_test")\n'
            "def pytest_test(paths, **kwargs):\n"
            "    py_test(args = paths, **kwargs)\n"
        ),
        "tests/BUILD": (
            'load("//bazel:pytest.bzl", "pytest_test")\n'
            "[pytest_test(name = path[:-3], srcs = [path], paths = ['tests/' + path],"
            ' deps = ["//jax_fp4attn"]) for path in glob(["**/test_*.py"])]\n'
        ),
        "tests/test_api.py": "",
        "tests/formats/test_codes.py": "",
        "examples/BUILD": (
            'load("@rules_python//python:defs.bzl", "py_binary", "py_library")\n'
            'py_library(name = "examples", srcs = ["train.py"])\n'
            'py_binary(name = "train", srcs = ["train.py"], main = "train.py")\n'
        ),
        "examples/train.py": 'if __name__ == "__main__":\n    pass\n',
        "benchmarks/BUILD": "",
        "cuda/emulator/BUILD": "",
    }

    @pytest.fixture
    def make_repository(self, tmp_path):
        def make(**changes: str) -> Path:
            for name, text in {**self.FILES, **changes}.items():
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return tmp_path

        return make

    @pytest.mark.parametrize("check", CHECKS)
    def test_accept_a_repository_that_is_covered(self, check, make_repository):
        assert check(make_repository()) == set()

    def test_targets_have_absolute_labels_and_paths(self, make_repository):
        targets = evaluate_build_files(make_repository())
        assert set(targets) == {
            "//jax_fp4attn:jax_fp4attn",
            "//tests:test_api",
            "//tests:formats/test_codes",
            "//examples:examples",
            "//examples:train",
        }
        assert targets["//tests:formats/test_codes"] == Target(
            rule="py_test",
            label="//tests:formats/test_codes",
            srcs=frozenset({"tests/formats/test_codes.py"}),
            deps=frozenset({"//jax_fp4attn:jax_fp4attn"}),
            args=("tests/formats/test_codes.py",),
        )

    def test_find_a_module_that_is_in_no_library(self, make_repository):
        build = self.FILES["jax_fp4attn/BUILD"].replace("**/", "")
        root = make_repository(**{"jax_fp4attn/BUILD": build})
        assert uncovered_modules(root) == {"jax_fp4attn/formats/codes.py"}
        assert incomplete_tests(root) == {"//tests:test_api", "//tests:formats/test_codes"}

    def test_find_a_module_that_an_inner_package_hides(self, make_repository):
        root = make_repository(**{"jax_fp4attn/formats/BUILD": ""})
        assert uncovered_modules(root) == {"jax_fp4attn/formats/codes.py"}

    def test_find_a_test_that_is_in_no_target(self, make_repository):
        build = self.FILES["tests/BUILD"].replace('"**/test_*.py"', '"test_*.py"')
        root = make_repository(**{"tests/BUILD": build})
        assert uncovered_tests(root) == {"tests/formats/test_codes.py"}

    def test_find_a_test_that_pytest_is_not_told_of(self, make_repository):
        root = make_repository(**{"tests/BUILD": self.FILES["tests/BUILD"].replace("'tests/' + path", "'tests/x.py'")})
        assert uncovered_tests(root) == {"tests/test_api.py", "tests/formats/test_codes.py"}
        assert dangling_references(root) == {"tests/x.py"}

    def test_find_a_helper_of_tests_that_is_in_no_library(self, make_repository):
        root = make_repository(**{"tests/assertions.py": ""})
        assert uncovered_modules(root) == {"tests/assertions.py"}

    def test_find_labels_of_nothing(self, make_repository):
        build = self.FILES["examples/BUILD"] + 'py_library(name = "x", srcs=["x.py"], deps=[":y"])'
        root = make_repository(**{"examples/BUILD": build})
        assert dangling_references(root) == {"examples/x.py", "//examples:y"}

    def test_find_imports_against_the_direction_of_dependencies(self, make_repository):
        build = (
            'load("@rules_python//python:defs.bzl", "py_library")\n'
            'py_library(name = "formats", srcs = glob(["formats/*.py"]))\n'
            'py_library(name = "jax_fp4attn", srcs = glob(["*.py"]), deps = [":formats"])\n'
        )
        root = make_repository(
            **{
                "jax_fp4attn/BUILD": build,
                "jax_fp4attn/__init__.py": "from jax_fp4attn.api import attention",
                "jax_fp4attn/api.py": "from jax_fp4attn.formats import codes",
                "jax_fp4attn/formats/codes.py": "import jax\n\ndef f():\n    from .. import api",
            }
        )
        assert undeclared_imports(root) == {"jax_fp4attn/formats/codes.py -> jax_fp4attn/api.py"}
        root = make_repository(
            **{
                "jax_fp4attn/BUILD": build,
                "jax_fp4attn/formats/codes.py": "from jax_fp4attn import attention",
                "examples/train.py": "import jax_fp4attn.api",
            }
        )
        assert undeclared_imports(root) == {
            "jax_fp4attn/formats/codes.py -> jax_fp4attn/__init__.py",
            "examples/train.py -> jax_fp4attn/api.py",
        }

    def test_find_an_example_that_no_binary_runs(self, make_repository):
        root = make_repository(**{"examples/swap.py": self.FILES["examples/train.py"]})
        assert scripts_without_binary(root) == {"examples/swap.py"}
