"""Scale factors in tensor memory.

Row r of an operand has its scale factors in lane r % 32 of column r // 32, one byte each, and a copy in each of the
four lane quadrants (PTX ISA, "Scale factor A/B layout organization"). Scale factor k is byte k % 4 of that column for
k < 4; the next four of all rows follow one group of columns later, where a group is 4 columns for each 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..checks.races import Actor
from ..errors import DescriptorFaultError, MemoryFaultError
from ..machine.tensor_memory import LANES, QUADRANT, TensorMemory, split_address
from ..ptx.syntax import Instruction
from .formats import SCALE_VALUES

# The bits of the address that select a byte, kept there by some compilers, are in the instruction descriptor as well.
_ADDRESS_MASK = 0x3FFFFFFF
# Scale factors of a row to the step of the byte at which they may start.
_BYTE_STEPS = {1: 1, 2: 2, 3: 1, 4: 4, 6: 2}


@dataclass(frozen=True, slots=True)
class ScaleFactors:
    """The scale factors of one operand.

    Attributes:
      column: where they start.
      factors: of a row.
      first: byte of the first.
      kind: "ue4m3" or "ue8m0".
    """

    column: int
    factors: int
    first: int
    kind: str

    def read_copies(
        self, memory: TensorMemory, rows: int, quadrants: range, actor: Actor | None, instruction: Instruction
    ) -> np.ndarray:
        """(rows, factors) float64, from the copies in some lane quadrants, which have to agree."""
        full, rest = divmod(rows, QUADRANT)
        lanes = slice(QUADRANT * quadrants.start, QUADRANT * quadrants.stop)
        groups = []
        for column in self._columns(rows):
            copies = memory.read(column, full, lanes, actor, instruction).reshape(full, len(quadrants), QUADRANT)
            words = copies[:, 0].reshape(-1)
            if rest:
                last = [
                    memory.read(column + full, 1, slice(start, start + rest), actor, instruction)[0]
                    for start in range(lanes.start, lanes.stop, QUADRANT)
                ]
                words = np.concatenate([words, last[0]])
            if (copies != copies[:, :1]).any() or (rest and (np.array(last) != last[0]).any()):
                raise MemoryFaultError(
                    f"{instruction.where}: the copies of the scale factors at column {column} differ between the lane "
                    f"quadrants {quadrants.start} to {quadrants.stop - 1}"
                )
            groups.append(words)
        return self._values(groups)

    def read_own(self, memory: TensorMemory, actor: Actor | None, instruction: Instruction) -> np.ndarray:
        """(128, factors) float64; the rows of each lane quadrant from the copy there."""
        groups = []
        for column in self._columns(LANES):
            own = [
                memory.read(column + lane // QUADRANT, 1, slice(lane, lane + QUADRANT), actor, instruction)
                for lane in range(0, LANES, QUADRANT)
            ]
            groups.append(np.concatenate(own, axis=None))
            self._note_missing_copies(memory, column, instruction)
        return self._values(groups)

    @staticmethod
    def _note_missing_copies(memory: TensorMemory, column: int, instruction: Instruction) -> None:
        if memory.monitor is None:
            return
        window = slice(column, column + LANES // QUADRANT)
        copies = memory.data[window].reshape(LANES // QUADRANT, -1, QUADRANT)
        if (copies != copies[:, :1]).any() or not memory.written[window].all():
            memory.monitor.report(
                "assumption",
                f"{instruction.where}: the scale factors of A at column {column} are not the same in all lane "
                "quadrants, as the PTX ISA asks; the rows of each quadrant are taken to read the copy there",
            )

    def _columns(self, rows: int) -> list[int]:
        """The first column of each group of four scale factors that is needed."""
        group = 4 * -(-rows // 128)
        return [self.column + group * i for i in range(-(-(self.first + self.factors) // 4))]

    def _values(self, groups: list[np.ndarray]) -> np.ndarray:
        codes = np.stack(groups, axis=1).view(np.uint8)
        return np.take(SCALE_VALUES[self.kind], codes[:, self.first : self.first + self.factors])


def scale_factors(address: int, factors: int, scale_id: int, kind: str) -> ScaleFactors:
    """From the address operand and the scale factor id of an instruction with `factors` scale factors a row."""
    lane, column = split_address(address & _ADDRESS_MASK)
    if lane:
        raise DescriptorFaultError(f"scale factors at lane {lane}; they start at lane 0")
    if scale_id % _BYTE_STEPS[factors]:
        raise DescriptorFaultError(f"scale factor id {scale_id} with {factors} scale factors a row")
    return ScaleFactors(column, factors, scale_id, kind)
