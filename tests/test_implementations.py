import pytest

from jax_fp4attn import implementations, native
from jax_fp4attn.native import cross_compile


@pytest.mark.parametrize("name", ["reference", ("reference",), ["cuda", "reference"], ("reference", "cuda")])
def test_the_first_that_can_run_is_selected(name):
    assert implementations.select(name) == "reference"


def test_without_a_name_something_can_always_run():
    assert implementations.select(None) == "reference"


@pytest.mark.parametrize("name", ["cuda", ("cuda",), ["cuda", "cuda"]])
def test_a_name_is_insisted_on_and_refused_with_the_reason(name, monkeypatch):
    monkeypatch.setattr(native, "why_unavailable", lambda: "no cuda here")
    with pytest.raises(NotImplementedError, match=r"implementation: (cuda: no cuda here(; )?)+$"):
        implementations.select(name)


def test_no_native_library_is_a_reason_against_cuda():
    with pytest.raises(NotImplementedError, match=r"native library.*implementation='reference'"):
        implementations.select("cuda")


@pytest.mark.parametrize(
    ("names", "selected"),
    [
        (("reference", "cuda"), "reference"),
        (("cuda", "reference"), "cuda or reference"),
        (None, "cuda or reference"),
        ("cuda", "cuda"),
        (("cuda",), "cuda"),
    ],
)
def test_names_are_tried_in_order(names, selected):
    with cross_compile((9, 0)):
        assert implementations.select(names) == selected


def test_dense_scores_are_for_the_reference():
    with cross_compile((9, 0)):
        assert implementations.select(None, dense="mask") == "reference"
        with pytest.raises(NotImplementedError, match="cuda: mask is an array of all scores"):
            implementations.select("cuda", dense="mask")


def test_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match="implementation: expected None, a name or a sequence of names, got int"):
        implementations.select(3)


@pytest.mark.parametrize("name", ["xla", "", (), ("cuda", "xla"), [], "CUDA"])
def test_unknown_names_and_empty_sequences_are_refused(name):
    with pytest.raises(ValueError, match=r"implementation: expected None, one of \('cuda', 'reference'\)"):
        implementations.select(name)
