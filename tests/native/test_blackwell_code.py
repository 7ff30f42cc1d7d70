"""What the assembler made of the forward for Blackwell: instructions, registers, memories."""

import re

import pytest

from tests.native.machine_code import of_kernels
from tests.native.stand_in.handlers import BUILT, NO_BUILD, manifest

ULTRA = "sm_103a"
TARGETS = ("sm_100f", ULTRA)
KERNELS = [f"blackwell_forward_h{head_size}" for head_size in (64, 128)]
REGISTERS = 65536  # of a multiprocessor
SHARED_BYTES = 227 << 10
COLUMNS = 512

pytestmark = pytest.mark.skipif(
    not all((BUILT / f"kernels.{target}.cubin").is_file() for target in TARGETS), reason=NO_BUILD
)


@pytest.fixture(scope="module", params=TARGETS)
def target(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def machine_code(target) -> dict[str, str]:
    """Of each forward, by name."""
    return of_kernels(target, "blackwell_")


@pytest.fixture(scope="module")
def ptx(target) -> dict[str, str]:
    """Of each forward, by name."""
    text = (BUILT / f"kernels.{target}.ptx").read_text()
    bodies = {re.match(r"\w+", part)[0]: part for part in text.split(".visible .entry ")[1:]}
    kernels = manifest(target)
    return {name: bodies[kernel["entry"]] for name, kernel in kernels.items() if name.startswith("blackwell_")}


def test_every_head_size_has_its_kernels(ptx):
    for prefix in KERNELS:
        assert {name.removeprefix(prefix + "_") for name in ptx if name.startswith(prefix)} == {
            "e4m3",
            "affine",
            "square",
            "exponential",
            "affine_mixed_anchor32",
            "affine_mixed_odd_anchor128",
        }


def test_products_are_those_of_the_formats(target, machine_code):
    stages = 2
    # The disassembler has a name for blocks of 16 for each target.
    by_16 = "UTCOMMA.BLOCK16" if target == ULTRA else "UTCOMMA.4X"
    for name, code in machine_code.items():
        # FP4 products with blocks of 16 and of 32, and FP8 products; a step of K is 64, or 32 of FP8.
        found = {kind: len(re.findall(rf"\b{re.escape(kind)} ", code)) for kind in (by_16, "UTCOMMA", "UTCQMMA")}
        direct = "e4m3" not in name
        score_steps = 2 if "h128" in name else 1
        assert found == {
            by_16: stages * score_steps,
            "UTCOMMA": stages * 2 * direct,
            "UTCQMMA": stages * 4 * (not direct),
        }, name
        # Scale factors: of query and key for each step of K64, and of the values.
        assert len(re.findall(r"\bUTCCP\.T\.S\.4x32dp128bit ", code)) == stages * (2 * score_steps + direct), name


def test_maxima_come_with_the_scores_where_loads_give_them(target, machine_code):
    for name, code in machine_code.items():
        # Stages whose maps differ have a loop each.
        loads_of_scores = 4 * (2 if "_odd_" in name else 1)
        assert len(re.findall(r"\bLDTM\.STAT\.x32\.MAX\.F32\.NAN ", code)) == loads_of_scores * (target == ULTRA), name
        assert len(re.findall(r"\bLDTM\.STAT", code)) == loads_of_scores * (target == ULTRA), name


def test_nothing_is_spilled(target, machine_code):
    for name, kernel in manifest(target).items():
        if name in machine_code:
            assert kernel["stack_bytes"] == 0, name
            assert not re.search(r"\b(STL|LDL)\b", machine_code[name]), name


def test_registers_are_within_the_budgets_of_the_roles(target, machine_code, ptx):
    for name, text in ptx.items():
        budgets = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+);", text)
        assert budgets == [("inc", "192"), ("dec", "80"), ("dec", "48")], name
        softmax, correction, others = (int(count) for _, count in budgets)
        kernel = manifest(target)[name]
        assert kernel["registers"] * kernel["threads"] <= REGISTERS, name
        assert 128 * (2 * softmax + correction + others) <= REGISTERS, name
        # What a role uses lies between its own request and the next one's.
        parts = re.split(r"USETMAXREG", machine_code[name])
        used = [max((int(n) for n in re.findall(r"\bR(\d+)\b", part)), default=0) + 1 for part in parts]
        assert used[1] <= softmax and used[2] <= correction, (name, used)


def test_memories(target, ptx):
    for name, text in ptx.items():
        assert manifest(target)[name]["shared_bytes"] <= SHARED_BYTES, name
        (allocated,) = re.findall(r"mov\.b32\s+(%r\d+), (\d+);\s+tcgen05\.alloc\S+\s+\[[^]]+\], (%r\d+);", text)
        assert allocated[0] == allocated[2] and int(allocated[1]) == COLUMNS, name
        assert len(re.findall(r"\btcgen05\.alloc\b", text)) == len(re.findall(r"\btcgen05\.dealloc\b", text)) == 1
        assert "tcgen05.relinquish_alloc_permit" in text, name
