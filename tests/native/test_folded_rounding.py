"""The arithmetic by which the folded kernel finds codes, emulated in numpy with reciprocals that are a little off.

The kernel's instruction is approximate, and differently so on each GPU.
"""

import ml_dtypes
import numpy as np
import pytest

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
HALF_STEP_UNIT = 2.0**22
JUST_ABOVE = 1.0 + 2.0**-18

SCALES = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
BFLOAT16 = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def emulate(value, step, ulps, factor=JUST_ABOVE):
    """The code's value, with a reciprocal that is off by so many units in the last place."""
    inverse = (np.float32(1) / step).view(np.uint32) + np.uint32(ulps % 2**32)
    inverse = inverse.view(np.float32)
    coarse = inverse * np.float32(HALF_STEP_UNIT * factor)
    rounder = np.maximum(value * coarse, np.float32(HALF_STEP_UNIT))
    # A fused multiply-add: products of floats are exact in float64, and so is this sum up to the rounding to float32.
    shifted = (value.astype(np.float64) * inverse + rounder).astype(np.float32)
    return np.minimum(shifted - rounder, np.float32(6))


def differences(step, ulps, **options):
    value = BFLOAT16[(step / 64 <= BFLOAT16) & (step * 64 >= BFLOAT16)]
    code = emulate(value, np.full_like(value, step), ulps, **options)
    nearest = np.abs(value[:, None] - VALUES * step).min(1)
    return np.abs(code * step - value), nearest


@pytest.mark.parametrize("ulps", [-8, -2, -1, 0, 1, 2, 8])
def test_every_value_gets_a_nearest_code(ulps):
    for step in SCALES:
        actual, nearest = differences(step, ulps)
        np.testing.assert_array_equal(actual, nearest)


def test_an_exact_binade_would_not_do():
    assert any((actual != nearest).any() for actual, nearest in (differences(s, -1, factor=1.0) for s in SCALES))
