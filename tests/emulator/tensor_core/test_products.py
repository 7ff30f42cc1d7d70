"""Sums of products and their rounding."""

import numpy as np

from cuda.emulator.tensor_core.products import multiply, to_accumulator


def test_one_rounding_to_float32() -> None:
    # Rounding the product to float32 before the addition would give 1 + 2**-23.
    product = np.array([[1.0 + 2.0**-24]])
    words = to_accumulator(product, np.array([[2.0**-30]], np.float32).view(np.uint32), "f32")
    assert words.view(np.float32)[0, 0] == np.float32(1.0 + 2.0**-23)
    assert to_accumulator(np.array([[1.0 + 2.0**-24]]), None, "f32").view(np.float32)[0, 0] == 1.0


def test_negative_products_and_scaled_accumulators() -> None:
    a, b = np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [5.0, 6.0]])
    product = multiply(a, b, negative=True)
    assert product.tolist() == [[-11.0], [-17.0]]
    old = np.array([[8.0], [16.0]], np.float32).view(np.uint32)
    assert to_accumulator(product, old, "f32", scale=0.25).view(np.float32).tolist() == [[-9.0], [-13.0]]


def test_float16_accumulators_use_the_low_half() -> None:
    old = np.array([[0xABCD3C00]], np.uint32)
    assert to_accumulator(np.array([[2.0]]), old, "f16")[0, 0] == np.float16(3.0).view(np.uint16)


def test_integers_wrap_around_or_saturate() -> None:
    old = np.array([[2**31 - 1]], np.int32).view(np.uint32)
    assert to_accumulator(np.array([[5.0]]), old, "s32").view(np.int32)[0, 0] == -(2**31) + 4
    assert to_accumulator(np.array([[5.0]]), old, "s32", saturate=True).view(np.int32)[0, 0] == 2**31 - 1


def test_infinities_and_nan() -> None:
    product = multiply(np.array([[np.inf, 0.0]]), np.array([[1.0, 1.0], [0.0, 1.0]]))
    assert product[0, 0] == np.inf
    assert np.isnan(product[1, 0])
