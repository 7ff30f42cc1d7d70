"""A launch of a hand-written PTX kernel and what it must leave in memory."""

import dataclasses
import itertools
import pathlib

import numpy as np

from tests.emulator.device import TiledMap

_REGISTERS = ".reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<128>; .reg .b64 %d<64>; .reg .f32 %f<160>;"
_PARAMETERS = {
    "map": ".param .align 64 .b8 {}[128]",
    "pointer": ".param .u64 {}",
    "s32": ".param .s32 {}",
    "u64": ".param .u64 {}",
    "f32": ".param .f32 {}",
}
_WAITS, _WAIT_NANOSECONDS = 1000, 1_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A launch.

    Attributes:
      name: Of the test.
      ptx: Text with one entry.
      arguments: Arrays (pointers), NumPy scalars and maps, in the order of the parameters.
      expected: By place in ``buffers``, arrays after the launch; where the documentation leaves them open, none.
      grid: CTAs.
      block: Threads of a CTA.
      shared_bytes: Dynamic shared memory of a CTA.
      cluster: CTAs of a cluster.
      unordered: Places of arrays whose elements the hardware may permute.
      cubin: What the GPU runs instead of the text, or None.
      entry: Of the text.
    """

    name: str
    ptx: str
    arguments: tuple
    expected: dict[int, np.ndarray]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    unordered: frozenset[int] = frozenset()
    cubin: pathlib.Path | None = None
    entry: str = "main"

    def __str__(self) -> str:
        return self.name

    @property
    def buffers(self) -> list[np.ndarray]:
        """The arrays of the arguments, maps among them, each once."""
        found: dict[int, np.ndarray] = {}
        for argument in self.arguments:
            array = argument.array if isinstance(argument, TiledMap) else argument
            if isinstance(array, np.ndarray):
                found.setdefault(id(array), array)
        return list(found.values())


def entry(parameters: dict[str, str], body: str, version: str = "8.0", header: str = "") -> str:
    """PTX with the entry ``main``.

    Args:
      parameters: Name to "map", "pointer", "s32", "u64" or "f32".
      body: Statements; ``shared`` is the dynamic shared memory, and registers of all kinds are declared.
      version: PTX version.
      header: Directives behind the parameters.
    """
    declared = ",\n".join(_PARAMETERS[kind].format(name) for name, kind in parameters.items())
    loads = "".join(
        f"ld.param.u64 %{name}, [{name}];\n cvta.to.global.u64 %{name}, %{name};\n"
        for name, kind in parameters.items()
        if kind == "pointer"
    )
    pointers = "".join(f".reg .b64 %{name}; " for name, kind in parameters.items() if kind == "pointer")
    return f"""\
.version {version}
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry main(
{declared})
{header}
{{
{_REGISTERS}
{pointers}
mov.u32 %r0, %tid.x;
mov.u32 %r1, shared;
{loads}{body}
ret;
}}
"""


_labels = itertools.count()


def fill_shared(start: int, nbytes: int, word: int, threads: int = 32) -> str:
    """Stores a word over and over; clobbers %r100 to %r102, %p20."""
    label = f"FILL{next(_labels)}"
    return f"""
shl.b32 %r100, %r0, 2;
mov.b32 %r102, {word};
{label}:
setp.ge.u32 %p20, %r100, {nbytes};
@%p20 bra {label}_END;
add.u32 %r101, %r1, %r100;
st.shared.b32 [%r101+{start}], %r102;
add.u32 %r100, %r100, {4 * threads};
bra {label};
{label}_END:
bar.warp.sync 0xffffffff;
"""


def copy_to_shared(pointer: str, start: int, nbytes: int, threads: int = 32) -> str:
    """Copies words from a global array; clobbers %r100 to %r102, %d50, %p20."""
    return _copy(f"ld.global.b32 %r102, [%d50];\nst.shared.b32 [%r101+{start}], %r102;", pointer, nbytes, threads)


def copy_from_shared(pointer: str, start: int, nbytes: int, threads: int = 32) -> str:
    """Copies words to a global array; clobbers %r100 to %r102, %d50, %p20."""
    return _copy(f"ld.shared.b32 %r102, [%r101+{start}];\nst.global.b32 [%d50], %r102;", pointer, nbytes, threads)


def _copy(access: str, pointer: str, nbytes: int, threads: int) -> str:
    label = f"COPY{next(_labels)}"
    return f"""
shl.b32 %r100, %r0, 2;
{label}:
setp.ge.u32 %p20, %r100, {nbytes};
@%p20 bra {label}_END;
add.u32 %r101, %r1, %r100;
cvt.u64.u32 %d50, %r100;
add.u64 %d50, %{pointer}, %d50;
{access}
add.u32 %r100, %r100, {4 * threads};
bra {label};
{label}_END:
bar.warp.sync 0xffffffff;
"""


def wait(barrier: int, parity: int | str) -> str:
    """Waits for a phase of the mbarrier at a shared offset, or exits after a second or so; clobbers %r103, %p21."""
    label = f"WAIT{next(_labels)}"
    return f"""
mov.u32 %r103, 0;
{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p21, [%r1+{barrier}], {parity}, {_WAIT_NANOSECONDS};
@%p21 bra {label}_END;
add.u32 %r103, %r103, 1;
setp.lt.u32 %p21, %r103, {_WAITS};
@%p21 bra {label};
exit;
{label}_END:
"""
