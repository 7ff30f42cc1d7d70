import pytest

from jax_fp4attn import implementations


@pytest.mark.parametrize("name", ["reference", ("reference",), ["cuda", "reference"], ("reference", "cuda")])
def test_the_first_that_can_run_is_selected(name):
    assert implementations.select(name) == "reference"


def test_without_a_name_something_can_always_run():
    assert implementations.select(None) in ("cuda", "reference")


def test_a_name_is_insisted_on_and_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(implementations, "_why_not", lambda name: f"no {name} here")
    with pytest.raises(NotImplementedError, match=r"implementation: cuda: no cuda here$"):
        implementations.select("cuda")
    with pytest.raises(NotImplementedError, match="cuda: no cuda here; reference: no reference here"):
        implementations.select(("cuda", "reference"))


def test_no_native_library_is_a_reason_against_cuda():
    with pytest.raises(NotImplementedError, match=r"native library.*implementation='reference'"):
        implementations.select("cuda")


def test_names_are_tried_in_order(monkeypatch):
    monkeypatch.setattr(implementations, "_why_not", lambda name: None)
    assert implementations.select(("reference", "cuda")) == "reference"
    assert implementations.select(("cuda", "reference")) == "cuda"
    assert implementations.select(None) == "cuda"


@pytest.mark.parametrize("name", ["xla", "", (), ("cuda", "xla"), [], "CUDA"])
def test_unknown_names_and_empty_sequences_are_refused(name):
    with pytest.raises(ValueError, match=r"implementation: expected None, one of \('cuda', 'reference'\)"):
        implementations.select(name)
