"""Problems that the kernels for Hopper are tried on: recipe, sizes, and what restricts which keys a query sees."""

import dataclasses
from typing import Any

from jax_fp4attn import recipes
from jax_fp4attn.recipe import Recipe
from tests.emulator.kernels.forward import Shape, random_segments

LEADING = dataclasses.replace(recipes.accurate, name="leading", anchor_order="leading", margin=0)
SMALL_MULTIPLIER = dataclasses.replace(
    recipes.train,
    name="small_multiplier",
    backward_multiplier=16.0,
    backward_p_lift_bits=3,
    backward_lse_correction=0.1,
)

FORWARD: dict[str, tuple[Recipe, Shape, dict[str, Any]]] = {
    "one key": (recipes.square, Shape(1, 3, 1, 1, 1, 64), {}),
    "31 keys": (recipes.fast, Shape(1, 40, 31, 2, 1, 128), {}),
    "33 keys": (recipes.exact_map, Shape(1, 40, 33, 1, 1, 64), {}),
    "127 keys": (recipes.train, Shape(1, 70, 127, 2, 2, 128), {}),
    "a whole tile": (recipes.fp8_pv, Shape(1, 40, 128, 1, 1, 64), {}),
    "strided anchor of few keys": (recipes.accurate, Shape(1, 40, 31, 1, 1, 128), {}),
    "two tiles and 1": (recipes.train, Shape(1, 40, 257, 1, 1, 64), {}),
    "two tiles and 33": (recipes.square, Shape(1, 40, 289, 1, 1, 128), {}),
    "three tiles": (recipes.fast, Shape(1, 40, 383, 1, 1, 64), {}),
    "strided anchor": (recipes.accurate, Shape(2, 40, 287, 2, 1, 64), {}),
    "raw margin": (recipes.accurate_raw_margin, Shape(1, 40, 161, 1, 1, 128), {}),
    "leading anchor": (LEADING, Shape(1, 40, 255, 1, 1, 64), {}),
    "several items a block": (recipes.square, Shape(2, 150, 40, 3, 1, 64), {}),
    "causal": (recipes.train, Shape(1, 150, 150, 2, 1, 64), {"is_causal": True}),
    "causal and more keys": (recipes.fast, Shape(1, 100, 260, 1, 1, 128), {"is_causal": True}),
    "causal and fewer keys": (recipes.fp8_pv, Shape(1, 200, 65, 1, 1, 128), {"is_causal": True}),
    "causal with a strided anchor": (recipes.accurate, Shape(1, 140, 140, 1, 1, 64), {"is_causal": True}),
    "window": (recipes.train, Shape(1, 140, 300, 1, 1, 128), {"window": (20, 50)}),
    "window behind": (recipes.square, Shape(1, 200, 200, 1, 1, 64), {"window": (17, 0)}),
    "window with a strided anchor": (recipes.accurate, Shape(1, 64, 200, 1, 1, 64), {"window": (9, 3)}),
    "offset": (recipes.train, Shape(1, 40, 200, 1, 1, 64), {"is_causal": True, "key_offset": -150}),
    "offset ahead": (recipes.fast, Shape(1, 60, 60, 1, 1, 64), {"is_causal": True, "key_offset": 30}),
    "lengths": (
        recipes.fast,
        Shape(3, 70, 200, 2, 1, 64),
        {"query_lengths": [70, 33, 1], "key_lengths": [129, 200, 31]},
    ),
    "lengths, E4M3": (recipes.train, Shape(2, 70, 200, 2, 1, 128), {"query_lengths": [65, 0], "key_lengths": [1, 9]}),
    "lengths with a strided anchor": (recipes.accurate, Shape(2, 40, 200, 1, 1, 64), {"key_lengths": [150, 3]}),
    "segments": (recipes.train, Shape(2, 70, 170, 2, 1, 64), {"segments": random_segments(2, 70, 170)}),
    "causal segments": (
        recipes.square,
        Shape(1, 150, 150, 1, 1, 128),
        {"is_causal": True, "segments": random_segments(1, 150, 150)},
    ),
    "everything": (
        recipes.accurate,
        Shape(2, 70, 150, 2, 1, 64),
        {
            "window": (100, 30),
            "query_lengths": [70, 50],
            "key_lengths": [150, 140],
            "segments": random_segments(2, 70, 150),
        },
    ),
}

# Those of one shape and mask share the reference's program.
SHAPE = Shape(2, 130, 150, 2, 1, 64)
LENGTHS: dict[str, Any] = {"query_lengths": [130, 65], "key_lengths": [129, 31]}
BACKWARD: dict[str, tuple[Recipe, Shape, dict[str, Any]]] = {
    "one key": (recipes.train, Shape(1, 3, 1, 1, 1, 64), {}),
    "causal": (recipes.train, SHAPE, {"is_causal": True}),
    "causal lengths": (recipes.train, SHAPE, {"is_causal": True, **LENGTHS}),
    "causal segments": (recipes.train, SHAPE, {"is_causal": True, "segments": random_segments(2, 130, 150)}),
    "offset": (recipes.train, SHAPE, {"is_causal": True, "key_offset": -70}),
    "offset ahead": (recipes.train, SHAPE, {"is_causal": True, "key_offset": 90}),
    "causal and everything": (
        recipes.train,
        SHAPE,
        {"is_causal": True, "key_offset": -7, "segments": random_segments(2, 130, 150), **LENGTHS},
    ),
    "whole tiles": (recipes.train, Shape(1, 128, 256, 2, 2, 128), {}),
    "more keys": (recipes.train, Shape(1, 70, 200, 4, 2, 128), {}),
    "more keys, lengths": (
        recipes.train,
        Shape(1, 70, 200, 4, 2, 128),
        {"query_lengths": [33], "key_lengths": [190]},
    ),
    "more keys, segments": (recipes.train, Shape(1, 70, 200, 4, 2, 128), {"segments": random_segments(1, 70, 200)}),
    "causal and fewer keys": (recipes.train, Shape(1, 300, 70, 2, 2, 128), {"is_causal": True}),
    "more heads and batches": (
        recipes.train,
        Shape(2, 150, 130, 4, 2, 128),
        {"is_causal": True, "query_lengths": [150, 70], "key_lengths": [9, 130]},
    ),
    "causal and many queries a key": (recipes.square, Shape(1, 260, 200, 3, 1, 128), {"is_causal": True}),
    "window": (recipes.train, Shape(1, 200, 300, 1, 1, 128), {"window": (20, 50)}),
    "window behind": (recipes.train, Shape(1, 260, 260, 2, 1, 64), {"window": (50, 0)}),
    "own key alone": (recipes.train, Shape(1, 130, 130, 1, 1, 64), {"window": (0, 0)}),
    "other factors": (SMALL_MULTIPLIER, Shape(1, 130, 150, 2, 1, 64), {"is_causal": True}),
    "probabilities of MXFP4": (recipes.accurate, Shape(1, 130, 150, 2, 1, 64), {"is_causal": True}),
}
