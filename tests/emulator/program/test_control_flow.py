from cuda.emulator.program.control_flow import ControlFlow
from cuda.emulator.ptx.parser import parse
from tests.emulator.text import module

LOOP = """
    mov.b32 %r1, 0;
HEAD:
    add.s32 %r1, %r1, 1;
    setp.lt.s32 %p1, %r1, 5;
    @%p2 bra SKIP;
    add.s32 %r2, %r2, 1;
SKIP:
    @%p1 bra HEAD;
    mov.b32 %r3, 1;
"""


def _flow(body: str) -> ControlFlow:
    return ControlFlow(parse(module(body)))


def test_blocks_and_edges():
    flow = _flow(LOOP)
    assert [(b.start, b.stop) for b in flow.blocks] == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 8), (8, 8)]
    assert [b.successors for b in flow.blocks] == [[1], [3, 2], [3], [1, 4], [5], []]


def test_lanes_meet_at_the_immediate_post_dominator():
    assert _flow(LOOP).reconvergence == [1, 3, 3, 4, 5, None]


def test_a_guarded_exit_goes_two_ways():
    flow = _flow("@%p1 ret; mov.b32 %r1, 1;")
    assert flow.blocks[0].successors == [flow.exit, 1]
    assert flow.reconvergence[0] == 1


def test_lanes_that_only_exit_are_not_waited_for():
    flow = _flow("@%p1 bra END; @%p2 bra SKIP; mov.b32 %r1, 1; SKIP: mov.b32 %r2, 2; END:")
    assert flow.reconvergence[:2] == [1, 3]


def test_a_loop_may_have_an_exit_only():
    flow = _flow("L: mov.b32 %r1, 1; @%p1 ret; bra L;")
    assert flow.reconvergence[0] == flow.exit


def test_a_region_ends_where_lanes_meet():
    flow = _flow(LOOP)
    assert flow.region(2, 3) == 0b100
    assert flow.region(1, 4) == 0b1110
