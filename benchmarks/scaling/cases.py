"""What is measured: ways to split the training of a language model over two devices, each against one device."""

import dataclasses

from examples.language_model.meshes import MeshSizes
from examples.language_model.model import ModelConfig

ONE = MeshSizes(data=1, model=1)
FSDP = MeshSizes(data=2, model=1)
TENSOR = MeshSizes(data=1, model=2)
RING = MeshSizes(data=1, model=1, sequence=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
      name: For tables.
      mesh: How it is split.
      batch: Windows of text in a step, on all devices together.
      length: Bytes in a window.
      steps: How many.
      implementation: Of attention; None for kernels where there are any.
      against: Name of the case on one device that it is compared with, or "" for such a case.
      rounding: Whether it is also trained from parameters that were rounded to bfloat16.
    """

    name: str
    mesh: MeshSizes
    batch: int
    length: int
    steps: int = 20
    implementation: str | None = None
    against: str = ""
    rounding: bool = False

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """All cases of a run.

    Attributes:
      model: Size of the model.
      cases: In the order in which they run, those on one device before what is compared with them.
      in_two_processes: Names of those that also run in two processes.
    """

    model: ModelConfig
    cases: tuple[Case, ...]
    in_two_processes: tuple[str, ...] = ("FSDP", "long ring")


def _cases(batch: int, length: int, long: int, steps: int, longest: int | None = None) -> tuple[Case, ...]:
    cases = [
        Case(name="one device", mesh=ONE, batch=batch, length=length, steps=steps, rounding=True),
        Case(name="FSDP", mesh=FSDP, batch=batch, length=length, steps=steps, against="one device"),
        Case(name="tensor parallel", mesh=TENSOR, batch=batch, length=length, steps=steps, against="one device"),
    ]
    one = Case(name="long one device", mesh=ONE, batch=1, length=long, steps=steps, rounding=True)
    reference = dataclasses.replace(
        one, name="long one device by reference", implementation="reference", rounding=False
    )
    ring = Case(name="long ring", mesh=RING, batch=1, length=long, steps=steps, against=reference.name)
    cases += [one, reference, ring]
    if longest is not None:
        few = max(3, steps // 4)
        cases += [
            dataclasses.replace(reference, name="longest one device by reference", length=longest, steps=few),
            dataclasses.replace(
                ring, name="longest ring", length=longest, steps=few, against="longest one device by reference"
            ),
        ]
    return tuple(cases)


STUDIES = {
    # 181 million parameters in wide layers, few of them so that a program compiles in seconds.
    "gpu": Study(
        model=ModelConfig(width=2048, hidden=5632, layers=4, heads=16, kv_heads=4, head_size=128, dtype="bfloat16"),
        cases=_cases(batch=8, length=2048, long=16384, steps=20, longest=32768),
    ),
    # What a CPU compiles and trains in minutes: programs and losses, no times.
    "cpu": Study(
        model=ModelConfig(layers=2, dtype="bfloat16"),
        cases=_cases(batch=4, length=256, long=1024, steps=20),
    ),
    "tiny": Study(
        model=ModelConfig(width=64, hidden=96, layers=1, heads=4, kv_heads=2, head_size=32, dtype="bfloat16"),
        cases=_cases(batch=2, length=128, long=512, steps=5),
    ),
}
