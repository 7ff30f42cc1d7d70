"""Which functions of a cubin are tabulated, and under which names."""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.model.published import FLASH_ATTENTION_4
from benchmarks.model.sass import Module

_BUILT = Path(__file__).parents[2] / "build" / "native"
CUBINS = tuple(_BUILT / f"kernels.{target}.cubin" for target in ("sm_100f", "sm_103a"))
"""Of this project for Blackwell, after `make native`."""

RECIPES: Mapping[str, str] = {
    "affine": "fast",
    "square": "square",
    "exponential": "exact_map",
    "affine_mixed_anchor32": "accurate",
    "e4m3": "fp8_pv",
    "affine_mixed_odd_anchor128": "guarded",
}
"""Recipe of each way in which the forward makes probabilities, for the tables."""

SAME_KERNEL: Mapping[str, str] = {"train": "fp8_pv"}
"""Recipes that run another one's kernel."""

_FORWARD = re.compile(r"blackwell_forward_h128_(\w+)_\d+")


def ours(module: Module) -> dict[str, str]:
    """Forward kernels of this project for head size 128.

    Args:
      module: Code of one of the project's cubins.

    Returns:
      Recipe by name of the function.
    """
    found = {x.name: match[1] for x in module.functions if (match := _FORWARD.fullmatch(x.name))}
    return {name: RECIPES.get(probabilities, probabilities) for name, probabilities in found.items()}


def theirs(module: Module) -> dict[str, str]:
    """The kernel of FlashAttention-4, which is alone in its cubin.

    Args:
      module: Code of the cubin.

    Returns:
      Name for tables by name of the function.
    """
    return {x.name: FLASH_ATTENTION_4 for x in module.functions if "FlashAttentionForwardSm100" in x.name}
