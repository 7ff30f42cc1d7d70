"""One case: trained for some steps, timed, and its compiled program read."""

import dataclasses
import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from benchmarks.quantizers.device_time import kernel_times
from benchmarks.scaling.cases import Case
from benchmarks.scaling.programs import compile_program
from examples.language_model.data import Corpus, training_batch
from examples.language_model.model import ModelConfig
from examples.language_model.sharding import computing_shardings, stored_shardings
from examples.language_model.training import IN_FLIGHT, TrainingConfig
from examples.train_sharded_language_model import ShardedLearner
from jax_fp4attn import recipes

UNTIMED_STEPS = 2
PROFILED_STEPS = 2
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a case gave; only numbers, texts and lists, for JSON.

    Attributes:
      name: Of the case.
      mesh: Sizes of its axes.
      devices: How many, in how many processes, and of which kind.
      software: What compiled and ran it.
      tokens: Of a step.
      length: Of a window.
      parameters: Their number.
      products: Number of those that are factors of matrix products.
      flops: Operations of a step, on all devices together: products with parameters and causal attention.
      losses: Of each step.
      rounded_losses: The same from parameters that were rounded to bfloat16: what rounding alone does.
      seconds: Of a step, UNTIMED_STEPS left out.
      compile_seconds: Of the program.
      parameter_sizes: Number of elements of each parameter, as a device computes with it.
      memory: Bytes of a device that the program takes, arguments included, as the compiler says.
      communication_seconds: Of NCCL's kernels in a step on one device, by the profiler; None where there is none.
      reason: Why there is nothing else, or "".
    """

    name: str
    mesh: str
    devices: str = ""
    software: str = ""
    tokens: int = 0
    length: int = 0
    parameters: int = 0
    products: int = 0
    flops: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    rounded_losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = math.nan
    compile_seconds: float = 0.0
    parameter_sizes: list[int] = dataclasses.field(default_factory=list)
    memory: int = 0
    communication_seconds: float | None = None
    reason: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether its times mean something: virtual devices share the cores of one processor."""
        return " x cpu," not in self.devices


def measure(case: Case, model: ModelConfig, corpus: Corpus, programs: Path, *, recipe: str, profile: bool) -> Result:
    """Measures a case.

    Args:
      case: How the training is split.
      model: Size of the model.
      corpus: Text.
      programs: Directory for the text of the compiled program.
      recipe: Of attention, by name.
      profile: Whether to ask the profiler, too.

    Returns:
      What it gave.
    """
    model = dataclasses.replace(model, implementation=case.implementation)
    config = TrainingConfig(
        steps=case.steps, batch=case.batch, sequence_length=case.length, seed=SEED, learning_rate=1e-3
    )
    mesh = case.mesh.make(AxisType.Auto)
    learner = ShardedLearner(model, config, recipes.named()[recipe], mesh)
    parameters = nnx.filter_state(learner.state, nnx.Param)[0]
    rounded = _rounded(learner.state) if case.rounding else None

    start = time.perf_counter()
    batch_of = functools.partial(_batch, learner, case, corpus)
    compiled = compile_program(learner.lower(batch_of(0)), programs, case.name)
    compile_seconds = time.perf_counter() - start
    losses, seconds, state = _train(compiled, learner.state, batch_of, case)
    rounded_losses = _train(compiled, rounded, batch_of, case)[0] if rounded is not None else []
    communication = _communication(compiled, state, batch_of(0)) if profile and mesh.size > 1 else None
    return Result(
        name=case.name,
        mesh=str(case.mesh),
        devices=f"{mesh.size} x {jax.devices()[0].device_kind}, {jax.process_count()} process(es)",
        software=f"jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}",
        tokens=case.tokens,
        length=case.length,
        parameters=sum(x.size for x in jax.tree.leaves(parameters)),
        products=(products := _products(parameters)),
        flops=step_flops(model, products, case),
        losses=losses,
        rounded_losses=rounded_losses,
        seconds=seconds,
        compile_seconds=compile_seconds,
        parameter_sizes=sorted(_sizes_on_a_device(parameters, mesh)),
        memory=_memory(compiled),
        communication_seconds=communication,
    )


def step_flops(model: ModelConfig, products: int, case: Case) -> float:
    """Operations of the products of a step: 6 for each parameter and token, and causal attention 3.5 times its forward.

    Args:
      model: Size of the model.
      products: Number of parameters that are factors of products.
      case: Batch and length.

    Returns:
      Operations.
    """
    attention = 3.5 * 2 * case.length * model.heads * model.head_size * model.layers
    return case.tokens * (6.0 * products + attention)


def _products(parameters: Any) -> int:
    """The embedding is a look-up, and scales are factors of single numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return sum(x.size for path, x in leaves if "kernel" in jax.tree_util.keystr(path))


def _batch(learner: ShardedLearner, case: Case, corpus: Corpus, step: int) -> jax.Array:
    def read(rows: slice) -> np.ndarray:
        return training_batch(corpus.training, seed=SEED, step=step, batch=case.batch, length=case.length, rows=rows)

    return learner.place(read, (case.batch, case.length + 1))


def _train(
    compiled: jax.stages.Compiled, state: Any, batch_of: Callable[[int], jax.Array], case: Case
) -> tuple[list[float], float, Any]:
    """Losses, seconds of a step, and the state afterwards; the one given is used up."""
    pending: deque[jax.Array] = deque()
    losses: list[float] = []
    start = math.nan
    for step in range(case.steps):
        state, loss = compiled(state, batch_of(step))
        pending.append(loss)
        if len(pending) > IN_FLIGHT:
            losses.append(float(pending.popleft()))
            if len(losses) == UNTIMED_STEPS:
                start = time.perf_counter()
    losses += [float(loss) for loss in pending]
    return losses, (time.perf_counter() - start) / (case.steps - UNTIMED_STEPS), state


def _rounded(state: nnx.State) -> nnx.State:
    """A copy of the state whose parameters are rounded to bfloat16; its first part is the model."""

    def copy(path: Any, x: jax.Array) -> jax.Array:
        is_parameter = jax.tree_util.keystr(path).startswith("[0]")
        return jax.lax.reduce_precision(x, 8, 7) if is_parameter else jnp.copy(x)

    return jax.block_until_ready(jax.tree_util.tree_map_with_path(copy, state))


def _communication(compiled: jax.stages.Compiled, state: Any, batch: jax.Array) -> float | None:
    """Seconds of NCCL's kernels in a step on one device."""

    def step() -> jax.Array:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    try:
        times = kernel_times(step, PROFILED_STEPS)
    # Whatever the profiler raises, the case has its other results.
    except Exception as error:
        print(f"  no profile: {error}", flush=True)
        return None
    seconds = sum(sum(x) for name, x in times.items() if "nccl" in name.lower())
    return seconds / PROFILED_STEPS / jax.local_device_count() if times else None


def _sizes_on_a_device(parameters: Any, mesh: jax.sharding.Mesh) -> set[int]:
    shardings = computing_shardings(stored_shardings(parameters, mesh))
    return {
        math.prod(sharding.shard_shape(x.shape))
        for x, sharding in zip(jax.tree.leaves(parameters), jax.tree.leaves(shardings), strict=True)
    }


def _memory(compiled: Any) -> int:
    try:
        analysis = compiled.memory_analysis()
        return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes)
    except Exception:
        return 0
