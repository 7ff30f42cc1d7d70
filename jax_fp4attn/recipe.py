"""`Recipe`: the one place where a numerical choice of the operator has a name."""

import dataclasses
import math
from typing import Literal, get_args

from jax_fp4attn.code_map import MapSchedule
from jax_fp4attn.formats.nvfp4 import ScaleFold
from jax_fp4attn.formats.power_of_two import ExponentRule, check_exponent_rule

QKFormat = Literal["nvfp4", "bf16"]
PVFormat = Literal["mxfp4", "nvfp4", "e4m3", "bf16"]
TensorScale = Literal["unit", "amax"]
Ties = Literal["even", "toward_zero"]
RowReference = Literal["zero", "anchor", "online_max"]
AnchorOrder = Literal["leading", "strided"]
MarginUnit = Literal["bits", "raw_score"]
Denominator = Literal["represented", "unquantized", "sampled"]
Backward = Literal["fp8", "bf16"]
BackwardQK = Literal["source", "represented"]
OutputGradientScale = Literal["unit", "amax"]
DQAccumulation = Literal["float32", "float32_ordered", "bfloat16_per_tile"]

# A stored scale byte is lowered by the shift and the working score by the margin; both must fit in E8M0's range.
_MAX_MARGIN_PLUS_SHIFT = 126


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every numerical choice of the attention operator; hashable, so it can be a static argument.

    A score is ``raw = <dequantised query, dequantised key>`` in float32 and the base-2 log score is
    ``x = (raw - ref) * softmax_scale * log2(e)``, where ``ref`` is the row reference. docs/numerics.md has each rule.

    Attributes:
      name: For messages and tables; has no numerical meaning and does not enter comparisons.
      qk_format: ``"nvfp4"`` (E2M1, blocks of 16 channels, E4M3 scales) or ``"bf16"`` (control).
      qk_scale_fold: Sharing of scales between the two K64 halves of a row.
      qk_tensor_scale: ``"unit"``, or ``"amax"``: amax / (6 * 448) of each batch entry and head.
      qk_ties: Rounding of query and key codes at midpoints.
      row_reference: ``"zero"`` (shiftless), ``"anchor"`` (maximum over a few leading keys plus the margin) or
        ``"online_max"`` (running maximum, as FlashAttention).
      anchor_keys: How many keys an anchor looks at: 32 or 128, at most one key tile.
      anchor_order: ``"strided"`` moves evenly spread keys to the front, ``"leading"`` keeps the order.
      margin: Added to the anchor, in ``margin_unit``.
      margin_unit: ``"bits"`` (of the base-2 score) or ``"raw_score"`` (margin * ln 2 before the softmax scale, as the
        published code does).
      rescale_threshold_bits: How far the running maximum may grow before the output is rescaled (0: always).
      p_format: Format of the probabilities: ``"mxfp4"`` (Direct-P), ``"nvfp4"``, ``"e4m3"`` or ``"bf16"``.
      p_exponent_rule: Rounding of a P block's scale exponent from its largest log score: ``"ceil"`` or a threshold.
      p_scale_shift: L; stored P scales are lowered by 2**L so that sums over many blocks stay in range.
      p_tensor_scale: Decode factor of NVFP4 P (1, or 1 / 2688 in the two-level form).
      code_map: Map from log score to E2M1 code of MXFP4 P.
      denominator: ``"represented"`` sums the values that the PV product consumes, ``"unquantized"`` the exponentials
        before rounding, ``"sampled"`` eight times the exponentials of four of every 32 keys.
      v_format: Format of the values, along the keys.
      v_exponent_rule: Rounding of an MXFP4 V block's exponent.
      v_channels_per_scale: 1, or 32 for the 32 keys x 32 channels tiles of training.
      v_multiplier: Power of two applied before E4M3 V and undone in the epilogue.
      backward: ``"fp8"`` (E4M3 query, key, value, P and dS, E5M2 dO) or ``"bf16"``.
      backward_qk: E4M3 query and key from the ``"source"`` bfloat16 values or the ``"represented"`` NVFP4 values.
      backward_multiplier: Fixed power of two applied before the E4M3 and E5M2 operands of the backward.
      backward_lse_correction: Natural-log units added to the saved lse when P is rebuilt. Direct-P's denominator sums
        codes, whose mass differs from that of the exponentials by a nearly constant factor; without the correction the
        rebuilt P would not sum to one.
      backward_p_lift_bits: P is rebuilt as 2**lift * P, clamped at 2**lift, before E4M3.
      output_gradient_scale: ``"amax"`` multiplies dO by a power of two that brings its largest magnitude, for each
        batch entry and key/value head, into [1, 2) before quantisation (and undoes it); ``"unit"`` takes dO as it
        comes, which needs a loss scale.
      dq_accumulation: ``"float32"``, on a GPU in another order in every run; ``"float32_ordered"``, always in the same
        order; or ``"bfloat16_per_tile"``: rounded at every key tile, as reduce-adds do.

    Raises:
      ValueError: If fields do not go together; the message says why.

    Example:
      >>> import dataclasses
      >>> from jax_fp4attn import recipes
      >>> dataclasses.replace(recipes.fast, p_scale_shift=8).p_scale_shift
      8
    """

    name: str = dataclasses.field(default="custom", compare=False)
    qk_format: QKFormat = "nvfp4"
    qk_scale_fold: ScaleFold = "none"
    qk_tensor_scale: TensorScale = "unit"
    qk_ties: Ties = "even"
    row_reference: RowReference = "online_max"
    anchor_keys: int = 32
    anchor_order: AnchorOrder = "leading"
    margin: float = 0.0
    margin_unit: MarginUnit = "bits"
    rescale_threshold_bits: float = 0.0
    p_format: PVFormat = "bf16"
    p_exponent_rule: Literal["ceil"] | float = 1.5
    p_scale_shift: int = 0
    p_tensor_scale: float = 1.0
    code_map: MapSchedule | None = None
    denominator: Denominator = "unquantized"
    v_format: PVFormat = "bf16"
    v_exponent_rule: ExponentRule | Literal["best_l2"] = "rte"
    v_channels_per_scale: int = 1
    v_multiplier: float = 1.0
    backward: Backward = "fp8"
    backward_qk: BackwardQK = "source"
    backward_multiplier: float = 4.0
    backward_lse_correction: float = 0.0
    backward_p_lift_bits: int = 8
    output_gradient_scale: OutputGradientScale = "amax"
    dq_accumulation: DQAccumulation = "float32"

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_query_key()
        self._check_row_reference()
        self._check_probabilities()
        self._check_values()
        self._check_backward()

    def _require(self, condition: bool, field: str, expected: str) -> None:
        if not condition:
            raise ValueError(f"Recipe.{field}: expected {expected}, got {getattr(self, field)!r}")

    def _check_choices(self) -> None:
        for field, choices in _CHOICES.items():
            allowed = get_args(choices)
            self._require(getattr(self, field) in allowed, field, f"one of {allowed}")

    def _check_numbers(self) -> None:
        for field in _INTEGERS:
            self._require(type(getattr(self, field)) is int, field, "a Python int")
        for field, (least, most, reason) in _NUMBERS.items():
            x = getattr(self, field)
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            expected = f"a Python number from {least:g} to {most:g} ({reason})"
            self._require(is_number and least <= x <= most, field, expected)

    def _check_query_key(self) -> None:
        if self.qk_format == "bf16":
            reason = "with qk_format='bf16', which has no scales"
            self._require(self.qk_scale_fold == "none", "qk_scale_fold", f"'none' {reason}")
            self._require(self.qk_tensor_scale == "unit", "qk_tensor_scale", f"'unit' {reason}")

    def _check_row_reference(self) -> None:
        anchored, online = self.row_reference == "anchor", self.row_reference == "online_max"
        self._require(self.anchor_keys in (32, 128), "anchor_keys", "32 or 128 (at most one key tile)")
        if not anchored:
            self._require(self.margin == 0, "margin", "0 unless row_reference='anchor'")
            self._require(self.anchor_order == "leading", "anchor_order", "'leading' unless row_reference='anchor'")
        if anchored and self.margin_unit == "bits":
            self._require(
                self.margin == int(self.margin), "margin", "a whole number of bits (keeps the scale grid's phase)"
            )
            self._require(
                self.margin + self.p_scale_shift <= _MAX_MARGIN_PLUS_SHIFT,
                "margin",
                f"margin + p_scale_shift <= {_MAX_MARGIN_PLUS_SHIFT}, the range of the E8M0 byte "
                f"(p_scale_shift={self.p_scale_shift})",
            )
        threshold = self.rescale_threshold_bits
        if not online or self.p_format == "nvfp4":
            self._require(
                threshold == 0,
                "rescale_threshold_bits",
                "0 unless row_reference='online_max' with e4m3 or bf16 P",
            )

    def _check_probabilities(self) -> None:
        direct = self.p_format == "mxfp4"
        self._require(
            direct == (self.row_reference != "online_max"),
            "row_reference",
            "'zero' or 'anchor' with p_format='mxfp4' (Direct-P takes scales from the score and never rescales), "
            "'online_max' with every other p_format (their range needs P <= 2**8)",
        )
        self._require(
            isinstance(self.code_map, MapSchedule) if direct else self.code_map is None,
            "code_map",
            "a MapSchedule with p_format='mxfp4' and None otherwise",
        )
        if self.p_exponent_rule != "ceil":
            check_exponent_rule(self.p_exponent_rule, "Recipe.p_exponent_rule")
            self._require(isinstance(self.p_exponent_rule, float), "p_exponent_rule", "'ceil' or a float")
        if not direct:
            self._require(self.p_scale_shift == 0, "p_scale_shift", "0 unless p_format='mxfp4'")
            self._require(self.denominator != "sampled", "denominator", "'sampled' only with p_format='mxfp4'")
        if self.p_format != "nvfp4":
            self._require(self.p_tensor_scale == 1, "p_tensor_scale", "1 unless p_format='nvfp4'")

    def _check_values(self) -> None:
        if self.v_exponent_rule != "best_l2":
            check_exponent_rule(self.v_exponent_rule, "Recipe.v_exponent_rule")
        self._require(
            self.v_format == self.p_format,
            "v_format",
            f"p_format={self.p_format!r} (both are operands of one tensor-core instruction)",
        )
        self._require(self.v_channels_per_scale in (1, 32), "v_channels_per_scale", "1 or 32")
        if self.v_format != "mxfp4":
            self._require(self.v_channels_per_scale == 1, "v_channels_per_scale", "1 unless v_format='mxfp4'")
        self._require(_is_power_of_two(self.v_multiplier), "v_multiplier", "a power of two")
        if self.v_format != "e4m3":
            self._require(self.v_multiplier == 1, "v_multiplier", "1 unless v_format='e4m3'")

    def _check_backward(self) -> None:
        self._require(_is_power_of_two(self.backward_multiplier), "backward_multiplier", "a power of two")


_INTEGERS = ("anchor_keys", "p_scale_shift", "v_channels_per_scale", "backward_p_lift_bits")
_INSIDE_FLOAT32 = "its products stay inside float32"
_NUMBERS = {
    "margin": (0, 2**16, _INSIDE_FLOAT32),
    "rescale_threshold_bits": (0, 8, "2**8 * P must fit in E4M3"),
    "p_scale_shift": (0, _MAX_MARGIN_PLUS_SHIFT, "the range of the E8M0 byte"),
    "p_tensor_scale": (2.0**-16, 2.0**16, _INSIDE_FLOAT32),
    "v_multiplier": (2.0**-16, 2.0**16, _INSIDE_FLOAT32),
    "backward_multiplier": (2.0**-12, 2.0**12, _INSIDE_FLOAT32),
    "backward_lse_correction": (-16, 16, "beyond it the rebuilt P vanishes or saturates"),
    "backward_p_lift_bits": (0, 8, "2**8 is the largest power of two in E4M3"),
}
_CHOICES = {
    "qk_format": QKFormat,
    "qk_scale_fold": ScaleFold,
    "qk_tensor_scale": TensorScale,
    "qk_ties": Ties,
    "row_reference": RowReference,
    "anchor_order": AnchorOrder,
    "margin_unit": MarginUnit,
    "p_format": PVFormat,
    "denominator": Denominator,
    "v_format": PVFormat,
    "backward": Backward,
    "backward_qk": BackwardQK,
    "output_gradient_scale": OutputGradientScale,
    "dq_accumulation": DQAccumulation,
}


def _is_power_of_two(x: float) -> bool:
    return x > 0 and math.isfinite(x) and math.frexp(x)[0] == 0.5
