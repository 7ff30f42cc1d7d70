"""Which pipe of a sub-partition an instruction takes, and for how many clocks."""

from collections.abc import Mapping

from benchmarks.model.machine import Rates
from benchmarks.model.sass import Instruction

PIPES = (
    *("fma", "alu", "conversion", "mufu", "tmem load", "tmem store"),
    *("shared", "barrier", "uniform", "other"),
)
"""Of the tables. Conversions are issued to the ALU; others are products, global memory and jumps."""

ARITHMETIC = ("fma", "alu", "conversion", "mufu")
"""Pipes that compute."""

_OPERATIONS: Mapping[str, str] = {
    "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 IMAD IDP HFMA2 HADD2 HMUL2 FSWZADD",
    "alu": (
        "FMNMX FMNMX3 FSEL FSET FSETP FCHK LOP3 SHF SHL SHR PRMT IADD IADD3 VIADD LEA ISETP ICMP SEL VIMNMX VIMNMX3 "
        "VIADDMNMX IMNMX IABS MOV CS2R PLOP3 P2R R2P BMSK SGXT LEA VABSDIFF I2IP I2FP HSET2 HSETP2 HMNMX2 VHMNMX "
        "IADD32I LOP32I MOV32I"
    ),
    "conversion": "F2FP F2F F2IP",
    "mufu": "MUFU F2I I2F FRND POPC FLO BREV",
    "tmem load": "LDTM",
    "tmem store": "STTM",
    "shared": "LDS STS STAS LDSM STSM ATOMS LDGSTS MOVM",
    "barrier": (
        "SYNCS BAR FENCE MEMBAR DEPBAR LDGDEPBAR ERRBAR WARPSYNC NANOSLEEP WARPGROUP WARPGROUPSET ELECT VOTE "
        "MATCH SHFL REDUX CREDUX UCGABAR_ARV UCGABAR_WAIT CCTL ACQBULK"
    ),
    "uniform": (
        "R2UR S2UR S2R LDCU ULDC UMOV UIADD3 UIMAD ULEA USHF USEL ULOP3 UISETP UPLOP3 UFLO UPOPC UPRMT UP2UR UR2UP "
        "UBMSK USGXT VOTEU UVIADD UVIMNMX UVIRTCOUNT UIABS UCLEA UFSETP UF2FP UFSEL UFMNMX UFADD UFFMA UFMUL B2R R2B"
    ),
    "other": (
        "UTCHMMA UTCQMMA UTCOMMA UTCIMMA UTCBAR UTCCP UTCSHIFT UTCATOMSWS HGMMA QGMMA IGMMA BGMMA HMMA QMMA IMMA OMMA "
        "LDG STG LDL STL LD ST LDC ATOM ATOMG RED REDG REDAS UTMALDG UTMASTG UTMAREDG UTMACCTL UTMACMDFLUSH UTMAPF "
        "UBLKCP UBLKRED UBLKPF "
        "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK BPT NOP USETMAXREG USETSHMSZ PREEXIT YIELD KILL"
    ),
}
_PIPE_OF = {operation: pipe for pipe, names in _OPERATIONS.items() for operation in names.split()}

_SCALAR = ("FFMA", "FMUL", "FADD")
_SHARED_CLOCKS = 4


def pipe_of(x: Instruction) -> str:
    """The pipe of an instruction.

    Args:
      x: The instruction.

    Returns:
      One of :data:`PIPES`.
    """
    try:
        return _PIPE_OF[x.operation]
    except KeyError:
        raise ValueError(f"{x.opcode}: its pipe is not known; add it to {__name__}") from None


def tmem_columns(x: Instruction) -> int:
    """Columns of tensor memory that a warp reads or writes, a 32-bit word a thread each."""
    if x.operation not in ("LDTM", "STTM"):
        return 0
    counts = [int(m[1:]) for m in x.modifiers if m[:1] == "x" and m[1:].isdigit()]
    return counts[0] if counts else 1


def takes_maximum(x: Instruction) -> bool:
    """Whether it loads tensor memory with the maximum of what it loads."""
    return x.operation == "LDTM" and "MAX" in x.modifiers


def converts_to_fp8(x: Instruction) -> bool:
    """Whether it packs E4M3 or E5M2."""
    return x.operation == "F2FP" and bool({"E4M3", "E5M2"} & set(x.modifiers)) and "UNPACK_B" not in x.modifiers


def issue_clocks(x: Instruction, rates: Rates) -> tuple[str, int]:
    """The unit that limits how often an instruction can be issued, and how long it keeps it.

    Args:
      x: The instruction.
      rates: Of the multiprocessor.

    Returns:
      Unit and clocks of one sub-partition.
    """
    pipe = pipe_of(x)
    if pipe == "fma":
        return pipe, 1 if x.operation in _SCALAR else rates.packed
    if pipe == "conversion":
        return "alu", rates.fp8 if converts_to_fp8(x) else rates.alu
    if pipe in ("tmem load", "tmem store"):
        return pipe, tmem_columns(x) * (rates.maxima if takes_maximum(x) else 1)
    return pipe, {"alu": rates.alu, "mufu": rates.mufu, "shared": _SHARED_CLOCKS}.get(pipe, 1)
