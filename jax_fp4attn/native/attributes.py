"""Attributes of the custom calls that stand for a recipe."""

import dataclasses

import numpy as np

from jax_fp4attn.code_map import CodeMap, MapSchedule
from jax_fp4attn.recipe import Recipe

Attribute = str | np.float32 | np.int32


def recipe_attributes(recipe: Recipe) -> dict[str, Attribute]:
    """Writes every field that has a numerical meaning as an attribute ``recipe_<field>``.

    Args:
      recipe: The recipe.

    Returns:
      Strings for choices, int32 and float32 for numbers, and the code map in the notation of :func:`map_text`.

    Example:
      >>> from jax_fp4attn import recipes
      >>> recipe_attributes(recipes.fast)["recipe_code_map"]
      'affine(1.5,1.2)'
    """
    fields = (field for field in dataclasses.fields(recipe) if field.compare)
    return {f"recipe_{field.name}": _attribute(field.type, getattr(recipe, field.name)) for field in fields}


def _attribute(kind: object, value: object) -> Attribute:
    match value:
        case None:
            return "none"
        case str():
            return value
        case MapSchedule():
            return map_text(value)
        case int() if kind is int:
            return np.int32(value)
        case int() | float():
            return np.float32(value)
    raise AssertionError(f"no attribute for {value!r}")


def map_text(schedule: MapSchedule) -> str:
    """A schedule of code maps as text, equal for equal schedules only.

    Args:
      schedule: The schedule.

    Returns:
      The map of each quarter separated by ``;`` (one map if all are equal), then ``|``, the alternate map, its pairs in
      each quarter and the query tiles that use it, if there is one. Numbers are written so that they read back exactly.
    """
    quarters = [_code_map(code_map) for code_map in schedule.quarters]
    text = quarters[0] if len(set(quarters)) == 1 else ";".join(quarters)
    if schedule.alternate is None:
        return text
    pairs = ";".join(",".join(map(str, members)) for members in schedule.alternate_pairs)
    tiles = "".join("x" if used else "-" for used in schedule.alternate_query_tiles)
    return f"{text}|{_code_map(schedule.alternate)}|{pairs}|{tiles}"


def _code_map(code_map: CodeMap) -> str:
    values = [getattr(code_map, field.name) for field in dataclasses.fields(code_map)]
    return f"{type(code_map).__name__.lower()}({','.join(_number(value) for value in values)})"


def _number(value: object) -> str:
    if isinstance(value, tuple):
        return ":".join(_number(part) for part in value)
    return repr(value)
