"""From PTX text to a kernel, for what CuTe DSL and inline PTX write."""

from __future__ import annotations

import re

from ..errors import PtxSyntaxError
from .syntax import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Pair,
    Parameter,
    Register,
    Symbol,
    Vector,
)

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.[^{;]*?)?)\{", re.DOTALL)
_EXTENTS = r"\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"
_WORD = re.compile(r"\S")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)(\S+)\s+(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b.*\s)?([\w$]+)(?:\[(\d+)\])?$")
_SHARED = re.compile(r"(?:\.(extern)\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
_REGISTER_RANGE = re.compile(r"(\S+?)<(\d+)>")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_INTEGER = re.compile(r"([-~]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_ADDRESS = re.compile(r"([^+\-\s]+)\s*(?:(?:\+|(?=-))\s*(-?)\s*(\w+))?")
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_IGNORED = (".pragma", ".maxnreg")


class _Scope:
    """The registers and labels of one pair of braces."""

    def __init__(self, parent: _Scope | None, number: int) -> None:
        self.parent, self.number = parent, number
        self.registers: dict[str, str] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.labels: dict[str, str] = {}
        self.operands: dict[str, object] = {}

    def _own_name(self, name: str) -> str:
        return f"{name}@{self.number}" if self.number else name

    def declare(self, kind: str, names: str) -> None:
        if kind != "pred":
            kind = f"b{8 * TYPE_BYTES[kind]}"
        for name in _split(names):
            match = _REGISTER_RANGE.fullmatch(name)
            if match:
                self.ranges.append((match[1], int(match[2]), kind))
            else:
                self.registers[name] = kind

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return Register(scope._own_name(name), scope.registers[name])
            for prefix, count, kind in scope.ranges:
                number = name[len(prefix) :]
                if name.startswith(prefix) and number.isdigit() and int(number) < count:
                    return Register(scope._own_name(name), kind)
            scope = scope.parent
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return [*parts, tail] if tail else parts


def _number(text: str) -> Immediate | None:
    match = _FLOAT.fullmatch(text)
    if match:
        return Immediate(int(match[1] or match[2], 16), is_float=True)
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2]
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8) if octal else int(digits, 0)
    return Immediate({"": value, "-": -value, "~": ~value}[match[1]])


def _operand(text: str, scope: _Scope):
    operand = scope.operands.get(text)
    if operand is None:
        operand = scope.operands[text] = _new_operand(text, scope)
    return operand


def _new_operand(text: str, scope: _Scope):
    if text.startswith("{"):
        return Vector(tuple(_operand(item, scope) for item in _split(text[1:-1])))
    if text.startswith("["):
        inner = _split(text[1:-1])
        match = _ADDRESS.fullmatch(inner[0])
        if match is None:
            raise PtxSyntaxError(f"the address {text!r} is not understood")
        coordinates = _operand(inner[1], scope).items if len(inner) > 1 else ()
        offset = int(match[2] + match[3], 0) if match[3] else 0
        return Address(_operand(match[1], scope), offset, coordinates)
    if text.startswith("!"):
        return Negated(_operand(text[1:].strip(), scope))
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first.strip(), scope), _operand(second.strip(), scope))
    if "+" in text[1:]:
        base, _, added = text.partition("+")
        return Address(_operand(base.strip(), scope), int(added, 0))
    return _number(text) or scope.register(text) or Symbol(text)


def _parameters(text: str) -> tuple[tuple[Parameter, ...], int]:
    parameters, offset = [], 0
    for declaration in _split(text):
        match = _PARAMETER.search(" ".join(declaration.split()))
        if match is None:
            raise PtxSyntaxError(f"the parameter {declaration!r} is not understood")
        size = TYPE_BYTES[match[2]] * int(match[4] or 1)
        align = int(match[1] or TYPE_BYTES[match[2]])
        offset = -(-offset // align) * align
        parameters.append(Parameter(match[3], offset, size, match[2]))
        offset += size
    return tuple(parameters), offset


def _without_comments(text: str) -> str:
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)


def entries(text: str) -> list[str]:
    """The names of the kernels in a PTX text."""
    return [match[1] for match in _ENTRY.finditer(_without_comments(text))]


def parse(text: str, entry: str | None = None) -> Kernel:
    """The kernel of a PTX text.

    Args:
      text: a PTX module.
      entry: which kernel; may be left out when the module has one.

    Raises:
      PtxSyntaxError: the text is not understood, with its line.
    """
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise PtxSyntaxError("the text has no .target")
    clean = _without_comments(text)
    found = {match[1]: match for match in _ENTRY.finditer(clean)}
    if entry is None and len(found) != 1:
        raise PtxSyntaxError(f"name one of the {len(found)} entries: {', '.join(found)}")
    if entry is not None and entry not in found:
        raise PtxSyntaxError(f"no entry {entry!r} among: {', '.join(found)}")
    match = found[entry] if entry is not None else next(iter(found.values()))
    parameters, parameter_bytes = _parameters(match[2] or "")
    body = _Body(clean, match.end(), dict(_FILE.findall(clean)))
    body.read()
    shared = _shared_variables(
        [m for m in _SHARED.finditer(clean, 0, next(iter(found.values())).start())] + body.shared
    )
    return Kernel(
        name=match[1],
        target=target[1],
        parameters=parameters,
        parameter_bytes=parameter_bytes,
        instructions=tuple(body.instructions()),
        labels=body.labels,
        shared_variables=shared,
        threads=_extents(match[3], "reqntid"),
        max_threads=_product(_extents(match[3], "maxntid")),
        cluster=_extents(match[3], "reqnctapercluster"),
        max_cluster=_product(_extents(match[3], "maxclusterrank")),
        explicit_cluster=".explicitcluster" in match[3],
    )


def _extents(directives: str, name: str) -> tuple[int, int, int] | None:
    """What one directive of an entry declares along x, y, z."""
    match = re.search(rf"\.{name}{_EXTENTS}", directives)
    return (int(match[1]), int(match[2] or 1), int(match[3] or 1)) if match else None


def _product(extents: tuple[int, int, int] | None) -> int | None:
    return None if extents is None else extents[0] * extents[1] * extents[2]


def _shared_variables(matches) -> dict[str, tuple[int, int]]:
    """Offsets of the shared arrays: static ones first, dynamic ones (of unknown size) all behind them."""
    variables, offset = {}, 0
    for dynamic in (False, True):
        for match in matches:
            if bool(match[1]) != dynamic:
                continue
            align = int(match[2] or TYPE_BYTES[match[3]])
            size = TYPE_BYTES[match[3]] * int(match[5] or (0 if match[1] else 1))
            offset = -(-offset // align) * align
            variables[match[4]] = (offset, size)
            offset += size
    return variables


class _Body:
    """The statements between the braces of an entry."""

    def __init__(self, text: str, start: int, files: dict[str, str]) -> None:
        self.text, self.position, self.files = text, start, files
        self.statements: list[tuple[str, _Scope, int, str]] = []
        self.labels: dict[str, int] = {}
        self.shared: list = []
        self._line, self._counted = text.count("\n", 0, start) + 1, start

    def _line_at(self, position: int) -> int:
        self._line += self.text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def read(self) -> None:
        scope, scopes, source = _Scope(None, 0), 0, ""
        text = self.text
        while True:
            word = _WORD.search(text, self.position)
            if word is None:
                raise PtxSyntaxError("the entry has no closing brace")
            self.position, c = word.start(), word[0]
            if c == "{":
                scopes += 1
                scope = _Scope(scope, scopes)
                self.position += 1
            elif c == "}":
                self.position += 1
                if scope.parent is None:
                    return
                scope = scope.parent
            elif c == ";":
                self.position += 1
            elif text.startswith((".loc ", ".loc\t", ".file"), self.position):
                end = text.index("\n", self.position)
                match = _LOCATION.match(text, self.position)
                if match:
                    source = f"{self.files.get(match[1], match[1])}:{match[2]}"
                self.position = end
            elif label := _LABEL.match(text, self.position):
                scope.labels[label[1]] = f"{label[1]}@{scope.number}"
                self.labels[f"{label[1]}@{scope.number}"] = len(self.statements)
                self.position = label.end()
            else:
                self._statement(scope, source)

    def _statement(self, scope: _Scope, source: str) -> None:
        end = self.text.index(";", self.position)
        statement, line = " ".join(self.text[self.position : end].split()), self._line_at(self.position)
        self.position = end + 1
        if statement.startswith(".reg"):
            kind, _, names = statement.removeprefix(".reg").strip().removeprefix(".").partition(" ")
            scope.declare(kind, names)
        elif shared := _SHARED.match(statement):
            self.shared.append(shared)
        elif not statement.startswith("."):
            self.statements.append((statement, scope, line, source))
        elif statement.split()[0] not in _IGNORED:
            raise PtxSyntaxError(f"line {line}: the directive {statement!r} is not supported")

    def instructions(self):
        for index, (statement, scope, line, source) in enumerate(self.statements):
            guard, negated, rest = None, False, statement
            if statement.startswith("@"):
                match = _GUARD.match(statement)
                if match is None:
                    raise PtxSyntaxError(f"line {line}: nothing follows the guard {statement!r}")
                guard, negated, rest = scope.register(match[2]), bool(match[1]), match[3]
                if guard is None:
                    raise PtxSyntaxError(f"line {line}: the guard of {statement!r} is not declared")
            opcode, _, operands = rest.partition(" ")
            try:
                parsed = tuple(_operand(part, scope) for part in _split(operands))
            except PtxSyntaxError as e:
                raise PtxSyntaxError(f"line {line}: {e}") from None
            if opcode.startswith("bra"):
                label = scope.label(operands.strip())
                if label is None:
                    raise PtxSyntaxError(f"line {line}: no label {operands!r}")
                parsed = (Symbol(label),)
            yield Instruction(opcode, parsed, guard, negated, line, statement, index, source)
