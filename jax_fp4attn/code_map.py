"""Maps from a base-2 log score to the value that E2M1 rounding turns into a code.

The argument ``xc`` is the logarithm of the wanted code: it is log2(6) where the probability equals the block's
power-of-two scale. A map may be any increasing function: it only has to place the seven code boundaries well, since the
denominator sums the codes themselves. Negative results become code 0.
"""

import dataclasses

PAIRS_PER_QUARTER = 16


_LARGEST = 2.0**16  # keeps the third power of a log score inside float32


def _check_finite(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise ValueError(
                f"{type(owner).__name__}.{name}: expected a Python number of at most {_LARGEST:g}, got {value!r}"
            )


def _check_positive(owner: object, *names: str) -> None:
    _check_finite(owner, *names)
    for name in names:
        if getattr(owner, name) < 1 / _LARGEST:
            raise ValueError(
                f"{type(owner).__name__}.{name}: expected a positive number from {1 / _LARGEST:g} on (the map must "
                f"increase and send a masked score, -inf, to code 0), got {getattr(owner, name)!r}"
            )


@dataclasses.dataclass(frozen=True)
class Affine:
    """``u = slope * xc + intercept`` (Direct-P, eq. for the affine payload).

    Raises:
      ValueError: If the slope is not positive, or a number is not finite or too large.

    Example:
      >>> Affine(1.5, 1.2)
      Affine(slope=1.5, intercept=1.2)
    """

    slope: float
    intercept: float

    def __post_init__(self) -> None:
        _check_positive(self, "slope")
        _check_finite(self, "intercept")


@dataclasses.dataclass(frozen=True)
class Exponential:
    """``u = 2**(xc + offset)``.

    Raises:
      ValueError: If the offset is not finite or too large.

    Example:
      >>> Exponential()
      Exponential(offset=0.0)
    """

    offset: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self, "offset")


@dataclasses.dataclass(frozen=True)
class SignedSquare:
    """``y = slope * xc + intercept; u = y * |y| + constant``: one fused multiply-add more than affine.

    Raises:
      ValueError: If the slope is not positive, or a number is not finite or too large.

    Example:
      >>> SignedSquare(0.64, 0.39, 0.68).constant
      0.68
    """

    slope: float
    intercept: float
    constant: float

    def __post_init__(self) -> None:
        _check_positive(self, "slope")
        _check_finite(self, "intercept", "constant")


@dataclasses.dataclass(frozen=True)
class MaxAffine:
    """``u = max(slope_i * xc + intercept_i)``, a convex piecewise-linear map.

    Raises:
      ValueError: If there are fewer than two pieces, or one is no :class:`Affine` map.

    Example:
      >>> len(MaxAffine(((1.0, 1.0), (2.0, 0.5))).pieces)
      2
    """

    pieces: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        are_pairs = isinstance(self.pieces, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in self.pieces)
        if not are_pairs or len(self.pieces) < 2:
            raise ValueError(
                f"MaxAffine.pieces: expected a tuple of at least two (slope, intercept), got {self.pieces!r}"
            )
        for slope, intercept in self.pieces:
            Affine(slope, intercept)


@dataclasses.dataclass(frozen=True)
class Cubic:
    """``u = ((c3 * xc + c2) * xc + c1) * xc + c0``, without range reduction.

    Raises:
      ValueError: If c3 is not positive, or a number is not finite or too large.

    Example:
      >>> Cubic(0.05, 0.2, 0.7, 1.0).c0
      1.0
    """

    c3: float
    c2: float
    c1: float
    c0: float

    def __post_init__(self) -> None:
        _check_positive(self, "c3")
        _check_finite(self, "c2", "c1", "c0")


CodeMap = Affine | Exponential | SignedSquare | MaxAffine | Cubic

_MAP_TYPES = (Affine, Exponential, SignedSquare, MaxAffine, Cubic)


@dataclasses.dataclass(frozen=True)
class MapSchedule:
    """Which map each element of a 128-key tile takes.

    A tile has four quarters of 32 keys and a quarter has sixteen pairs of neighbouring keys (what one packed
    instruction handles).

    Attributes:
      quarters: The map of each quarter.
      alternate: A second map for chosen pairs, or None.
      alternate_pairs: For each quarter the pairs (0 to 15) that take ``alternate``.
      alternate_query_tiles: Whether even and odd 128-row query tiles use the alternate map at all; the two tiles of a
        job are two software stages, and a kernel may spend the costly map in one of them only.

    Raises:
      ValueError: If the fields do not make a schedule; the message names the field.

    Example:
      >>> MapSchedule((Affine(1.65, 0.8),) * 4, Exponential(), ((0, 4),) * 4).alternate_pairs[3]
      (0, 4)
    """

    quarters: tuple[CodeMap, CodeMap, CodeMap, CodeMap]
    alternate: CodeMap | None = None
    alternate_pairs: tuple[tuple[int, ...], ...] = ((), (), (), ())
    alternate_query_tiles: tuple[bool, bool] = (True, True)

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.quarters, tuple)
        if not is_tuple or len(self.quarters) != 4 or not all(isinstance(m, _MAP_TYPES) for m in self.quarters):
            raise ValueError(f"MapSchedule.quarters: expected a tuple of four code maps, got {self.quarters!r}")
        if self.alternate is not None and not isinstance(self.alternate, _MAP_TYPES):
            raise ValueError(f"MapSchedule.alternate: expected a code map or None, got {self.alternate!r}")
        pairs = self.alternate_pairs
        if not isinstance(pairs, tuple) or len(pairs) != 4 or not all(map(_are_pairs, pairs)):
            raise ValueError(
                "MapSchedule.alternate_pairs: expected a tuple of distinct pairs in [0, 16) for each of four quarters, "
                f"got {self.alternate_pairs!r}"
            )
        if (self.alternate is None) != (not any(self.alternate_pairs)):
            raise ValueError("MapSchedule: alternate and alternate_pairs are given together or not at all")
        tiles = self.alternate_query_tiles
        are_bools = isinstance(tiles, tuple) and all(isinstance(x, bool) for x in tiles)
        if not are_bools or len(tiles) != 2 or not any(tiles):
            raise ValueError(
                "MapSchedule.alternate_query_tiles: expected a tuple of two bools (even, odd), at least one of them "
                f"True, got {self.alternate_query_tiles!r}"
            )


def _are_pairs(pairs: object) -> bool:
    """Whether these are distinct pairs of a quarter."""
    if not isinstance(pairs, tuple) or not all(type(pair) is int for pair in pairs):
        return False
    return set(pairs) <= set(range(PAIRS_PER_QUARTER)) and len(set(pairs)) == len(pairs)


def uniform(code_map: CodeMap) -> MapSchedule:
    """The schedule in which every element takes ``code_map``.

    Args:
      code_map: A map.

    Returns:
      The schedule.

    Example:
      >>> uniform(Exponential()).quarters[3]
      Exponential(offset=0.0)
    """
    return MapSchedule((code_map,) * 4)


def paper_pairs(density: int, quarter: int) -> tuple[int, ...]:
    """The pairs of a quarter that Direct-P evaluates by the exponential unit at a given density.

    Args:
      density: 0 (none) to 4 (all sixteen); each step adds four pairs.
      quarter: 0 to 3; the sets are rotated by quarter to spread the unit's work.

    Returns:
      The pairs in increasing order.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> paper_pairs(1, quarter=2)
      (2, 4, 10, 12)
    """
    if density not in range(5):
        raise ValueError(f"density: expected 0 to 4, got {density!r}")
    if quarter not in range(4):
        raise ValueError(f"quarter: expected 0 to 3, got {quarter!r}")
    if density == 4:
        return tuple(range(PAIRS_PER_QUARTER))
    steps = (
        (quarter, quarter + 8, 4, 12),
        ((quarter + 2) & 3, 6, 8 + ((quarter + 2) & 3), 14),
        ((quarter + 1) & 3, 5, 8 + ((quarter + 1) & 3), 13),
    )
    return tuple(sorted({pair for step in steps[:density] for pair in step}))


def with_exponential(
    base: CodeMap | tuple[CodeMap, CodeMap, CodeMap, CodeMap],
    densities: tuple[int, int, int, int],
    *,
    query_tiles: tuple[bool, bool] = (True, True),
    offset: float = 0.0,
) -> MapSchedule:
    """A schedule that takes the exponential on :func:`paper_pairs` and ``base`` elsewhere.

    Args:
      base: One map, or one a quarter.
      densities: Density of exponentials in each quarter.
      query_tiles: Parities of query tiles that use the exponential.
      offset: Offset of the exponential.

    Returns:
      The schedule.

    Raises:
      ValueError: If a density is out of range, or there are other than four.

    Example:
      >>> with_exponential(Affine(1.65, 0.8), (1, 1, 1, 1)).alternate_pairs[2]
      (2, 4, 10, 12)
    """
    quarters = base if isinstance(base, tuple) else (base,) * 4
    pairs = tuple(paper_pairs(density, quarter) for quarter, density in enumerate(densities))
    return MapSchedule(quarters, Exponential(offset), pairs, query_tiles)
