"""What the assembler made of forward and backward for Hopper: what it may silently do makes them slow, not wrong."""

import re

import pytest

from tests.native.machine_code import of_kernels
from tests.native.stand_in.handlers import BUILT, NO_BUILD, manifest

TARGET = "sm_90a"
PRODUCT = r"[HQ]GMMA\."
ADDRESS_MASK = "0x3fc0"  # of a descriptor's address, in units of 16 bytes and a multiple of 1024
HALF_STEP = "0x1000100"  # of two codes, see cuda/kernels/hopper/direct_p.py

pytestmark = pytest.mark.skipif(not (BUILT / f"kernels.{TARGET}.cubin").is_file(), reason=NO_BUILD)


@pytest.fixture(scope="module")
def forward() -> dict[str, str]:
    return of_kernels(TARGET, "forward_")


@pytest.fixture(scope="module")
def backward() -> dict[str, str]:
    kernels = of_kernels(TARGET, "backward_")
    return {name: code for name, code in kernels.items() if count(PRODUCT, code)}


def count(opcode: str, code: str) -> int:
    return len(re.findall(rf"\b{opcode}", code))


def test_products_wait_for_one_another_nowhere(forward, backward):
    """Where registers are short the assembler has every product wait, and only its note C7512 says so."""
    assert len(forward) == 10 and len(backward) == 6
    for name, code in forward.items():
        steps = 12 if "h128" in name else 8
        assert (count(PRODUCT, code), count(r"WARPGROUP\.DEPBAR", code)) == (steps, 2), name
    for name, code in backward.items():
        assert count(r"WARPGROUP\.DEPBAR", code) < count(PRODUCT, code) / 2, name


def steps_of(code: str) -> list[str]:
    """The innermost loops with products, the longest first."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?) *;", code)
    places = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (address, text) in enumerate(lines):
        # Waiting again, which lies behind the end of the code, jumps back always.
        jump = re.fullmatch(r"@!?U?P\d BRA (0x[0-9a-f]+)", text)
        if jump and (target := int(jump[1], 16)) < int(address, 16):
            loops.append(range(places[target], i + 1))
    texts = {loop: "\n".join(text for _, text in lines[loop.start : loop.stop]) for loop in loops}
    found = [loop for loop in loops if count(PRODUCT, texts[loop])]
    inner = [x for x in found if not any(y != x and x.start <= y.start and y.stop <= x.stop for y in found)]
    return [texts[loop] for loop in sorted(inner, key=len, reverse=True)]


def test_a_step_of_the_consumers_of_the_backward_has_one_fence_and_no_barrier_of_threads(backward):
    """A fence waits for all products under way."""
    for name, products in {"backward_h64": 10, "backward_h128": 16}.items():
        step, _ = steps_of(backward[name])
        assert count(PRODUCT, step) == products, name
        assert (count(r"FENCE\.VIEW\.ASYNC", step), count(r"BAR\.SYNC", step)) == (1, 0), name
        (step,) = steps_of(backward[f"{name}_ordered"])
        assert count(PRODUCT, step) == products, name
        assert (count(r"FENCE\.VIEW\.ASYNC", step), count(r"BAR\.SYNC", step)) == (0, 0), name


def test_a_part_of_dq_has_one_fence_and_one_barrier_of_its_warpgroup(backward):
    for name in ("backward_h64", "backward_h128"):
        _, part = steps_of(backward[name])
        assert count(PRODUCT, part) == 4, name
        assert (count(r"FENCE\.VIEW\.ASYNC", part), count(r"BAR\.SYNC", part)) == (1, 1), name


def test_descriptors_of_the_backward_are_made_before_its_loops(backward):
    """The compiler makes them again inside, by this mask, where it sees what they are."""
    for name, code in backward.items():
        assert ADDRESS_MASK in code, name
        assert all(ADDRESS_MASK not in step for step in steps_of(code)), name


def test_warpgroups_trade_registers_and_find_those_that_they_ask_for(forward, backward):
    """Where too few are left the assembler drops all such instructions; where too many are asked for a block hangs."""
    launches = manifest(TARGET)
    for name, code in (*forward.items(), *backward.items()):
        given, asked = (int(count, 16) for count in re.findall(r"USETMAXREG\.\w+\.CTAPOOL.* 0x([0-9a-f]+) ;", code))
        warpgroups = launches[name]["threads"] // 128
        assert given < launches[name]["registers"] < asked, name
        assert given + (warpgroups - 1) * asked <= warpgroups * launches[name]["registers"], name


def test_maxima_are_taken_by_threes(forward):
    """Of 32 scores in each of two rows: fifteen of three and one of two, and as many minima."""
    for name, code in forward.items():
        assert count("VIMNMX3 ", code) == 2 * 2 * 15, name


def test_codes_take_one_instruction_a_pair_and_a_constant_that_stays(forward):
    for name, code in forward.items():
        is_direct = not name.endswith("e4m3")
        assert count(r"VIADDMNMX\.S16x2\.RELU ", code) == 32 * is_direct, name
        assert count(HALF_STEP + r"\b", code) == is_direct, name
