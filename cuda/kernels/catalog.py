"""The kernels of the library: every variant by name, with what a launch has to know of it."""

import dataclasses
from collections.abc import Callable

from kernels.publish_output_gradient import publish_output_gradient
from kernels.quantize_folded_rows import quantize_folded_rows
from kernels.quantize_rows import quantize_rows
from kernels.quantize_value_e4m3 import quantize_value_e4m3
from kernels.quantize_value_mxfp4 import quantize_value_mxfp4

HEAD_SIZES = (64, 128)
FOLDED_HEAD_SIZE = 128

_WITH_OPTION = (
    (quantize_rows, "with_columns"),
    (quantize_folded_rows, "with_columns"),
    (quantize_value_e4m3, "with_rows"),
    (quantize_value_mxfp4, "with_rows"),
)


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
        for function, option in _WITH_OPTION:
            if function is not quantize_folded_rows or head_size == FOLDED_HEAD_SIZE:
                found += [_variant(function, head_size, option, chosen) for chosen in (False, True)]
        found.append(_variant(publish_output_gradient, head_size))
    return found


def _variant(function: Callable[..., None], head_size: int, option: str | None = None, chosen: bool = False) -> Variant:
    name = f"{function.__name__}_h{head_size}" + (f"_{option}" if chosen else "")
    constants: dict[str, int | bool] = {"head_size": head_size}
    if option is not None:
        constants[option] = chosen
    return Variant(name, function, constants, threads=2 * head_size)
