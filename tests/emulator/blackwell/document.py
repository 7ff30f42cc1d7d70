"""Writes docs/blackwell_questions.md: python -m tests.emulator.blackwell.document"""

import pathlib

from tests.emulator.blackwell import catalog
from tests.emulator.blackwell.probe import Question

PATH = pathlib.Path(__file__).parents[3] / "docs" / "blackwell_questions.md"

_INTRODUCTION = """\
# Questions to a Blackwell GPU

What the PTX emulator assumes about compute capability 10.0 and 10.3 that no run on such a GPU has confirmed. Each \
question is a few small PTX kernels in `tests/emulator/blackwell`; the emulator must give the answer stated here, and \
a GPU is asked the same by

    BLACKWELL_ANSWERS=answers.md pytest -m gpu tests/emulator/blackwell

which writes one line a kernel. Sections are those of the PTX ISA 9.0. "Reading alone" means that no kernel known to \
run right on the hardware depends on it. The last column is about the attention kernels for Blackwell \
(docs/blackwell.md). "HAO" is hao-ai-lab/flash-attention-fp4, "CUTLASS" is NVIDIA/cutlass with its examples, all of \
2026.

**The one that matters most is the first**: storing the scale factors of P with one `tcgen05.st` a warp rests on the \
rule that each lane quadrant reads its own copy of A's scale factors, which the ISA's text does not grant.

This file is written by `python -m tests.emulator.blackwell.document`.

Not asked, because the emulator refuses it: sparse matrices, `.ws`, matrix descriptors with a base offset, \
decompression in `tcgen05.cp`, im2col and interleaved tensor maps. Not asked either: what Hopper has too (mbarriers, \
named barriers, bulk copies, `ld`, `st`, atomics), which `tests/emulator/test_hardware_kernels.py` compares on Hopper.
"""

_HEADER = "| question | the emulator's answer | rests on | if not |\n|---|---|---|---|\n"


def text() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for subject, questions in catalog.SUBJECTS.items():
        rows = "\n".join(_row(question) for question in questions)
        parts.append(f"\n## {subject}\n\n{_HEADER}{rows}\n")
    return "".join(parts)


def _row(question: Question) -> str:
    cells = (question.title, question.answer, question.source, question.otherwise)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PATH.write_text(text())
