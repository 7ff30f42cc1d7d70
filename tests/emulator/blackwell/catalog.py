"""All questions, by subject, the most important first."""

from tests.emulator.blackwell import (
    bulk,
    conversions,
    copies,
    data_path,
    fragments,
    numerics,
    ordering,
    pairs,
    scales,
    shared_operands,
    tensor_memory,
)
from tests.emulator.blackwell.probe import Probe, Question

SUBJECTS: dict[str, tuple[Question, ...]] = {
    "Scale factors": scales.QUESTIONS,
    "Order": ordering.QUESTIONS,
    "A and D in tensor memory": data_path.QUESTIONS,
    "Loads and stores of tensor memory": fragments.QUESTIONS,
    "Tensor memory": tensor_memory.QUESTIONS,
    "Copies of scale factors": copies.QUESTIONS,
    "Operands in shared memory": shared_operands.QUESTIONS,
    "Numerics": numerics.QUESTIONS,
    "Registers": conversions.QUESTIONS,
    "Tensor copies": bulk.QUESTIONS,
    "Pairs of CTAs": pairs.QUESTIONS,
}


def questions() -> list[Question]:
    """In the order of the documentation."""
    return [question for questions in SUBJECTS.values() for question in questions]


def probes() -> list[tuple[Question, Probe]]:
    """Every launch, with its question."""
    return [(question, probe) for question in questions() for probe in question.probes]
