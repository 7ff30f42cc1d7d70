"""Published figures (Direct-P, R. Hu, 2026; its GB200 and B300 tables) and the requirements on ours."""

import dataclasses

from benchmarks.accuracy.figures import AtLeast, AtMost, Requirement, Within
from benchmarks.accuracy.metrics import Accuracy, mean

SOURCE = "Direct-P, R. Hu, 2026"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of a published row, head size 128."""

    batch: int
    length: int
    heads: int


_GRID_SHAPES = (
    Shape(1, 256, 16),
    Shape(1, 1024, 16),
    Shape(1, 4096, 12),
    Shape(1, 4096, 24),
    Shape(4, 4096, 16),
    Shape(4, 4096, 32),
    Shape(1, 32768, 12),
    Shape(1, 32768, 16),
    Shape(1, 32768, 24),
)


def _on_grid(*rows: tuple[float, float]) -> dict[Shape, Accuracy]:
    return {shape: Accuracy(*row) for shape, row in zip(_GRID_SHAPES, rows, strict=True)}


_ACCURATE = _on_grid(
    (0.952746, 0.324222),
    (0.951898, 0.326822),
    (0.951458, 0.328657),
    (0.951883, 0.326615),
    (0.951389, 0.327867),
    (0.951434, 0.327651),
    (0.951799, 0.326234),
    (0.950849, 0.329451),
    (0.951562, 0.327510),
)

# GB200 grid and controls, non-causal, against attention on the bfloat16 inputs.
GRID: dict[str, dict[Shape, Accuracy]] = {
    "fast": _on_grid(
        (0.944477, 0.336733),
        (0.944104, 0.335687),
        (0.943412, 0.337556),
        (0.943973, 0.335775),
        (0.943563, 0.336995),
        (0.943642, 0.336704),
        (0.944271, 0.334849),
        (0.942894, 0.338727),
        (0.943768, 0.336388),
    ),
    "accurate": _ACCURATE,
    "accurate_raw_margin": _ACCURATE,
    "nvfp4_pv": _on_grid(
        (0.982173, 0.188921),
        (0.982043, 0.189558),
        (0.981599, 0.192130),
        (0.981894, 0.190474),
        (0.981750, 0.191099),
        (0.981796, 0.190958),
        (0.981836, 0.190560),
        (0.981547, 0.192216),
        (0.981720, 0.191287),
    ),
    "fp8_pv": {
        Shape(1, 256, 16): Accuracy(0.990301, 0.139279),
        Shape(1, 1024, 24): Accuracy(0.989974, 0.141526),
        Shape(1, 2048, 24): Accuracy(0.989787, 0.142844),
        Shape(1, 4096, 24): Accuracy(0.989914, 0.141943),
        Shape(1, 4096, 64): Accuracy(0.989848, 0.142410),
        Shape(1, 8192, 64): Accuracy(0.989804, 0.142733),
    },
}

# Headline means over shapes.
GRID_MEANS: dict[str, Accuracy] = {
    "fast": Accuracy(0.943789, 0.336602),
    "accurate": Accuracy(0.951669, 0.327225),
    "accurate_raw_margin": Accuracy(0.951669, 0.327225),
    "nvfp4_pv": Accuracy(0.981818, 0.190800),
    "fp8_pv": Accuracy(0.9899, 0.1421),
}

_COSINE_TOLERANCE, _REL_L2_TOLERANCE = 0.0015, 0.005


def _near(cosine: float, rel_l2: float) -> tuple[Requirement, Requirement]:
    return Within(cosine, _COSINE_TOLERANCE), Within(rel_l2, _REL_L2_TOLERANCE)


REQUIRED_MEANS: dict[str, tuple[Requirement, Requirement]] = {
    "fast": _near(0.9438, 0.3366),
    "accurate": _near(0.9517, 0.3272),
    "accurate_raw_margin": _near(0.9517, 0.3272),
    "nvfp4_pv": _near(0.9818, 0.1908),
    "fp8_pv": _near(0.9900, 0.1415),
    "square": (AtLeast(0.9725), AtMost(0.234)),
    "square_rte_v": (AtLeast(0.9705), AtMost(0.240)),
}


def grid_mean(recipe: str, length: int) -> Accuracy | None:
    """Mean of a recipe's published rows of one length, or None where nothing was published."""
    rows = [accuracy for shape, accuracy in GRID.get(recipe, {}).items() if shape.length == length]
    return mean(rows) if rows else None


@dataclasses.dataclass(frozen=True)
class PRange:
    """A row of the published diagnostic of P's range.

    Attributes:
      zero_scales: Fraction of blocks whose scale is zero.
      zero_payloads: Fraction of probabilities that become zero.
      lost_mass: Share of the probability mass that becomes zero.
      p_rel_l2: Relative L2 error of the renormalised P.
      pv_cosine: Cosine of P V.
      pv_rel_l2: Relative L2 error of P V.
    """

    zero_scales: float
    zero_payloads: float
    lost_mass: float
    p_rel_l2: float
    pv_cosine: float
    pv_rel_l2: float


P_RANGE: dict[tuple[str, int], PRange] = {
    ("NV G=1", 1024): PRange(0.706299, 0.831829, 0.683773, 1.715156, 0.700819, 1.685442),
    ("NV G=1", 4096): PRange(0.996063, 0.999438, 0.994332, 13.815642, 0.217328, 13.876892),
    ("NV G=1", 8192): PRange(0.999634, 0.999977, 0.999284, 12.467307, 0.096774, 12.389232),
    ("NV G=448", 1024): PRange(0.0, 0.155418, 0.029314, 0.114408, 0.993854, 0.113687),
    ("NV G=448", 4096): PRange(0.0, 0.156454, 0.029760, 0.114091, 0.993747, 0.114582),
    ("NV G=448", 8192): PRange(0.0, 0.160613, 0.030691, 0.114725, 0.993841, 0.113660),
    ("MX", 1024): PRange(0.0, 0.188683, 0.040178, 0.146380, 0.989846, 0.144944),
    ("MX", 4096): PRange(0.0, 0.189755, 0.040494, 0.147209, 0.989338, 0.148716),
    ("MX", 8192): PRange(0.0, 0.194189, 0.041630, 0.147318, 0.989660, 0.146237),
}

# Format matrix, NVFP4 Q/K with MXFP4 P/V; two rows were published at 4096.
FORMAT_MATRIX: dict[int, Accuracy] = {
    256: Accuracy(0.929613, 0.373055),
    1024: Accuracy(0.946337, 0.323387),
    2048: Accuracy(0.948649, 0.317135),
    4096: mean([Accuracy(0.950622, 0.311853), Accuracy(0.950186, 0.313010)]),
    8192: Accuracy(0.950828, 0.311299),
}

# B300: `fast` with a growing share of exact exponentials, S4096, 24 heads.
DENSITY_SWEEP: dict[int, Accuracy] = {
    0: Accuracy(0.943964, 0.335825),
    1: Accuracy(0.947037, 0.325258),
    2: Accuracy(0.950069, 0.314812),
    4: Accuracy(0.956047, 0.294037),
}

# Isolated causal forwards, B2, S4096, 32 query and 8 key/value heads, against attention on represented inputs.
CAUSAL: dict[str, Accuracy] = {
    "train": Accuracy(0.999453, 0.033072),
    "causal_mxfp4": Accuracy(0.991812, 0.127745),
    "causal_mxfp4_raw_margin": Accuracy(0.991812, 0.127745),
}

REQUIRED_CAUSAL: dict[str, tuple[Requirement, Requirement]] = {"train": (AtLeast(0.999), AtMost(0.04))}


@dataclasses.dataclass(frozen=True)
class Gradients:
    """A number for each gradient."""

    query: float
    key: float
    value: float


# rel-L2 of the FP8 backward against an exact backward on its own operands, by layer of a language model.
BACKWARD: dict[int, Gradients] = {
    10: Gradients(0.06759, 0.02898, 0.01522),
    12: Gradients(0.048359, 0.030575, 0.017404),
    22: Gradients(0.07741, 0.02626, 0.03991),
}

REQUIRED_BACKWARD = Gradients(0.07, 0.04, 0.04)
REQUIRED_BACKWARD_COSINE = 0.95  # against the gradients without any quantisation

# How well a recipe's `backward_lse_correction` must cancel the bias of its lse.
LSE_TOLERANCE = 0.005
