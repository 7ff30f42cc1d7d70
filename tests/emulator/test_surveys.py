"""Kept surveys of the library's kernels are of kernels that synchronise as today's do."""

import pathlib
import re
from collections import Counter

import pytest

from cuda.emulator import parse
from cuda.emulator.mutations import mutants
from tests.emulator.kernels import blackwell_forward, hopper_backward, hopper_forward

_RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "emulator" / "results"
_BLACKWELL, _HOPPER = blackwell_forward.LIBRARY, hopper_forward.LIBRARY

pytestmark = pytest.mark.skipif(
    not (blackwell_forward.available() and hopper_backward.available()),
    reason="build/native has no kernels: make native",
)


@pytest.mark.parametrize(
    ("table", "library", "kernel"),
    [
        ("blackwell_forward_direct_p", _BLACKWELL, "blackwell_forward_h64_square"),
        ("blackwell_forward_running_maximum", _BLACKWELL, "blackwell_forward_h64_e4m3"),
        ("hopper_forward_direct_p", _HOPPER, "forward_h128_square"),
        ("hopper_forward_running_maximum", _HOPPER, "forward_h128_e4m3"),
        ("hopper_backward_h64", _HOPPER, "backward_h64"),
        ("hopper_backward_h128", _HOPPER, "backward_h128"),
        ("hopper_backward_ordered", _HOPPER, "backward_h128_ordered"),
        ("hopper_backward_query", _HOPPER, "backward_query_h128"),
    ],
)
def test_a_table_has_the_changes_that_there_are_to_a_kernel(table, library, kernel):
    text = (_RESULTS / f"mutations_{table}.md").read_text()
    kept = {name: int(count) for name, count in re.findall(r"^\| (.+: .+) \| (\d+) \| \d+ \|", text, re.M)}
    parsed = parse(library.ptx, library.kernels[kernel].entry)
    counts = Counter(f"{mutant.family}: {mutant.change}" for mutant in mutants(parsed))
    assert kept == counts, "the synchronisation has changed: run tests.emulator.kernels.*_survey and renew docs"
