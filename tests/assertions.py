"""How tests compare arrays.

`assert_close` is what tests use in place of `chex.assert_trees_all_close`, which takes NaN for
equal to NaN and float32 for equal to bfloat16.
"""

import chex
import jax
import numpy as np


def assert_close(
    actual: chex.ArrayTree,
    expected: chex.ArrayTree,
    *,
    rtol: float,
    atol: float,
    allow_neg_inf: bool = False,
) -> None:
    """Asserts that two trees of arrays agree in structure, shapes, dtypes and values.

    Values agree where `|actual - expected| <= atol + rtol * |expected|`, computed in float64. NaN
    and infinities agree with nothing.

    Args:
      actual: The tree of arrays under test.
      expected: The tree of arrays to compare with.
      rtol: Relative tolerance.
      atol: Absolute tolerance.
      allow_neg_inf: Whether `expected` may hold -inf, as the logsumexp of a row without keys does.
        `actual` must then hold -inf at the same positions and nowhere else.

    Raises:
      AssertionError: If the trees do not agree.
    """
    for name, tree in (("actual", actual), ("expected", expected)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise AssertionError(
                    f"{name}{jax.tree_util.keystr(path)}: expected an array, which has a dtype to "
                    f"compare, got {leaf!r} of type {type(leaf).__name__}"
                )
    chex.assert_trees_all_equal_structs(actual, expected)
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_equal_dtypes(actual, expected)

    actual, expected = jax.tree.map(_to_float64, (actual, expected))
    jax.tree_util.tree_map_with_path(
        lambda path, a, e: _assert_same_finite(jax.tree_util.keystr(path), a, e, allow_neg_inf=allow_neg_inf),
        actual,
        expected,
    )
    # The infinities left are at equal positions in both trees.
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


def assert_same_bytes(actual: chex.ArrayTree, expected: chex.ArrayTree) -> None:
    """Asserts that two trees of arrays hold the same bytes; a NaN equals every NaN of its dtype.

    Args:
      actual: The tree of arrays under test.
      expected: The tree of arrays to compare with.

    Raises:
      AssertionError: If structure, shapes, dtypes or bytes differ; it says how many elements do.
    """
    chex.assert_trees_all_equal_structs(actual, expected)
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_equal_dtypes(actual, expected)

    def compare(path: jax.tree_util.KeyPath, a: chex.Array, e: chex.Array) -> None:
        a, e = np.asarray(a), np.asarray(e)
        both_nan = (a != a) & (e != e)
        bits = np.dtype(f"u{a.dtype.itemsize}")
        differ = (a.view(bits) != e.view(bits)) & ~both_nan if a.ndim else (a != e) & ~both_nan
        if differ.any():
            where = tuple(map(int, np.argwhere(differ)[0])) if a.ndim else ()
            raise AssertionError(
                f"{jax.tree_util.keystr(path)}: {differ.sum()} of {differ.size} elements differ, the first at {where}: "
                f"{a[where]!r} for {e[where]!r}"
            )

    jax.tree_util.tree_map_with_path(compare, actual, expected)


def relative_l2(actual: chex.Array, expected: chex.Array) -> float:
    """Returns `‖actual - expected‖ / ‖expected‖` in float64.

    It is 0 if both are zero, and inf if only `expected` is.

    Args:
      actual: The array under test.
      expected: The array to compare with, of the same shape. The dtypes may differ.
    """
    a, e = _comparable(actual, expected)
    difference, norm = float(np.linalg.norm(a - e)), float(np.linalg.norm(e))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def cosine(actual: chex.Array, expected: chex.Array) -> float:
    """Returns the cosine of the angle between two arrays, taken as vectors, in float64.

    Args:
      actual: The array under test.
      expected: The array to compare with, of the same shape. The dtypes may differ.

    Raises:
      AssertionError: If either is zero, so that there is no angle.
    """
    a, e = _comparable(actual, expected)
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(e))
    if 0.0 in norms:
        raise AssertionError(f"expected nonzero arrays, got norms {norms[0]} and {norms[1]}")
    # Dividing first keeps the product of two small norms from underflowing.
    return float((a / norms[0]) @ (e / norms[1]))


def _to_float64(x: chex.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _assert_same_finite(path: str, actual: np.ndarray, expected: np.ndarray, *, allow_neg_inf: bool) -> None:
    """Asserts that every element is finite, or -inf in both if that is allowed."""
    if allow_neg_inf:
        neg_inf = np.isneginf(expected)
        for bad, complaint in (
            (np.isneginf(actual) & ~neg_inf, "-inf where expected is not"),
            (~np.isneginf(actual) & neg_inf, "not -inf where expected is"),
        ):
            _assert_nowhere(bad, f"actual{path}", actual, complaint)
        actual, expected = np.where(neg_inf, 0.0, actual), np.where(neg_inf, 0.0, expected)
    for name, x in (("actual", actual), ("expected", expected)):
        _assert_nowhere(~np.isfinite(x), f"{name}{path}", x, "not finite")


def _assert_nowhere(bad: np.ndarray, name: str, values: np.ndarray, complaint: str) -> None:
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name} is {complaint} at {int(bad.sum())} of {bad.size} positions, first at {first}: {values[first]}"
        )


def _comparable(actual: chex.Array, expected: chex.Array) -> tuple[np.ndarray, np.ndarray]:
    """Flattens two arrays to float64 after checking that they can be compared."""
    if actual.shape != expected.shape:
        raise AssertionError(f"expected shape {expected.shape}, got {actual.shape}")
    a, e = _to_float64(actual).ravel(), _to_float64(expected).ravel()
    _assert_same_finite("", a, e, allow_neg_inf=False)
    return a, e
