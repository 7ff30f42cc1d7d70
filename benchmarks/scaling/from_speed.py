"""Predicts how FSDP scales the training of `examples.train_language_model --size gpu`, from its speed on one GPU.

Usage: python -m benchmarks.scaling.from_speed 558877 --devices 2 [--out FILE.md]

Nothing is trained: the step is compiled for two devices, virtual ones will do, and its collectives are counted.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType

from benchmarks.scaling import predict
from benchmarks.scaling.cases import FSDP, ONE
from benchmarks.scaling.measure import Result
from benchmarks.scaling.programs import compile_program, read_program
from benchmarks.scaling.report import ASSUMED_BANDWIDTHS, PREDICTED_DEVICES
from examples._tables import markdown_table
from examples.language_model import processes
from examples.language_model.sizes import SIZES, Size
from examples.train_sharded_language_model import ShardedLearner
from jax_fp4attn import recipes


def main(arguments: Sequence[str] | None = None) -> None:
    """Predicts, and prints or writes the table.

    Args:
      arguments: Command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling.from_speed", description="Predicts how FSDP scales from one GPU's speed."
    )
    parser.add_argument("tokens_per_second", type=float, help="measured on one GPU with --size gpu --arms train")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="for the table")
    processes.add_arguments(parser)
    options = parser.parse_args(arguments)
    processes.start(options)
    text = markdown(SIZES["gpu"], options.tokens_per_second, split_bytes(SIZES["gpu"]))
    print(text)
    if options.out is not None:
        options.out.write_text(text)


def split_bytes(size: Size) -> dict[str, float]:
    """What each of two devices sends in a step, by kind of collective, before a backend changes the program.

    Args:
      size: Of the model, and its training.

    Returns:
      Bytes.
    """
    learner = ShardedLearner(size.model, size.training, recipes.train, FSDP.make(AxisType.Auto))
    shape = (size.training.batch, size.training.sequence_length + 1)
    windows = learner.place(np.zeros(shape, np.int32).__getitem__, shape)
    with tempfile.TemporaryDirectory() as directory:
        compile_program(learner.lower(windows), Path(directory), "FSDP")
        return read_program(Path(directory), "FSDP", ()).split_bytes


def markdown(size: Size, speed: float, sent: Mapping[str, float]) -> str:
    """The table, and what it rests on.

    Args:
      size: Of the model, and its training.
      speed: Tokens a second of one device.
      sent: Bytes that each of two devices sends, by kind of collective.

    Returns:
      Markdown.
    """
    tokens = size.training.batch * size.training.sequence_length
    one = Result(name="one device", mesh=str(ONE), tokens=tokens, seconds=tokens / speed)
    two = Result(name="FSDP", mesh=str(FSDP), tokens=tokens)
    rows = []
    for devices in PREDICTED_DEVICES:
        x = predict.predict(two, one, sent, devices, "weak")
        slow, fast = (x.efficiency(overlapped=overlapped) for overlapped in (False, True))
        rows.append(
            [
                str(devices),
                str(tokens * devices),
                f"{1e3 * x.compute:.1f}",
                f"{x.sent_bytes / 1e6:.0f}",
                f"{1e3 * x.communication:.2f}",
                f"{slow:.0%} to {fast:.0%}",
                f"{slow * devices * speed / 1e6:.2f} to {fast * devices * speed / 1e6:.2f}",
            ]
        )
    header = ["devices", "tokens a step", "computing, ms", "sent, MB", "sending, ms", "efficiency", "million tokens/s"]
    counted = ", ".join(f"{kind} {x / 1e6:.1f} MB" for kind, x in sent.items())
    return "\n\n".join(
        [
            "# Predicted, not measured: FSDP, each device with the batch of one",
            f"From {speed:.0f} tokens/s measured on one device, and what each of two devices sends in a step of the "
            f"program as it is split: {counted} (jax {jax.__version__}). {ASSUMED_BANDWIDTHS} Efficiency: tokens a "
            "second and device against one device, with communication not hidden at all and hidden as far as it can "
            "be.",
            markdown_table(header, rows) + "\n",
        ]
    )


if __name__ == "__main__":
    main()
