"""PTX modules around a few lines of interest."""

from __future__ import annotations

_REGISTERS = """
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<160>;
    .reg .f32 %f<160>;
    .reg .b64 %d<64>;"""


def module(
    body: str, parameters: str = "", *, target: str = "sm_100a", shared: int = 0, threads: int = 32, name: str = "k"
) -> str:
    """A PTX module with one entry.

    Args:
      body: statements; registers %p, %h, %r, %f, %d are declared, `buffer` is the shared memory.
      parameters: one letter each: "p" a pointer, "i" a 32-bit integer, "f" a float, "m" a tensor map; they are
        called a0, a1, ...
      target: of the module.
      shared: bytes of a static shared array `buffer`, aligned to 1024.
      threads: of the block.
      name: of the entry.
    """
    kinds = {
        "p": ".param .u64 a{}",
        "i": ".param .u32 a{}",
        "f": ".param .f32 a{}",
        "m": ".param .align 64 .b8 a{}[128]",
    }
    declared = ",\n".join(kinds[kind].format(i) for i, kind in enumerate(parameters))
    array = f".shared .align 1024 .b8 buffer[{shared}];" if shared else ""
    return f"""
.version 8.8
.target {target}
.address_size 64
.visible .entry {name}({declared})
.reqntid {threads}, 1, 1
{{{_REGISTERS}
    {array}
    {body}
    ret;
}}
"""


def store_words(registers: list[str], pointer: str = "a0") -> str:
    """Store 32-bit registers of each thread: word `i * threads + thread` of an array is register i."""
    lines = [
        f"ld.param.u64 %d60, [{pointer}];",
        "mov.u32 %r150, %tid.x;",
        "mov.u32 %r151, %ntid.x;",
        "mul.wide.u32 %d61, %r150, 4;",
        "add.s64 %d60, %d60, %d61;",
        "mul.wide.u32 %d62, %r151, 4;",
    ]
    for register in registers:
        lines += [f"st.global.b32 [%d60], {register};", "add.s64 %d60, %d60, %d62;"]
    return "\n    ".join(lines)
