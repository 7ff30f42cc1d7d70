import csv
import dataclasses

import pytest

from benchmarks.model import (
    __main__,
    cases,
    check,
    control_flow,
    evidence,
    images,
    pipes,
    published,
    records,
    report,
    schedule,
)
from benchmarks.model.cycles import Step, model_step, seconds
from benchmarks.model.machine import B200, B300, GB200, Rates, rates_of
from benchmarks.model.plot import write_plot
from benchmarks.model.sass import Instruction, Module, disassemble, find_nvdisasm, parse
from benchmarks.model.shapes import Shape
from benchmarks.model.warps import Warps, find_warps, products

RATES = Rates(mufu=8, barrier=0, tmem=0)


def line(text, address, **schedule_):
    """An instruction as nvdisasm -hex prints it."""
    fields = {"stall": 1, "write_barrier": 7, "read_barrier": 7, "wait_mask": 0, **schedule_}
    places = {"stall": 41, "write_barrier": 46, "read_barrier": 49, "wait_mask": 52}
    bits = sum(value << places[name] for name, value in fields.items())
    return f"        /*{address:04x}*/    {text} ;   /* 0x{0:016x} */\n        /* 0x{bits:016x} */\n"


def listing(code, name="kernel", target="sm_100a"):
    """Output of nvdisasm for a function whose lines are labels, instructions, or instructions with a schedule."""
    text, address = f"\t.target\t{target}\n.text.{name}:\n", 0
    for x in code:
        if isinstance(x, str) and x.endswith(":"):
            text += x + "\n"
            continue
        text += line(x, address) if isinstance(x, str) else line(x[0], address, **x[1])
        address += 16
    return text


def function(code, **kwargs):
    return parse(listing(code, **kwargs)).functions[0]


def turn(*opcodes):
    """Instructions by their opcodes, one clock apart."""
    return tuple(Instruction(16 * i, "", x, "") for i, x in enumerate(opcodes))


class TestSass:
    def test_parse_reads_instructions_with_their_schedules(self):
        code = [
            ".L_x_0:",
            ("@!P0 MUFU.EX2 R1, R2", {"stall": 8, "write_barrier": 3, "wait_mask": 0b101}),
            "BRA `(.L_x_0)",
        ]
        module = parse(listing(code))
        assert module.target == "sm_100a"
        assert module.functions[0].name == "kernel"
        first, second = module.functions[0].instructions
        assert first == Instruction(0, "@!P0", "MUFU.EX2", "R1, R2", None, 8, 3, 7, 0b101)
        assert (first.operation, first.modifiers) == ("MUFU", ("EX2",))
        assert (second.opcode, second.target) == ("BRA", 0)

    def test_parse_separates_functions(self):
        text = listing(["EXIT"], name="a") + listing(["NOP", "EXIT"], name="b").partition("\n")[2]
        assert [(x.name, len(x.instructions)) for x in parse(text).functions] == [("a", 1), ("b", 2)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (listing(["EXIT"]).replace(f"/* 0x{0:016x} */", "/* */").replace("0x", ""), "no encoding"),
            ("nothing", "nvdisasm"),
        ],
    )
    def test_parse_refuses_other_output(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse(text)

    def test_a_missing_nvdisasm_is_said(self, monkeypatch):
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.setattr("sys.path", [])
        with pytest.raises(FileNotFoundError, match="extra 'build'"):
            find_nvdisasm()


# A loop over items, in it a loop over tiles that waits in a loop out of line, and masks some tiles.
NESTED = [
    "MOV R0, RZ",
    ".L_items:",
    "MOV R1, RZ",
    ".L_tiles:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",
    "@!P0 BRA `(.L_spin)",
    ".L_there:",
    "LDTM.x32 R4, tmem[UR4]",
    "BRA.U UP0, `(.L_skip)",
    "FSEL R4, R4, R5, P1",
    "FSEL R5, R4, R5, P1",
    ".L_skip:",
    "STTM.x16 tmem[UR4], R4",
    "@P0 BRA `(.L_tiles)",
    "@P1 BRA `(.L_items)",
    "EXIT",
    ".L_spin:",
    "NANOSLEEP 0x20",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",
    "@!P0 BRA `(.L_spin)",
    "BRA `(.L_there)",
]


class TestControlFlow:
    def test_loops_are_nested(self):
        flow = control_flow.analyze(function(NESTED))
        (items,) = flow.loops
        (tiles,) = items.inner
        (spin,) = tiles.inner
        assert items.header == 16 * 1
        assert tiles.header == 16 * 2
        assert spin.blocks < tiles.blocks < items.blocks
        assert [x.header for x in flow.all_loops()] == [spin.header, tiles.header, items.header]

    def test_the_steady_turn_neither_waits_nor_masks(self):
        flow = control_flow.analyze(function(NESTED))
        steady = flow.steady_turn(flow.loops[0].inner[0], pipes.tmem_columns)
        assert [x.operation for x in steady] == ["SYNCS", "BRA", "LDTM", "BRA", "STTM", "BRA"]

    def test_the_steady_turn_does_not_leave_the_work_out(self):
        code = [".L_x_0:", "@P0 BRA `(.L_x_1)", "LDTM.x32 R4, tmem[UR4]", ".L_x_1:", "@P1 BRA `(.L_x_0)", "EXIT"]
        flow = control_flow.analyze(function(code))
        assert len(flow.steady_turn(flow.loops[0], pipes.tmem_columns)) == 3
        assert len(flow.steady_turn(flow.loops[0], lambda x: 0)) == 2

    def test_a_loop_that_waits_in_line_is_gone_through_once(self):
        code = [
            ".L_x_0:",
            "NOP",
            ".L_x_1:",
            "SYNCS.PHASECHK.TRYWAIT P0, [R3], R4",
            "@!P0 BRA `(.L_x_1)",
            "BRA `(.L_x_0)",
        ]
        flow = control_flow.analyze(function(code))
        assert [x.operation for x in flow.steady_turn(flow.loops[0], lambda x: 0)] == ["NOP", "SYNCS", "BRA", "BRA"]

    def test_code_behind_computed_jumps_has_loops_too(self):
        code = ["BRX R4 -0x10", ".L_x_0:", "NOP", "@P0 BRA `(.L_x_0)", "EXIT"]
        assert [x.header for x in control_flow.analyze(function(code)).loops] == [16]

    def test_straight_code_has_no_loop(self):
        assert control_flow.analyze(function(["MOV R0, R1", "@P0 EXIT", "EXIT"])).loops == ()


class TestPipes:
    @pytest.mark.parametrize(
        ("opcode", "pipe", "unit", "clocks"),
        [
            ("FFMA", "fma", "fma", 1),
            ("FFMA2", "fma", "fma", 2),
            ("IMAD.MOV.U32", "fma", "fma", 2),
            ("FMNMX3", "alu", "alu", 2),
            ("F2FP.SATFINITE.RELU.E2M1.F32.PACK_AB_MERGE_C", "conversion", "alu", 2),
            ("F2FP.BF16.F32.PACK_AB", "conversion", "alu", 2),
            ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "conversion", "alu", 4),
            ("MUFU.EX2", "mufu", "mufu", 8),
            ("LDTM.x32", "tmem load", "tmem load", 32),
            ("LDTM.STAT.x32.MAX.F32", "tmem load", "tmem load", 32),
            ("STTM", "tmem store", "tmem store", 1),
            ("STS.64", "shared", "shared", 4),
            ("SYNCS.ARRIVE.TRANS64", "barrier", "barrier", 1),
            ("UIADD3", "uniform", "uniform", 1),
            ("UTCHMMA", "other", "other", 1),
            ("LDG.E", "other", "other", 1),
            ("BRA", "other", "other", 1),
        ],
    )
    def test_pipes_and_clocks(self, opcode, pipe, unit, clocks):
        (x,) = turn(opcode)
        assert pipes.pipe_of(x) == pipe
        assert pipe in pipes.PIPES
        assert pipes.issue_clocks(x, RATES) == (unit, clocks)

    def test_loads_with_maxima_may_be_slower(self):
        (x,) = turn("LDTM.STAT.x32.MAX.F32.NAN")
        assert pipes.issue_clocks(x, dataclasses.replace(RATES, maxima=2)) == ("tmem load", 64)

    def test_an_unknown_opcode_is_refused(self):
        with pytest.raises(ValueError, match=r"FROB\.X"):
            pipes.pipe_of(turn("FROB.X")[0])

    def test_a_group_names_no_operation_of_another(self):
        names = [name for names in pipes._OPERATIONS.values() for name in set(names.split())]
        assert len(names) == len(set(names))
        assert set(pipes._OPERATIONS) == set(pipes.PIPES)


SOFTMAX_BODY = [
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",
    *[("LDTM.x32 R4, tmem[UR4]", {"write_barrier": 0})] * 4,
    ("FMNMX3 R4, R5, R6, R7, !PT", {"wait_mask": 1}),
    *["FMNMX3 R4, R5, R6, R7, !PT"] * 63,
    *["F2FP.BF16.F32.PACK_AB R4, R5, R6"] * 64,
    *["STTM.x16 tmem[UR4], R4"] * 4,
    "SYNCS.ARRIVE.TRANS64 RZ, [R3], R4",
]


def loop(label, *body):
    return [f"{label}:", *body, f"@P0 BRA `({label})"]


def kernel(softmax):
    """A kernel with an epilogue that loads, converts and stores, and a warp that issues products."""
    return [
        *softmax,
        *loop(".L_epilogue", *["LDTM.x32 R4, tmem[UR4]"] * 4, *["F2FP.BF16.F32.PACK_AB R4, R5, R6"] * 64, "STTM R4"),
        *loop(
            ".L_rescale", "@P1 BRA `(.L_skip)", "LDTM.x32 R4, tmem[UR4]", "STTM.x32 tmem[UR4], R4", ".L_skip:", "NOP"
        ),
        *loop(
            ".L_issue",
            *["UTCHMMA tmem[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT"] * 4,
            *["UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT"] * 2,
        ),
        "EXIT",
    ]


class TestWarps:
    def test_the_loops_are_told_apart_by_what_they_do(self):
        warps = find_warps(function(kernel(loop(".L_softmax", *SOFTMAX_BODY))))
        assert len(warps.softmax[0]) == len(SOFTMAX_BODY) + 1
        assert warps.softmax[0] == warps.softmax[1]
        assert (warps.fragments, warps.tiles) == (8, 1)
        assert [x.operation for x in warps.correction] == ["BRA", "NOP", "BRA"]
        assert products(warps.issue) == (2, 4)

    def test_of_a_masked_and_an_unmasked_loop_the_unmasked_one_counts(self):
        masked = loop(".L_masked", *SOFTMAX_BODY[:5], *["FSEL R4, R5, R6, P1"] * 128, *SOFTMAX_BODY[5:])
        warps = find_warps(function(kernel([*masked, *loop(".L_softmax", *SOFTMAX_BODY)])))
        assert len(warps.softmax[0]) == len(SOFTMAX_BODY) + 1

    def test_query_tiles_may_have_code_of_their_own(self):
        first = loop(".L_items0", "NOP", *loop(".L_softmax0", *SOFTMAX_BODY))
        second = loop(".L_items1", "NOP", *loop(".L_softmax1", *SOFTMAX_BODY, "NOP"))
        warps = find_warps(function(kernel([*first, *second])))
        assert [len(x) for x in warps.softmax] == [len(SOFTMAX_BODY) + 1, len(SOFTMAX_BODY) + 2]

    def test_what_is_loaded_again_is_not_counted_again(self):
        again = [*SOFTMAX_BODY[:5], "LDTM.x16 R4, tmem[UR4]", *SOFTMAX_BODY[5:]]
        assert find_warps(function(kernel(loop(".L_softmax", *again)))).tiles == 1

    def test_a_kernel_without_softmax_has_no_such_loops(self):
        assert find_warps(function(kernel(["NOP"]))) is None


SIMPLE = turn("SYNCS.PHASECHK", "LDTM.x32", "MUFU.EX2", "STTM.x16", "SYNCS.ARRIVE")


def simple_turn(num_exponentials):
    """A turn that loads, computes exponentials, stores, and waits for load and store by scoreboard barriers."""
    wait, load, _, store, arrive = SIMPLE
    return (
        wait,
        dataclasses.replace(load, write_barrier=0),
        dataclasses.replace(turn("MUFU.EX2")[0], wait_mask=1),
        *turn(*["MUFU.EX2"] * (num_exponentials - 1)),
        store,
        dataclasses.replace(turn("FENCE.VIEW.ASYNC.T")[0], write_barrier=1),
        dataclasses.replace(arrive, wait_mask=2),
    )


class TestSchedule:
    def test_marks(self):
        marks = schedule.find_marks(turn("SYNCS.PHASECHK", *(x.opcode for x in SIMPLE), "SYNCS.ARRIVE"))
        assert marks == schedule.Marks(scores=1, loaded=None, first=5, last=5, share=1.0)

    def test_marks_of_probabilities_in_two_parts_and_of_loaded_scores(self):
        opcodes = ["SYNCS.PHASECHK", "LDTM.x32", "SYNCS.ARRIVE", "STTM.x16", "STTM.x32", "SYNCS.ARRIVE", "STTM.x16"]
        marks = schedule.find_marks(turn(*opcodes, "SYNCS.ARRIVE", "SYNCS.ARRIVE"))
        assert marks == schedule.Marks(scores=0, loaded=2, first=5, last=7, share=0.75)

    def test_a_turn_without_hand_offs_is_refused(self):
        with pytest.raises(ValueError, match="arrival"):
            schedule.find_marks(turn("SYNCS.PHASECHK", "LDTM.x32", "STTM.x32"))

    def test_the_dependency_path_is_the_sum_of_its_parts(self):
        rates = Rates(mufu=8, barrier=80, tmem=220)
        path = schedule.dependency_path(simple_turn(3), schedule.Products(scores=100, output=50), rates)
        assert path.load == 80 + 1 + 32 + 220
        assert path.compute == 2 * 8 + 1
        assert path.store == 16 + 220
        assert path.first_output == path.load + path.compute + path.store + 80
        assert path.total == path.first_output + 50 + 100

    def test_stall_counts_keep_instructions_apart(self):
        slow = tuple(dataclasses.replace(x, stall=20) for x in simple_turn(3))
        path = schedule.dependency_path(slow, schedule.Products(0, 0), RATES)
        assert path.compute == 3 * 20

    def test_the_first_part_of_probabilities_starts_the_product(self):
        early = (*simple_turn(3), *simple_turn(3)[2:])
        path = schedule.dependency_path(early, schedule.Products(100, 80), RATES)
        assert schedule.find_marks(early).share == 0.5
        assert path.total == path.first_output + 80 + 100

    def test_a_slow_tensor_core_sets_the_period(self):
        turns = (simple_turn(3), simple_turn(3))
        assert schedule.period(turns, (), schedule.Products(500, 700), RATES) == 2 * (500 + 700)

    def test_slow_exponentials_of_both_tiles_set_the_period(self):
        turns = (simple_turn(100), simple_turn(100))
        assert schedule.period(turns, (), schedule.Products(10, 10), RATES) == pytest.approx(2 * 100 * 8, rel=0.02)

    def test_an_idle_machine_is_bound_by_the_path(self):
        rates = Rates(mufu=8, barrier=500, tmem=0)
        path = schedule.dependency_path(simple_turn(3), schedule.Products(10, 10), rates)
        found = schedule.period((simple_turn(3),) * 2, (), schedule.Products(10, 10), rates)
        assert path.total <= found <= path.total + 2 * (10 + 10)

    def test_issue_slots_are_shared_with_the_correction(self):
        rates = Rates(mufu=1, barrier=0, tmem=0)
        busy = turn(*["SYNCS.PHASECHK", "LDTM", *["NOP"] * 300, "STTM", "SYNCS.ARRIVE"])
        alone = schedule.period((busy, busy), (), schedule.Products(1, 1), rates)
        shared = schedule.period((busy, busy), turn(*["NOP"] * 100), schedule.Products(1, 1), rates)
        assert alone == pytest.approx(2 * len(busy), rel=0.02)
        assert shared == pytest.approx(alone + 100, rel=0.02)

    def test_scores_that_must_be_loaded_first_delay_the_other_tile(self):
        """Each Q K waits until the other tile's scores are loaded, so that a step has both loads in turn."""
        wait, load, *rest = simple_turn(1)
        after = dataclasses.replace(turn("SYNCS.ARRIVE")[0], wait_mask=1)
        slow_load = dataclasses.replace(load, opcode="LDTM.x128")
        rates = Rates(mufu=1, barrier=400, tmem=0)
        free = schedule.period(((wait, slow_load, *rest),) * 2, (), schedule.Products(1, 1), rates)
        tied = schedule.period(((wait, slow_load, after, *rest),) * 2, (), schedule.Products(1, 1), rates)
        assert free < tied
        assert tied == pytest.approx(2 * (400 + 128 + 400), rel=0.05)

    def test_a_product_that_never_comes_is_an_error(self):
        never = schedule.Warp(SIMPLE, RATES, gate=lambda index, turn: float("inf"))
        with pytest.raises(RuntimeError, match="waits"):
            schedule.run([never], lambda: False)


def made_warps(num_exponentials=8):
    issue = function(kernel(loop(".L_softmax", *SOFTMAX_BODY)))
    softmax = simple_turn(num_exponentials)
    load = dataclasses.replace(softmax[1], opcode="LDTM.x128")
    return dataclasses.replace(find_warps(issue), softmax=((softmax[0], load, *softmax[2:]),) * 2, correction=())


class TestCycles:
    def test_units_of_a_step(self):
        step = model_step(made_warps(), Rates(mufu=8))
        assert step.units["tensor core"] == 6 * 79
        assert step.units["mufu"] == 2 * 8 * 8
        assert step.units["tmem load"] == 2 * 128
        assert step.units["issue"] == 2 * len(made_warps().softmax[0]) + 7
        assert step.path.total <= step.period

    def test_bounds(self):
        step = model_step(made_warps(), Rates(mufu=8))
        assert step.bound == "dependency path"
        assert dataclasses.replace(step, units={"alu": step.period, "fma": 1}).bound == "alu"
        assert model_step(made_warps(), Rates(mufu=8, product=2000)).bound == "tensor core"

    def test_a_turn_of_another_size_is_refused(self):
        warps = dataclasses.replace(made_warps(), softmax=(simple_turn(1),) * 2)
        with pytest.raises(ValueError, match="key tiles"):
            model_step(warps, RATES)

    def test_seconds(self):
        path = schedule.DependencyPath(0, 0, 0, 0, total=3000)
        step = Step({"alu": 0}, path, period=2000)
        machine = dataclasses.replace(B200, multiprocessors=10, clock=1e9)
        # Four items of four steps, one each.
        assert seconds(step, machine, Shape(1, 512, 2)) == pytest.approx((3 * 2000 + 2 * 3000) * 1e-9)
        # Two multiprocessors: two items each.
        machine = dataclasses.replace(machine, multiprocessors=2)
        assert seconds(step, machine, Shape(1, 512, 2)) == pytest.approx(2 * (3 * 2000 + 2 * 3000) * 1e-9)


class TestShapes:
    def test_flop(self):
        assert Shape(2, 1024, 3).flop == 4 * 2 * 3 * 1024**2 * 128
        assert Shape(2, 1024, 3, causal=True).flop == Shape(2, 1024, 3).flop / 2

    def test_waves_of_items(self):
        assert Shape(1, 4096, 24).most_loaded(152) == (3 * 32, 3)

    def test_causal_steps(self):
        # Two items of a head: two and four key tiles.
        assert Shape(1, 512, 8, causal=True).most_loaded(4) == (8 * (2 + 4) / 4, 16 / 4)
        # The longest item is not split.
        assert Shape(1, 512, 1, causal=True).most_loaded(100) == (4, 1)


def test_rates_follow_the_exponentials():
    assert rates_of(B200.exponentials).mufu == 8
    assert rates_of(B300.exponentials).mufu == 4


def made_record(kernel, period=2000.0, fragment=None, exponentials=16, target="sm_100a"):
    fragment = dict.fromkeys(pipes.PIPES, 0.0) | (fragment or {"fma": 50.0, "barrier": 2.0})
    path = schedule.DependencyPath(300.0, 500.0, 200.0, 1100.0, 1800.0)
    units = dict.fromkeys(records.UNITS, 100.0) | {"alu": 900.0}
    return records.Record(kernel, "code", target, exponentials, fragment, Step(units, path, period))


class TestRecords:
    def test_count(self):
        warps = find_warps(function(kernel(loop(".L_softmax", *SOFTMAX_BODY))))
        record = records.count("fast", "x.cubin", "sm_100a", 16, warps)
        assert record.fragment["alu"] == 16
        assert record.fragment["conversion"] == 16
        assert record.fragment["tmem load"] == 1
        assert record.arithmetic == 32
        assert record.instructions == (len(SOFTMAX_BODY) + 1) / 4
        assert record.runs_on(B200)
        assert not record.runs_on(B300)

    def test_csv_gives_back_what_was_written(self, tmp_path):
        written = [made_record("a"), made_record("b", exponentials=32)]
        records.write_csv(tmp_path / "x.csv", written)
        assert records.read_csv(tmp_path / "x.csv") == written
        with (tmp_path / "x.csv").open() as file:
            assert [row["period"] for row in csv.DictReader(file)] == ["2000", "2000"]

    def test_kernels_are_found_by_their_functions(self):
        code = kernel(loop(".L_softmax", *SOFTMAX_BODY))
        module = Module(
            "sm_100", (function(code, name="blackwell_forward_h128_square_3"), function(["EXIT"], name="x"))
        )
        assert cases.ours(module) == {"blackwell_forward_h128_square_3": "square"}
        assert list(records.find_kernels(module, cases.ours(module))) == ["square"]


class TestCheck:
    def test_comparisons_use_the_kernel_of_the_recipe_and_the_gpu(self):
        known = [made_record("fp8_pv"), made_record("fp8_pv", period=1000.0, exponentials=32)]
        shape = Shape(1, 32768, 24)
        rows = [
            published.Row("fp8_pv", GB200, shape, 1.0, "x"),
            published.Row("train", B300, shape, 1.0, "x"),
            published.Row("fast", B300, shape, 1.0, "x"),
        ]
        first, second = check.compare(known, rows)
        assert first.seconds == seconds(known[0].step, GB200, shape)
        assert second.seconds == seconds(known[1].step, B300, shape)
        assert first.error == pytest.approx(first.seconds - 1)

    def test_a_gpu_takes_the_code_that_is_for_the_fewest(self):
        family = [made_record("fast", target="sm_100", exponentials=x) for x in (16, 32)]
        own = made_record("fast", period=1500.0, target="sm_103a", exponentials=32)
        alone = made_record("square", target="sm_100", exponentials=32)
        known = [*family, alone, own]
        assert images.taken(known, B200) == [family[0]]
        assert images.taken(known, B300) == [own, alone]
        assert check.find(known, "fast", B300) == own
        (saving,) = images.savings(known, B300, {"fast": 1600.0})
        assert (saving.family, saving.own, saving.slow_loads, saving.time) == (family[1], own, 1600.0, 0.75)

    def test_targets(self):
        of_fast = {"fma": 40.0, "alu": 42.0, "uniform": 9.0}
        known = [made_record("fast", fragment=of_fast), made_record("square", period=2300.0, fragment={"fma": 100.0})]
        found = check.targets(known, [B200, B300])
        assert [(x.value, x.limit, x.met) for x in found] == [
            (82, 82, True),
            (100, 99, False),
            (pytest.approx(1.15), 1.13, False),
        ]

    def test_published_rows_are_plausible(self):
        rows = list(published.rows())
        assert len({(x.kernel, x.machine.name, x.shape) for x in rows}) == len(rows)
        assert all(300 < x.shape.flop / x.seconds / 1e12 < 3500 for x in rows)
        assert {sum(x.values()) for x in published.DESIGN_FRAGMENT.values()} == {82, 99}


class TestEvidence:
    def test_stalls_between_neighbours(self):
        first, second, third = turn("MUFU.EX2", "MUFU.EX2", "FFMA2")
        code = (dataclasses.replace(first, stall=8), second, third, third)
        assert evidence.stalls_between_neighbours([code]) == {"MUFU": {8: 1}, "FFMA2": {1: 1}}

    def test_variations(self):
        found = evidence.vary(made_warps(), Rates(mufu=8))
        assert set(found) == {*evidence.VARIATIONS, evidence.WITHOUT_ARITHMETIC}
        assert found["barriers at once"] < found["as assumed"]
        assert found["tmem latency halved"] < found["as assumed"]
        assert found["no arithmetic"] == evidence.vary(made_warps(num_exponentials=1), Rates(mufu=8))["no arithmetic"]


def test_reports(tmp_path):
    known = [made_record("fast"), made_record("square", period=2200.0)]
    comparisons = check.compare(known, [published.Row("fast", GB200, Shape(1, 4096, 24), 1e-4, "somewhere")])
    findings = report.Findings(
        known,
        comparisons,
        ["nvfp4_pv"],
        check.targets(known, [B200]),
        {"fast": dict.fromkeys(evidence.VARIATIONS, 1500.0)},
        [images.Saving(known[0], made_record("fast", period=1000.0, target="sm_103a"), 1100.0)],
        {"MUFU": {8: 20}},
        ["counted"],
    )
    text = report.markdown(findings)
    assert "Nothing here was measured" in text
    assert "| fast | sm_100a | 52 | 50 | 50 |" in text
    assert "| fast | sm_100a | 100 | 100 | 900 |" in text
    assert "| fast | 52 | 52 | 0 | 0 | 2000 | 1000 | 0.500 | 1100 |" in text
    assert "| 300 | 500 | 200 | 1100 | 1800 | 2000 | alu, 45% | dependency path |" in text
    assert "| 1.13 | 1.1 | met |" in text
    assert f"| 0.1 | {comparisons[0].seconds * 1e3:.4g} | {comparisons[0].error:+.1%} | somewhere |" in text
    assert "Without a kernel to model: nvfp4_pv." in text
    assert "| MUFU | 8: 20 |" in text
    write_plot(tmp_path / "x.png", known, comparisons)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_cubin_there_is_nothing_to_model(tmp_path, capsys):
    assert __main__.main(["--cubin", str(tmp_path / "x.cubin"), "--out", str(tmp_path / "out")]) == 1
    assert "run make native" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_flash_attention_4_is_recorded_for_both_kinds_of_multiprocessor():
    recorded = [x for x in records.read_csv(__main__.RESULTS / "model.csv") if x.kernel == published.FLASH_ATTENTION_4]
    assert {(x.target, x.exponentials) for x in recorded} == {("sm_100a", 16), ("sm_103a", 32)}
    # 64 conversions of two for 128 scores, and the exponentials that no polynomial replaces.
    assert all(x.fragment["conversion"] == 16 and x.fragment["mufu"] > 16 for x in recorded)


def _skip_without(cubins):
    missing = next((cubin for cubin in cubins if not cubin.is_file()), None)
    if missing is not None:
        pytest.skip(f"there is no {missing.name}: run make native")
    try:
        find_nvdisasm()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=cases.CUBINS, ids=lambda cubin: cubin.name)
def built(request):
    """Code of each of the project's cubins for Blackwell."""
    _skip_without([request.param])
    return disassemble(request.param)


@pytest.fixture(scope="module")
def kernels(built) -> dict[str, Warps]:
    return records.find_kernels(built, cases.ours(built))


class TestBuilt:
    def test_every_opcode_has_a_pipe(self, built):
        for opcode in {x.opcode for f in built.functions for x in f.instructions}:
            pipes.pipe_of(turn(opcode)[0])

    def test_jumps_have_targets(self, built):
        for f in built.functions:
            addresses = {x.address for x in f.instructions}
            assert all(x.target in addresses for x in f.instructions if x.operation == "BRA")

    def test_every_recipe_has_its_loops(self, kernels):
        assert set(kernels) >= set(cases.RECIPES.values())
        for warps in kernels.values():
            assert warps.tiles == 1
            assert sum(x.operation == "F2FP" for x in warps.softmax[0]) == 64
            of_scores, of_output = products(warps.issue)
            assert of_scores == 4  # Two K64 of NVFP4 in each query tile.
            assert of_output in (4, 8)  # Two K64 of MXFP4, or four K32 of E4M3.

    def test_exponentials_are_where_the_recipe_has_them(self, kernels):
        count = {name: sum(x.opcode == "MUFU.EX2" for x in warps.softmax[1]) for name, warps in kernels.items()}
        assert count["square"] == count["fast"]
        assert count["accurate"] - count["fast"] == 128 / 4
        assert count["exact_map"] - count["fast"] == 128

    def test_stall_counts_are_not_below_the_rates(self, built, kernels):
        stalls = evidence.stalls_between_neighbours(x for warps in kernels.values() for x in warps.softmax)
        rates = rates_of(records.exponentials_of(built.target)[0])
        for operation, clocks in {
            "MUFU": rates.mufu,
            "FFMA2": rates.packed,
            "F2FP": rates.alu,
        }.items():
            assert min(stalls[operation]) == clocks

    def test_maxima_are_taken_by_loads_or_by_the_alu(self, built, kernels):
        for warps in kernels.values():
            for turn in warps.softmax:
                by_loads = any(pipes.takes_maximum(x) for x in turn)
                by_alu = sum(x.operation == "FMNMX3" for x in turn)
                assert by_loads == (built.target == "sm_103a")
                assert by_alu < 8 if by_loads else by_alu >= 60


def test_the_report_is_made_with_recorded_counts_of_flash_attention_4(tmp_path, capsys):
    _skip_without(cases.CUBINS)
    assert __main__.main(["--out", str(tmp_path)]) == 0
    text = (tmp_path / "model.md").read_text()
    assert "as recorded in model.csv" in text
    assert capsys.readouterr().out == text + "\n"
    written = records.read_csv(tmp_path / "model.csv")
    assert {x.kernel for x in written} >= {*cases.RECIPES.values(), published.FLASH_ATTENTION_4}
    assert (tmp_path / "model.png").is_file()
    kept = records.read_csv(__main__.RESULTS / "model.csv")
    assert written == kept, "the results are of other kernels: run python -m benchmarks.model and renew docs"
