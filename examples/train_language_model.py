"""Trains language models that differ in the recipe of attention alone, and compares them.

Usage: python -m examples.train_language_model [--arms bf16,train] [--steps 300] [--resume] ...

`--size gpu` trains models of 85 million parameters on sequences of 2048 bytes. Arms may run in processes of their own,
each on its own GPU; the last one to end finds the others' results, and so does `--report`:

    CUDA_VISIBLE_DEVICES=0 python -m examples.train_language_model --size gpu --arms bf16 &
    CUDA_VISIBLE_DEVICES=1 python -m examples.train_language_model --size gpu --arms train &
    wait; python -m examples.train_language_model --size gpu --report
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from examples.language_model import sources
from examples.language_model.arm_curves import write_curves, write_losses
from examples.language_model.checkpointing import Checkpoints
from examples.language_model.data import Corpus, load_corpus, split_text, spread_windows
from examples.language_model.exact_attention import Exact
from examples.language_model.generation import generate
from examples.language_model.model import LanguageModel
from examples.language_model.progress import run_with_progress, tokens_per_second
from examples.language_model.report import ArmResult, read_results, table, write_report
from examples.language_model.sizes import BASELINE, SIZES, Size
from examples.language_model.training import (
    History,
    OneDeviceLearner,
    held_out_loss,
    make_optimizer,
    train,
)
from jax_fp4attn import recipes

PROMPT_BYTES = 128
SAMPLE_BYTES = 300
TEMPERATURE = 0.7


def train_arm(
    arm: str,
    corpus: Corpus,
    size: Size,
    out: Path,
    *,
    resume: bool = False,
    deadline: float = math.inf,
) -> tuple[OneDeviceLearner, History]:
    """Trains one model. All arms start from the same parameters and see the same data.

    Args:
      arm: Name of a recipe.
      corpus: Text.
      size: Of the model, and its training.
      out: Directory of the results; checkpoints go to ``out/checkpoints/<arm>``.
      resume: Whether to go on from the latest checkpoint, if there is one, instead of deleting all.
      deadline: Time of :func:`time.perf_counter` from which no further step is begun.

    Returns:
      What was trained and what was measured.
    """
    config = size.training
    model = LanguageModel(size.model, recipe=size.attention(arm), rngs=nnx.Rngs(config.seed))
    learner = OneDeviceLearner(model, make_optimizer(model, config))
    if not size.checkpoints:
        history = History()
        run_with_progress(arm, train(learner, corpus, config, history, deadline=deadline), history, config)
        return learner, history
    settings = dataclasses.asdict(size.model) | dataclasses.asdict(config)
    with Checkpoints(out / "checkpoints" / arm, settings) as checkpoints:
        if not resume:
            checkpoints.clear()
        history = checkpoints.restore_latest(model, learner.optimizer)

        def save() -> None:
            checkpoints.save(model, learner.optimizer, history)

        run_with_progress(arm, train(learner, corpus, config, history, save, deadline), history, config)
    return learner, history


def compare(
    arms: Sequence[str], corpus: Corpus, size: Size, out: Path, *, resume: bool = False, minutes: float = math.inf
) -> None:
    """Trains arms and writes the result of each.

    Args:
      arms: Names of recipes.
      corpus: Text.
      size: Of the models, and their training.
      out: Directory of the results.
      resume: Whether to go on from checkpoints.
      minutes: After which an arm ends, its compilation included.
    """
    config = size.training
    held_out = spread_windows(corpus.held_out, count=None, length=config.sequence_length)
    for arm in arms:
        deadline = time.perf_counter() + 60 * minutes
        learner, history = train_arm(arm, corpus, size, out, resume=resume, deadline=deadline)
        ArmResult(
            name=arm,
            attention=_describe(size, arm),
            settings=_settings(size, corpus),
            device=jax.devices()[0].device_kind,
            history=history,
            held_out_loss=held_out_loss(learner, held_out, config.batch),
            tokens_per_second=tokens_per_second(history, config),
            sample=_sample(learner, corpus, config.seed),
        ).write(out / "arms")


def report(corpus: Corpus, out: Path) -> list[ArmResult]:
    """Writes the report of all arms that have been trained.

    Args:
      corpus: Text.
      out: Directory of the results.

    Returns:
      A result for each arm.

    Raises:
      ValueError: If they were trained on another text.
    """
    results = read_results(out / "arms")
    if (trained_on := results[0].settings["text"]) != corpus.digest:
        raise ValueError(f"corpus: the arms in {out} learned from text {trained_on}, this one is {corpus.digest}")
    write_losses(out / "curves.csv", results)
    write_curves(out / "curves.png", results)
    write_report(out / "report.md", results, _prompt(corpus).tobytes().decode(errors="replace"))
    return results


def _prompt(corpus: Corpus) -> Any:
    return corpus.held_out[:PROMPT_BYTES]


def _sample(learner: OneDeviceLearner, corpus: Corpus, seed: int) -> str:
    sample = generate(learner.model, _prompt(corpus), length=SAMPLE_BYTES, temperature=TEMPERATURE, seed=seed)
    return sample.decode(errors="replace")


def _describe(size: Size, arm: str) -> str:
    attention = size.attention(arm)
    if isinstance(attention, Exact):
        return f"jax.nn.dot_product_attention, {attention.implementation}"
    return "jax_fp4attn"


def _settings(size: Size, corpus: Corpus) -> dict[str, Any]:
    text = {"bytes": len(corpus.training), "text": corpus.digest}
    return dataclasses.asdict(size.model) | dataclasses.asdict(size.training) | text


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains language models that differ in the recipe of attention alone, and compares them.",
        epilog="Defaults of --arms, --steps, --batch and --sequence-length are those of --size.",
    )
    parser.add_argument("--size", choices=list(SIZES), default="small", help="of the models (default: %(default)s)")
    parser.add_argument("--arms", metavar="A,B", help="recipes to compare, by name")
    parser.add_argument("--steps", type=int, help="optimiser steps of each arm")
    parser.add_argument("--batch", type=int, help="windows of text in a step")
    parser.add_argument("--sequence-length", type=int, help="bytes in a window")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data and samples (default: %(default)s)")
    parser.add_argument("--exact", choices=("cudnn", "xla"), help=f"what attends in place of the recipe {BASELINE}")
    parser.add_argument("--corpus", type=Path, metavar="FILE.gz", help="text that examples.gather_sources wrote")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which an arm ends (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/language_model"), help="of results (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parser.add_argument("--report", action="store_true", help="train nothing, join the arms in --out")
    parsed = parser.parse_args(arguments)
    parsed.size = _chosen_size(parsed)
    parsed.arms = list(parsed.size.arms) if parsed.arms is None else parsed.arms.split(",")
    if unknown := set(parsed.arms) - set(recipes.named()):
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; there are {', '.join(recipes.named())}")
    if parsed.resume and not parsed.size.checkpoints:
        parser.error("--resume: this size writes no checkpoints")
    return parsed


def _chosen_size(parsed: argparse.Namespace) -> Size:
    size = SIZES[parsed.size]
    names = ("steps", "batch", "sequence_length", "seed")
    given = {name: value for name in names if (value := getattr(parsed, name)) is not None}
    size = dataclasses.replace(size, training=dataclasses.replace(size.training, **given))
    return size if parsed.exact is None else dataclasses.replace(size, baseline=Exact(parsed.exact))


def _load(parsed: argparse.Namespace) -> Corpus:
    size: Size = parsed.size
    if parsed.corpus is not None:
        return split_text(sources.read(parsed.corpus), size.held_out_fraction)
    if size.sources:
        text = sources.gather(sources.installed_directories(), sources.MEGABYTES * 1_000_000)
        return split_text(text, size.held_out_fraction)
    return load_corpus(size.held_out_fraction)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example.

    Args:
      arguments: Command line; None for the process's own.
    """
    start = time.perf_counter()
    parsed = parse_arguments(arguments)
    corpus = _load(parsed)
    if not parsed.report:
        compare(parsed.arms, corpus, parsed.size, parsed.out, resume=parsed.resume, minutes=parsed.minutes)
    results = report(corpus, parsed.out)
    print(f"\n{table(results)}\n")
    for result in results:
        print(f"--- {result.name} writes ---\n{result.sample}\n")
    print(f"Report, curves and checkpoints are in {parsed.out} ({time.perf_counter() - start:.0f} s).")


if __name__ == "__main__":
    main()
