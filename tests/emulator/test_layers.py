"""A part of the emulator imports only what stands above it in the table of docs/emulator.md."""

import ast
import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[2]
_EMULATOR = _ROOT / "cuda" / "emulator"


def _layers() -> list[str]:
    """The parts of the table, in its order."""
    table = (_ROOT / "docs" / "emulator.md").read_text().split("## Parts")[1].split("\n\n")[2]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1])]


def _part(path: pathlib.Path) -> str:
    return path.relative_to(_EMULATOR).parts[0].removesuffix(".py")


def _imported(path: pathlib.Path) -> set[str]:
    """Parts that a module imports when it runs; imports for type checkers do not count."""
    tree = ast.parse(path.read_text())
    typing = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing:
            folder = path.parents[node.level - 1]
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                target = folder.joinpath(*name.split("."))
                found.add(_part(target))
    return found


def test_every_part_is_in_the_table():
    parts = {_part(path) for path in _EMULATOR.rglob("*.py")} - {"__init__"}
    assert sorted(_layers()) == sorted(parts)


def test_imports_go_upwards():
    order = {name: i for i, name in enumerate(_layers())}
    wrong = [
        f"{path.relative_to(_EMULATOR)} imports {other}"
        for path in sorted(_EMULATOR.rglob("*.py"))
        if path.name != "__init__.py" or path.parent != _EMULATOR
        for other in _imported(path)
        if order[other] > order[_part(path)]
    ]
    assert not wrong
