import pytest

from cuda.emulator.ptx.parser import PtxSyntaxError, entries, parse
from cuda.emulator.ptx.syntax import Address, Immediate, Negated, Pair, Register, Symbol, Vector
from tests.emulator.text import module


def _only(statement: str):
    return parse(module(statement)).instructions[0]


@pytest.mark.parametrize(
    "statement, operands",
    [
        ("add.s32 %r1, %r2, -7;", (Register("%r1", "b32"), Register("%r2", "b32"), Immediate(-7))),
        ("mov.f32 %f1, 0fBF800000;", (Register("%f1", "b32"), Immediate(0xBF800000, True))),
        ("mov.b32 %r1, 0x1F;", (Register("%r1", "b32"), Immediate(31))),
        ("mov.b32 %r1, 017;", (Register("%r1", "b32"), Immediate(15))),
        ("mov.b32 %r1, 8U;", (Register("%r1", "b32"), Immediate(8))),
        ("ld.shared.b32 %r1, [%r2+-16];", (Register("%r1", "b32"), Address(Register("%r2", "b32"), -16))),
        ("ld.shared.b32 %r1, [%r2-16];", (Register("%r1", "b32"), Address(Register("%r2", "b32"), -16))),
        ("ld.shared.b32 %r1, [%r2 - 0x10];", (Register("%r1", "b32"), Address(Register("%r2", "b32"), -16))),
        ("ld.shared.b32 %r1, [%r2 + 16];", (Register("%r1", "b32"), Address(Register("%r2", "b32"), 16))),
        (
            "st.shared.v2.b32 [buffer+8], {%r1, 5};",
            (Address(Symbol("buffer"), 8), Vector((Register("%r1", "b32"), Immediate(5)))),
        ),
        (
            "cp.async.bulk.tensor.2d.x [%r1], [%d1, {%r2, %r3}], [%r4];",
            (
                Address(Register("%r1", "b32")),
                Address(Register("%d1", "b64"), 0, (Register("%r2", "b32"), Register("%r3", "b32"))),
                Address(Register("%r4", "b32")),
            ),
        ),
        ("elect.sync _|%p1, -1;", (Pair(Symbol("_"), Register("%p1", "pred")), Immediate(-1))),
        (
            "selp.b32 %r1, 1, 0, !%p2;",
            (Register("%r1", "b32"), Immediate(1), Immediate(0), Negated(Register("%p2", "pred"))),
        ),
        ("mov.u32 %r1, %tid.x;", (Register("%r1", "b32"), Symbol("%tid.x"))),
    ],
)
def test_operands(statement, operands):
    assert _only(statement).operands == operands


def test_guards_opcodes_and_lines():
    kernel = parse(module("@!%p3 add.s32 %r1,\n   %r1, 1;\n  @%p4 bra DONE;\nDONE:"))
    add, branch, ret = kernel.instructions
    assert (add.guard, add.negated, add.opcode) == (Register("%p3", "pred"), True, "add.s32")
    assert (branch.guard, branch.negated) == (Register("%p4", "pred"), False)
    assert branch.line == add.line + 2
    assert kernel.labels[branch.operands[0].name] == ret.index
    assert "add.s32" in add.where and str(add.line) in add.where


def test_scopes_keep_registers_and_labels_apart():
    kernel = parse(
        module(
            "mov.b32 %r1, 1; { .reg .b32 t; .reg .pred %p1; mov.b32 t, 2; bra END; END: }{ .reg .b32 t; mov.b32 t, 3; }"
        )
    )
    first, second = kernel.instructions[1].operands[0], kernel.instructions[3].operands[0]
    assert first != second and first.kind == second.kind == "b32"
    assert kernel.labels[kernel.instructions[2].operands[0].name] == 3


def test_parameters_are_aligned():
    kernel = parse(module("", "ipmf"))
    assert [(p.offset, p.size) for p in kernel.parameters] == [(0, 4), (8, 8), (64, 128), (192, 4)]
    assert kernel.parameter_bytes == 196
    assert kernel.threads == (32, 1, 1)


def test_dynamic_shared_memory_is_behind_static():
    text = ".extern .shared .align 1024 .b8 dynamic[];\n" + module("", shared=40)
    text = text.replace(".version 8.8\n", "").replace(".extern", ".version 8.8\n.extern", 1)
    assert parse(text).shared_variables == {"buffer": (0, 40), "dynamic": (1024, 0)}


def test_source_lines_are_kept():
    kernel = parse(module(".loc 1 42 7\n  add.s32 %r1, %r1, 1;") + '.file 1 "kernel.py"\n')
    assert kernel.instructions[0].source == "kernel.py:42"


def test_entries_are_chosen_by_name():
    text = module("mov.b32 %r1, 1;", name="one") + module("mov.b32 %r1, 2;", name="two").split(".address_size 64")[1]
    assert entries(text) == ["one", "two"]
    assert parse(text, "two").instructions[0].operands[1] == Immediate(2)
    with pytest.raises(PtxSyntaxError, match="name one of the 2 entries: one, two"):
        parse(text)
    with pytest.raises(PtxSyntaxError, match="no entry 'three'"):
        parse(text, "three")


@pytest.mark.parametrize(
    "statement, message",
    [
        ("bra NOWHERE;", "no label"),
        ("@%p99 add.s32 %r1, %r1, 1;", "the guard"),
        (".local .b8 x[16];", "the directive"),
    ],
)
def test_errors_name_the_line(statement, message):
    text = module(statement)
    line = text[: text.index(statement)].count("\n") + 1
    with pytest.raises(PtxSyntaxError, match=f"^line {line}: {message}"):
        parse(text)


def test_parameters_have_types():
    kernel = parse(module("", "pifm"))
    assert [(p.type, p.size, p.offset) for p in kernel.parameters] == [
        ("u64", 8, 0), ("u32", 4, 8), ("f32", 4, 12), ("b8", 128, 64),
    ]  # fmt: skip


def test_what_an_entry_declares_of_its_launches():
    kernel = parse(module(""))
    assert (kernel.threads, kernel.max_threads, kernel.cluster, kernel.max_cluster) == ((32, 1, 1), None, None, None)
    assert not kernel.explicit_cluster
    directives = ".maxntid 16, 8\n.minnctapersm 1\n.explicitcluster\n.reqnctapercluster 2, 2\n.maxclusterrank 8"
    kernel = parse(module("").replace(".reqntid 32, 1, 1", directives))
    assert (kernel.threads, kernel.max_threads, kernel.cluster, kernel.max_cluster) == (None, 128, (2, 2, 1), 8)
    assert kernel.explicit_cluster
