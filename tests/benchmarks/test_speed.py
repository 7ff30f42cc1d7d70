"""The speed benchmark: its counts, its exact values, its statistics, its reports, and a small run."""

import csv
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy.metrics import Accuracy
from benchmarks.speed import __main__, contenders, exact, inputs, measure, ratios, report, timing
from benchmarks.speed.cases import GRID, MASKS, PASSES, QUICK, Case, Shape
from benchmarks.speed.contenders import Contender, Program
from benchmarks.speed.measure import Result
from benchmarks.speed.plot import write_plot
from benchmarks.speed.timing import Timing
from jax_fp4attn import recipes

SHAPE = Shape(2, 128, 4, 2, 64)
LONG = Shape(1, 4096, 24, 24, 128)
ALL_RECIPES = [name for names in contenders.RECIPES.values() for name in names]
SOUND = Accuracy(0.99, 0.1)


def result(case, label, *times, kind=None, recipe="", **fields):
    timed = Timing(times, calls=3) if times else None
    return Result(case, kind or label, recipe, label, SOUND if times else None, 0.5, timed, **fields)


@pytest.mark.parametrize("mask, passes, factor", [("full", "forward", 1), ("causal", "forward+backward", 1.75)])
def test_flops(mask, passes, factor):
    assert Case(Shape(2, 10, 3, 1, 8), mask, passes).flops == factor * 4 * 2 * 3 * 10 * 10 * 8


def test_quick_runs_take_the_large_head_size():
    assert {shape.head_size for shape in GRID[:QUICK]} == {128}
    assert len(set(GRID)) == len(GRID)
    assert str(GRID[2]) == "B4 S4096 H32/8 D128"


def test_every_recipe_is_tried_on_its_mask():
    for mask, names in contenders.RECIPES.items():
        for passes in PASSES:
            case = Case(SHAPE, mask, passes)
            found = contenders.contenders_of(case, contenders.KINDS, ALL_RECIPES, "reference")
            assert [x.recipe for x in found if x.kind == "ours"] == list(names)
            assert [x.recipe for x in found if x.kind == "ours-forward"] == ([] if case.has_gradients else list(names))
            assert [x.kind for x in found[-3:]] == ["cudnn", "flash3", "xla"]
    assert {recipes.named()[name].p_format for name in ALL_RECIPES} <= set(contenders.LIMITS)


def test_contenders_are_chosen():
    case = Case(SHAPE, "full", "forward")
    found = contenders.contenders_of(case, ["ours-forward", "xla"], ["square", "train"], "reference")
    assert [x.label for x in found] == ["square, forward step", "xla"]


@pytest.mark.parametrize("mask", MASKS)
def test_exact_values_are_those_of_jax(mask):
    case = Case(SHAPE, mask, "forward+backward")
    arrays, sample = inputs.draw(SHAPE), inputs.sample_of(SHAPE)
    d_output = inputs.cotangent_of_rows(sample, arrays.d_output)
    output, pull_back = jax.vjp(
        lambda *x: jax.nn.dot_product_attention(*x, is_causal=case.is_causal),
        *(x.astype(jnp.float32) for x in arrays[:3]),
    )
    wanted = exact.expected(case, arrays, sample)
    found = exact.agreement([output, *pull_back(d_output.astype(jnp.float32))], wanted, sample)
    assert found.cosine == pytest.approx(1, abs=1e-9) and found.rel_l2 < 1e-5
    assert len(exact.expected(dataclasses.replace(case, passes="forward"), arrays, sample)) == 1


def test_a_sample_covers_the_ends_and_whole_groups():
    sample = inputs.sample_of(Shape(3, 1000, 8, 4, 64))
    assert (sample.batch, sample.rows[0], sample.rows[-1], len(sample.rows)) == (2, 0, 999, inputs.ROWS)
    assert (sample.kv_heads, sample.heads) == ((0, 3), (0, 1, 6, 7))
    assert inputs.sample_of(Shape(1, 8, 4, 1, 64)).kv_heads == (0,)


def test_statistics():
    times = Timing((3.0, 1.0, 2.0, 4.0, 5.0), calls=1)
    assert times.median == 3
    assert times.spread == pytest.approx((1.4, 4.6))


def test_rounds_fill_their_time_and_begin_with_each_in_turn():
    assert timing.rounds(["a", "b"], 1.0, 6.0) == [["a", "b"], ["b", "a"]] * 3
    assert len(timing.rounds(["a"], 1.0, 0.0)) == timing.ROUNDS[0]
    assert len(timing.rounds(["a"], 1e-9, 1.0)) == timing.ROUNDS[1]
    assert timing.rounds([], 0.0, 1.0) == []


def test_turns_are_filled_with_calls():
    assert timing.calls_a_turn(timing.TURN_SECONDS / 7) == 7
    assert timing.calls_a_turn(1.0) == 1
    assert timing.calls_a_turn(0.0) == timing.MOST_CALLS
    assert timing.calls_a_turn(1e-3, 0.5) == 500


def test_a_failure_in_a_turn_is_that_of_its_function_alone():
    calls = []

    def fails_later():
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of memory")

    found = timing.take_turns({"a": fails_later, "b": lambda: jnp.zeros(())}, 0.0)
    assert str(found["a"]) == "out of memory"
    assert len(found["b"].times) >= timing.ROUNDS[0]


def test_ratios_and_their_means():
    short, other = dataclasses.replace(LONG, length=1024), dataclasses.replace(LONG, batch=2)
    cases = [Case(shape, "full", "forward") for shape in (LONG, other, short)]
    results = [
        result(cases[0], "fast", 1.0, 1.0, 9.0),
        result(cases[0], "flash3", 2.0),
        result(cases[0], "cudnn", reason="absent"),
        result(cases[1], "fast", 1.0),
        result(cases[1], "flash3", 8.0),
        result(cases[2], "fast", 1.0),
        result(cases[2], "flash3", 100.0),
    ]
    assert [ratios.ratio(results, x, "flash3") for x in results] == [2, 1, None, 8, 1, 100, 1]
    assert ratios.ratio(results, results[0], "cudnn") is None
    (of_fast, of_flash3) = ratios.means(results)
    assert (of_fast.label, of_fast.ratios["cudnn"]) == ("fast", None)
    assert of_fast.ratios["flash3"] == (pytest.approx(4.0), 2)
    assert of_flash3.ratios["flash3"] == (1.0, 2)


def test_means_keep_head_sizes_apart():
    small = Case(dataclasses.replace(LONG, head_size=64), "full", "forward")
    large = Case(LONG, "full", "forward")
    results = [result(case, label, 1.0) for case in (small, large) for label in ("fast", "flash3")]
    assert [(x.head_size, x.label) for x in ratios.means(results)] == [
        (size, label) for size in (128, 64) for label in ("fast", "flash3")
    ]


RESULTS = [
    *(
        result(Case(LONG, mask, passes), label, *times, kind=kind, recipe=recipe)
        for passes in PASSES
        for mask in MASKS
        for label, kind, recipe, times in (
            ("fast", "ours", "fast", (2e-4, 1e-4, 3e-4)),
            ("fast, forward step", "ours-forward", "fast", (1e-4,)),
            ("flash3", "flash3", "", (4e-4,)),
        )
    ),
    result(Case(LONG, "full", "forward"), "cudnn", reason="RuntimeError: a | b"),
]


def test_reports(tmp_path):
    text = report.markdown(RESULTS, {"device": "X100", "jax": "1.2.3"})
    assert text.startswith("# Speed on one X100\n")
    assert "jax 1.2.3" in text
    assert "| B1 S4096 H24 D128 | 1031 | 2062 | 515 |  |" in text
    assert "| fast | 0.200 | 0.120 to 0.280 | 1031 | 2.00 |  | 0.9900 / 0.1000 |" in text
    assert "| cudnn | RuntimeError: a / b |" in text
    assert "- cudnn: RuntimeError: a | b (always)" in text
    assert "| forward | full | 128 | fast | 2.000 (1) |  |" in text
    assert report.summary(RESULTS, {}) in report.markdown(RESULTS, {})
    report.write_csv(tmp_path / "x.csv", RESULTS)
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RESULTS)
    assert (rows[0]["median_seconds"], rows[0]["ratio_to_flash3"], rows[0]["turns"]) == ("2.0000e-04", "2.0000", "3")
    assert rows[0]["turn_seconds"].split() == ["2.0000e-04", "1.0000e-04", "3.0000e-04"]
    assert (rows[-1]["reason"], rows[-1]["median_seconds"]) == ("RuntimeError: a | b", "")


def test_a_reason_that_does_not_always_hold_names_its_cases():
    cases = [Case(LONG, mask, "forward") for mask in MASKS]
    text = report.summary([result(cases[0], "xla", reason="too large"), result(cases[1], "xla", 1.0)], {})
    assert "- xla: too large (forward, full, B1 S4096 H24 D128)" in text


def test_plots(tmp_path):
    for name in ("a.png", "b.png"):
        assert write_plot(tmp_path / name, RESULTS, "forward", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert not write_plot(tmp_path / "none.png", RESULTS[-1:], "forward", "title")
    assert not (tmp_path / "none.png").exists()


def attention(scale=1.0):
    def build(case, arrays):
        function = jax.jit(lambda *x: scale * jax.nn.dot_product_attention(*x, is_causal=case.is_causal))
        return Program(function, arrays[:3])

    return build


def fails(case, arrays):
    raise ValueError("no\nkernel " + "x" * 500)


def measured(earlier=(), **builds):
    """Results of contenders, by kind."""
    case = Case(SHAPE, "full", "forward")
    limits = contenders.LIMITS["bf16"]
    found = [Contender(kind, "", build, limits) for kind, build in builds.items()]
    return measure.measure(case, found, inputs.draw(SHAPE), seconds=0.0, earlier=earlier)


@pytest.mark.parametrize("scale", [2.0, -1.0, math.nan])
def test_a_contender_with_wrong_results_is_not_timed(scale):
    (found,) = measured(xla=attention(scale))
    assert found.timing is None and found.reason.startswith("wrong: cosine")


def test_a_contender_that_fails_leaves_the_others_alone():
    failed, found = measured(flash3=fails, xla=attention())
    assert failed.reason.startswith("ValueError: no kernel xxx") and len(failed.reason) == 200
    assert found.timing is not None and not found.reason


def test_a_lost_device_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(measure, "device_answers", lambda: False)
    _, found = measured(flash3=fails, xla=attention())
    assert found.reason == "not tried: flash3 took the device with it"
    assert found.timing is None


def test_plain_xla_is_left_out_once_it_has_compiled_for_long():
    slow = dataclasses.replace(RESULTS[0], kind="xla", first_call=measure.XLA_FIRST_CALLS + 1)
    cudnn, xla = measured(cudnn=attention(), xla=attention(), earlier=[slow])
    assert xla.reason == "left out: its first calls have taken 46 s"
    assert not cudnn.reason


def test_plain_xla_is_left_out_where_its_scores_do_not_fit():
    case = Case(Shape(1, 32768, 24, 24, 128), "full", "forward")
    assert contenders.xla_bytes(case) == 3 * 4 * 24 * 32768**2
    (xla,) = contenders.contenders_of(case, ["xla"], [], "reference")
    with pytest.raises(NotImplementedError, match="288 GiB"):
        xla.build(case, None)


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    chosen = ["--only", "ours,ours-forward,xla", "--recipes", "fast,train", "--shapes", "0"]
    options = [*chosen, "--implementation", "reference", "--seconds", "0", "--out", str(tmp_path)]
    assert __main__.main(options, grid=(Shape(1, 160, 2, 1, 64), LONG)) == 0
    printed = capsys.readouterr()
    assert "| B1 S160 H2/1 D64 |" in printed.out
    assert "forward+backward, causal, B1 S160 H2/1 D64" in printed.err
    with (tmp_path / "speed.csv").open() as file:
        rows = {(row["passes"], row["mask"], row["contender"]): row for row in csv.DictReader(file)}
    assert not any(row["reason"] for row in rows.values())
    assert all(float(row["tflops"]) > 0 for row in rows.values())
    assert len(rows) == 2 * (3 + 2)
    assert float(rows["forward+backward", "causal", "train"]["cosine"]) > 0.97
    assert (tmp_path / "speed.md").read_text().startswith("# Speed on one ")
    for name in ("speed_forward.png", "speed_forward_backward.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert __main__.main(["--out", str(tmp_path / "out")]) == 1
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--only", "--recipes", "--shapes", "--masks", "--passes"])
def test_unknown_names_are_named(option, capsys):
    with pytest.raises(SystemExit):
        __main__.main([option, "nothing"])
    assert "unknown nothing" in capsys.readouterr().err


def test_a_call_takes_time():
    assert np.isfinite(measure.launch_seconds()) and measure.launch_seconds() > 0
