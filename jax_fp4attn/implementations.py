"""Choice of an implementation: which names exist, and which of them can run a call."""

from collections.abc import Sequence

from jax_fp4attn import native
from jax_fp4attn.config import Implementation
from jax_fp4attn.recipe import Recipe

_NAMES = ("cuda", "reference")


def select(
    implementation: str | Sequence[str] | None, recipe: Recipe, head_size: int, *, dense: str | None = None
) -> Implementation:
    """Picks the implementation of a call.

    Args:
      implementation: None for the best one that can run, a name to insist on it, or names to try in order.
      recipe: Numerical choices of the call.
      head_size: H.
      dense: Name of a dense argument of the call, "bias" or "mask", or None.

    Returns:
      The implementation to use. A program may be compiled for several platforms, and a step may have no kernel, so
      "cuda" is followed by "reference" unless the caller left that out.

    Raises:
      TypeError: If it is neither None, a name nor a sequence.
      ValueError: If a name is unknown or the sequence is empty.
      NotImplementedError: If none of the named implementations can run; the message holds every reason.
    """
    if implementation is not None and not isinstance(implementation, str | Sequence):
        raise TypeError(
            f"implementation: expected None, a name or a sequence of names, got {type(implementation).__name__}"
        )
    names: tuple[str, ...]
    if implementation is None:
        names = _NAMES
    elif isinstance(implementation, str):
        names = (implementation,)
    else:
        names = tuple(implementation)
    unknown = [name for name in names if name not in _NAMES]
    if unknown or not names:
        raise ValueError(
            f"implementation: expected None, one of {_NAMES} or a non-empty sequence of them, got {implementation!r}"
        )
    reasons = []
    for position, name in enumerate(names):
        if name == "reference":
            return "reference"
        followed = "reference" in names[position:]
        reason = _why_not_cuda(dense) or (None if followed else _why_not_cuda_alone(recipe, head_size))
        if reason is None:
            return "cuda or reference" if followed else "cuda"
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError("implementation: " + "; ".join(reasons))


def _why_not_cuda(dense: str | None) -> str | None:
    if dense is not None:
        return (
            f"{dense} is an array of all scores, which only the reference reads; use is_causal, local_window_size, "
            "lengths or segment_ids"
        )
    return native.why_unavailable()


def _why_not_cuda_alone(recipe: Recipe, head_size: int) -> str | None:
    reasons = (native.missing_kernel(step, recipe, head_size) for step in ("quantize", "forward"))
    return next((reason for reason in reasons if reason is not None), None)
