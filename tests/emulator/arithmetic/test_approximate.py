"""The approximate functions: special values of the ISA's tables, and the nearest value elsewhere."""

import math

import numpy as np
import pytest

from cuda.emulator.arithmetic import approximate
from tests.emulator import sweeps
from tests.emulator.arithmetic import reference
from tests.emulator.arithmetic.reference import apply, assert_same_floats

INF, NAN = np.inf, np.nan
SUBNORMAL = 2.0**-130

# Function, then pairs of an operand and the result, with and without .ftz where that differs.
SPECIAL = {
    "ex2": [(-INF, 0), (INF, INF), (NAN, NAN), (0, 1), (-0.0, 1), (SUBNORMAL, 1), (128, INF), (-150, 0)],
    "lg2": [(-INF, NAN), (-1, NAN), (0, -INF), (-0.0, -INF), (INF, INF), (NAN, NAN), (1, 0)],
    "rcp": [(-INF, -0.0), (INF, 0), (0, INF), (-0.0, -INF), (NAN, NAN), (2, 0.5)],
    "sqrt": [(-INF, NAN), (-1, NAN), (-0.0, -0.0), (0, 0), (INF, INF), (NAN, NAN), (4, 2)],
    "rsqrt": [(-INF, NAN), (-1, NAN), (-0.0, -INF), (0, INF), (INF, 0), (NAN, NAN), (4, 0.5)],
    "sin": [(-INF, NAN), (INF, NAN), (-0.0, -0.0), (0, 0), (NAN, NAN)],
    "cos": [(-INF, NAN), (INF, NAN), (-0.0, 1), (0, 1), (NAN, NAN)],
    "tanh": [(-INF, -1), (INF, 1), (-0.0, -0.0), (0, 0), (NAN, NAN)],
}
FLUSHED = {
    "ex2": [(-126, 2.0**-126), (-126.5, 0), (-130, 0)],
    "lg2": [(SUBNORMAL, -INF), (-SUBNORMAL, -INF)],
    "rcp": [(SUBNORMAL, INF), (-SUBNORMAL, -INF), (2.0**127, 0), (-(2.0**127), -0.0)],
    "sqrt": [(SUBNORMAL, 0), (-SUBNORMAL, -0.0)],
    "rsqrt": [(SUBNORMAL, INF), (-SUBNORMAL, -INF)],
}
KEPT = {
    "ex2": [(-130, SUBNORMAL), (-149, 2.0**-149)],
    "lg2": [(SUBNORMAL, -130)],
    "rcp": [(2.0**127, 2.0**-127), (2.0**-127, 2.0**127)],
    "sqrt": [(SUBNORMAL, 2.0**-65)],
    "rsqrt": [(SUBNORMAL, 2.0**65)],
}


def check(opcode: str, cases) -> None:
    x, y = (np.array(column, "f4") for column in zip(*cases, strict=True))
    assert_same_floats(apply(opcode, x), y.view("u4"), "f32")


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name):
    check(f"{name}.approx.f32", SPECIAL[name] + KEPT.get(name, []))
    if name in FLUSHED:
        check(f"{name}.approx.ftz.f32", SPECIAL[name] + FLUSHED[name])


PYTHON = {
    "ex2": lambda x: 2.0**x,
    "lg2": math.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", PYTHON)
def test_results_are_the_nearest(name):
    rng = np.random.default_rng(0)
    x = rng.uniform(0.01, 30, 500).astype("f4")
    expected = np.array([PYTHON[name](float(value)) for value in x])
    with np.errstate(under="ignore"):
        np.testing.assert_array_equal(apply(f"{name}.approx.f32", x).view("f4"), expected.astype("f4"))
    assert f"{name}.approx.f32" in approximate.BOUNDS


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_halves(name, kind):
    every = np.arange(1 << 16, dtype="u2")
    ftz = ".ftz" if (name, kind) == ("ex2", "bf16") else ""
    with np.errstate(all="ignore"):
        exact = approximate.FUNCTIONS[name](reference.values(every, kind))
        wanted = exact.astype("f2").view("u2") if kind == "f16" else apply("cvt.rn.bf16.f64", exact)
    if ftz:
        wanted = np.where(np.abs(exact) < 2.0**-126, 0, wanted)
    assert_same_floats(apply(f"{name}.approx{ftz}.{kind}", every), wanted, kind)
    words = every.astype("u4") | every[::-1].astype("u4") << 16
    packed = apply(f"{name}.approx{ftz}.{kind}x2", words)
    assert_same_floats(packed & 0xFFFF, wanted, kind)
    assert_same_floats(packed >> 16, wanted[::-1], kind)


APPROXIMATE = [sweep for sweep in sweeps.SWEEPS if sweep.approximate]


@pytest.mark.parametrize("sweep", APPROXIMATE, ids=lambda sweep: sweep.name)
def test_results_are_within_the_bounds_of_the_isa(sweep):
    columns = [np.ascontiguousarray(column[::50]) for column in sweeps.inputs(sweep)]
    results = sweeps.emulated(sweep, columns)
    assert sweeps.errors(sweep, columns, results).max() <= 1
    if sweep.result_type == "f32":
        assert sweeps.errors(sweep, columns, results + np.uint32(1 << 13)).max() > 1


def test_division():
    a = np.array([6, 1, -1, INF, 1, 0, 2.0**-120], "f4")
    b = np.array([3, 2.0**127, 2.0**127, 2.0**127, 0, 0, 2.0**20], "f4")
    assert_same_floats(
        apply("div.approx.f32", a, b), np.array([2, 0, -0.0, NAN, INF, NAN, 2.0**-140], "f4").view("u4"), "f32"
    )
    quotients = np.array([2, 2.0**-127, -(2.0**-127), INF, INF, NAN, 2.0**-140], "f4")
    assert_same_floats(apply("div.full.f32", a, b), quotients.view("u4"), "f32")
    flushed = np.array([2, 0, -0.0, INF, INF, NAN, 0], "f4")
    assert_same_floats(apply("div.full.ftz.f32", a, b), flushed.view("u4"), "f32")
