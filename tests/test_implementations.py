import pytest

from jax_fp4attn import implementations, native, recipes
from jax_fp4attn.native import cross_compile
from tests import kernels
from tests.native import pretended


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    pretended.set_library(monkeypatch, None)


def select(name, recipe=recipes.train, head_size=64, **options):
    return implementations.select(name, recipe, head_size, **options)


@pytest.mark.parametrize("name", ["reference", ("reference",), ["cuda", "reference"], ("reference", "cuda")])
def test_the_first_that_can_run_is_selected(name):
    assert select(name) == "reference"


def test_without_a_name_something_can_always_run():
    assert select(None) == "reference"


@pytest.mark.parametrize("name", ["cuda", ("cuda",), ["cuda", "cuda"]])
def test_a_name_is_insisted_on_and_refused_with_the_reason(name, monkeypatch):
    monkeypatch.setattr(native, "why_unavailable", lambda: "no cuda here")
    with pytest.raises(NotImplementedError, match=r"implementation: (cuda: no cuda here(; )?)+$"):
        select(name)


def test_no_native_library_is_a_reason_against_cuda():
    with pytest.raises(NotImplementedError, match=r"native library.*implementation='reference'"):
        select("cuda")


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
    with kernels.for_every_step(), cross_compile((9, 0)):
        assert select(names) == selected


def test_a_step_without_a_kernel_is_a_reason_against_cuda_alone():
    with cross_compile((10, 0)):
        assert select(("cuda", "reference"), recipes.nvfp4_pv) == "cuda or reference"
        with pytest.raises(NotImplementedError, match="cuda: there is no kernel for v_format='nvfp4'"):
            select("cuda", recipes.nvfp4_pv)
        with pytest.raises(NotImplementedError, match="cuda: there are kernels for head sizes 64 and 128, not 80"):
            select("cuda", head_size=80)
        with pytest.raises(NotImplementedError, match="cuda: there is no kernel for qk_format='bf16'"):
            select("cuda", recipes.bf16)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=str)
def test_the_forward_has_kernels(capability):
    with cross_compile(capability):
        for recipe in (recipes.train, recipes.square, recipes.accurate):
            assert select("cuda", recipe) == "cuda"
        with pytest.raises(NotImplementedError, match="cuda: there is no kernel for code_map=MapSchedule"):
            select("cuda", recipes.two_piece)


def test_dense_scores_are_for_the_reference():
    with cross_compile((9, 0)):
        assert select(None, dense="mask") == "reference"
        with pytest.raises(NotImplementedError, match="cuda: mask is an array of all scores"):
            select("cuda", dense="mask")


def test_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match="implementation: expected None, a name or a sequence of names, got int"):
        select(3)


@pytest.mark.parametrize("name", ["xla", "", (), ("cuda", "xla"), [], "CUDA"])
def test_unknown_names_and_empty_sequences_are_refused(name):
    with pytest.raises(ValueError, match=r"implementation: expected None, one of \('cuda', 'reference'\)"):
        select(name)
