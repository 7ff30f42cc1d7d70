"""Results of arms, as they are joined, tabled and drawn."""

import csv
import dataclasses

import numpy as np
import pytest

from examples.language_model import arm_curves
from examples.language_model.report import ArmResult, losses_at_equal_steps, read_results, table, write_report
from examples.language_model.training import History

BF16 = ArmResult(
    name="bf16",
    attention="exact",
    settings={"steps": 4, "text": "a digest"},
    device="a device",
    history=History([4.0, 2.0, 1.0, 0.5], [(2, 2.0), (4, 1.0)], timed_steps=3, seconds=6.0),
    held_out_loss=1.0,
    tokens_per_second=100.0,
    sample="what it writes",
)
TRAIN = dataclasses.replace(
    BF16,
    name="train",
    attention="ours",
    history=History([4.0, 2.0, 1.0, 0.75], [(2, 2.0), (4, 1.0625)]),
    held_out_loss=1.03125,
    tokens_per_second=50.0,
)
DIVERGED = dataclasses.replace(
    BF16, name="causal_mxfp4", history=History([4.0, 8.0, 9.0], [(2, 8.0), (3, 9.0)]), held_out_loss=9.0
)


class TestJoining:
    def test_results_are_read_back_with_the_baseline_first(self, tmp_path):
        for result in (DIVERGED, TRAIN, BF16):
            result.write(tmp_path / "arms")
        names = [result.name for result in read_results(tmp_path / "arms")]
        assert names[0] == "bf16"
        assert sorted(names) == ["bf16", "causal_mxfp4", "train"]
        assert sorted(path.name for path in (tmp_path / "arms").iterdir()) == sorted(f"{x}.json" for x in names)

    def test_what_is_written_is_what_is_read(self, tmp_path):
        BF16.write(tmp_path)
        (read,) = read_results(tmp_path)
        assert [tuple(x) for x in read.history.held_out_loss] == BF16.history.held_out_loss
        read.history.held_out_loss = BF16.history.held_out_loss
        assert read == BF16

    def test_a_new_result_replaces_an_old_one(self, tmp_path):
        TRAIN.write(tmp_path)
        dataclasses.replace(TRAIN, held_out_loss=7.0).write(tmp_path)
        assert [result.held_out_loss for result in read_results(tmp_path)] == [7.0]

    def test_arms_of_other_settings_are_refused(self, tmp_path):
        BF16.write(tmp_path)
        dataclasses.replace(TRAIN, settings={"steps": 5, "text": "a digest"}).write(tmp_path)
        with pytest.raises(ValueError, match="bf16 and train differ in steps; train both alike"):
            read_results(tmp_path)

    def test_an_empty_directory_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="holds no results"):
            read_results(tmp_path / "arms")


def rows_of(markdown):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]


class TestTables:
    def test_arms_stand_beside_the_baseline(self):
        header, _, first, second = rows_of(table([BF16, TRAIN]))
        assert header[-3:] == ["held-out vs bf16", "tokens/s", "speed vs bf16"]
        assert first == ["bf16", "exact", "4", "0.5000", "1.0000", "1.4427", "+0.00%", "100", "1.00"]
        assert second == ["train", "ours", "4", "0.7500", "1.0312", "1.4878", "+3.12%", "50", "0.50"]

    def test_without_a_baseline_there_is_nothing_to_compare_with(self):
        (*_, row) = rows_of(table([TRAIN]))
        assert [row[6], row[8]] == ["", ""]

    def test_an_arm_that_ended_early_has_no_later_losses(self):
        assert rows_of(losses_at_equal_steps([BF16, DIVERGED]))[2:] == [
            ["2", "2.0000", "8.0000"],
            ["3", "", "9.0000"],
            ["4", "1.0000", ""],
        ]

    def test_a_report_has_settings_tables_and_samples(self, tmp_path):
        write_report(tmp_path / "report.md", [BF16, TRAIN], "a prompt")
        text = (tmp_path / "report.md").read_text()
        assert "Measured on a device: steps 4, text a digest." in text
        assert "\na prompt\n" in text
        for result in (BF16, TRAIN):
            assert f"## {result.name}\n\n```text\n{result.sample}\n```" in text


class TestCurves:
    def test_losses_of_every_step(self, tmp_path):
        arm_curves.write_losses(tmp_path / "curves.csv", [BF16, DIVERGED])
        with (tmp_path / "curves.csv").open() as file:
            rows = list(csv.DictReader(file))
        for result in (BF16, DIVERGED):
            mine = [row for row in rows if row["recipe"] == result.name]
            assert [float(row["training_loss"]) for row in mine] == result.history.training_loss
            held_out = [(int(row["step"]), float(row["held_out_loss"])) for row in mine if row["held_out_loss"]]
            assert held_out == result.history.held_out_loss

    def test_differences_are_those_after_equally_many_steps(self):
        assert arm_curves.differences(TRAIN, BF16) == {2: 0.0, 4: 0.0625}
        assert arm_curves.differences(DIVERGED, BF16) == {2: 3.0}

    @pytest.mark.parametrize(
        ("results", "panels", "lines"),
        [
            # A curve and its mean in the first panel, and training, held out and zero in the last.
            ([BF16, TRAIN, DIVERGED], 3, [6, 3, 3]),
            ([BF16, DIVERGED], 2, [4, 2]),
            ([BF16], 2, [2, 1]),
            ([TRAIN, DIVERGED], 2, [4, 2]),
        ],
    )
    def test_arms_that_follow_the_baseline_are_drawn_against_it(self, results, panels, lines, tmp_path, monkeypatch):
        figures = []
        save = arm_curves.Figure.savefig

        def keep(figure, *arguments, **others):
            figures.append(figure)
            save(figure, *arguments, **others)

        monkeypatch.setattr(arm_curves.Figure, "savefig", keep)
        arm_curves.write_curves(tmp_path / "curves.png", results)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        (figure,) = figures
        assert len(figure.axes) == panels
        assert [len(axes.lines) for axes in figure.axes] == lines
        if panels == 3:
            np.testing.assert_allclose(figure.axes[2].lines[0].get_ydata(), [0, 0, 0, 50])
            np.testing.assert_allclose(figure.axes[2].lines[1].get_ydata(), [0, 6.25])
