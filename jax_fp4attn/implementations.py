"""Choice of an implementation: which names exist, and which of them can run a call."""

from collections.abc import Sequence
from typing import Literal

Implementation = Literal["cuda", "reference"]

_NAMES = ("cuda", "reference")


def select(implementation: str | Sequence[str] | None) -> Implementation:
    """Picks the implementation of a call.

    Args:
      implementation: None for the best one that can run, a name to insist on it, or names to try in order.

    Returns:
      The implementation to use.

    Raises:
      ValueError: If a name is unknown or the sequence is empty.
      NotImplementedError: If none of the named implementations can run; the message holds every reason.
    """
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
    for name in names:
        reason = _why_not(name)
        if reason is None:
            return "cuda" if name == "cuda" else "reference"
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError("implementation: " + "; ".join(reasons))


def _why_not(name: str) -> str | None:
    if name == "cuda":
        return "this installation has no native library; use implementation='reference' or None"
    return None
