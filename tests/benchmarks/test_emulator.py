"""The benchmark of the emulator: its measurements, on small kernels, its references, and its reports."""

import csv
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.emulator import __main__, attention, mutations, products, report
from benchmarks.emulator.errors import Errors, relative_l2
from benchmarks.emulator.measure import Measurement, Run, measure
from benchmarks.emulator.subjects import Subject
from cuda.emulator import Finding
from cuda.emulator.recording import Parameter, Place, RecordedLaunch
from tests.emulator.nvidia import cases, operands
from tests.emulator.text import module

DOUBLED = """
    ld.param.u64 %d1, [a0]; ld.param.u64 %d2, [a1]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
    add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
    ld.global.f32 %f1, [%d1]; add.f32 %f2, %f1, %f1; st.global.f32 [%d2], %f2;
"""
# Both warps write the same words.
RACING = """
    ld.param.u64 %d2, [a1]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; cvt.rn.f32.u32 %f2, %r2;
    and.b32 %r1, %r1, 31; mul.wide.u32 %d3, %r1, 4; add.s64 %d2, %d2, %d3;
    st.global.f32 [%d2], %f2; st.global.f32 [%d2+128], %f2;
"""
# Of the two warps that the barrier waits for one does not come.
HANGING = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0, 64; END:"


def subject(body, hangs=False):
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    launch = RecordedLaunch(
        module(body, "pp", threads=64),
        "k",
        tuple(Parameter(bytes(8), {0: Place(i, 0)}) for i in range(2)),
        grid=(1, 1, 1),
        block=(64, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=0,
    )
    return Subject(
        "a kernel", "S64", launch, [x, np.zeros_like(x)], 1, lambda y: Errors(relative_l2(y[0], 2.0 * x)), hangs=hangs
    )


def test_a_kernel_is_measured():
    measured = measure(subject(DOUBLED), seeds=3)
    assert [(run.seed, run.races) for run in measured.runs] == [(s, races) for races in (False, True) for s in range(3)]
    assert {run.instructions for run in measured.runs} == {20}
    assert all(run.seconds > 0 for run in measured.runs)
    assert measured.making > 0
    assert measured.peak_bytes >= measured.first_peak_bytes > 1 << 20
    assert measured.errors == Errors(0.0)
    assert (measured.findings, measured.varies, measured.fault) == (frozenset(), False, "")
    assert not measured.unexpected


def test_races_and_what_they_change_are_found():
    measured = measure(subject(RACING), seeds=10)
    assert set(measured.findings_by_kind) == {"race"}
    assert measured.varies
    assert {text.partition(":")[0] for text in measured.unexpected} == {"race", "outputs vary"}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_hang_ends_the_measurement(is_known):
    measured = measure(subject(HANGING, hangs=is_known), seeds=2)
    assert measured.fault.startswith("DeadlockError: ")
    assert measured.unexpected == ([] if is_known else [measured.fault])
    assert report.markdown_table([measured]).splitlines()[2].count("DeadlockError") == 1
    assert ("NOT AS EXPECTED" in report.markdown([measured], {}, {})) != is_known


def test_a_known_hang_that_does_not_happen_is_not_expected():
    assert measure(subject(DOUBLED, hangs=True), seeds=1).unexpected == ["does not hang"]


MEASUREMENT = Measurement(
    kernel="FMHA bf16 sm_100a",
    shape="S256 B1 H2",
    making=1.234,
    runs=[
        *(Run(seed, False, 80_000 + 1000 * seed, 0.1) for seed in range(3)),
        *(Run(seed, True, 80_000 + 1000 * seed, 0.2) for seed in range(3)),
    ],
    first_peak_bytes=101_000_000,
    peak_bytes=123_400_000,
    findings=frozenset(
        [
            Finding("issue", "line 3: cp.async.bulk.tensor.5d.global.shared::cta is issued by 32 threads"),
            Finding("issue", "line 5: cp.async.bulk.tensor.5d.global.shared::cta is issued by 32 threads"),
            Finding("lifetime", "the use by cp.async.bulk.tensor.5d.global.shared::cta is not ordered"),
        ]
    ),
    varies=False,
    errors=Errors(0.00212, 1.24e-6),
    fault="",
)


def test_table():
    assert report.markdown_table([MEASUREMENT]).splitlines()[2] == (
        "| FMHA bf16 sm_100a | S256 B1 H2 | 81000 | 1.23 | 810 (800 to 820) | 405 (400 to 410) | 101, 123 | 3 |"
        " 2 issue, 1 lifetime | no | 2.1e-03 | 1.2e-06 |"
    )


@pytest.mark.parametrize("kind", ["race", "proxy", "phase", "register", "issue"])
def test_only_findings_of_stores_are_known(kind):
    finding = Finding(kind, "line 3: cp.async.bulk.tensor.5d.shared::cluster.global is issued by 32 threads")
    assert not MEASUREMENT.unexpected
    findings = MEASUREMENT.findings | {finding}
    measured = dataclasses.replace(MEASUREMENT, findings=findings)
    assert measured.unexpected == [str(finding)]
    assert f"- FMHA bf16 sm_100a, S256 B1 H2: {finding}" in report.markdown([measured], {}, {}).splitlines()


def test_reports(tmp_path):
    text = report.markdown([MEASUREMENT], {"a/fmha.py": "0123456789ab"}, {"a-package": "1.2.3"})
    assert "a-package 1.2.3" in text
    assert report.markdown_table([MEASUREMENT]) in text
    assert "`a/fmha.py` (git blob 0123456789ab)" in text
    report.write_csv(tmp_path / "x.csv", [MEASUREMENT])
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["races"] for row in rows] == ["off"] * 3 + ["on"] * 3
    assert rows[4] | {"kernel": "", "shape": ""} == {
        "kernel": "",
        "shape": "",
        "seed": "1",
        "races": "on",
        "instructions": "81000",
        "cpu_seconds": "0.2000",
    }
    report.write_plot(tmp_path / "x.png", [MEASUREMENT])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_attention_reference_is_that_of_jax():
    case = attention.Attention("sm_90a", "bfloat16", batch=2, length=32, heads=4, kv_heads=2)
    *inputs, _, _ = attention.arrays_of(case)
    expected = jax.nn.dot_product_attention(
        *(jnp.asarray(x, jnp.float32) for x in inputs), is_causal=True, return_residual=True
    )
    for actual, value in zip(attention.reference(*inputs), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=0, atol=9e-7)


@pytest.mark.parametrize("target, unit", [("sm_90a", 1.0), ("sm_100a", math.log(2))])
def test_attention_errors_are_in_nats(target, unit):
    case = attention.Attention(target, "bfloat16", batch=1, length=16, heads=2, kv_heads=2)
    output, lse = attention.reference(*attention.arrays_of(case)[:3])
    found = attention.errors(case, [1.01 * output, (lse + 0.001) / unit])
    assert found.relative_l2 == pytest.approx(0.01)
    assert found.lse == pytest.approx(0.001)


@pytest.mark.parametrize("case", [c for c in cases.HOPPER if c.kernel.c == cases.F32][:1], ids=str)
def test_products_are_judged_against_float64(case):
    product = operands.make_operands(case).product
    stored = product if case.kernel.majors[2] == "n" else product.transpose(0, 2, 1)
    off_by_one_percent = np.ascontiguousarray(1.01 * stored, np.float32)
    assert products._errors(case, [off_by_one_percent]).relative_l2 == pytest.approx(0.01, rel=1e-4)


def test_keys_that_rise_raise_the_running_maximum():
    first, second = attention.PERSISTENT_CASES
    assert first.persistent and second.persistent
    key = attention.arrays_of(first)[1].astype(np.float64)
    tiles = key.reshape(1, -1, 128, 1, 128).std(axis=(0, 2, 3, 4))
    np.testing.assert_allclose(tiles, np.arange(1, 7), rtol=0.024)


def test_without_the_compiler_there_is_nothing_to_measure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(__main__, "PACKAGES", ("no-such-package",))
    assert __main__.main(["--cutlass", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no-such-package is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_the_examples_there_is_nothing_to_measure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(__main__, "PACKAGES", ("numpy",))
    monkeypatch.setattr(__main__.shutil, "which", lambda name: name)
    assert __main__.main(["--cutlass", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "fmha.py" in capsys.readouterr().err


def test_nothing_is_broken_without_the_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(__main__, "PACKAGES", ("no-such-package",))
    assert mutations.main(["--cutlass", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no-such-package is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
