"""The formats again, in NumPy: IEEE division, the casts of ml_dtypes and rational numbers.

Nothing here shares code with the package. Arrays are float32, codes are unpacked.
"""

from fractions import Fraction

import jax
import ml_dtypes
import numpy as np

E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
FOLD_MULTIPLIERS = (0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25)


def assert_same_floats(actual, expected):
    """Asserts equality of bits, so that -0 is not 0, except that all NaNs are equal."""
    actual, expected = np.asarray(actual), np.asarray(expected, np.float32)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def assert_same_bytes(actual, expected):
    """Asserts that two trees have equal structure and equal leaves."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def bfloat16(x):
    """Rounds to bfloat16 and returns float32."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def encode_e4m3(x):
    """E4M3 bytes of float32 values, saturated."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def decode_e4m3(codes):
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def encode_e2m1(x, ties="even"):
    """E2M1 codes of float32 values other than NaN, saturated."""
    if ties == "even":
        return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    magnitude = np.searchsorted(E2M1_MIDPOINTS, np.abs(x), side="left")
    return (magnitude + 8 * np.signbit(x)).astype(np.uint8)


def decode_e2m1(codes):
    return np.where(codes >= 8, -1, 1).astype(np.float32) * E2M1_GRID[codes & 7]


def unpack(packed):
    """Codes of packed bytes, low nibble first."""
    packed = np.asarray(packed)
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed % 16, packed // 16
    return codes


def sum_of_squares(x):
    """Float32 sum over the last axis: the halves are added element by element until one is left."""
    squares = x * x
    while squares.shape[-1] > 1:
        first, second = np.split(squares, 2, axis=-1)
        squares = first + second
    return squares[..., 0]


def sum_of_neighbours(x):
    """Float32 sum over the last axis by recursion: the sum of the first half of a row and that of the second."""
    if x.shape[-1] == 1:
        return x[..., 0]
    first, second = np.split(x, 2, axis=-1)
    return sum_of_neighbours(first) + sum_of_neighbours(second)


def nvfp4(x, *, tensor_scale=None, fold="none", ties="even"):
    """Codes [..., n] and E4M3 bytes [..., n / 16]."""
    x = np.asarray(x, np.float32)
    if tensor_scale is not None:
        x = x * (np.float32(1) / np.asarray(tensor_scale, np.float32))
    groups = x.reshape(*x.shape[:-1], -1, 16)
    scales = encode_e4m3(np.abs(groups).max(-1) / np.float32(6))
    if fold != "none":
        for row in np.ndindex(*x.shape[:-1]):
            for block in range(groups.shape[-2]):
                if block % 8 < 4:
                    pair = [block, block + 4]
                    scales[row][pair] = _folded_scale(groups[row][pair], fold, ties)
    codes = _scaled_codes(groups, decode_e4m3(scales)[..., None], ties)
    return codes.reshape(x.shape), scales


def _folded_scale(pair, fold, ties):
    base = np.abs(pair).max() / np.float32(6)
    if fold == "k64_max":
        return encode_e4m3(base)
    scales, errors = [], []
    for multiplier in FOLD_MULTIPLIERS:
        scales.append(encode_e4m3(base * np.float32(multiplier)))
        step = decode_e4m3(scales[-1])
        difference = decode_e2m1(_scaled_codes(pair, step, ties)) * step - pair
        errors.append(sum_of_squares(difference.reshape(-1)))
    return scales[int(np.argmin(errors))]  # the first of equals


def _scaled_codes(x, scale, ties):
    zero = np.broadcast_to(scale == 0, x.shape)
    codes = encode_e2m1(x / np.where(scale == 0, np.float32(1), scale), ties)
    return np.where(zero, 0, codes).astype(np.uint8)


def block_exponent(amax, rule):
    """Exponent of one positive normal number, by rational arithmetic."""
    value, exponent = Fraction(float(amax)), 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    if rule == "floor":
        up = False
    elif rule == "ceil":
        up = value > 1
    elif rule == "rte":
        even_byte = (exponent + 127) % 2 == 0
        up = value > Fraction(3, 2) or (value == Fraction(3, 2) and not even_byte)
    else:
        up = value >= Fraction(rule)
    return min(exponent + up, 127)


def mxfp4(x, *, rule="rte", rows_per_scale=1, convention="endpoint", ties="even"):
    """Codes [..., rows, n] and E8M0 bytes [..., rows, n / 32] of normal numbers and zeros."""
    x = np.asarray(x, np.float32)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((*x.shape[:-1], x.shape[-1] // 32))
    for batch in np.ndindex(*x.shape[:-2]):
        for row in range(0, x.shape[-2], rows_per_scale):
            for block in range(x.shape[-1] // 32):
                rows = slice(row, row + rows_per_scale)
                tile = (rows, slice(32 * block, 32 * block + 32))
                values = x[batch][tile]
                if not values.any():
                    continue
                exponent = _mxfp4_exponent(values, rule, convention, ties)
                codes[batch][tile] = encode_e2m1(_units(values, exponent, convention), ties)
                scales[batch][rows, block] = exponent + 127
    return codes, scales.astype(np.uint8)


def _units(values, exponent, convention):
    quotient = np.ldexp(values.astype(np.float64), -exponent)
    return (quotient * (6 if convention == "endpoint" else 1)).astype(np.float32)


def _mxfp4_exponent(values, rule, convention, ties):
    amax = np.abs(values).max()
    shift = 0 if convention == "endpoint" else 2
    if rule != "best_l2":
        return max(block_exponent(amax, rule) - shift, -126)
    floor = block_exponent(amax, "floor") - shift
    errors = {}
    for exponent in (floor + 1, floor, floor - 1):
        units = decode_e2m1(encode_e2m1(_units(values, exponent, convention), ties))
        scale = np.ldexp(1.0, exponent) / (6 if convention == "endpoint" else 1)
        errors[exponent] = np.sum((units * scale - values.astype(np.float64)) ** 2)
    return min(errors, key=lambda exponent: (errors[exponent], -exponent))
