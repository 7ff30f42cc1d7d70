"""What it means that the reference agrees with an oracle."""

from typing import Any

import numpy as np

from jax_fp4attn import Recipe
from tests import oracles, shapes
from tests.assertions import assert_close, relative_l2


def assert_forward_agrees(actual: oracles.Forward | shapes.Result, expected: oracles.Forward) -> None:
    """Asserts equality of output and lse up to codes that float32 arithmetic moves across a rounding boundary.

    A wrong rule moves every row. A score in float32 instead of float64 moves about one code in a hundred thousand,
    which changes one row's output by at most a few per cent of itself, so nearly all rows agree to a bfloat16 step.
    """
    output = oracles.bfloat16(expected.output).reshape(actual.output.shape)
    distance = np.abs(oracles.float64(actual.output) - output)
    moved = (distance > 2**-7 * np.abs(output) + 1e-6).any(-1)
    assert moved.mean() <= 0.02, f"{moved.mean():.1%} of the rows are more than a bfloat16 step away"
    assert relative_l2(actual.output, output) < 0.03
    lse = expected.lse.reshape(actual.lse.shape)
    assert_close(actual.lse, lse.astype(np.float32), rtol=0, atol=0.01, allow_neg_inf=True)
    finite = np.isfinite(lse)
    assert np.mean(np.abs(actual.lse[finite] - lse[finite]) > 1e-5) <= 0.02


def assert_gradients_agree(result: shapes.Result, expected: oracles.Gradients) -> None:
    """Asserts equality of dQ, dK and dV up to P and dS codes that float32 arithmetic moves across a boundary.

    One moved code changes a row by less than a per cent; a step left out or put in costs two to four.
    """
    for name, actual, oracle in zip(("dQ", "dK", "dV"), input_gradients(result), expected[:3], strict=True):
        error = relative_l2(actual, oracles.bfloat16(oracle).reshape(actual.shape))
        assert error < 4e-3, f"{name}: {error:.1e}"


def input_gradients(result: shapes.Result) -> tuple[np.ndarray, ...]:
    """dQ, dK and dV."""
    return result[2:5]


def straight_through(
    recipe: Recipe,
    inputs: shapes.Inputs,
    result: shapes.Result,
    *,
    rounded: bool,
    bias: np.ndarray | None = None,
    **options: Any,
) -> oracles.Gradients:
    """The oracle's gradients for the output and lse that the library's forward gave."""
    call = shapes.oracle_call(inputs, bias, **options)
    output, d_output = (x.reshape(call.query.shape) for x in (result.output, inputs.d_output))
    lse, d_lse = (x.reshape(call.query.shape[:3]) for x in (result.lse, inputs.d_lse))
    return oracles.straight_through(recipe, call, output, lse, d_output, d_lse, rounded=rounded)
