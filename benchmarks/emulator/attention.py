"""Which attention kernels among CUTLASS's examples are run, on what, and what they should give."""

import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from benchmarks.emulator.errors import Errors, relative_l2

HEAD_SIZE = 128
SCALE = HEAD_SIZE**-0.5


@dataclasses.dataclass(frozen=True)
class Attention:
    """One launch of a causal forward pass.

    Attributes:
      target: That the kernel is compiled for.
      type: Of query, key and value, by its name in ml_dtypes; the output is bfloat16.
      batch: Size.
      length: Of queries and of keys.
      heads: Of queries.
      kv_heads: Of keys and values.
      persistent: Whether one CTA computes all tiles.
      rising: Whether keys grow with their tile, so that the running maximum does and the output is rescaled.
    """

    target: str
    type: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    persistent: bool = False
    rising: bool = False

    @property
    def kernel(self) -> str:
        """For tables."""
        short = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
        return f"FMHA {short[self.type]} {self.target}" + (" persistent" if self.persistent else "")

    @property
    def many_seeds(self) -> bool:
        """Whether it is run under all seeds."""
        return (self.target, self.type) == ("sm_100a", "bfloat16")

    @property
    def shape(self) -> str:
        """For tables."""
        heads = f"Hq{self.heads} Hkv{self.kv_heads}" if self.heads != self.kv_heads else f"H{self.heads}"
        return f"S{self.length} B{self.batch} {heads}"


CASES = (
    Attention("sm_100a", "bfloat16", batch=1, length=256, heads=2, kv_heads=2),
    Attention("sm_100a", "bfloat16", batch=2, length=512, heads=4, kv_heads=2),
    Attention("sm_100a", "float8_e4m3fn", batch=1, length=256, heads=2, kv_heads=2),
    Attention("sm_90a", "bfloat16", batch=1, length=256, heads=2, kv_heads=2),
)

# With three and four tiles in one CTA, for which barriers change their phase more than once.
PERSISTENT_CASES = (
    Attention("sm_100a", "bfloat16", batch=1, length=768, heads=1, kv_heads=1, persistent=True, rising=True),
    Attention("sm_100a", "bfloat16", batch=1, length=384, heads=2, kv_heads=2, persistent=True, rising=True),
)
_KEYS_OF_A_TILE = 128


def arrays_of(case: Attention) -> list[np.ndarray]:
    """Query, key, value (batch, length, heads, HEAD_SIZE), normally distributed; output and lse, zero."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((case.batch, case.length, heads, HEAD_SIZE), np.float32)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    if case.rising:
        key *= (1 + np.arange(case.length, dtype=np.float32) // _KEYS_OF_A_TILE)[:, None, None]
    inputs = [x.astype(getattr(ml_dtypes, case.type)) for x in (query, key, value)]
    output = np.zeros((case.batch, case.length, case.heads, HEAD_SIZE), ml_dtypes.bfloat16)
    return [*inputs, output, np.zeros(output.shape[:3], np.float32)]


def reference(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64.

    Args:
      query: (batch, length, heads, size).
      key: (batch, length, kv_heads, size).
      value: Like key.

    Returns:
      The output like query, and the natural logarithms of the sums of exponentials (batch, length, heads).
    """
    group = query.shape[2] // key.shape[2]
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    key, value = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[3] ** -0.5
    logits = np.where(np.tril(np.ones(logits.shape[2:], bool)), logits, -np.inf)
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - largest)
    sums = weights.sum(axis=-1, keepdims=True)
    lse = (largest + np.log(sums))[..., 0].transpose(0, 2, 1)
    return np.einsum("bhqk,bkhd->bqhd", weights / sums, value), lse


def errors(case: Attention, results: Sequence[np.ndarray]) -> Errors:
    """Errors of [output, lse] after a run; the sm_100a kernel's lse is in bits."""
    output, lse = reference(*arrays_of(case)[:3])
    unit = math.log(2) if case.target == "sm_100a" else 1.0
    return Errors(
        relative_l2(results[0], output),
        float(np.abs(results[1].astype(np.float64) * unit - lse).max()),
    )
