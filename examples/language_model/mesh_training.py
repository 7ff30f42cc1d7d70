"""What the examples on meshes share: the command line, the run, and what it leaves behind."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from examples._tables import markdown_table
from examples.language_model import processes
from examples.language_model.curves import write_losses, write_plot
from examples.language_model.data import Corpus, load_corpus, spread_windows
from examples.language_model.meshes import MeshSizes
from examples.language_model.model import LanguageModel, ModelConfig
from examples.language_model.progress import run_with_progress, tokens_per_second
from examples.language_model.training import (
    History,
    Learner,
    OneDeviceLearner,
    TrainingConfig,
    make_optimizer,
    train,
)
from jax_fp4attn import Recipe, recipes


class MeshLearner(Learner, Protocol):
    """A learner whose parameters and optimiser state are split over a mesh.

    Attributes:
      state: Parameters and optimiser state.
    """

    state: Any


MakeLearner = Callable[[ModelConfig, TrainingConfig, Recipe, Mesh], MeshLearner]


def one_device_learner(model_config: ModelConfig, config: TrainingConfig, recipe: Recipe) -> OneDeviceLearner:
    """Makes what a run on a mesh is compared with: the same model and optimiser on the default device.

    Args:
      model_config: Size of the model.
      config: Settings of the training.
      recipe: Of attention.

    Returns:
      The learner.
    """
    model = LanguageModel(model_config, recipe=recipe, rngs=nnx.Rngs(config.seed))
    return OneDeviceLearner(model, make_optimizer(model, config))


def main(
    arguments: Sequence[str] | None,
    *,
    name: str,
    description: str,
    kind: AxisType,
    make_learner: MakeLearner,
    out: Path,
    model_config: ModelConfig,
) -> None:
    """Runs an example.

    Args:
      arguments: Command line; None for the process's own.
      name: Of the run.
      description: Of the example.
      kind: Of the mesh's axes.
      make_learner: Makes what to train.
      out: Directory of the results, if the command line names no other.
      model_config: Size of the model.
    """
    parser = _make_parser(description, out)
    parsed = parser.parse_args(arguments)
    config = TrainingConfig(
        steps=parsed.steps,
        batch=parsed.batch,
        sequence_length=parsed.sequence_length,
        seed=parsed.seed,
        evaluation_windows=max(TrainingConfig.evaluation_windows, parsed.batch),
    )
    corpus = load_corpus()
    try:
        processes.start(parsed)
        sizes = parsed.mesh or MeshSizes.default(jax.device_count(), model_config.kv_heads)
        sizes.check(jax.device_count(), model_config, config.batch)
        _check_text(corpus, config)
    except ValueError as error:
        parser.error(str(error))

    recipe = recipes.named()[parsed.recipe]
    learner = make_learner(model_config, config, recipe, sizes.make(kind))
    histories = {name: _run(name, learner, corpus, config)}
    if parsed.compare:
        # Every process does, so that none has to wait for another.
        histories["one device"] = _run("one device", one_device_learner(model_config, config, recipe), corpus, config)
    if _is_first_process():
        losses = {run: history.training_loss for run, history in histories.items()}
        parsed.out.mkdir(parents=True, exist_ok=True)
        write_losses(parsed.out / "losses.csv", losses)
        write_plot(parsed.out / "losses.png", losses)
        print(f"\n{_where(sizes, learner)}\n\n{_table(histories, config)}\n")
        if parsed.compare:
            differences = np.abs(np.diff(list(losses.values()), axis=0))[0]
            print(f"Largest difference of a loss: {differences.max():.2g}, at step {differences.argmax() + 1}.")
        print(f"Losses and plot are in {parsed.out}.")


def _run(name: str, learner: Learner, corpus: Corpus, config: TrainingConfig) -> History:
    history = History()
    losses = train(learner, corpus, config, history)
    run_with_progress(name, losses, history, config, disable=not _is_first_process())
    return history


def _is_first_process() -> bool:
    return jax.process_index() == 0


def _check_text(corpus: Corpus, config: TrainingConfig) -> None:
    available = len(spread_windows(corpus.held_out, count=None, length=config.sequence_length))
    if config.batch > available:
        raise ValueError(
            f"batch: {config.batch} windows of {config.sequence_length} bytes are more than the {available} that are "
            "held out; take a smaller batch or sequence length"
        )


def _where(sizes: MeshSizes, learner: MeshLearner) -> str:
    """Says what the training ran on, and what of its state one device holds."""
    device = jax.local_devices()[0]
    arrays = jax.tree.leaves(learner.state)
    held = sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards if shard.device == device)
    return (
        f"Mesh {sizes}: {jax.device_count()} {device.platform} devices of {jax.process_count()} process(es).\n"
        f"Parameters and optimiser state: {sum(x.nbytes for x in arrays) / 1e6:.2f} MB, "
        f"of which one device holds {held / 1e6:.2f} MB."
    )


def _table(histories: dict[str, History], config: TrainingConfig) -> str:
    header = ["run", "first loss", "last loss", "held-out loss", "tokens/s"]
    rows = [
        [
            name,
            f"{history.training_loss[0]:.4f}",
            f"{history.training_loss[-1]:.4f}",
            f"{history.held_out_loss[-1][1]:.4f}",
            "" if math.isnan(speed := tokens_per_second(history, config)) else f"{speed:.0f}",
        ]
        for name, history in histories.items()
    ]
    return markdown_table(header, rows)


def _make_parser(description: str, out: Path) -> argparse.ArgumentParser:
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--mesh",
        type=_mesh,
        help="sizes of the axes, such as data=2,model=4; None for all devices, key and value heads kept whole",
    )
    parser.add_argument("--recipe", default="train", choices=list(recipes.named()), metavar="NAME", help="of attention")
    parser.add_argument("--steps", type=_positive, default=defaults.steps, help="optimiser steps")
    parser.add_argument("--batch", type=_positive, default=defaults.batch, help="windows of text in a step")
    parser.add_argument("--sequence-length", type=_positive, default=defaults.sequence_length, help="bytes in a window")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of parameters and data")
    parser.add_argument("--out", type=Path, default=out, help="directory of the results")
    parser.add_argument("--compare", action="store_true", help="then train on one device, too, and compare the losses")
    processes.add_arguments(parser)
    return parser


def _mesh(text: str) -> MeshSizes:
    try:
        return MeshSizes.parse(text)
    except ValueError as error:
        # argparse shows the message of this exception alone.
        raise argparse.ArgumentTypeError(str(error).removeprefix("mesh: ")) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number
