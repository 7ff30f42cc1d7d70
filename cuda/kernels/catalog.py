"""The kernels of the library: every variant by name, with what a launch has to know of it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kernels.blackwell import forward as blackwell_forward
from kernels.blackwell.order_key import order_key
from kernels.code_maps import Map
from kernels.hopper import backward as hopper_backward
from kernels.hopper import backward_query as hopper_backward_query
from kernels.hopper import forward as hopper_forward
from kernels.hopper.backward_prepare import backward_prepare
from kernels.hopper.backward_query_sums import backward_finish_query
from kernels.hopper.expand_key import expand_key
from kernels.hopper.expand_value import expand_value
from kernels.publish_output_gradient import publish_output_gradient
from kernels.quantize_folded_rows import quantize_folded_rows
from kernels.quantize_rows import quantize_rows
from kernels.quantize_value_e4m3 import quantize_value_e4m3
from kernels.quantize_value_mxfp4 import quantize_value_mxfp4

HEAD_SIZES = (64, 128)
FOLDED_HEAD_SIZE = 128
HOPPER, BLACKWELL, BLACKWELL_ULTRA = "sm_90a", "sm_100f", "sm_103a"

# The compile-time choices of each kernel that runs everywhere, besides the head size.
_CHOICES: dict[Callable[..., None], tuple[str, ...]] = {
    quantize_rows: ("with_columns",),
    quantize_folded_rows: ("with_columns",),
    quantize_value_e4m3: ("with_rows",),
    quantize_value_mxfp4: ("ordered", "with_rows"),
    publish_output_gradient: (),
}

# How the forward makes probabilities: the code map, and how many leading keys give the row reference.
_PROBABILITIES: dict[str, tuple[Map | None, int]] = {
    "e4m3": (None, 0),
    "affine": (Map("affine"), 0),
    "square": (Map("square"), 0),
    "exponential": (Map("exponential"), 0),
    "affine_mixed_anchor32": (Map("affine", mixed=True), 32),
}


_BLACKWELL_PROBABILITIES = {
    **_PROBABILITIES,
    "affine_mixed_odd_anchor128": (Map("affine", mixed=True, odd_tiles=True), 128),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel for fixed values of its compile-time parameters.

    Attributes:
      name: Of the entry in the cubin.
      function: The kernel's body.
      constants: Its compile-time parameters, the last ones.
      threads: Of a block.
      targets: What it is compiled for.
      tensor_maps: Element type, box with the innermost dimension first, and swizzle of each tensor map.
      capped: Whether the threads of one block may take all registers of a multiprocessor, and no more.
    """

    name: str
    function: Callable[..., None]
    constants: dict[str, Any]
    threads: int
    targets: tuple[str, ...] = (HOPPER, BLACKWELL)
    tensor_maps: dict[str, str] = dataclasses.field(default_factory=dict)
    capped: bool = False


def variants(target: str) -> list[Variant]:
    """All kernels for a target."""
    return [variant for variant in _all() if target in variant.targets]


def _all() -> Iterator[Variant]:
    """Those for one target come last: the compiler numbers entries, and common ones shall have common numbers."""
    for head_size in HEAD_SIZES:
        for function, choices in _CHOICES.items():
            if function is quantize_folded_rows and head_size != FOLDED_HEAD_SIZE:
                continue
            for chosen in itertools.product((False, True), repeat=len(choices)):
                yield _variant(function, head_size, dict(zip(choices, chosen, strict=True)))
    for head_size in HEAD_SIZES:
        expansions = [_variant(expand_key, head_size, {"by_block": chosen}) for chosen in (False, True)]
        for expansion in (*expansions, _variant(expand_value, head_size, {})):
            yield dataclasses.replace(expansion, targets=(HOPPER,))
        for name in _PROBABILITIES:
            yield _hopper_forward(name, head_size)
        yield from _hopper_backward(head_size)
    for head_size in HEAD_SIZES:
        yield dataclasses.replace(_variant(order_key, head_size, {}), targets=(BLACKWELL,))
        for name in _BLACKWELL_PROBABILITIES:
            yield _blackwell_forward(name, head_size)
    for head_size, name in itertools.product(HEAD_SIZES, _BLACKWELL_PROBABILITIES):
        yield _blackwell_forward(name, head_size, BLACKWELL_ULTRA)


def _variant(function: Callable[..., None], head_size: int, choices: dict[str, bool]) -> Variant:
    suffix = "".join(f"_{name}" for name, chosen in choices.items() if chosen)
    name = f"{function.__name__}_h{head_size}{suffix}"
    return Variant(name, function, {"head_size": head_size, **choices}, threads=2 * head_size)


def _hopper_forward(probabilities: str, head_size: int) -> Variant:
    code_map, anchor_keys = _PROBABILITIES[probabilities]
    return Variant(
        f"forward_h{head_size}_{probabilities}",
        hopper_forward.forward,
        {"head_size": head_size, "code_map": code_map, "anchor_keys": anchor_keys},
        threads=hopper_forward.THREADS,
        targets=(HOPPER,),
        tensor_maps={"key_map": "tensor_map(f16, 64x128, 128B)", "value_map": f"tensor_map(u8, 128x{head_size}, 128B)"},
        capped=True,
    )


def _blackwell_forward(probabilities: str, head_size: int, target: str = BLACKWELL) -> Variant:
    code_map, anchor_keys = _BLACKWELL_PROBABILITIES[probabilities]
    row = head_size // 2
    value = f"tensor_map(u8, 128x{head_size}, 128B)" if code_map is None else f"tensor_map(u8, 64x{head_size}, 64B)"
    return Variant(
        f"blackwell_forward_h{head_size}_{probabilities}",
        blackwell_forward.forward,
        {
            "head_size": head_size,
            "code_map": code_map,
            "anchor_keys": anchor_keys,
            "maxima_from_loads": target == BLACKWELL_ULTRA,
        },
        threads=blackwell_forward.THREADS,
        targets=(target,),
        tensor_maps={
            "query_map": f"tensor_map(u8, {row}x128, {row}B)",
            "key_map": f"tensor_map(u8, {row}x128, {row}B)",
            "value_map": value,
        },
        capped=True,
    )


def _hopper_backward(head_size: int) -> Iterator[Variant]:
    yield dataclasses.replace(_variant(backward_prepare, head_size, {}), targets=(HOPPER,))
    finish = _variant(backward_finish_query, head_size, {})
    yield dataclasses.replace(finish, threads=128, targets=(HOPPER,))
    swizzle = f"{head_size}B"
    maps = {
        "query_map": "tensor_map(f16, 64x64, 128B)",
        "key_map": "tensor_map(f16, 64x128, 128B)",
        "value_map": f"tensor_map(u8, {head_size}x8x2x8, {swizzle})",
        "gradient_map": f"tensor_map(u8, {head_size}x8x2x4, {swizzle})",
        "query_columns_map": f"tensor_map(u8, 64x{head_size}, 64B)",
        "gradient_columns_map": f"tensor_map(u8, 64x{head_size}, 64B)",
        "key_columns_map": f"tensor_map(u8, 128x{head_size}, 128B)",
    }
    for suffix, with_query in (("", True), ("_ordered", False)):
        constants = {"head_size": head_size, "with_query": with_query}
        name = f"backward_h{head_size}{suffix}"
        threads = hopper_backward.THREADS
        yield Variant(name, hopper_backward.backward, constants, threads, (HOPPER,), maps, capped=True)
    maps = {
        "query_map": "tensor_map(f16, 64x128, 128B)",
        "gradient_map": f"tensor_map(u8, {head_size}x8x2x8, {swizzle})",
        "key_map": "tensor_map(f16, 64x64, 128B)",
        "value_map": f"tensor_map(u8, {head_size}x8x2x4, {swizzle})",
        "key_columns_map": f"tensor_map(u8, 64x{head_size}, 64B)",
    }
    function, threads = hopper_backward_query.backward_query, hopper_backward_query.THREADS
    name = f"backward_query_h{head_size}"
    yield Variant(name, function, {"head_size": head_size}, threads, (HOPPER,), maps, capped=True)
