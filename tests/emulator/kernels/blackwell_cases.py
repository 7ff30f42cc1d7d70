"""Problems that the forward for Blackwell is tried on: recipe, sizes, and what restricts which keys a query sees."""

import dataclasses
from typing import Any

from jax_fp4attn import recipes
from jax_fp4attn.recipe import Recipe
from tests.emulator.kernels.forward import Shape, random_segments

GUARDED = recipes.guarded(10, 16)
LEADING = dataclasses.replace(recipes.accurate, name="leading", anchor_order="leading", margin=0)

CASES: dict[str, tuple[Recipe, Shape, dict[str, Any]]] = {
    "one key": (recipes.square, Shape(1, 3, 1, 1, 1, 64), {}),
    "one key, online": (recipes.train, Shape(1, 3, 1, 1, 1, 128), {}),
    "31 keys": (recipes.fast, Shape(1, 140, 31, 2, 1, 128), {}),
    "33 keys": (recipes.exact_map, Shape(1, 40, 33, 1, 1, 64), {}),
    "127 keys": (recipes.train, Shape(1, 70, 127, 2, 2, 128), {}),
    "a whole tile": (recipes.fp8_pv, Shape(1, 256, 128, 1, 1, 64), {}),
    "strided anchor of few keys": (recipes.accurate, Shape(1, 40, 31, 1, 1, 128), {}),
    "guarded with few keys": (GUARDED, Shape(1, 140, 33, 1, 1, 64), {}),
    "a tile and 1": (recipes.fast_video, Shape(1, 40, 129, 2, 1, 128), {}),
    "a tile and 31": (recipes.fp8_pv, Shape(1, 129, 159, 1, 1, 128), {}),
    "a tile and 33": (GUARDED, Shape(1, 257, 161, 1, 1, 128), {}),
    "two tiles": (recipes.exact_map, Shape(1, 200, 256, 1, 1, 128), {}),
    "two tiles and 1": (recipes.train, Shape(1, 40, 257, 1, 1, 64), {}),
    "two tiles and 31": (recipes.fast_video, Shape(1, 40, 287, 1, 1, 64), {}),
    "two tiles and 33": (recipes.square, Shape(1, 256, 289, 1, 1, 128), {}),
    "two tiles and 127": (recipes.accurate, Shape(1, 300, 383, 1, 1, 64), {}),
    "three tiles and 1": (recipes.fp8_pv, Shape(1, 40, 385, 2, 1, 64), {}),
    "three tiles and 33": (GUARDED, Shape(1, 256, 417, 1, 1, 64), {}),
    "four tiles and 31": (recipes.fast, Shape(1, 256, 543, 1, 1, 64), {}),
    "five tiles": (recipes.train, Shape(1, 40, 640, 1, 1, 128), {}),
    "strided anchor": (recipes.accurate, Shape(2, 140, 287, 2, 1, 128), {}),
    "raw margin": (recipes.accurate_raw_margin, Shape(1, 40, 161, 1, 1, 128), {}),
    "leading anchor": (LEADING, Shape(1, 40, 255, 1, 1, 64), {}),
    "grouped heads": (recipes.square, Shape(2, 150, 40, 6, 2, 64), {}),
    "causal": (recipes.train, Shape(1, 300, 300, 2, 1, 64), {"is_causal": True}),
    "causal, grouped heads": (recipes.train, Shape(2, 257, 257, 4, 2, 128), {"is_causal": True}),
    "causal and more keys": (recipes.fast, Shape(1, 100, 260, 1, 1, 128), {"is_causal": True}),
    "causal and fewer keys": (recipes.fp8_pv, Shape(1, 300, 65, 1, 1, 128), {"is_causal": True}),
    "causal with a strided anchor": (recipes.accurate, Shape(1, 140, 140, 1, 1, 64), {"is_causal": True}),
    "causal, square": (recipes.square, Shape(1, 513, 513, 1, 1, 64), {"is_causal": True}),
    "lengths": (recipes.square, Shape(2, 300, 300, 1, 1, 128), {"query_lengths": [170, 300], "key_lengths": [131, 9]}),
    "segments": (recipes.train, Shape(2, 150, 260, 2, 1, 64), {"segments": random_segments(2, 150, 260)}),
    "segments with a strided anchor": (
        recipes.accurate,
        Shape(1, 70, 150, 1, 1, 128),
        {"segments": random_segments(1, 70, 150), "key_lengths": [141]},
    ),
}

WINDOWS: dict[str, tuple[Recipe, Shape, dict[str, Any]]] = {
    "window": (recipes.train, Shape(1, 600, 600, 1, 1, 64), {"window": (100, 30)}),
    "window without future": (recipes.square, Shape(1, 513, 513, 1, 1, 128), {"window": (70, 0)}),
    "a key": (recipes.fp8_pv, Shape(1, 300, 300, 1, 1, 64), {"window": (0, 0)}),
    "offset": (recipes.fast, Shape(1, 300, 300, 1, 1, 64), {"window": (100, 100), "key_offset": -290}),
    "keys after the queries": (recipes.train, Shape(1, 512, 200, 1, 1, 64), {"is_causal": True, "key_offset": 300}),
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
