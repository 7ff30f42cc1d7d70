"""Sums as Hopper's tensor cores form them, in integers, by the rules of cuda/emulator/tensor_core/adders.py."""

import numpy as np

# Bits of the exponent and of the fraction.
_FORMATS = {"bf16": (8, 7), "f16": (5, 10), "tf32": (8, 10), "e4m3": (4, 3), "e5m2": (5, 2), "f32": (8, 23)}
_NARROW = ("e4m3", "e5m2")
_LARGEST_SHIFT = 62


def _fields(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Signed significands, as integers with the fraction's bits, and exponents, of finite values of a format."""
    exponent_bits, fraction_bits = _FORMATS[kind]
    exponents = np.maximum(np.frexp(values)[1] - 1, 2 - (1 << exponent_bits - 1))
    significands = np.ldexp(values, fraction_bits - exponents)
    assert (significands == np.rint(significands)).all(), f"not all of {kind}"
    return significands.astype(np.int64), exponents


def truncated_sums(a: np.ndarray, b: np.ndarray, start: np.ndarray, kinds: tuple[str, str, str]) -> np.ndarray:
    """All products of rows and what is added to them; every step in integers.

    Args:
      a: float64, [m, k].
      b: float64, [n, k].
      start: Accumulators, float64, [m, n].
      kinds: Formats of a, b and the accumulators.
    """
    (a, a_exponents), (b, b_exponents), (start, exponents) = map(_fields, (a, b, start), kinds)
    bits = 13 if kinds[0] in _NARROW else 25
    terms = np.concatenate([a[:, None] * b, start[:, :, None]], -1)
    exponents = np.concatenate([a_exponents[:, None] + b_exponents, exponents[:, :, None]], -1)
    fractions = np.full(terms.shape[-1], _FORMATS[kinds[0]][1] + _FORMATS[kinds[1]][1])
    fractions[-1] = _FORMATS[kinds[2]][1]
    largest = np.where(terms != 0, exponents, exponents.min()).max(-1, keepdims=True)
    total = _shifted(terms, exponents - largest + bits - fractions).sum(-1)
    unit = largest[:, :, 0] - bits
    if kinds[2] == "f16":
        return np.ldexp(total.astype(np.float64), unit).astype(np.float16)
    leading = np.frexp(total.astype(np.float64))[1] - 1
    lost = np.maximum(0, np.maximum(leading, -126 - unit) - (13 if bits == 13 else 23))
    return np.ldexp(_shifted(_shifted(total, -lost), lost).astype(np.float64), unit).astype(np.float32)


def chain_of_sums(a: np.ndarray, b: np.ndarray, a_kind: str, b_kind: str) -> np.ndarray:
    """``a b^T`` of instructions that add 32 bytes of K each, one after the other, to float32 accumulators.

    Args:
      a: float64, [m, k].
      b: float64, [n, k].
      a_kind: Format.
      b_kind: Format.
    """
    step = 32 if a_kind in _NARROW else 8 if a_kind == "tf32" else 16
    sums = np.zeros((len(a), len(b)))
    for first in range(0, a.shape[1], step):
        terms = (x[:, first : first + step] for x in (a, b))
        sums = truncated_sums(*terms, sums, (a_kind, b_kind, "f32"))
    return sums


def _shifted(x: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Times 2**left, truncated towards zero."""
    bits = np.clip(left, 0, _LARGEST_SHIFT), np.clip(-left, 0, _LARGEST_SHIFT)
    return np.sign(x) * (np.abs(x) << bits[0] >> bits[1])
