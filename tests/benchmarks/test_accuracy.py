"""The accuracy benchmark: its published figures, its own arithmetic, and a small run."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import backward, published
from benchmarks.accuracy.__main__ import SECTIONS, main
from benchmarks.accuracy.exact import exact_attention
from benchmarks.accuracy.figures import AtLeast, AtMost, Figure, Within
from benchmarks.accuracy.forward import accuracies
from benchmarks.accuracy.inputs import SCALE, draw
from benchmarks.accuracy.metrics import Accuracy, Comparison, compare, mean
from benchmarks.accuracy.plot import write_plot
from benchmarks.accuracy.report import markdown_table, summary
from jax_fp4attn import recipes
from tests.assertions import assert_close, cosine, relative_l2


@pytest.mark.parametrize("name", ["fast", "accurate", "nvfp4_pv", "fp8_pv"])
def test_published_rows_have_the_published_mean(name):
    rows, headline = mean(list(published.GRID[name].values())), published.GRID_MEANS[name]
    assert rows.cosine == pytest.approx(headline.cosine, abs=1e-4)
    assert rows.rel_l2 == pytest.approx(headline.rel_l2, abs=5e-4)


@pytest.mark.parametrize("name", ["fast", "accurate", "nvfp4_pv", "fp8_pv"])
def test_published_means_meet_our_requirements(name):
    for requirement, field in zip(published.REQUIRED_MEANS[name], ("cosine", "rel_l2"), strict=True):
        assert requirement.holds(getattr(published.GRID_MEANS[name], field))


@pytest.mark.slow
def test_fast_and_square_meet_the_requirements_at_a_small_size():
    chosen = (recipes.fast, recipes.square)
    for name, accuracy in accuracies(chosen, 256, rows=128, heads=48, group=4).items():
        required_cosine, required_rel_l2 = published.REQUIRED_MEANS[name]
        assert required_cosine.holds(accuracy.cosine), (name, accuracy)
        assert required_rel_l2.holds(accuracy.rel_l2), (name, accuracy)


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_attention_is_softmax_attention(is_causal):
    sample = draw(256, rows=256, heads=4, kv_heads=2)
    arrays = [x.astype(jnp.float32) for x in (sample.query, sample.key, sample.value)]
    output, lse = exact_attention(*arrays, is_causal=is_causal)
    expected, expected_lse = jax.nn.dot_product_attention(
        *arrays, scale=SCALE, is_causal=is_causal, return_residual=True
    )
    assert_close((output, lse), (expected, expected_lse), rtol=1e-5, atol=1e-5)


def test_backward_oracle_is_the_gradient_of_exact_attention():
    sample = draw(128, rows=128, heads=8, kv_heads=2)
    arrays = [x.astype(jnp.float32) for x in (sample.query, sample.key, sample.value)]
    d_output = jax.random.normal(jax.random.key(0), arrays[0].shape)
    _, pull_back = jax.vjp(lambda *x: exact_attention(*x, is_causal=True)[0], *arrays)
    query, key, value, d_out = (backward.head_major(x) for x in (*arrays, d_output))
    oracle = backward.exact_gradients(query, key, query, key, value, d_out)
    for ours, expected in zip(oracle, pull_back(d_output), strict=True):
        assert relative_l2(ours, backward.head_major(expected)) < 1e-5


def test_accuracy_of_pieces_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    actual, expected = rng.normal(size=(2, 3, 50)) * [[[1e-30]], [[1.0]]]
    pieces = Comparison()
    for a, e in zip(actual, expected, strict=True):
        pieces.add(a, e)
    assert dataclasses.astuple(pieces.accuracy()) == pytest.approx(
        (cosine(actual, expected), relative_l2(actual, expected))
    )


def test_accuracy_of_zeros():
    assert compare(np.zeros(3), np.ones(3)) == Accuracy(0.0, 1.0)


def test_requirements_include_their_bounds():
    assert Within(1.0, 0.5).holds(1.5) and not Within(1.0, 0.5).holds(1.51)
    assert AtLeast(1.0).holds(1.0) and not AtLeast(1.0).holds(0.99)
    assert AtMost(1.0).holds(1.0) and not AtMost(1.0).holds(1.01)


def test_a_requirement_that_is_not_met_stands_out():
    figure = Figure("fast", "cosine", 0.9, published=0.94, requirement=AtLeast(0.93))
    assert "NOT MET" in markdown_table([figure])
    assert summary({SECTIONS["grid"]: [figure]}) == "0 of 1 requirements met; not met: grid: fast, cosine."


@pytest.mark.slow
def test_quick_run_writes_table_csv_and_plot(tmp_path, capsys):
    sections = ["p_range", "format_matrix", "backward", "pareto"]
    assert main(["--quick", "--sections", ",".join(sections), "--out", str(tmp_path)]) == 0
    assert SECTIONS["backward"].title in capsys.readouterr().out
    table = (tmp_path / "accuracy.md").read_text()
    with (tmp_path / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["section"] for row in rows} == set(sections)
    for name in sections:
        assert SECTIONS[name].title in table
    assert all(np.isfinite(float(row["ours"])) for row in rows)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_plot_is_deterministic(tmp_path):
    figures = [
        Figure(name, quantity, x)
        for name, point in {"fast": (0.944, 0.336), "square": (0.974, 0.229), "bf16": (1.0, 0.002)}.items()
        for quantity, x in zip(("cosine", "rel-L2"), point, strict=True)
    ]
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path in paths:
        write_plot(path, figures)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_unknown_section_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--sections", "grid,nothing"])
    assert "unknown nothing" in capsys.readouterr().err
