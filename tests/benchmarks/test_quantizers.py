import collections
import csv

import jax
import jax.numpy as jnp
import pytest

from benchmarks.quantizers import __main__, cases, report
from benchmarks.quantizers.measure import Measurement
from jax_fp4attn import native
from jax_fp4attn.config import Visibility

# How often a step runs each of its kernels: query and key take the same one.
LAUNCHES = collections.Counter(
    {f"{name}{choices}": 2 for name in ("quantize_rows", "quantize_folded_rows") for choices in ("", "_with_columns")}
)


def shapes(step):
    rows = jax.ShapeDtypeStruct((cases.BATCH, cases.LENGTH, cases.HEADS, cases.HEAD_SIZE), jnp.bfloat16)
    if step.name != "row operands":
        return rows, rows, rows, Visibility()
    lse = jax.ShapeDtypeStruct((cases.BATCH, cases.HEADS, cases.LENGTH), jnp.float32)
    return rows, lse, rows, lse, jax.ShapeDtypeStruct((cases.BATCH, cases.HEADS), jnp.float32)


def count_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", cases.STEPS)
def test_kernels_move_the_inputs_and_outputs_of_their_step_once(name):
    step = cases.STEPS[name]
    moved = count_bytes(shapes(step)) + count_bytes(jax.eval_shape(step.oracle, *shapes(step)))
    listed = sum(
        kernel.bytes_an_element * max(1, LAUNCHES[kernel.label]) * cases.ELEMENTS
        for kernel in cases.KERNELS
        if kernel.step == name
    )
    missing = 0
    if name == "quantize accurate":  # Its unfolded rows are listed with another step.
        missing = 2 * (cases.INPUT + cases.NVFP4) * cases.ELEMENTS
    scales_of_gradients = 4 * cases.BATCH * cases.HEADS if name == "row operands" else 0
    assert listed + missing + scales_of_gradients == moved


def test_every_quantiser_of_the_head_size_is_listed():
    listed = {f"{kernel.name}_h{cases.HEAD_SIZE}{kernel.choices}" for kernel in cases.KERNELS}
    manifest = __main__.RESULTS.parents[2] / "cuda" / "manifest" / "kernels.sm_90a.json"
    names = {line.split('"')[3] for line in manifest.read_text().splitlines() if '"name"' in line}
    quantisers = {name for name in names if name.startswith(("quantize", "publish")) and "_h128" in name}
    # An ordered value with rows is the sum of two that are listed.
    assert quantisers - listed == {"quantize_value_mxfp4_h128_ordered_with_rows"}


def test_reports(tmp_path):
    copies = {"driver": 4e12, "kernel": 3e12}
    kernel = cases.KERNELS[0]
    moved = kernel.bytes_an_element * cases.ELEMENTS
    measured = [Measurement(kernel, [moved / 2e12, moved / 1e12, moved / 4e12])]
    text = report.markdown(copies, measured, {"a step": (1e-4, 3e-4)}, runs=3)
    assert f"| {kernel.label} | {moved / 1e6:.1f} |" in text
    assert "| 2.00 | 0.50 |" in text
    assert "| a step | 100 | 300 | 3.0 |" in text
    report.write_csv(tmp_path / "x.csv", copies, measured)
    with (tmp_path / "x.csv").open() as file:
        assert [row["of_copy"] for row in csv.DictReader(file)] == ["0.5000", "0.2500", "1.0000"]
    report.write_plot(tmp_path / "x.png", copies, measured)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_kernel_there_is_nothing_to_measure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(native, "why_unavailable", lambda: "no GPU today")
    assert __main__.main(["--out", str(tmp_path / "out")]) == 1
    assert "no GPU today" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
