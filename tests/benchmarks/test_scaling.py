"""The scaling study: what it reads from programs, what it predicts, its reports, and a small run on virtual devices."""

import contextlib
import dataclasses
import io
import json
import math
import types

import numpy as np
import pytest

from benchmarks.scaling import __main__, checks, collectives, from_speed, least, predict, report, stage
from benchmarks.scaling.cases import STUDIES
from benchmarks.scaling.collectives import Array, Collective
from benchmarks.scaling.measure import Result
from benchmarks.scaling.programs import read_program
from examples.language_model.sizes import SIZES, Size
from examples.language_model.training import TrainingConfig
from jax_fp4attn import recipes

TINY = STUDIES["tiny"]

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=2

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %permute.1 = u8[8,4]{1,0} collective-permute(%keys), source_target_pairs={{0,1},{1,0}}
  ROOT %tuple = (s32[], f32[8,4]) tuple(%i, %sums)
}

%async_computation (x: f32[16]) -> f32[8] {
  ROOT %scatter = f32[8]{0} reduce-scatter(%x), replica_groups=[1,2]<=[2], dimensions={0}, to_apply=%add
}

ENTRY %main (p0: f32[8,4]) -> f32[8,4] {
  %gather = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%p0), replica_groups={{0,1}}, dimensions={0}
  %gathered = f32[16,4]{1,0} all-gather-done(%gather)
  %shift = (bf16[6]{0}, bf16[6]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %shifted = bf16[6]{0} collective-permute-done(%shift)
  %scatter-start = ((f32[16]), f32[8]) async-start(%g), calls=%async_computation
  %scatter-done = f32[8] async-done(%scatter-start), calls=%async_computation
  %loop = (s32[], f32[8,4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %sum = (f32[5]{0}, bf16[2,3]{1,0}) all-reduce(%a, %b), replica_groups=mesh['data'=2,'model'=1] {'data'}, to_apply=%add
  %alone = f32[5]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add
  %begun = ((f32[7], u8[2]), (f32[7], u8[2])) all-reduce-start(%a, %b), replica_groups={{0,1}}, to_apply=%add
  %plain = (f32[9]{0}, u8[3]{0}) all-reduce-start(%a, %b), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = f32[8,4] copy(%p0), metadata={op_name="all-gather(x)"}
}
"""


class TestCollectives:
    def test_each_is_found_as_often_as_it_runs(self):
        found = [(x.kind, x.results, x.runs) for x in collectives.find(PROGRAM)]
        assert found == [
            ("all-gather", (Array("f32", (16, 4)),), 1),
            ("collective-permute", (Array("bf16", (6,)),), 1),
            ("reduce-scatter", (Array("f32", (8,)),), 1),
            ("collective-permute", (Array("u8", (8, 4)),), 3),
            ("all-reduce", (Array("f32", (5,)), Array("bf16", (2, 3))), 1),
            ("all-reduce", (Array("f32", (7,)), Array("u8", (2,))), 1),
            ("all-reduce", (Array("f32", (9,)), Array("u8", (3,))), 1),
        ]

    @pytest.mark.parametrize(
        ("kind", "devices", "sent"),
        [
            ("all-gather", 4, 75),
            ("all-to-all", 4, 75),
            ("all-reduce", 4, 150),
            ("reduce-scatter", 4, 300),
            ("collective-permute", 2, 100),
        ],
    )
    def test_what_is_sent(self, kind, devices, sent):
        assert Collective(kind, (Array("u8", (100,)),), devices, 2, "").sent_bytes == 2 * sent

    def test_what_is_gathered_besides_parameters(self):
        found = collectives.find(PROGRAM)
        assert collectives.gathered(found, {64}) == []
        assert collectives.gathered(found, {32}) == [Array("f32", (16, 4))]

    def test_another_text_is_refused(self):
        with pytest.raises(ValueError, match="program: expected the text of a compiled program"):
            collectives.find("stablehlo")

    @pytest.mark.parametrize(
        ("groups", "devices"),
        [
            ("replica_groups={{0,1},{2,3}}", 2),
            ("replica_groups=[2,4]<=[8]", 4),
            ("replica_groups=mesh['data'=2,'seq'=3,'model'=5] {'data','model'}", 10),
            ("replica_groups={}", 8),
        ],
    )
    def test_groups_of_devices(self, groups, devices):
        program = PROGRAM.replace("num_partitions=2", "num_partitions=8").replace("replica_groups={{0,1}}", groups)
        assert collectives.find(program)[0].devices == devices


def result(name, mesh, *, devices=2, seconds=0.1, tokens=256, length=128):
    return Result(
        name=name,
        mesh=mesh,
        devices=f"{devices} x cpu, 1 process(es)",
        tokens=tokens,
        length=length,
        parameters=1000,
        products=800,
        flops=6.0 * 800 * tokens * 2,
        losses=[3.0, 2.0],
        seconds=seconds,
    )


ONE = result("one device", "data=1,model=1", devices=1)


class TestPredict:
    def test_a_step_that_sends_nothing_has_full_efficiency(self):
        for devices, scaling in ((8, "strong"), (64, "weak")):
            found = predict.predict(result("FSDP", "data=2,model=1"), ONE, {}, devices, scaling)
            assert found.efficiency(overlapped=False) == found.efficiency(overlapped=True) == pytest.approx(1)

    def test_two_devices_send_what_was_counted(self):
        sent = {"all-gather": 10.0, "collective-permute": 5.0}
        assert predict.predict(result("FSDP", "data=2,model=1"), ONE, sent, 2, "strong").sent_bytes == 15

    @pytest.mark.parametrize(
        ("mesh", "kind", "scaling", "factor"),
        [
            ("data=2,model=1", "all-gather", "weak", 2 * 7 / 8),
            ("data=1,model=2", "all-reduce", "strong", 2 * 7 / 8),
            ("data=1,model=2", "all-reduce", "weak", 8 * 2 * 7 / 8),
            ("data=1,model=1,seq=2", "collective-permute", "strong", 2 * 7 / 8),
            ("data=1,model=1,seq=2", "collective-permute", "weak", 14),
            ("data=1,model=1,seq=2", "all-reduce", "weak", 2 * 7 / 8),
        ],
    )
    def test_what_eight_devices_send(self, mesh, kind, scaling, factor):
        found = predict.predict(result("x", mesh), ONE, {kind: 100.0}, 8, scaling)
        assert found.sent_bytes == pytest.approx(100 * factor)

    def test_attention_grows_with_the_square_of_a_ring(self):
        ring = result("long ring", "data=1,model=1,seq=2")
        assert predict.attention_part(ring) == 0.5
        assert predict.predict(ring, ONE, {}, 8, "weak").compute == pytest.approx(0.1 * (8 + 64) / 2 / 8)

    def test_communication_lowers_the_efficiency_unless_it_is_hidden(self):
        sent = {"all-reduce": predict.bandwidth(8) * 0.1 / 8 * 8 / 14}  # As long as an eighth of the step.
        found = predict.predict(result("FSDP", "data=2,model=1"), ONE, sent, 8, "strong")
        assert found.efficiency(overlapped=False) == pytest.approx(0.5)
        assert found.efficiency(overlapped=True) == pytest.approx(1)

    def test_hosts_are_linked_by_less(self):
        assert predict.bandwidth(8) == 9 * predict.bandwidth(9)


class TestFromSpeed:
    SIZE = Size(model=TINY.model, training=TrainingConfig(batch=2, sequence_length=128), arms=(), baseline=recipes.bf16)

    def test_a_table_follows_from_speed_and_bytes(self):
        sent = {"all-gather": predict.bandwidth(8) * 1e-3}
        rows = from_speed.markdown(self.SIZE, 64_000.0, sent).splitlines()[-2:]
        eight, sixty_four = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
        # 256 tokens take 4 ms; what two devices send in 1 ms, half of their arrays, eight send in 7/4 ms.
        assert eight[:3] == ["8", "2048", "4.0"]
        assert eight[4:] == ["1.75", "70% to 100%", "0.36 to 0.51"]
        assert sixty_four[:3] == ["64", "16384", "4.0"]
        assert sixty_four[4:] == ["17.72", "18% to 23%", "0.75 to 0.92"]

    def test_the_command_prints_and_writes_the_table(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(from_speed, "split_bytes", lambda size: {"all-reduce": 1e6 * size.training.batch})
        from_speed.main(["64000", "--out", str(tmp_path / "predicted.md")])
        text = (tmp_path / "predicted.md").read_text()
        assert text in capsys.readouterr().out
        assert "From 64000 tokens/s measured on one device" in text
        assert f"all-reduce {SIZES['gpu'].training.batch:.1f} MB" in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The cases of a tiny study in this process, and their report."""
    out = tmp_path_factory.mktemp("scaling")
    options = types.SimpleNamespace(recipe="train", minutes=math.inf)
    names = ("one device", "FSDP", "tensor parallel", "long one device by reference", "long ring")
    cases = [case for case in TINY.cases if case.name in names]
    with contextlib.redirect_stdout(io.StringIO()):
        stage.run_cases(cases, TINY, stage.load_corpus(), out / stage.CASES, options)
    return types.SimpleNamespace(
        out=out,
        text=report.write(out),
        results={x["name"]: Result(**x) for x in json.loads((out / stage.CASES).read_text())},
        program=lambda x: read_program(out / stage.PROGRAMS, x.name, x.parameter_sizes),
    )


@pytest.mark.slow
class TestRun:
    def test_every_case_is_measured(self, run):
        assert [x.reason for x in run.results.values()] == [""] * 5
        assert all(x.seconds > 0 and len(x.losses) == 5 for x in run.results.values())

    def test_losses_equal_those_of_one_device_within_rounding(self, run):
        one = run.results["one device"]
        rounding = np.abs(np.subtract(one.rounded_losses, one.losses)).max()
        assert rounding > 0
        for name in ("FSDP", "tensor parallel"):
            np.testing.assert_allclose(run.results[name].losses, one.losses, rtol=0, atol=rounding)
        ring, long = run.results["long ring"], run.results["long one device by reference"]
        np.testing.assert_allclose(ring.losses, long.losses, rtol=0, atol=rounding)

    def test_programs_gather_parameters_alone(self, run):
        assert "all it gathers are parameters" in run.text

    def test_a_ring_sends_what_it_has_to(self, run):
        ring = run.results["long ring"]
        sent = run.program(ring).sent_bytes
        expected = least.least_bytes(ring) - least.PARAMETER_BYTES * ring.parameters
        # Padding of heads of 32 channels to 64 doubles what travels.
        assert sent["collective-permute"] == pytest.approx(2 * expected, rel=0.01)
        # A CPU sums in float32.
        assert sent["all-reduce"] == pytest.approx(4 * ring.parameters, rel=0.001)

    def test_kernels_are_gathered_as_bfloat16(self, run):
        fsdp = run.results["FSDP"]
        float32 = 2 * TINY.model.vocabulary * TINY.model.width  # Embedding and head.
        scales = 3 * TINY.model.width  # Of the norms, which are whole everywhere.
        kernels = fsdp.parameters - float32 - scales
        program = run.program(fsdp)
        assert program.split_bytes["all-gather"] == (4 * float32 + 2 * kernels) / 2
        assert program.sent_bytes["all-gather"] == (4 * float32 + 4 * kernels) / 2
        # And their gradients are summed as such.
        assert program.split_bytes["all-reduce"] == pytest.approx(4 * float32 + 2 * kernels + 4 * scales, rel=0.001)

    def test_from_speed_counts_the_same_bytes(self, run):
        assert from_speed.split_bytes(TestFromSpeed.SIZE) == run.program(run.results["FSDP"]).split_bytes

    def test_a_report_has_every_part(self, run):
        for title in ("Cases", "Losses", "Communication"):
            assert f"## {title}\n" in run.text
        for name in run.results:
            assert f"| {name} " in run.text
        assert (run.out / "scaling.md").read_text() == run.text
        assert len((run.out / "losses.csv").read_text().splitlines()) == 1 + 5 * 5

    def test_times_of_virtual_devices_are_not_reported(self, run):
        assert "there are no times" in run.text
        for text in ("tokens/s", "Predicted"):
            assert text not in run.text

    def test_times_of_gpus_are_reported_and_predicted_from(self, run):
        results = {
            name: dataclasses.replace(x, devices=x.devices.replace("cpu", "NVIDIA H200"), seconds=0.5)
            for name, x in run.results.items()
        }
        programs = {name: run.program(x) for name, x in run.results.items()}
        text = report.markdown(results, programs, {}, [])
        assert "| tokens/s |" in text
        assert "there are no times" not in text
        predicted = text.split("## Predicted, not measured")[1]
        for name in ("FSDP", "tensor parallel", "long ring"):
            assert predicted.count(f"| {name} ") == 4


def test_a_case_that_fails_is_a_result(tmp_path, capsys):
    case = dataclasses.replace(TINY.cases[0], length=10**9)
    options = types.SimpleNamespace(recipe="train", minutes=math.inf)
    stage.run_cases([case], TINY, stage.load_corpus(), tmp_path / stage.CASES, options)
    assert "## Not measured\n\n- one device: ValueError" in report.write(tmp_path)
    assert "one device: ValueError" in capsys.readouterr().out


def test_no_case_is_begun_after_the_time_is_over(tmp_path):
    options = types.SimpleNamespace(recipe="train", minutes=-1)
    stage.run_cases(TINY.cases, TINY, None, tmp_path / stage.CASES, options)
    assert report.write(tmp_path).count(": out of time") == len(TINY.cases)


def test_checks_on_two_devices():
    found = checks.run()
    assert [x.passed for x in found] == [True] * 4 + [None] * 3


def test_stages_that_fail_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(__main__, "_command", lambda *_: ["false"])
    assert __main__.main(["--out", str(tmp_path), "--study", "tiny"]) == 1
    assert "Failed: one process, two processes." in capsys.readouterr().out
