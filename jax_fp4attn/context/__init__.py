"""Context parallelism: attention to keys that other shards of the sequence hold (ring attention).

Each shard keeps its query rows, and the quantised keys and values travel from shard to shard. What a shard computes
from the keys that are with it is a function of the caller's; here are the order of the sequence, the travel, and the
merging of partial results.
"""

from jax_fp4attn.context.order import exchange, positions, zigzag_order
from jax_fp4attn.context.partial_output import PartialOutput
from jax_fp4attn.context.ring import Relation, Visit, run_balanced_causal, run_contiguous
from jax_fp4attn.context.trees import LaidOut

__all__ = [
    "LaidOut",
    "PartialOutput",
    "Relation",
    "Visit",
    "exchange",
    "positions",
    "run_balanced_causal",
    "run_contiguous",
    "zigzag_order",
]
