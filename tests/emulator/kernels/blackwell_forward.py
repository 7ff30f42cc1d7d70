"""The library's forward for Blackwell on the emulator, launched as cuda/ffi/forward_blackwell.cc launches it."""

import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from cuda.emulator import Output
from tests.emulator.kernels.forward import (
    TILE,
    Attention,
    Launch,
    Library,
    Problem,
    common_values,
    order_of,
    probabilities,
)

LIBRARY = Library("sm_100f")
IMAGES = (LIBRARY, Library("sm_103a"))
"""What compute capabilities 10.0 and 10.3 take the attention kernels from; others are in the first one alone."""
_ITEM_ROWS = 2 * TILE


def available() -> bool:
    """Whether the kernels have been built."""
    return all(library.has("blackwell_forward_h64_square") for library in IMAGES)


def ordered_key(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale pages of the key in the order of the slots."""
    codes, pages = np.asarray(problem.operands.key.codes), np.asarray(problem.operands.key.scales)
    order = order_of(problem)
    if order is None:
        return codes, pages
    B, K, slots, H = problem.operands.key.shape
    values = {
        "codes": codes,
        "pages": pages,
        "order": order,
        "ordered_codes": Output(np.zeros_like(codes)),
        "ordered_pages": Output(np.zeros_like(pages)),
        "num_keys": problem.num_keys,
        "num_heads": K,
    }
    (arrays,), findings = LIBRARY.run(f"order_key_h{H}", (K, slots // TILE, B), values)
    assert not findings, list(findings)[:3]
    return arrays["ordered_codes"], arrays["ordered_pages"]


def name_of(problem: Problem) -> str:
    """Of the attention kernel."""
    return f"blackwell_forward_h{problem.operands.query.shape[3]}_{probabilities(problem.recipe)}"


def items_of(problem: Problem) -> int:
    """How many there are."""
    B, N, T, _ = problem.operands.query.shape
    return B * N * math.ceil(T / _ITEM_ROWS)


def values_of(problem: Problem, key_codes: Any, key_pages: Any) -> dict[str, Any]:
    """The attention kernel's arguments by name.

    Args:
      problem: What to compute.
      key_codes: Codes of the key in the order of the slots.
      key_pages: Its scale pages.
    """
    B, N, T, H = problem.operands.query.shape
    K = problem.operands.key.shape[1]
    query, value = problem.operands.query, problem.operands.value
    is_mxfp4 = problem.recipe.v_format == "mxfp4"
    return {
        "query_map": np.asarray(query.codes).reshape(B * N * T, -1),
        "query_pages": np.asarray(query.scales),
        "key_map": np.asarray(key_codes).reshape(-1, H // 2),
        "key_pages": np.asarray(key_pages),
        "value_map": np.asarray(value.codes if is_mxfp4 else value).reshape(B * K * H, -1),
        "value_pages": np.asarray(value.scales) if is_mxfp4 else None,
        **common_values(problem, items_of(problem)),
    }


def attention_launch(problem: Problem, blocks: int = 2, library: Library = LIBRARY) -> Launch:
    """The attention kernel, with the key in the order of the slots; see :func:`attend`."""
    values = values_of(problem, *ordered_key(problem))
    return Launch(library, name_of(problem), (min(items_of(problem), blocks), 1, 1), values)


def attend(
    problem: Problem, seeds: Iterable[int] = (0,), blocks: int = 2, library: Library = LIBRARY, **options: Any
) -> list[Attention]:
    """Runs the attention kernel, in which nothing may be found.

    Args:
      problem: What to compute.
      seeds: Of the schedules.
      blocks: Thread blocks at most.
      library: That has the attention kernel.
      **options: Of the emulator.

    Returns:
      The result of each schedule.
    """
    launch = attention_launch(problem, blocks, library)
    runs, findings = library.run(launch.kernel, launch.grid, launch.values, seeds=seeds, **options)
    assert_nothing_found(findings)
    return [Attention(x["output"].view(ml_dtypes.bfloat16).astype(np.float32).swapaxes(1, 2), x["lse"]) for x in runs]


def assert_nothing_found(findings: Iterable[Any]) -> None:
    """But that each lane quadrant has scale factors of P of its own, which docs/blackwell_questions.md asks about."""
    others = [x for x in findings if not (x.kind == "assumption" and "scale factors of A" in x.text)]
    assert not others, others[:3]
