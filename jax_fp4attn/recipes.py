"""Named recipes. `train` is the default of causal attention and `square` of non-causal attention."""

import dataclasses

from jax_fp4attn.code_map import (
    Affine,
    Cubic,
    Exponential,
    MaxAffine,
    SignedSquare,
    uniform,
    with_exponential,
)
from jax_fp4attn.recipe import Recipe

__all__ = [
    "accurate",
    "accurate_raw_margin",
    "balanced_raw_margin",
    "bf16",
    "causal_mxfp4",
    "causal_mxfp4_raw_margin",
    "exact_map",
    "fast",
    "fast_video",
    "fp8_pv",
    "guarded",
    "guarded_raw_margin",
    "named",
    "nvfp4_pv",
    "nvfp4_pv_two_level",
    "sampled_denominator",
    "square",
    "square_rte_v",
    "train",
    "train_unit_gradient_scale",
    "two_piece",
]

fast = Recipe(
    name="fast",
    qk_scale_fold="k64_mse",
    qk_ties="toward_zero",
    row_reference="zero",
    p_format="mxfp4",
    p_scale_shift=16,
    code_map=uniform(Affine(1.5, 1.2)),
    denominator="represented",
    v_format="mxfp4",
    backward_lse_correction=0.065,
)
"""Direct-P's quickest policy: shiftless, folded scales, one affine map (1.5, 1.2)."""

fast_video = dataclasses.replace(
    fast,
    name="fast_video",
    code_map=uniform(Affine(1.60, 0.95)),
    backward_lse_correction=0.154,
)
"""`fast` with the map that the published video models use (1.60, .95)."""

exact_map = dataclasses.replace(fast, name="exact_map", code_map=uniform(Exponential()), backward_lse_correction=0.035)
"""`fast` with the exponential itself."""

square_rte_v = dataclasses.replace(
    fast,
    name="square_rte_v",
    code_map=uniform(SignedSquare(0.64, 0.39, 0.68)),
    backward_lse_correction=0.201,
)
"""`fast` with the signed-square map, and V scales rounded to nearest even as published."""

square = dataclasses.replace(square_rte_v, name="square", v_exponent_rule=1.203125)
"""The default of non-causal attention: signed-square map, V scales by the least-squared-error threshold."""

two_piece = dataclasses.replace(
    fast,
    name="two_piece",
    code_map=uniform(MaxAffine(((0.453, 0.953), (2.272, -0.965)))),
    backward_lse_correction=0.198,
)
"""`fast` with the maximum of two affine pieces."""

accurate = Recipe(
    name="accurate",
    row_reference="anchor",
    anchor_keys=32,
    anchor_order="strided",
    margin=64,
    p_format="mxfp4",
    p_scale_shift=8,
    code_map=with_exponential(Affine(1.65, 0.8), (1, 1, 1, 1)),
    denominator="represented",
    v_format="mxfp4",
    backward_lse_correction=0.166,
)
"""Direct-P's accurate policy: anchored on 32 spread keys, a quarter of the exponentials exact; margin in bits."""

accurate_raw_margin = dataclasses.replace(accurate, name="accurate_raw_margin", margin_unit="raw_score")
"""`accurate` with the published margin, 64 ln 2 in raw-score units (5.66 bits at head size 128)."""

balanced_raw_margin = dataclasses.replace(
    accurate_raw_margin,
    name="balanced_raw_margin",
    qk_scale_fold="k64_mse",
    qk_ties="toward_zero",
    code_map=uniform(Affine(1.65, 0.8)),
    backward_lse_correction=0.208,
)
"""The retired published policy between `fast` and `accurate`: anchored, all affine."""

sampled_denominator = dataclasses.replace(
    fast,
    name="sampled_denominator",
    qk_scale_fold="none",
    qk_ties="even",
    p_scale_shift=0,
    code_map=with_exponential(Affine(1.62330034, 0.92083546), (1, 1, 1, 1)),
    denominator="sampled",
    backward_lse_correction=0.0,
)
"""The NVFP4-QK / MXFP4-PV entry of the published format matrix: denominator from four of every 32 keys."""

nvfp4_pv = Recipe(name="nvfp4_pv", p_format="nvfp4", v_format="nvfp4")
"""Stable NVFP4 Q/K and P/V: running maximum, P blocks of 16 keys, denominator of unrounded exponentials."""

nvfp4_pv_two_level = dataclasses.replace(nvfp4_pv, name="nvfp4_pv_two_level", p_tensor_scale=1 / 2688)
"""`nvfp4_pv` with the constant 1 / (6 * 448) folded into P's scales, which then use all of E4M3."""

fp8_pv = Recipe(name="fp8_pv", p_format="e4m3", v_format="e4m3")
"""NVFP4 Q/K with E4M3 P/V, unscaled."""

train = Recipe(
    name="train",
    rescale_threshold_bits=8.0,
    p_format="e4m3",
    v_format="e4m3",
    v_multiplier=4.0,
)
"""The default of causal attention and the training recipe: NVFP4 Q/K, E4M3 P/V, FP8 backward."""

train_unit_gradient_scale = dataclasses.replace(
    train,
    name="train_unit_gradient_scale",
    output_gradient_scale="unit",
    dq_accumulation="bfloat16_per_tile",
)
"""`train` exactly as published: dO as it comes (needs a loss scale) and dQ summed in bfloat16."""

causal_mxfp4 = Recipe(
    name="causal_mxfp4",
    row_reference="anchor",
    anchor_keys=32,
    margin=64,
    p_format="mxfp4",
    p_exponent_rule="ceil",
    p_scale_shift=32,
    code_map=with_exponential(
        (Affine(1.5, 1.2),) + (Cubic(0.07430709, 0.28611863, 0.64670005, 0.99010784),) * 3,
        (3, 3, 0, 0),
    ),
    denominator="represented",
    v_format="mxfp4",
    backward_lse_correction=0.037,
)
"""The safe causal MXFP4 P/V route. Training with it diverges: a diagnostic, not a training recipe."""

causal_mxfp4_raw_margin = dataclasses.replace(causal_mxfp4, name="causal_mxfp4_raw_margin", margin_unit="raw_score")
"""`causal_mxfp4` with the published margin in raw-score units."""

bf16 = Recipe(name="bf16", qk_format="bf16", p_format="bf16", v_format="bf16", backward="bf16")
"""Control: bfloat16 operands, float32 softmax and accumulation."""


def guarded(margin_bits: int, shift_bits: int) -> Recipe:
    """Direct-P with a sampled guard, for activations too large for the shiftless form.

    The reference is the row's maximum over 128 spread keys plus the margin. Scores may exceed it by 127 bits; scores
    more than ``126 - margin_bits - shift_bits`` bits below the sampled maximum vanish, so keep that above 20 or so.

    Args:
      margin_bits: Bits added to the maximum over 128 spread keys.
      shift_bits: L, the lowering of stored P scales, in bits.

    Returns:
      The recipe.

    Raises:
      ValueError: If ``margin_bits + shift_bits`` exceeds 126.

    Example:
      >>> guarded(10, 16).anchor_keys
      128
    """
    return Recipe(
        name=f"guarded({margin_bits}, {shift_bits})",
        qk_scale_fold="k64_mse",
        qk_ties="toward_zero",
        row_reference="anchor",
        anchor_keys=128,
        anchor_order="strided",
        margin=margin_bits,
        p_format="mxfp4",
        p_scale_shift=shift_bits,
        code_map=with_exponential(Affine(1.65, 0.8), (1, 1, 1, 1), query_tiles=(False, True)),
        denominator="represented",
        v_format="mxfp4",
        backward_lse_correction=0.185,
    )


def guarded_raw_margin(margin: int, shift_bits: int) -> Recipe:
    """`guarded` with the published margin, ``margin * ln 2`` in raw-score units.

    Args:
      margin: Margin M of the paper.
      shift_bits: L, the lowering of stored P scales, in bits.

    Returns:
      The recipe.

    Example:
      >>> guarded_raw_margin(10, 16).margin_unit
      'raw_score'
    """
    return dataclasses.replace(
        guarded(margin, shift_bits),
        name=f"guarded_raw_margin({margin}, {shift_bits})",
        margin_unit="raw_score",
    )


def named() -> dict[str, Recipe]:
    """All recipes without parameters, by name.

    Returns:
      A new dictionary.

    Example:
      >>> sorted(named())[0]
      'accurate'
    """
    return {value.name: value for value in globals().values() if isinstance(value, Recipe)}
