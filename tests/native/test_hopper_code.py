"""What the assembler made of forward and backward for Hopper: what it may silently do makes them slow, not wrong."""

import re

import pytest

from tests.native.machine_code import of_kernels
from tests.native.stand_in.handlers import BUILT, NO_BUILD

TARGET = "sm_90a"
PRODUCT = r"[HQ]GMMA\."
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


def step_of(code: str) -> str:
    """The innermost of the loops with most products."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?) *;", code)
    places = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (address, text) in enumerate(lines):
        # Waiting again, which lies behind the end of the code, jumps back always.
        jump = re.fullmatch(r"@!?U?P\d BRA (0x[0-9a-f]+)", text)
        if jump and (target := int(jump[1], 16)) < int(address, 16):
            loops.append("\n".join(text for _, text in lines[places[target] : i + 1]))
    most = max(count(PRODUCT, loop) for loop in loops)
    return min((loop for loop in loops if count(PRODUCT, loop) == most), key=len)


def test_a_step_of_the_backward_has_one_fence_and_no_barrier_of_threads(backward):
    """A fence waits for all products under way."""
    for name, products in {"backward_h64": 14, "backward_h128": 20}.items():
        step = step_of(backward[name])
        assert count(PRODUCT, step) == products, name
        assert (count(r"FENCE\.VIEW\.ASYNC", step), count(r"BAR\.SYNC", step)) == (1, 0), name


def test_maxima_are_taken_by_threes(forward):
    """Of 32 scores in each of two rows: fifteen of three and one of two, and as many minima."""
    for name, code in forward.items():
        assert count("VIMNMX3 ", code) == 2 * 2 * 15, name


def test_codes_take_one_instruction_a_pair_and_a_constant_that_stays(forward):
    for name, code in forward.items():
        is_direct = not name.endswith("e4m3")
        assert count(r"VIADDMNMX\.S16x2\.RELU ", code) == 32 * is_direct, name
        assert count(HALF_STEP + r"\b", code) == is_direct, name
