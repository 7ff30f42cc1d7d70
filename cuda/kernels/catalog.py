"""The kernels of the library: every variant by name, with what a launch has to know of it."""

import dataclasses
import itertools
from collections.abc import Callable

from kernels.publish_output_gradient import publish_output_gradient
from kernels.quantize_folded_rows import quantize_folded_rows
from kernels.quantize_rows import quantize_rows
from kernels.quantize_value_e4m3 import quantize_value_e4m3
from kernels.quantize_value_mxfp4 import quantize_value_mxfp4

HEAD_SIZES = (64, 128)
FOLDED_HEAD_SIZE = 128

# The compile-time choices of each kernel, besides the head size.
_CHOICES = {
    quantize_rows: ("with_columns",),
    quantize_folded_rows: ("with_columns",),
    quantize_value_e4m3: ("with_rows",),
    quantize_value_mxfp4: ("ordered", "with_rows"),
    publish_output_gradient: (),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel for fixed values of its compile-time parameters.

    Attributes:
      name: Of the entry in the cubin.
      function: The kernel's body.
      constants: Its compile-time parameters, the last ones.
      threads: Of a block.
    """

    name: str
    function: Callable[..., None]
    constants: dict[str, int | bool]
    threads: int


def variants() -> list[Variant]:
    """All kernels."""
    found = []
    for head_size in HEAD_SIZES:
        for function, choices in _CHOICES.items():
            if function is quantize_folded_rows and head_size != FOLDED_HEAD_SIZE:
                continue
            for chosen in itertools.product((False, True), repeat=len(choices)):
                found.append(_variant(function, head_size, dict(zip(choices, chosen, strict=True))))
    return found


def _variant(function: Callable[..., None], head_size: int, choices: dict[str, bool]) -> Variant:
    suffix = "".join(f"_{name}" for name, chosen in choices.items() if chosen)
    name = f"{function.__name__}_h{head_size}{suffix}"
    return Variant(name, function, {"head_size": head_size, **choices}, threads=2 * head_size)
