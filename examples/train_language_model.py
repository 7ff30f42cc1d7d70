"""Trains small language models that differ in the recipe of attention alone, and compares them.

Usage: python -m examples.train_language_model [--arms bf16,train] [--steps 300] [--resume] ...
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from examples.language_model.checkpointing import Checkpoints
from examples.language_model.data import Corpus, load_corpus, spread_windows
from examples.language_model.generation import generate
from examples.language_model.model import LanguageModel, ModelConfig
from examples.language_model.progress import run_with_progress, tokens_per_second
from examples.language_model.report import ArmResult, table, write_curves, write_report
from examples.language_model.training import (
    History,
    OneDeviceLearner,
    TrainingConfig,
    held_out_loss,
    make_optimizer,
    train,
)
from jax_fp4attn import recipes

ARMS = ("bf16", "train", "causal_mxfp4")
PROMPT_BYTES = 128
SAMPLE_BYTES = 300
TEMPERATURE = 0.7


def train_arm(
    arm: str,
    corpus: Corpus,
    model_config: ModelConfig,
    config: TrainingConfig,
    out: Path,
    *,
    resume: bool = False,
) -> tuple[OneDeviceLearner, History]:
    """Trains one model. All arms start from the same parameters and see the same data.

    Args:
      arm: Name of a recipe.
      corpus: Text.
      model_config: Size of the model.
      config: Settings of the training.
      out: Directory of the results; checkpoints go to ``out/checkpoints/<arm>``.
      resume: Whether to go on from the latest checkpoint, if there is one, instead of deleting all.

    Returns:
      What was trained and what was measured.
    """
    model = LanguageModel(model_config, recipe=recipes.named()[arm], rngs=nnx.Rngs(config.seed))
    optimizer = make_optimizer(model, config)
    learner = OneDeviceLearner(model, optimizer)
    settings = dataclasses.asdict(model_config) | dataclasses.asdict(config)
    with Checkpoints(out / "checkpoints" / arm, settings) as checkpoints:
        if not resume:
            checkpoints.clear()
        history = checkpoints.restore_latest(model, optimizer)
        losses = train(learner, corpus, config, history, save=lambda: checkpoints.save(model, optimizer, history))
        run_with_progress(arm, losses, history, config)
    return learner, history


def compare(
    arms: Sequence[str], model_config: ModelConfig, config: TrainingConfig, out: Path, *, resume: bool = False
) -> list[ArmResult]:
    """Trains every arm and writes the report.

    Args:
      arms: Names of recipes.
      model_config: Size of the models.
      config: Settings of the training.
      out: Directory of the results.
      resume: Whether to go on from checkpoints.

    Returns:
      A result for each arm.
    """
    corpus = load_corpus()
    held_out = spread_windows(corpus.held_out, count=None, length=config.sequence_length)
    prompt = corpus.held_out[:PROMPT_BYTES]
    results = []
    for arm in arms:
        learner, history = train_arm(arm, corpus, model_config, config, out, resume=resume)
        sample = generate(learner.model, prompt, length=SAMPLE_BYTES, temperature=TEMPERATURE, seed=config.seed)
        results.append(
            ArmResult(
                name=arm,
                history=history,
                held_out_loss=held_out_loss(learner, held_out, config.batch),
                tokens_per_second=tokens_per_second(history, config),
                sample=sample.decode(errors="replace"),
            )
        )
    write_curves(out / "curves.png", results)
    write_report(out / "report.md", results, prompt.tobytes().decode(errors="replace"))
    return results


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(
        description="Trains small language models that differ in the recipe of attention alone, and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--arms", default=",".join(ARMS), help="recipes to compare, by name")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimiser steps of each arm")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="windows of text in a step")
    parser.add_argument("--sequence-length", type=int, default=defaults.sequence_length, help="bytes in a window")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of parameters, data and samples")
    parser.add_argument("--out", type=Path, default=Path("out/language_model"), help="directory of the results")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parsed = parser.parse_args(arguments)
    parsed.arms = parsed.arms.split(",")
    if unknown := set(parsed.arms) - set(recipes.named()):
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; there are {', '.join(recipes.named())}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example.

    Args:
      arguments: Command line; None for the process's own.
    """
    start = time.perf_counter()
    parsed = parse_arguments(arguments)
    config = TrainingConfig(
        steps=parsed.steps, batch=parsed.batch, sequence_length=parsed.sequence_length, seed=parsed.seed
    )
    results = compare(parsed.arms, ModelConfig(), config, parsed.out, resume=parsed.resume)
    print(f"\n{table(results)}\n")
    for result in results:
        print(f"--- {result.name} writes ---\n{result.sample}\n")
    print(f"Report, curves and checkpoints are in {parsed.out} ({time.perf_counter() - start:.0f} s).")


if __name__ == "__main__":
    main()
