"""Whether the emulator notices a kernel's missing or wrong synchronisation: faults put in on purpose, one at a time."""

from .mutants import Mutant, mutants
from .report import bars, rows, save, table
from .survey import Outcome, survey

__all__ = ["Mutant", "Outcome", "bars", "mutants", "rows", "save", "survey", "table"]
