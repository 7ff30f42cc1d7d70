"""Whether the emulator notices a kernel's missing or wrong synchronisation: faults put in on purpose, one at a time."""

from .mutants import Mutant, mutants
from .report import bars, rows, save, table
from .survey import UNNOTICED, Outcome, survey, survey_launches

__all__ = [
    "UNNOTICED", "Mutant", "Outcome", "bars", "mutants", "rows", "save", "survey", "survey_launches", "table",
]  # fmt: skip
