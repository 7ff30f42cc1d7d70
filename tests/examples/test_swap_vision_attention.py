"""examples/swap_vision_attention.py, at a tiny size."""

import functools

import numpy as np
import pytest
from flax import nnx

from examples import swap_vision_attention
from examples.swap_vision_attention import Agreement, VisionTransformer
from jax_fp4attn import recipes

TinyTransformer = functools.partial(VisionTransformer, width=32, heads=1, layers=1)
CHOSEN = {"square": recipes.square, "bf16": recipes.bf16}


@pytest.fixture(scope="module")
def digits():
    return swap_vision_attention.load_data(0)


@pytest.fixture(scope="module")
def model(digits):
    model = TinyTransformer(rngs=nnx.Rngs(0))
    losses = list(swap_vision_attention.train(model, digits, steps=120, batch=32, seed=0))
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    return model


def test_images_are_split_and_scaled(digits):
    assert digits.training_images.shape == (1437, 8, 8, 1)
    assert digits.test_images.shape == (360, 8, 8, 1)
    assert digits.training_images.min() == 0
    assert digits.training_images.max() == 1
    counts = np.bincount(digits.test_labels)
    assert len(counts) == 10
    assert counts.max() - counts.min() <= 3


def test_recipes_are_those_of_attention_that_is_not_causal():
    names = set(swap_vision_attention.forward_recipes())
    assert {"square", "fast", "accurate", "guarded(10, 16)"} < names
    assert not any("causal" in name for name in names)
    assert set(recipes.named()) > swap_vision_attention.LEFT_OUT


def test_a_swap_changes_the_logits_by_what_the_recipe_rounds(model, digits):
    results = swap_vision_attention.swap_attention(model, digits, CHOSEN)
    assert list(results) == ["standard attention", "square", "bf16"]
    standard, square, bf16 = results.values()
    assert standard.accuracy > 0.5
    assert (standard.relative_l2, standard.same_prediction) == (0, 1)
    assert 0 < bf16.relative_l2 < 0.01
    assert bf16.relative_l2 < square.relative_l2 < 0.3
    assert square.cosine > 0.95
    assert square.same_prediction > 0.8


def test_a_swap_leaves_the_model_as_it_was(model, digits):
    attention_fn = model.blocks[0].attention.attention_fn
    swap_vision_attention.swap_attention(model, digits, {"bf16": recipes.bf16})
    assert model.blocks[0].attention.attention_fn is attention_fn is nnx.dot_product_attention


def test_agreement():
    logits, original = np.array([[3.0, 0.0], [0.0, 4.0]]), np.array([[3.0, 0.0], [4.0, 0.0]])
    agreement = Agreement.measure(logits, original, np.array([0, 1]))
    assert agreement.accuracy == 1
    assert agreement.same_prediction == 0.5
    assert agreement.cosine == pytest.approx(9 / 25)
    assert agreement.relative_l2 == pytest.approx(np.sqrt(32) / 5)


def test_main_writes_and_prints_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(swap_vision_attention, "VisionTransformer", TinyTransformer)
    monkeypatch.setattr(swap_vision_attention, "forward_recipes", lambda: CHOSEN)
    swap_vision_attention.main(["--steps", "2", "--out", str(tmp_path / "out")])
    table = (tmp_path / "out" / "table.md").read_text()
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["standard attention", *CHOSEN]
    assert table in capsys.readouterr().out + "\n"
    assert (tmp_path / "out" / "recipes.png").read_bytes().startswith(b"\x89PNG")
