"""Trains a small vision transformer with standard attention, then swaps in FP4 attention without further training.

Usage: python -m examples.swap_vision_attention [--steps 400] [--out out/vision_attention]
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from examples._tables import markdown_table
from jax_fp4attn import Recipe, recipes
from jax_fp4attn.flax import make_attention_fn

SIZE = 8
WHITE = 16
CLASSES = 10
# Recipes for causal attention, and one whose forward is that of `train`.
LEFT_OUT = {"causal_mxfp4", "causal_mxfp4_raw_margin", "train_unit_gradient_scale"}


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images, float32 [images, 8, 8, 1] from 0 to 1, and their labels, int32 [images]."""

    training_images: np.ndarray
    training_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


class Block(nnx.Module):
    """Attention and feed-forward layer, each on a normalised input and added to the stream."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 2 * width, rngs=rngs), nnx.gelu, nnx.Linear(2 * width, width, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nnx.Module):
    """Classifies an image from a class token and one token for each pixel and its neighbours."""

    def __init__(self, *, width: int = 64, heads: int = 2, layers: int = 2, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.class_token = nnx.Param(0.02 * rngs.params.normal((1, 1, width)))
        self.positions = nnx.Param(0.02 * rngs.params.normal((SIZE * SIZE + 1, width)))
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Computes logits.

        Args:
          images: float32 [B, 8, 8, 1], from 0 to 1.

        Returns:
          float32 [B, classes].
        """
        pixels = jax.lax.collapse(self.embedding(images), 1, 3)
        class_tokens = jnp.broadcast_to(self.class_token[...], (pixels.shape[0], 1, pixels.shape[2]))
        x = jnp.concatenate([class_tokens, pixels], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def load_data(seed: int) -> Digits:
    """Reads scikit-learn's 1797 handwritten digits of 8 × 8 pixels and holds out a fifth.

    Args:
      seed: Of the choice of test images.

    Returns:
      The digits.
    """
    pixels, classes = load_digits(return_X_y=True)
    images = (pixels / WHITE).reshape(-1, SIZE, SIZE, 1).astype(np.float32)
    labels = classes.astype(np.int32)
    training_images, test_images, training_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=seed
    )
    return Digits(training_images, training_labels, test_images, test_labels)


@nnx.jit
def train_step(model: VisionTransformer, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Updates model and optimiser in place; returns the loss before."""

    def mean_loss(model: VisionTransformer) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model: VisionTransformer, images: jax.Array) -> jax.Array:
    """Logits of the model."""
    return model(images)


def train(model: VisionTransformer, data: Digits, *, steps: int, batch: int, seed: int) -> Iterator[float]:
    """Trains with AdamW.

    Args:
      model: Updated in place.
      data: Digits.
      steps: Number of steps.
      batch: Images in a step.
      seed: Of the order of images.

    Yields:
      The loss of each step.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.05), wrt=nnx.Param)
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = generator.choice(len(data.training_images), batch, replace=False)
        images, labels = jnp.asarray(data.training_images[chosen]), jnp.asarray(data.training_labels[chosen])
        yield float(train_step(model, optimizer, images, labels))


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How a model with swapped attention compares with itself before.

    Attributes:
      accuracy: On the test images.
      relative_l2: Error of the logits, relative to their norm.
      cosine: Of all logits with those before.
      same_prediction: Part of the images that are classified as before.
    """

    accuracy: float
    relative_l2: float
    cosine: float
    same_prediction: float

    @classmethod
    def measure(cls, logits: ArrayLike, original: ArrayLike, labels: np.ndarray) -> "Agreement":
        """Compares logits [images, classes] with those before the swap."""
        x, y = (np.asarray(z, np.float64) for z in (logits, original))
        return cls(
            accuracy=float(np.mean(x.argmax(-1) == labels)),
            relative_l2=float(np.linalg.norm(x - y) / np.linalg.norm(y)),
            cosine=float(np.vdot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y))),
            same_prediction=float(np.mean(x.argmax(-1) == y.argmax(-1))),
        )


def forward_recipes() -> dict[str, Recipe]:
    """Recipes for non-causal attention, by name."""
    guarded = recipes.guarded(10, 16)
    return {name: recipe for name, recipe in recipes.named().items() if name not in LEFT_OUT} | {guarded.name: guarded}


def swap_attention(model: VisionTransformer, data: Digits, chosen: Mapping[str, Recipe]) -> dict[str, Agreement]:
    """Runs a trained model with each recipe in place of its attention.

    Args:
      model: Trained; left with its own attention.
      data: Digits.
      chosen: Recipes by name.

    Returns:
      By name, with "standard attention" first.
    """
    standard = model.blocks[0].attention.attention_fn
    images = jnp.asarray(data.test_images)
    original = predict(model, images)
    results = {"standard attention": Agreement.measure(original, original, data.test_labels)}
    for name, recipe in chosen.items():
        model.set_attributes(nnx.MultiHeadAttention, attention_fn=make_attention_fn(recipe=recipe))
        results[name] = Agreement.measure(predict(model, images), original, data.test_labels)
    model.set_attributes(nnx.MultiHeadAttention, attention_fn=standard)
    return results


def table(results: Mapping[str, Agreement]) -> str:
    """Makes a Markdown table of the results."""
    header = ["attention", "test accuracy", "logit rel-L2", "logit cosine", "same prediction"]
    rows = [
        [name, f"{x.accuracy:.2%}", f"{x.relative_l2:.4f}", f"{x.cosine:.5f}", f"{x.same_prediction:.2%}"]
        for name, x in results.items()
    ]
    return markdown_table(header, rows)


def write_plot(path: Path, results: Mapping[str, Agreement]) -> None:
    """Draws accuracy and logit error of every recipe.

    Args:
      path: PNG file.
      results: By name.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    errors, accuracies = figure.subplots(1, 2, sharey=True)
    names = list(results)
    errors.barh(names, [x.relative_l2 for x in results.values()])
    errors.set(xlabel="relative L2 error of logits")
    accuracies.barh(names, [100 * x.accuracy for x in results.values()], color="C1")
    accuracies.set(xlabel="test accuracy, %", xlim=(0, 100))
    errors.invert_yaxis()
    for axes in (errors, accuracies):
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small vision transformer with standard attention, then swaps in FP4 attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps")
    parser.add_argument("--batch", type=int, default=64, help="images in a step")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data order and test images")
    parser.add_argument("--out", type=Path, default=Path("out/vision_attention"), help="directory of the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example.

    Args:
      arguments: Command line; None for the process's own.
    """
    parsed = _parse_arguments(arguments)
    data = load_data(parsed.seed)
    model = VisionTransformer(rngs=nnx.Rngs(parsed.seed))
    losses = train(model, data, steps=parsed.steps, batch=parsed.batch, seed=parsed.seed)
    with tqdm(losses, total=parsed.steps, desc="standard attention", unit="step", mininterval=1.0) as bar:
        for loss in bar:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    results = swap_attention(model, data, forward_recipes())
    parsed.out.mkdir(parents=True, exist_ok=True)
    (parsed.out / "table.md").write_text(table(results) + "\n")
    write_plot(parsed.out / "recipes.png", results)
    print(f"\n{table(results)}\n\nTable and plot are in {parsed.out}.")


if __name__ == "__main__":
    main()
