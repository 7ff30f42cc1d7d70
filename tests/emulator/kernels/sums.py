"""Records how a GPU rounds the sums of single products, to be compared with models of its adders.

usage: python -m tests.emulator.kernels.sums OUT.npz
"""

import argparse
import pathlib
from collections.abc import Iterator

import numpy as np

from tests.emulator import launches
from tests.emulator.kernels.products import ACCUMULATORS, DTYPES, K_MAJOR, Kind, Product, launch, matrix_of

KINDS = (
    Kind("bf16", "bf16", "f32", 16),
    Kind("f16", "f16", "f32", 16),
    Kind("f16", "f16", "f16", 16),
    Kind("tf32", "tf32", "f32", 8),
    *(Kind(a, b, "f32", 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    Kind("e4m3", "e4m3", "f16", 32),
)
_ROWS, _COLUMNS = 64, 64


def _wide(rng: np.random.Generator, shape: tuple[int, ...], exponents: int) -> np.ndarray:
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-exponents, exponents + 1, shape)


def _steps(kind: Kind, sign: int, leading: int, small: float, accumulated: bool) -> Product:
    """Row i, column j: a leading 2**(2 leading) and j mod k terms of +-2**-i times ``small``.

    Args:
      kind: Types.
      sign: Of the small terms.
      leading: Half the exponent of the leading term.
      small: A power of two.
      accumulated: Whether the leading term is the accumulator instead of a product.
    """
    a, b = np.zeros((_ROWS, kind.k)), np.zeros((_COLUMNS, kind.k))
    a[:, 1:] = sign * 2.0 ** -np.arange(_ROWS)[:, None]
    b[:, 1:] = small * (np.arange(1, kind.k) <= np.arange(_COLUMNS)[:, None] % kind.k)
    start = np.zeros((_ROWS, _COLUMNS))
    if accumulated:
        start += 4.0**leading
    else:
        a[:, 0] = b[:, 0] = 2.0**leading
    return Product(kind, a, b, start)


def products(kind: Kind) -> Iterator[tuple[str, Product]]:
    """Random operands of one scale and of many, and terms that are far smaller than another."""
    rng = np.random.default_rng(0)
    for i in range(4):
        for name, exponents in (("normal", 0), ("wide", 3), ("wider", 6)):
            shapes = ((_ROWS, kind.k), (_COLUMNS, kind.k), (_ROWS, _COLUMNS))
            yield f"{name}_{i}", Product(kind, *(_wide(rng, shape, exponents) for shape in shapes))
    for sign in (1, -1):
        for leading, small in ((0, 1.0), (0, 2.0**-6), (4, 1.0), (4, 2.0**-6)):
            for accumulated in (False, True):
                yield f"steps_{sign}_{leading}_{small}_{accumulated}", _steps(kind, sign, leading, small, accumulated)


def record(path: pathlib.Path) -> None:
    """Writes operands and results of all products on the first CUDA device; the formats as raw bits.

    Args:
      path: npz file, with KIND/NAME/a, b, start and d.
    """
    found = {}
    for kind in KINDS:
        for name, product in products(kind):
            rounded = Product(
                kind,
                product.a.astype(np.float32).astype(DTYPES[kind.a]),
                product.b.astype(np.float32).astype(DTYPES[kind.b]),
                product.start.astype(ACCUMULATORS[kind.d]),
            )
            case = launch(name, rounded, (K_MAJOR, K_MAJOR), np.random.default_rng(0))
            arrays = {"a": rounded.a, "b": rounded.b, "start": rounded.start}
            arrays["d"] = matrix_of(launches.on_device(case)[2])
            for part, array in arrays.items():
                found[f"{kind.a}_{kind.b}_{kind.d}/{name}/{part}"] = array.view(f"u{array.itemsize}")
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    record(parser.parse_args().out)
