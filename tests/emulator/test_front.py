import numpy as np
import pytest

from cuda.emulator import EmulationError, MemoryFaultError, Output, Struct, TensorMap, emulate
from tests.emulator.text import module, store_words

COPY = module(
    """
    ld.param.u64 %d1, [a0]; ld.param.u64 %d2, [a1];
    mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
    add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
    ld.global.b32 %r2, [%d1]; st.global.b32 [%d2], %r2;
    """,
    "pp",
)


def test_arrays_are_copied_for_every_seed():
    source, target = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    result = emulate(COPY, [source, Output(target)], 1, seeds=range(3))
    assert [len(run) for run in result.arrays] == [2, 2, 2]
    for run in result.arrays:
        np.testing.assert_array_equal(run[1], source)
    assert not target.any() and not result.varying and not result.findings
    assert result.instructions == 3 * 9


def test_an_array_in_two_arguments_is_one_buffer():
    array = np.arange(32, dtype=np.uint32)
    (run,) = emulate(COPY, [array, array], 1).arrays
    assert len(run) == 1
    np.testing.assert_array_equal(run[0], array)


def test_scalars_reach_the_kernel():
    body = "ld.param.u32 %r1, [a1]; ld.param.f32 %f1, [a2];" + store_words(["%r1", "%f1"])
    out = np.zeros((2, 32), np.uint32)
    (run,) = emulate(module(body, "pif"), [Output(out), -2, 1.5], 1).arrays
    assert (run[0][0] == 0xFFFFFFFE).all() and (run[0][1].view(np.float32) == 1.5).all()
    (run,) = emulate(module(body, "pif"), [Output(out), np.uint32(7), b"\0\0\0\x40"], 1).arrays
    assert (run[0][0] == 7).all() and (run[0][1].view(np.float32) == 2.0).all()


def test_structs_hold_pointers():
    text = module(
        "ld.param.u64 %d1, [a0+8]; ld.param.u32 %r1, [a0]; mov.u32 %r2, %tid.x;"
        "setp.ne.u32 %p1, %r2, 0; @!%p1 st.global.b32 [%d1], %r1;",
        "m",
    )
    data = (5).to_bytes(4, "little") + bytes(124)
    (run,) = emulate(text, [Struct(data, {8: Output(np.zeros(1, np.uint32))})], 1).arrays
    assert run[0][0] == 5


def test_reading_an_output_before_it_is_written_is_a_fault():
    with pytest.raises(
        MemoryFaultError, match=r"line \d+: ld.global.b32.*never written(.|\n)*warp 0 of CTA(.|\n)*seed 4"
    ):
        emulate(COPY, [Output(np.zeros(32, np.uint32)), np.zeros(32, np.uint32)], 1, seeds=[4])


def test_instructions_need_registers_that_were_written():
    text = module("ld.param.u64 %d1, [a0]; add.s64 %d1, %d1, 0; st.global.b32 [%d2], 1;", "p")
    with pytest.raises(
        EmulationError, match=r"st.global.b32 \[%d2\], 1: the register %d2 is read but was never written"
    ):
        emulate(text, [np.zeros(1, np.uint32)], 1)


def test_registers_that_nothing_writes_are_found_in_the_text():
    result = emulate(module("add.s32 %r2, %r1, 1;" + store_words(["%r2"]), "p"), [np.zeros((1, 32), np.uint32)], 1)
    (finding,) = result.findings
    assert finding.kind == "register" and "add.s32 %r2, %r1, 1 reads %r1, which nothing writes" in finding.text


def test_lanes_in_which_a_register_was_never_written_do_not_look_right():
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 3; @%p1 mov.u32 %r2, %r1;" + store_words(["%r2"])
    (run,) = emulate(module(body, "p"), [Output(np.zeros((1, 32), np.uint32))], 1).arrays
    np.testing.assert_array_equal(run[0][0], [0, 1, 2, *[0xFFC0DEAD] * 29])


def test_guarded_instructions_that_do_not_run_need_nothing():
    body = """
    mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 99; ld.param.u64 %d1, [a0];
    @%p1 ld.global.b32 %r2, [%d1]; @%p1 add.s32 %r3, %r2, 1; @%p1 mov.b32 %r4, %r3; @%p1 st.global.b32 [%d1], %r4;
    """
    result = emulate(module(body, "p"), [Output(np.zeros(1, np.uint32))], 1)
    assert not result.findings


def test_results_that_differ_between_schedules_are_told():
    # All CTAs take a ticket; who gets which is up to the schedule.
    text = module(
        """
        ld.param.u64 %d1, [a0]; ld.param.u64 %d2, [a1]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 ret;
        atom.global.add.u32 %r2, [%d1], 1;
        mov.u32 %r3, %ctaid.x; mul.wide.u32 %d3, %r3, 4; add.s64 %d2, %d2, %d3; st.global.b32 [%d2], %r2;
        """,
        "pp",
    )
    arguments = [np.zeros(1, np.uint32), Output(np.zeros(8, np.uint32))]
    result = emulate(text, arguments, 8, seeds=range(8), resident=8)
    assert result.varying == [1] and not result.findings
    for run in result.arrays:
        assert run[0][0] == 8 and sorted(run[1]) == list(range(8))
    assert not emulate(text, arguments, 8, seeds=range(4)).varying


_WORDS, _OTHER_WORDS = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
_TWO = [_WORDS, _OTHER_WORDS]


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ([np.zeros(32, np.uint32)], {}, "2 parameters, not 1"),
        ([np.zeros(32, np.uint32), b"\0"], {}, "1 bytes for 8"),
        ([np.zeros(32, np.uint32), object()], {}, "type object is not supported"),
        ([np.zeros(32, np.uint32)] * 2, {"block": 64}, "blocks of \\(32, 1, 1\\), not \\(64, 1, 1\\)"),
        ([np.zeros(32, np.uint32)] * 2, {"cluster": 2}, "no multiple of the cluster"),
        (_TWO, {"grid": 0}, "the grid must have at least 1 .* not 0"),
        (_TWO, {"grid": (2, -1)}, "the grid must have at least 1"),
        (_TWO, {"grid": ()}, "the grid must have at least 1"),
        (_TWO, {"grid": (1, 1, 1, 7)}, "one to three of them"),
        (_TWO, {"grid": 1.5}, "the grid must be an int"),
        (_TWO, {"cluster": 0}, "the cluster must have at least 1"),
        (_TWO, {"grid": 32, "cluster": 32}, "32 CTAs; k takes at most 16"),
        (_TWO, {"resident": 0}, "resident must be at least 1"),
        (_TWO, {"shared_bytes": -5}, "shared_bytes must be 0 to 232448 beside 0 static bytes, not -5"),
        (_TWO, {"shared_bytes": 232449}, "not 232449"),
        ([_WORDS, [1, 2]], {}, "type list is not supported"),
        ([_WORDS, _WORDS[1:]], {}, "overlap"),
        ([_WORDS, TensorMap.for_array(_WORDS.view(np.float32), [32])], {}, "overlap"),
        ([_WORDS, np.array([None] * 32)], {}, "arrays of object"),
        ([_WORDS, Output(Output(_WORDS))], {}, "an Output holds an array, not one of type Output"),
        ([_WORDS, TensorMap.for_array(_OTHER_WORDS, [32])], {}, "128 bytes at 0 of a parameter of 8"),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        emulate(COPY, arguments, **{"grid": 1} | options)


def test_seeds_are_several():
    with pytest.raises(TypeError, match=r"range\(3\)"):
        emulate(COPY, _TWO, 1, seeds=3)
    assert len(emulate(COPY, _TWO, 1, seeds=np.arange(3)).arrays) == 3


def test_shapes_may_be_numpy_integers():
    assert emulate(COPY, _TWO, np.int64(2), races=False).instructions == 2 * 9
    assert emulate(COPY, _TWO, np.array([2, 1]), races=False, block=np.array([32])).instructions == 2 * 9


def test_arrays_that_interleave_without_a_common_byte_are_different():
    both = np.arange(64, dtype=np.uint32).reshape(32, 2)
    (run,) = emulate(COPY, [both[:, 0], both[:, 1]], 1).arrays
    np.testing.assert_array_equal(run[1], both[:, 0])


def _launch(directives: str, **options):
    return emulate(module("").replace(".reqntid 32, 1, 1", directives), [], **{"grid": 4, "block": 32} | options)


@pytest.mark.parametrize(
    "directives, options, message",
    [
        (".reqntid 32, 1, 1", {"block": 64}, "blocks of"),
        (".maxntid 64, 1, 1", {"block": 128}, "128 threads; k takes at most 64"),
        (".minnctapersm 1", {"block": (32, 64)}, "2048 threads; k takes at most 1024"),
        (".minnctapersm 1", {"block": None}, "pass block"),
        (".reqnctapercluster 2, 1, 1", {"cluster": 4}, r"clusters of \(2, 1, 1\), not \(4, 1, 1\)"),
        (".reqnctapercluster 2, 1, 1", {"grid": 3}, "no multiple of the cluster"),
        (".explicitcluster", {}, "pass cluster"),
        (".maxclusterrank 2", {"cluster": 4}, "4 CTAs; k takes at most 2"),
    ],
)
def test_launches_that_the_kernel_does_not_take(directives, options, message):
    with pytest.raises(ValueError, match=message):
        _launch(directives, **options)


def test_a_declared_cluster_need_not_be_passed():
    for directives, options in (
        (".explicitcluster .reqnctapercluster 2", {}),
        (".reqnctapercluster 2, 1, 1", {"cluster": 2}),
        (".explicitcluster", {"cluster": 1}),
    ):
        text = module("mov.u32 %r1, %cluster_nctaid.x;" + store_words(["%r1"]), "p")
        text = text.replace(".reqntid 32, 1, 1", directives)
        (run,) = emulate(text, [np.zeros((1, 32), np.uint32)], 2, block=32, races=False, **options).arrays
        assert (run[0] == (2 if "reqn" in directives else 1)).all()


def test_shared_memory_is_static_and_dynamic_together():
    text = module("mov.u32 %r1, buffer;", shared=1024)
    assert not emulate(text, [], 1, shared_bytes=231424).findings
    with pytest.raises(ValueError, match="0 to 231424 beside 1024 static bytes, not 231425"):
        emulate(text, [], 1, shared_bytes=231425)


def _scalar(value, kind: str) -> np.uint32:
    (run,) = emulate(
        module("ld.param.u32 %r1, [a1];" + store_words(["%r1"]), "p" + kind), [np.zeros((1, 32), np.uint32), value], 1
    ).arrays
    return run[0][0, 0]


def test_scalars_take_the_type_of_their_parameter():
    assert _scalar(2, "f").view(np.float32) == 2.0
    assert _scalar(True, "i") == 1 and _scalar(-1, "i") == 0xFFFFFFFF and _scalar(0xFFFFFFFF, "i") == 0xFFFFFFFF
    assert _scalar(np.float32(3), "f").view(np.float32) == 3.0 and _scalar(np.int32(-2), "i") == 0xFFFFFFFE


@pytest.mark.parametrize(
    "value, kind, message",
    [
        (2.0, "i", "a float .* of type .u32"),
        (np.float32(2), "i", "float32 for a parameter of type .u32"),
        (np.int32(2), "f", "int32 for a parameter of type .f32"),
        (1 << 32, "i", "does not fit"),
        (-(1 << 31) - 1, "i", "does not fit"),
        (np.int64(1), "i", "8 bytes for 4"),
        (5, "m", "pass 128 bytes or a Struct"),
        (np.zeros(4, np.uint32), "i", "an array for a parameter of type .u32"),
        (np.zeros(4, np.uint32), "m", "an array for a parameter"),
        (Struct(bytes(128), {124: np.zeros(4, np.uint32)}), "m", "8 bytes at 124 of a parameter of 128"),
        (Struct(bytes(128), {0: 5}), "m", "a piece of type int"),
    ],
)
def test_scalars_that_do_not_fit_their_parameter(value, kind, message):
    with pytest.raises(ValueError, match=message):
        _scalar(value, kind)


def test_tensor_maps_are_found_by_their_parameter():
    text = module(
        """
        mov.u32 %r1, %tid.x; mov.b32 %r2, buffer; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
        mbarrier.init.shared.b64 [%r2+1024], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 128;
        mov.b64 %d1, a1; cvta.param.u64 %d1, %d1; mov.b32 %r3, 0; add.s32 %r4, %r2, 1024;
        cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%d1, {%r3}], [%r4];
    WAIT:
        bar.warp.sync -1;
    AGAIN:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r2+1024], 0; @!%p2 bra AGAIN;
        shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r2; ld.shared.b32 %r6, [%r5];
        """
        + store_words(["%r6"]),
        "pm",
        shared=1032,
    )
    source = np.arange(100, 132, dtype=np.uint32)
    arguments = [Output(np.zeros((1, 32), np.uint32)), TensorMap.for_array(source, [32])]
    result = emulate(text, arguments, 1, seeds=range(5))
    for run in result.arrays:
        np.testing.assert_array_equal(run[0][0], source)
    assert not result.findings
