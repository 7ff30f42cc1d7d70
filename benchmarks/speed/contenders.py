"""Who competes: our operator with and without its quantisers, cuDNN, FlashAttention-3 and plain XLA."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Collection
from typing import Any

import jax

import jax_fp4attn
from benchmarks.accuracy.metrics import Accuracy
from benchmarks.speed.cases import Case
from benchmarks.speed.inputs import Arrays
from jax_fp4attn import recipes, steps
from jax_fp4attn.config import Implementation, OperatorConfig, Visibility
from jax_fp4attn.recipe import Recipe

KINDS = {
    "ours": "the whole call of jax_fp4attn.attention from bfloat16 arrays, quantisers included",
    "ours-forward": "its forward step alone, from operands that were quantised before",
    "cudnn": "jax.nn.dot_product_attention(implementation='cudnn')",
    "flash3": "flash_attn3_jax.flash_mha, whose wheel runs head size 64 in its kernels for 128",
    "xla": "jax.nn.dot_product_attention(implementation='xla')",
}

RECIPES = {"full": ("fast", "square", "exact_map", "accurate", "fp8_pv"), "causal": ("train",)}

SCORE_COPIES = {"forward": 3, "forward+backward": 6}
"""Float32 arrays of all scores that plain XLA is taken to hold at once."""

XLA_MEMORY = 0.6
"""The part of the device's memory that they may fill."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A call that is ready to run.

    Attributes:
      function: Jitted. Its first results are the output and, with a backward, the gradients of query, key and value.
      arguments: Of the function; with a backward the last one is the cotangent.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        """Runs it."""
        return self.function(*self.arguments)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to compute a case.

    Attributes:
      kind: One of :data:`KINDS`.
      recipe: Name of ours, or "".
      build: Makes the program of a case. Raises what it likes where it has none.
      limits: Least cosine and greatest relative L2 error that a sound result has.
    """

    kind: str
    recipe: str
    build: Callable[[Case, Arrays], Program]
    limits: Accuracy

    @property
    def label(self) -> str:
        """For tables."""
        return {"ours": self.recipe, "ours-forward": f"{self.recipe}, forward step"}.get(self.kind, self.kind)


LIMITS = {
    "bf16": Accuracy(cosine=0.999, rel_l2=0.05),
    "e4m3": Accuracy(cosine=0.97, rel_l2=0.25),
    "mxfp4": Accuracy(cosine=0.9, rel_l2=0.5),
}
"""By the format of P. Loose: they tell a broken kernel from a sound one, and leave accuracy to its own benchmark."""


def contenders_of(
    case: Case, kinds: Collection[str], recipe_names: Collection[str], implementation: Implementation
) -> list[Contender]:
    """The contenders of a case.

    Args:
      case: What is computed.
      kinds: Which of :data:`KINDS`.
      recipe_names: Which of :data:`RECIPES`.
      implementation: Of ours.

    Returns:
      Ours first.
    """
    found = []
    for recipe in (recipes.named()[name] for name in RECIPES[case.mask] if name in recipe_names):
        limits = LIMITS[recipe.p_format]
        found.append(Contender("ours", recipe.name, functools.partial(_build_ours, recipe, implementation), limits))
        if not case.has_gradients:
            build = functools.partial(_build_forward_step, recipe, implementation)
            found.append(Contender("ours-forward", recipe.name, build, limits))
    builders = {"cudnn": _build_cudnn, "flash3": _build_flash3, "xla": _build_xla}
    found += [Contender(kind, "", build, LIMITS["bf16"]) for kind, build in builders.items()]
    return [contender for contender in found if contender.kind in kinds]


def _program(function: Callable[..., jax.Array], case: Case, arrays: Arrays) -> Program:
    """The program of a function of query, key and value."""
    if not case.has_gradients:
        return Program(jax.jit(function), arrays[:3])

    def with_gradients(query: jax.Array, key: jax.Array, value: jax.Array, d_output: jax.Array) -> Any:
        output, pull_back = jax.vjp(function, query, key, value)
        return output, *pull_back(d_output)

    return Program(jax.jit(with_gradients), tuple(arrays))


def _build_ours(recipe: Recipe, implementation: Implementation, case: Case, arrays: Arrays) -> Program:
    function = functools.partial(
        jax_fp4attn.attention, is_causal=case.is_causal, recipe=recipe, implementation=implementation
    )
    return _program(function, case, arrays)


def _build_forward_step(recipe: Recipe, implementation: Implementation, case: Case, arrays: Arrays) -> Program:
    shape = case.shape
    scale = 1 / math.sqrt(shape.head_size)
    config = OperatorConfig(recipe, scale, case.is_causal, window=None, implementation=implementation)

    def quantize(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return steps.quantize(config, query, key, value, Visibility())

    def forward(operands: Any) -> Any:
        return steps.forward(config, operands, None, Visibility(), num_keys=shape.length, head_size=shape.head_size)

    return Program(jax.jit(forward), (jax.jit(quantize)(*arrays[:3]),))


def _build_cudnn(case: Case, arrays: Arrays) -> Program:
    function = functools.partial(jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="cudnn")
    return _program(function, case, arrays)


def _build_flash3(case: Case, arrays: Arrays) -> Program:
    # Imported here, since it registers its kernels where it is imported and is no dependency of ours.
    flash_mha = importlib.import_module("flash_attn3_jax").flash_mha
    return _program(functools.partial(flash_mha, is_causal=case.is_causal), case, arrays)


def _build_xla(case: Case, arrays: Arrays) -> Program:
    needed, limit = xla_bytes(case), xla_limit()
    if needed > limit:
        raise NotImplementedError(
            f"its scores would take {needed / 2**30:.0f} GiB ({SCORE_COPIES[case.passes]} float32 arrays), "
            f"of {limit / 2**30:.0f} allowed"
        )
    function = functools.partial(jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="xla")
    return _program(function, case, arrays)


def xla_bytes(case: Case) -> float:
    """Bytes of all scores that plain XLA is taken to hold.

    Args:
      case: What is computed.

    Returns:
      Bytes.
    """
    shape = case.shape
    return SCORE_COPIES[case.passes] * 4.0 * shape.batch * shape.heads * shape.length**2


def xla_limit() -> float:
    """Bytes that the scores may take: a part of what JAX may allocate on the device, or of 16 GiB if it does not say.

    Returns:
      Bytes.
    """
    statistics = jax.devices()[0].memory_stats() or {}
    return XLA_MEMORY * float(statistics.get("bytes_limit", 2**34))
