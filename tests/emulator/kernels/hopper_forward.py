"""The library's forward for Hopper on the emulator, launched as cuda/ffi/forward_hopper.cc launches it."""

import math
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from cuda.emulator import Output
from jax_fp4attn.reference.tiles import padded_keys
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

LIBRARY = Library("sm_90a")


def available() -> bool:
    """Whether the kernels have been built."""
    return LIBRARY.has("expand_key_h64")


def expanded_key(problem: Problem) -> np.ndarray:
    """Key as float16 [B, K, S', H], in the order of the kernel, see :func:`rows_of_keys`."""
    B, K, slots, H = problem.operands.key.shape
    values = {
        "codes": np.asarray(problem.operands.key.codes),
        "pages": np.asarray(problem.operands.key.scales),
        "order": order_of(problem),
        "values": Output(np.zeros((B * K * slots, H), np.float16)),
        "counter": Output(np.full(1, 7, np.int32)),
        "num_keys": problem.num_keys,
        "num_heads": K,
    }
    order = "_by_block" if is_by_block(problem) else ""
    (arrays,) = Launch(LIBRARY, f"expand_key_h{H}{order}", (K, slots // TILE, B), values).run()
    assert arrays["counter"] == 0
    return arrays["values"].reshape(B, K, slots, H)


def expanded_value(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 value as E5M2 bytes [B, K, H, S'], and the exponent of each tile, [B, K, S' / 128].

    Key k is at place ``places_of_keys(S)[k]``.
    """
    B, K, H, slots = problem.operands.value.shape
    values = {
        "codes": np.asarray(problem.operands.value.codes),
        "pages": np.asarray(problem.operands.value.scales),
        "values": Output(np.zeros((B * K * H, slots), np.uint8)),
        "exponents": Output(np.zeros((B, K, slots // TILE), np.int32)),
        "num_keys": problem.num_keys,
        "num_heads": K,
    }
    (arrays,) = Launch(LIBRARY, f"expand_value_h{H}", (K, slots // TILE, B), values).run()
    return arrays["values"].reshape(B, K, H, slots), arrays["exponents"]


def attend(
    problem: Problem, seeds: Iterable[int] = (0,), blocks: int | None = 2, section: int | None = None
) -> list[Attention]:
    """Expands key and value and runs the attention kernel.

    Args:
      problem: What to compute.
      seeds: Of the schedules.
      blocks: Thread blocks at most; None for one for each item, without a counter.
      section: Heads that are sorted together, of those of all batches; None for one head or all.

    Returns:
      The result of each schedule.
    """
    return [
        Attention(x["output"].view(ml_dtypes.bfloat16).astype(np.float32).swapaxes(1, 2), x["lse"])
        for x in attention_launch(problem, blocks, section).run(seeds)
    ]


def attention_launch(problem: Problem, blocks: int | None = 2, section: int | None = None) -> Launch:
    """The attention kernel, with key and value expanded; see :func:`attend`."""
    B, N, T, H = problem.operands.query.shape
    K = problem.operands.key.shape[1]
    kernel = f"forward_h{H}_{probabilities(problem.recipe)}"
    # All warpgroups but one have 64 rows each.
    rows_an_item = LIBRARY.kernels[kernel].threads // 2 - 64
    items = B * N * math.ceil(T / rows_an_item)
    if problem.recipe.v_format == "mxfp4":
        value, exponents = expanded_value(problem)
    else:
        value, exponents = np.asarray(problem.operands.value), None
    values = {
        "query_codes": np.asarray(problem.operands.query.codes),
        "query_pages": np.asarray(problem.operands.query.scales),
        "key_map": expanded_key(problem).reshape(-1, H),
        "value_map": value.reshape(B * K * H, -1),
        "value_exponents": exponents,
        "counter": None if blocks is None else np.zeros(1, np.int32),
        **common_values(problem, items),
    }
    if section is not None:
        values["section"] = section
    return Launch(LIBRARY, kernel, (items if blocks is None else min(items, blocks), 1, 1), values)


def is_by_block(problem: Problem) -> bool:
    """Whether keys are in the order by block."""
    return problem.recipe.p_format == "mxfp4"


def rows_of_keys(num_keys: int, *, by_block: bool = False) -> np.ndarray:
    """The row of the expanded key that holds each slot.

    By block, row 8 i + 2 t + e of a tile has slot 32 t + 2 i + e; otherwise of each 16, row 8 h + 2 t + e has slot
    4 t + 2 e + h.
    """
    slot = np.arange(padded_keys(num_keys))
    if by_block:
        return slot // 128 * 128 + slot % 32 // 2 * 8 + slot % 128 // 32 * 2 + slot % 2
    return slot // 16 * 16 + slot % 2 * 8 + slot % 16 // 4 * 2 + slot % 4 // 2


def places_of_keys(num_keys: int) -> np.ndarray:
    """The place of each slot in the expanded value: of a tile, 16 w + 4 t + j has slot 32 t + 4 w + j."""
    slot = np.arange(padded_keys(num_keys))
    return slot // 128 * 128 + slot % 32 // 4 * 16 + slot % 128 // 32 * 4 + slot % 4
