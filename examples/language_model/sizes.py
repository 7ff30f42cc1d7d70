"""Sizes of the comparison: what two CPU cores train in minutes, and what keeps a GPU busy."""

import dataclasses

from examples.language_model.exact_attention import Exact
from examples.language_model.model import ModelConfig
from examples.language_model.training import TrainingConfig
from jax_fp4attn import Recipe, recipes

BASELINE = "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model, how it is trained, and on what.

    Attributes:
      model: Its size.
      training: Settings.
      arms: Recipes that are compared, by name.
      baseline: What the arm `bf16` attends with: its recipe, or JAX's own exact attention.
      sources: Whether the text is the installed Python sources rather than the language reference.
      held_out_fraction: Part of the text that is held out.
      checkpoints: Whether checkpoints are written.
    """

    model: ModelConfig
    training: TrainingConfig
    arms: tuple[str, ...]
    baseline: Recipe | Exact = recipes.bf16
    sources: bool = False
    held_out_fraction: float = 0.1
    checkpoints: bool = True

    def attention(self, arm: str) -> Recipe | Exact:
        """What an arm attends with."""
        return self.baseline if arm == BASELINE else recipes.named()[arm]


SIZES = {
    "small": Size(model=ModelConfig(), training=TrainingConfig(), arms=(BASELINE, "train", "causal_mxfp4")),
    # 85 million parameters, 16384 bytes a step: 6 x 85e6 x 16384 operations for the products with parameters and
    # 3.5 x 2 x 2048 x 768 x 12 x 16384 for causal attention, 10.6e12 together. Recipe bf16 has no kernels and would run
    # by the reference, so its place is taken by cuDNN, whose speed is the one to compare with.
    "gpu": Size(
        model=ModelConfig(width=768, hidden=2048, layers=12, heads=6, kv_heads=6, head_size=128, dtype="bfloat16"),
        training=TrainingConfig(
            steps=4000,
            batch=8,
            sequence_length=2048,
            learning_rate=6e-4,
            evaluations=20,
            evaluation_windows=64,
        ),
        arms=(BASELINE, "train"),
        baseline=Exact("cudnn"),
        sources=True,
        held_out_fraction=0.01,
        checkpoints=False,
    ),
}
