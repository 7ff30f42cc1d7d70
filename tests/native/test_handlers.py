"""What the C++ handlers launch and what they refuse, seen by a stand-in for the CUDA driver."""

import ctypes
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda.emulator import Output
from jax_fp4attn import SegmentIds, native, recipes, reference, steps
from jax_fp4attn.code_map import Exponential, uniform
from jax_fp4attn.config import LN_2, LOG2_E, OperatorConfig, Visibility
from jax_fp4attn.native import availability
from jax_fp4attn.native.attributes import recipe_attributes
from jax_fp4attn.reference.tiles import key_order
from tests.emulator.kernels import blackwell_forward as blackwell
from tests.emulator.kernels.forward import inputs, problem_of
from tests.native.stand_in import handlers
from tests.native.stand_in.handlers import Handlers, Launch, TensorMap

BF16, F16, F32, S32, U8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.uint8
ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""What the error of a handler becomes; the second where JAX finds the program in its cache."""
STEPS = ("quantize", "quantize_for_training", "forward", "row_operands")


@pytest.fixture(scope="module")
def shared(libraries):
    """Handlers for the tests that do not care whether kernels are loaded; also under the names of the custom calls."""
    shared = Handlers(*reversed(libraries))
    for step in STEPS:
        shared.register(step, native.target_name(step))
    return shared


@pytest.fixture
def new_process(libraries):
    """Makes handlers that have loaded nothing yet."""
    return lambda driver=libraries.driver: Handlers(libraries.handlers, driver)


class Shape(NamedTuple):
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int


def zeros(*shapes, dtype=BF16):
    """Arrays in different places of memory."""
    return [jnp.zeros(shape, dtype) for shape in shapes]


def address(x):
    return 0 if x is None else x.unsafe_buffer_pointer()


def config_of(recipe):
    return OperatorConfig(recipe, scale=0.125, is_causal=True, window=None)


def run_step(step, function, recipe, *arguments, kernel_arguments=()):
    """A step's custom call as the package makes it, with the reference's results."""
    config = config_of(recipe)
    results = jax.eval_shape(functools.partial(function, config), *arguments)
    return jax.block_until_ready(native.call(step, config, {}, results, *arguments, *kernel_arguments))


class Expected(NamedTuple):
    """What a recipe's launches are; of the value's parameters, those that depend on the recipe."""

    recipe: Any
    rows: str
    ties_toward_zero: int
    value: str
    parameters: dict[str, float]
    has_order: bool = False


def e4m3(recipe, multiplier):
    return Expected(recipe, "quantize_rows", 0, "quantize_value_e4m3", {"multiplier": multiplier})


def mxfp4(recipe, round_up_at, odd_weight=0, channels_per_scale=1, folded=False, has_order=False):
    rows = "quantize_folded_rows" if folded else "quantize_rows"
    parameters = {"round_up_at": round_up_at, "odd_weight": odd_weight, "channels_per_scale": channels_per_scale}
    return Expected(recipe, rows, int(folded), "quantize_value_mxfp4", parameters, has_order)


def with_rule(rule):
    return dataclasses.replace(recipes.causal_mxfp4, v_exponent_rule=rule)


EXPECTED = {
    "train": e4m3(recipes.train, 4.0),
    "fp8_pv": e4m3(recipes.fp8_pv, 1.0),
    "square": mxfp4(recipes.square, 26, folded=True),
    "fast": mxfp4(recipes.fast, 65, 1, folded=True),
    "accurate": mxfp4(recipes.accurate, 65, 1, has_order=True),
    "causal_mxfp4": mxfp4(recipes.causal_mxfp4, 65, 1),
    "channels": mxfp4(dataclasses.replace(recipes.causal_mxfp4, v_channels_per_scale=32), 65, 1, 32),
    "floor": mxfp4(with_rule("floor"), 256),
    "ceil": mxfp4(with_rule("ceil"), 1),
    # Between two mantissas of bfloat16: the greater one reaches it.
    "threshold": mxfp4(with_rule(1.5 + 2**-12), 65),
}


def check_quantize(driver, expected, shape, query_grid, key_grid, training, visibility=Visibility()):  # noqa: B008
    recipe = dataclasses.replace(expected.recipe, backward_multiplier=8.0)
    B, T, S, N, K, H = shape
    query, key, value = inputs = zeros((B, T, N, H), (B, S, K, H), (B, S, K, H))
    step, function = "quantize", reference.quantize_operands
    if training:
        step, function = "quantize_for_training", reference.quantize_for_training
    order = jnp.asarray(key_order(recipe, S), S32) if expected.has_order else None
    operands = run_step(step, function, recipe, *inputs, visibility, kernel_arguments=(order,))
    forward, backward = (operands.forward, operands) if training else (operands, reference.Operands(None, None, None))
    segments = visibility.segment_ids or SegmentIds(None, None)
    slots = math.ceil(S / 128) * 128

    def rows_launch(source, grid, operand, columns, lengths, segments, num_rows, num_heads, code_rows):
        rows = expected.rows if H == 128 else "quantize_rows"
        parameters = {
            "source": address(source),
            "codes": address(operand.codes),
            "pages": address(operand.scales),
            "columns": address(columns),
            "lengths": address(lengths),
            "segments": address(segments),
            "num_rows": num_rows,
            "num_heads": num_heads,
            "code_rows": code_rows,
            "ties_toward_zero": expected.ties_toward_zero,
            "multiplier": 8.0,
        }
        return Launch(f"{rows}_h{H}" + "_with_columns" * training, grid, parameters)

    value_parameters = {
        "source": address(value),
        "published_rows": address(backward.value),
        "lengths": address(visibility.key_lengths),
        "segments": address(segments.key_value),
        "num_rows": S,
        "num_heads": K,
        "row_multiplier": 8.0,
        **expected.parameters,
    }
    if recipe.v_format == "mxfp4":
        codes, pages = address(forward.value.codes), address(forward.value.scales)
        value_parameters |= {"codes": codes, "pages": pages, "order": address(order)}
    else:
        value_parameters |= {"columns": address(forward.value)}

    value_kernel = f"{expected.value}_h{H}" + "_ordered" * expected.has_order
    lengths = visibility.query_lengths, visibility.key_lengths
    launches = driver.launches()
    assert launches == [
        rows_launch(query, query_grid, forward.query, backward.query, lengths[0], segments.query, T, N, T),
        rows_launch(key, key_grid, forward.key, backward.key, lengths[1], segments.key_value, S, K, slots),
        Launch(value_kernel + "_with_rows" * training, key_grid, value_parameters),
    ]


both_modes = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


@pytest.mark.usefixtures("shared")
class TestQuantize:
    @both_modes
    @pytest.mark.parametrize("H", [64, 128])
    @pytest.mark.parametrize("name", EXPECTED)
    def test_recipes(self, driver, name, H, training):
        check_quantize(driver, EXPECTED[name], Shape(2, 129, 127, 4, 2, H), (4, 2, 2), (2, 1, 2), training)

    @both_modes
    @pytest.mark.parametrize(
        ("shape", "query_grid", "key_grid"),
        [
            (Shape(1, 1, 1, 1, 1, 64), (1, 1, 1), (1, 1, 1)),
            (Shape(2, 127, 128, 4, 2, 64), (4, 1, 2), (2, 1, 2)),
            (Shape(2, 128, 129, 4, 4, 128), (4, 1, 2), (4, 2, 2)),
            (Shape(3, 129, 127, 6, 1, 128), (6, 2, 3), (1, 1, 3)),
            (Shape(1, 257, 1000, 8, 2, 64), (8, 3, 1), (2, 8, 1)),
        ],
        ids=str,
    )
    def test_shapes(self, driver, shape, query_grid, key_grid, training):
        check_quantize(driver, EXPECTED["train"], shape, query_grid, key_grid, training)
        check_quantize(driver, EXPECTED["accurate"], shape, query_grid, key_grid, training)

    @both_modes
    @pytest.mark.parametrize("name", ["train", "accurate"])
    @pytest.mark.parametrize("present", ["query", "key", "segments", "query, key, segments"])
    def test_restrictions(self, driver, name, present, training):
        lengths = zeros((2,), (2,), dtype=S32)
        segments = SegmentIds(*zeros((2, 129), (2, 127), dtype=S32))
        visibility = Visibility(
            query_lengths=lengths[0] if "query" in present else None,
            key_lengths=lengths[1] if "key" in present else None,
            segment_ids=segments if "segments" in present else None,
        )
        shape = Shape(2, 129, 127, 4, 2, 128)
        check_quantize(driver, EXPECTED[name], shape, (4, 2, 2), (2, 1, 2), training, visibility)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("B", "T", "N", "K", "H", "grid"),
    [
        (1, 1, 1, 1, 64, (1, 1, 1)),
        (2, 127, 4, 4, 128, (4, 1, 2)),
        (2, 128, 6, 2, 64, (6, 1, 2)),
        (3, 129, 8, 1, 128, (8, 2, 3)),
    ],
)
def test_row_operands(driver, B, T, N, K, H, grid):
    recipe = dataclasses.replace(recipes.train, backward_multiplier=8.0)
    output, output_gradient = zeros((B, T, N, H), (B, T, N, H))
    lse, lse_gradient, scale = zeros((B, N, T), (B, N, T), (B, K), dtype=F32)
    arguments = (output, lse, output_gradient, lse_gradient, scale)
    rows = run_step("row_operands", reference.row_operands, recipe, *arguments)
    parameters = {
        "output": address(output),
        "output_gradient": address(output_gradient),
        "lse": address(lse),
        "lse_gradient": address(lse_gradient),
        "gradient_scale": address(scale),
        "published_rows": address(rows.output_gradient),
        "columns": address(rows.output_gradient_columns),
        "row_statistic": address(rows.row_statistic),
        "num_rows": T,
        "num_heads": N,
        "heads_a_group": N // K,
        "multiplier": 8.0,
    }
    assert driver.launches() == [Launch(f"publish_output_gradient_h{H}", grid, parameters)]


SCALE = 0.125
LOG2_SCALE = float(np.float32(SCALE * LOG2_E))
UNLIMITED = 1 << 30
HOPPER, BLACKWELL = (9, 0), (10, 0)
BLACKWELL_DEVICE = 7  # of the stand-in; others are of Hopper, since the library remembers what a device is


class ExpectedForward(NamedTuple):
    """A recipe's kernel, and its numbers that are not zero."""

    recipe: Any
    kernel: str
    numbers: dict[str, float]
    has_order: bool = False


def direct_p(recipe, kernel, *, threshold=1.5, has_order=False, **numbers):
    numbers |= {"block_offset": 1 - math.log2(threshold), "unit": 1.0}
    return ExpectedForward(recipe, kernel, numbers, has_order)


MIXED = {"slope": 1.65, "intercept": 0.8, "shift": 8}
MARGIN = 64 / np.float32(LOG2_SCALE)
FORWARD = {
    "train": ExpectedForward(recipes.train, "e4m3", {"rescale_threshold": 8, "unit": 0.25}),
    "fp8_pv": ExpectedForward(recipes.fp8_pv, "e4m3", {"unit": 1}),
    "fast": direct_p(recipes.fast, "affine", slope=1.5, intercept=1.2, shift=16),
    "square": direct_p(recipes.square, "square", slope=0.64, intercept=0.39, constant=0.68, shift=16),
    "exact_map": direct_p(recipes.exact_map, "exponential", slope=1, shift=16),
    "offset": direct_p(
        dataclasses.replace(recipes.exact_map, code_map=uniform(Exponential(-1.5)), p_scale_shift=0),
        "exponential",
        slope=1,
        intercept=-1.5,
    ),
    "threshold": direct_p(
        dataclasses.replace(recipes.fast, p_exponent_rule=1.203125),
        "affine",
        slope=1.5,
        intercept=1.2,
        shift=16,
        threshold=1.203125,
    ),
    "accurate": direct_p(recipes.accurate, "affine_mixed_anchor32", **MIXED, margin=MARGIN, has_order=True),
    "leading": direct_p(
        dataclasses.replace(recipes.accurate, anchor_order="leading", margin=0),
        "affine_mixed_anchor32",
        **MIXED,
    ),
    "accurate_raw_margin": direct_p(
        recipes.accurate_raw_margin, "affine_mixed_anchor32", **MIXED, margin=64 * LN_2, has_order=True
    ),
}


def matrix_map(element, data, rows, columns, box):
    """The map of a matrix whose boxes have rows of 128 bytes, swizzled."""
    size = {"f16": 2, "u8": 1}[element]
    l2_256b = 3
    return TensorMap(element, data, (columns, rows), (columns * size,), box, (1, 1), 0, "128B", l2_256b, 0)


def in_float32(numbers):
    return {name: float(np.float32(value)) for name, value in numbers.items()}


def run_forward(config, operands, visibility, order, results, num_keys, *capabilities):
    """The custom call of a program for GPUs of these compute capabilities."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "capabilities", lambda: set(capabilities))
        expanded, ordered = steps.expanded_operands(config, operands), steps.ordered_key(config, operands)
    attributes = {
        "num_keys": num_keys,
        "head_size": operands.query.shape[3],
        "has_expanded_operands": bool(expanded),
        "has_ordered_key": bool(ordered),
    }
    arguments = (operands, None, visibility, order)
    return jax.block_until_ready(
        native.call("forward", config, attributes, results, *arguments, workspace=(*expanded, *ordered))
    )


def check_forward(driver, expected, shape, visibility=Visibility(), is_causal=False, window=None, section=1):  # noqa: B008
    recipe = expected.recipe
    B, T, S, N, K, H = shape
    config = OperatorConfig(recipe, SCALE, is_causal, window)
    inputs = [jax.ShapeDtypeStruct(x, BF16) for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H))]
    operands = jax.eval_shape(functools.partial(reference.quantize_operands, config), *inputs, visibility)
    operands = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), operands)
    results = jax.ShapeDtypeStruct((B, T, N, H), BF16), jax.ShapeDtypeStruct((B, N, T), F32)
    order = jnp.asarray(key_order(recipe, S), S32) if expected.has_order else None
    output, lse = run_forward(config, operands, visibility, order, results, S, HOPPER)

    slots, key_grid = math.ceil(S / 128) * 128, (K, math.ceil(S / 128), B)
    *expansions, attention = driver.launches()
    key_values, counter = (expansions[0].parameters[name] for name in ("values", "counter"))
    codes, pages = address(operands.key.codes), address(operands.key.scales)
    sizes = {"num_keys": S, "num_heads": K}
    parameters = {"codes": codes, "pages": pages, "order": address(order), "values": key_values, "counter": counter}
    by_block = "_by_block" if recipe.p_format == "mxfp4" else ""
    launches = [Launch(f"expand_key_h{H}{by_block}", key_grid, parameters | sizes)]
    workspace = [key_values, counter]
    value, value_exponents = operands.value, 0
    if recipe.v_format == "mxfp4":
        codes, pages = address(value.codes), address(value.scales)
        value, value_exponents = (expansions[1].parameters[name] for name in ("values", "exponents"))
        workspace += [value, value_exponents]
        parameters = {"codes": codes, "pages": pages, "values": value, "exponents": value_exponents}
        launches.append(Launch(f"expand_value_h{H}", key_grid, parameters | sizes))
    else:
        value = address(value)
    others = [address(x) for x in jax.tree.leaves((operands, visibility, order, output, lse))]
    assert 0 not in workspace and len({*workspace, *others}) == len(workspace) + len(others)

    name = f"forward_h{H}_{expected.kernel}"
    # All warpgroups but one have 64 rows each.
    items = B * N * math.ceil(T / (handlers.manifest()[name]["threads"] // 2 - 64))
    left, right = (UNLIMITED, UNLIMITED) if window is None else window
    segments = visibility.segment_ids or SegmentIds(None, None)
    zero = ("block_offset", "shift", "margin", "slope", "intercept", "constant", "rescale_threshold")
    parameters = {
        "query_codes": address(operands.query.codes),
        "query_pages": address(operands.query.scales),
        "key_map": matrix_map("f16", key_values, B * K * slots, H, (64, 128)),
        "value_map": matrix_map("u8", value, B * K * H, slots, (128, H)),
        "value_exponents": value_exponents,
        "output": address(output),
        "lse": address(lse),
        "query_lengths": address(visibility.query_lengths),
        "key_lengths": address(visibility.key_lengths),
        "query_segments": address(segments.query),
        "key_segments": address(segments.key_value),
        "order": address(order),
        "key_offset": address(visibility.key_offset),
        "counter": counter,
        "num_queries": T,
        "num_keys": S,
        "query_heads": N,
        "kv_heads": K,
        "batches": B,
        "num_items": items,
        "section": section,
        "window_left": left,
        "window_right": 0 if is_causal else right,
        "log2_scale": LOG2_SCALE,
        **dict.fromkeys(zero, 0.0),
        **in_float32(expected.numbers),
    }
    launches.append(Launch(name, (min(items, handlers.MULTIPROCESSORS), 1, 1), parameters))
    assert [*expansions, attention] == launches


@pytest.mark.usefixtures("shared")
class TestForward:
    @pytest.mark.parametrize("H", [64, 128])
    @pytest.mark.parametrize("name", FORWARD)
    def test_recipes(self, driver, name, H):
        check_forward(driver, FORWARD[name], Shape(2, 129, 127, 4, 2, H))

    @pytest.mark.parametrize(
        "shape",
        [
            Shape(1, 1, 1, 1, 1, 64),
            Shape(2, 192, 128, 4, 4, 64),
            Shape(2, 193, 129, 6, 1, 128),
            Shape(3, 127, 1000, 4, 2, 128),
            Shape(1, 1000, 33, 8, 2, 64),
        ],
        ids=str,
    )
    def test_shapes(self, driver, shape):
        for name in ("train", "accurate"):
            check_forward(driver, FORWARD[name], shape)

    @pytest.mark.parametrize("name", ["train", "square", "accurate"])
    @pytest.mark.parametrize("present", ["query", "key", "segments", "offset", "query, key, segments, offset"])
    def test_restrictions(self, driver, name, present):
        lengths = zeros((2,), (2,), dtype=S32)
        visibility = Visibility(
            query_lengths=lengths[0] if "query" in present else None,
            key_lengths=lengths[1] if "key" in present else None,
            segment_ids=SegmentIds(*zeros((2, 129), (2, 127), dtype=S32)) if "segments" in present else None,
            key_offset=jnp.zeros((), S32) if "offset" in present else None,
        )
        check_forward(driver, FORWARD[name], Shape(2, 129, 127, 4, 2, 128), visibility)

    @pytest.mark.parametrize("window", [None, (0, 0), (7, 300), (2**31 - 1, 2**31 - 1)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_windows(self, driver, is_causal, window):
        shape = Shape(2, 129, 127, 4, 2, 64)
        clipped = None if window is None else tuple(min(side, UNLIMITED) for side in window)
        is_limited = is_causal or (window is not None and clipped[1] < UNLIMITED)
        check_forward(
            driver, FORWARD["train"], shape, is_causal=is_causal, window=clipped, section=8 if is_limited else 1
        )

    @pytest.mark.parametrize(
        ("N", "K", "S", "H", "section"),
        # A head of 8192 keys of 128 channels takes 3 MiB of the 32 MiB.
        [
            (16, 16, 8192, 128, 8),
            (24, 12, 8192, 128, 12),
            (26, 13, 8192, 128, 14),
            (16, 4, 8192, 128, 16),
            (2, 2, 2**17, 128, 1),
        ],
    )
    def test_heads_that_the_cache_holds_together(self, driver, N, K, S, H, section):
        check_forward(driver, FORWARD["train"], Shape(1, 1, S, N, K, H), is_causal=True, section=section)


GUARDED = recipes.guarded(10, 16)
BLACKWELL_RECIPES = [
    recipes.train,
    recipes.fp8_pv,
    recipes.fast,
    recipes.fast_video,
    recipes.square,
    recipes.exact_map,
    recipes.accurate,
    recipes.accurate_raw_margin,
    GUARDED,
    dataclasses.replace(GUARDED, name="leading", anchor_order="leading", margin=0),
]


def check_forward_on_blackwell(driver, recipe, shape, *, gpus=(BLACKWELL,), sections=None, **options):
    """The launches are those that the emulator runs, with what they take and nothing else."""
    query, key, value = inputs(shape)
    problem = problem_of(recipe, query, key, value, scale=SCALE, **options)
    B, T, S, N, K, H = shape
    order = None if blackwell.order_of(problem) is None else jnp.asarray(blackwell.order_of(problem))
    results = jax.ShapeDtypeStruct((B, T, N, H), BF16), jax.ShapeDtypeStruct((B, N, T), F32)
    driver.pretend(BLACKWELL, BLACKWELL_DEVICE)
    output, lse = run_forward(problem.config, problem.operands, problem.visibility, order, results, S, *gpus)
    *ordering, attention = driver.launches()

    operands, visibility = problem.operands, problem.visibility
    segments = visibility.segment_ids or SegmentIds(None, None)
    key_codes, key_pages = address(operands.key.codes), address(operands.key.scales)
    if order is not None:
        (launch,) = ordering
        new_codes, new_pages = (launch.parameters[f"ordered_{name}"] for name in ("codes", "pages"))
        parameters = {"codes": key_codes, "pages": key_pages, "order": address(order), "num_keys": S, "num_heads": K}
        parameters |= {"ordered_codes": new_codes, "ordered_pages": new_pages}
        assert launch == Launch(f"order_key_h{H}", (K, math.ceil(S / 128), B), parameters)
        key_codes, key_pages = new_codes, new_pages
        others = [address(x) for x in jax.tree.leaves((operands, visibility, order, output, lse))]
        assert len({0, new_codes, new_pages, *others}) == len(others) + 3
    else:
        assert ordering == []
    is_mxfp4 = recipe.v_format == "mxfp4"
    addresses = {
        "query_map": address(operands.query.codes),
        "query_pages": address(operands.query.scales),
        "key_map": key_codes,
        "key_pages": key_pages,
        "value_map": address(operands.value.codes if is_mxfp4 else operands.value),
        "value_pages": address(operands.value.scales if is_mxfp4 else None),
        "output": address(output),
        "lse": address(lse),
        "query_lengths": address(visibility.query_lengths),
        "key_lengths": address(visibility.key_lengths),
        "query_segments": address(segments.query),
        "key_segments": address(segments.key_value),
        "order": address(order),
        "key_offset": address(visibility.key_offset),
    }
    emulated = blackwell.values_of(problem, operands.key.codes, operands.key.scales)
    if sections is not None:
        emulated["section"] = sections
    for name, found in attention.parameters.items():
        value = emulated[name].array if isinstance(emulated[name], Output) else emulated[name]
        if isinstance(found, TensorMap):
            assert found == byte_map(addresses[name], value.shape, found.box), name
        elif name in addresses:
            assert found == addresses[name] and (found == 0) == (value is None), name
        else:
            assert found == float(np.float32(value)), name
    assert attention.parameters.keys() == emulated.keys()
    grid = (min(blackwell.items_of(problem), handlers.MULTIPROCESSORS), 1, 1)
    assert (attention.kernel, attention.grid) == (blackwell.name_of(problem), grid)


def byte_map(data, shape, box):
    """The map of a matrix of bytes, whose boxes, which the manifest has, are swizzled by their rows."""
    l2_256b = 3
    rows, columns = shape
    return TensorMap("u8", data, (columns, rows), (columns,), box, (1, 1), 0, f"{box[0]}B", l2_256b, 0)


@pytest.mark.usefixtures("shared")
class TestForwardOnBlackwell:
    @pytest.mark.parametrize("H", [64, 128])
    @pytest.mark.parametrize("recipe", BLACKWELL_RECIPES, ids=lambda recipe: recipe.name)
    def test_recipes(self, driver, recipe, H):
        check_forward_on_blackwell(driver, recipe, Shape(2, 129, 127, 4, 2, H))

    @pytest.mark.parametrize(
        "shape",
        [
            Shape(1, 1, 1, 1, 1, 64),
            Shape(2, 256, 128, 4, 4, 64),
            Shape(2, 257, 129, 6, 1, 128),
            Shape(3, 127, 300, 4, 2, 128),
            Shape(1, 600, 33, 8, 2, 64),
        ],
        ids=str,
    )
    def test_shapes(self, driver, shape):
        for recipe in (recipes.train, recipes.accurate):
            check_forward_on_blackwell(driver, recipe, shape)

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square, recipes.accurate], ids=lambda r: r.name)
    @pytest.mark.parametrize("present", ["query", "key", "segments", "offset", "query, key, segments, offset"])
    def test_restrictions(self, driver, recipe, present):
        options = {
            "query_lengths": [70, 129] if "query" in present else None,
            "key_lengths": [70, 120] if "key" in present else None,
            "segments": (np.ones((2, 129)), np.ones((2, 127))) if "segments" in present else None,
            "key_offset": 3 if "offset" in present else None,
        }
        check_forward_on_blackwell(driver, recipe, Shape(2, 129, 127, 4, 2, 128), **options)

    @pytest.mark.parametrize("window", [None, (0, 0), (7, 300)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_windows(self, driver, is_causal, window):
        sections = 8 if is_causal or window is not None else 1
        shape = Shape(2, 129, 127, 4, 2, 64)
        check_forward_on_blackwell(driver, recipes.train, shape, is_causal=is_causal, window=window, sections=sections)

    @pytest.mark.parametrize(
        ("recipe", "shape", "section"),
        # A head of 8192 keys of 128 channels takes 1.5 MiB of the 32 MiB, or 1 MiB with MXFP4 values.
        [
            (recipes.train, Shape(1, 1, 8192, 24, 24, 128), 12),
            (recipes.train, Shape(1, 1, 8192, 48, 12, 128), 48),
            (recipes.train, Shape(1, 1, 2**17, 4, 2, 128), 2),
            (recipes.square, Shape(1, 1, 8192, 40, 40, 128), 20),
        ],
        ids=str,
    )
    def test_heads_that_the_cache_holds_together(self, shared, driver, recipe, shape, section):
        driver.pretend(BLACKWELL, BLACKWELL_DEVICE)
        call = forward_call(recipe, shape).having(is_causal=True, has_expanded_operands=False)
        results = {name: call.results[name] for name in ("output", "lse")}
        call._replace(results=results).run(shared)
        (launch,) = driver.launches()
        assert launch.parameters["section"] == section

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square, recipes.accurate], ids=lambda r: r.name)
    def test_a_program_for_both_architectures(self, driver, recipe):
        shape = Shape(2, 129, 127, 4, 2, 128)
        check_forward_on_blackwell(driver, recipe, shape, gpus=(HOPPER, BLACKWELL))

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.accurate], ids=lambda r: r.name)
    def test_a_program_for_the_other_architecture(self, shared, driver, recipe):
        wrong = "expected true on this GPU, got false; the program was made for another one"
        call = forward_call(recipe).having(has_expanded_operands=False)
        refused(shared, driver, call, f"forward: has_expanded_operands: {wrong}")
        driver.pretend(BLACKWELL, BLACKWELL_DEVICE)
        if recipe is recipes.accurate:
            refused(shared, driver, forward_call(recipe), f"forward: has_ordered_key: {wrong}")

    @pytest.mark.parametrize(
        ("recipe", "name", "value", "expected"),
        [
            (recipes.accurate, "recipe_anchor_keys", np.int32(128), "32"),
            (GUARDED, "recipe_anchor_keys", np.int32(32), "128"),
            (GUARDED, "recipe_row_reference", "zero", "anchor"),
        ],
    )
    def test_recipe_without_a_kernel(self, shared, driver, recipe, name, value, expected):
        driver.pretend(BLACKWELL, BLACKWELL_DEVICE)
        call = forward_call(recipe).having(**{name: value})
        refused(shared, driver, call, f"forward: {name}: expected {expected}, got {value}", code="UNIMPLEMENTED")


class Call(NamedTuple):
    """A custom call; types of the operands and results by the names in messages."""

    step: str
    operands: dict[str, jax.ShapeDtypeStruct]
    results: dict[str, jax.ShapeDtypeStruct]
    attributes: dict[str, Any]

    def run(self, handlers):
        operands = [np.zeros(x.shape, x.dtype) for x in self.operands.values()]
        return handlers.call(self.step, operands, self.results.values(), **self.attributes)

    def having(self, **attributes):
        return self._replace(attributes=self.attributes | attributes)


def types(shapes):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, *shape) in shapes.items()}


def quantize_call(recipe=recipes.train, shape=Shape(2, 129, 127, 4, 2, 64), *, training=False, restricted=False):  # noqa: B008
    B, T, S, N, K, H = shape
    query_tiles, key_tiles = math.ceil(T / 128), math.ceil(S / 128)
    operands = {"query": (BF16, B, T, N, H), "key": (BF16, B, S, K, H), "value": (BF16, B, S, K, H)}
    if restricted:
        operands |= {"query_lengths": (S32, B), "key_lengths": (S32, B)}
        operands |= {"segment_ids.query": (S32, B, T), "segment_ids.key_value": (S32, B, S)}
    if recipe.anchor_order == "strided":
        operands |= {"slot_order": (S32, S)}
    results = {
        "query.codes": (U8, B, N, T, H // 2),
        "query.scales": (U8, B, N, query_tiles, H // 64, 512),
        "key.codes": (U8, B, K, 128 * key_tiles, H // 2),
        "key.scales": (U8, B, K, key_tiles, H // 64, 512),
    }
    if recipe.v_format == "mxfp4":
        results |= {"value.codes": (U8, B, K, H, 64 * key_tiles), "value.scales": (U8, B, K, 1, key_tiles, 512)}
    else:
        results |= {"value": (U8, B, K, H, 128 * key_tiles)}
    if training:
        results |= {
            "query for the backward": (U8, B, N, H, 128 * query_tiles),
            "key for the backward": (U8, B, K, H, 128 * key_tiles),
            "value for the backward": (U8, B, K, 128 * key_tiles, H),
        }
    flags = dict.fromkeys(["has_query_lengths", "has_key_lengths", "has_segment_ids"], restricted)
    step = "quantize_for_training" if training else "quantize"
    return Call(step, types(operands), types(results), {**flags, **recipe_attributes(recipe)})


def row_operands_call(B=2, T=129, N=4, K=2, H=64):
    rows = math.ceil(T / 128) * 128
    operands = {
        "output": (BF16, B, T, N, H),
        "lse": (F32, B, N, T),
        "output_gradient": (BF16, B, T, N, H),
        "lse_gradient": (F32, B, N, T),
        "gradient_scale": (F32, B, K),
    }
    results = {
        "output_gradient": (U8, B, N, rows, H),
        "output_gradient_columns": (U8, B, N, H, rows),
        "row_statistic": (F32, B, N, T),
    }
    return Call("row_operands", types(operands), types(results), recipe_attributes(recipes.train))


def forward_call(recipe=recipes.train, shape=Shape(2, 129, 127, 4, 2, 64), *, restricted=False):  # noqa: B008
    B, T, S, N, K, H = shape
    tiles = math.ceil(S / 128)
    operands = {
        "query.codes": (U8, B, N, T, H // 2),
        "query.scales": (U8, B, N, math.ceil(T / 128), H // 64, 512),
        "key.codes": (U8, B, K, 128 * tiles, H // 2),
        "key.scales": (U8, B, K, tiles, H // 64, 512),
    }
    results = {"output": (BF16, B, T, N, H), "lse": (F32, B, N, T), "expanded key": (F16, B, K, 128 * tiles, H)}
    if recipe.v_format == "mxfp4":
        operands |= {"value.codes": (U8, B, K, H, 64 * tiles), "value.scales": (U8, B, K, 1, tiles, 512)}
        results |= {"expanded value": (U8, B, K, H, 128 * tiles), "exponents of the expanded value": (S32, B, K, tiles)}
    else:
        operands |= {"value": (U8, B, K, H, 128 * tiles)}
    results |= {"items taken": (S32, 1)}
    if restricted:
        operands |= {"query_lengths": (S32, B), "key_lengths": (S32, B)}
        operands |= {"segment_ids.query": (S32, B, T), "segment_ids.key_value": (S32, B, S), "key_offset": (S32,)}
    if recipe.anchor_order == "strided":
        operands |= {"slot_order": (S32, S)}
    flags = ["has_query_lengths", "has_key_lengths", "has_segment_ids", "has_key_offset"]
    attributes = {
        "scale": np.float32(SCALE),
        "is_causal": False,
        "num_keys": np.int32(S),
        "has_expanded_operands": True,
        "has_ordered_key": False,
        **dict.fromkeys(["window_left", "window_right"], np.int32(-1)),
        **dict.fromkeys(flags, restricted),
        **recipe_attributes(recipe),
    }
    return Call("forward", types(operands), types(results), attributes)


CALLS = {
    "quantize": quantize_call(restricted=True),
    "quantize_for_training": quantize_call(recipes.accurate, training=True, restricted=True),
    "forward": forward_call(recipes.accurate, restricted=True),
    "row_operands": row_operands_call(),
}
all_calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@all_calls
def test_calls_that_the_tests_below_spoil_are_right(shared, driver, call):
    call.run(shared)
    assert len(driver.launches()) == (1 if call.step == "row_operands" else 3)


@pytest.mark.parametrize("T", [64, 129, 8000])
def test_without_keys_each_thread_block_has_one_item(shared, driver, T):
    """Nobody clears a counter then."""
    forward_call(shape=Shape(2, T, 0, 4, 2, 64)).run(shared)
    (launch,) = driver.launches()
    assert launch.parameters["counter"] == 0
    assert launch.grid == (2 * 4 * math.ceil(T / 192), 1, 1)


@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (quantize_call(shape=Shape(0, 129, 127, 4, 2, 64)), []),
        (quantize_call(recipes.accurate, Shape(0, 129, 127, 4, 2, 128), training=True), []),
        (quantize_call(shape=Shape(2, 0, 127, 4, 2, 64)), ["quantize_rows_h64", "quantize_value_e4m3_h64"]),
        (quantize_call(shape=Shape(2, 129, 0, 4, 2, 64)), ["quantize_rows_h64"]),
        (quantize_call(recipes.accurate, Shape(2, 0, 0, 4, 2, 64), training=True, restricted=True), []),
        (quantize_call(shape=Shape(2, 129, 127, 0, 0, 64)), []),
        (forward_call(shape=Shape(0, 129, 127, 4, 2, 64)), []),
        (forward_call(recipes.accurate, Shape(2, 0, 127, 4, 2, 128), restricted=True), []),
        (forward_call(shape=Shape(2, 129, 127, 0, 0, 64)), []),
        (forward_call(shape=Shape(2, 129, 127, 0, 2, 64)), []),
        (forward_call(shape=Shape(2, 129, 0, 4, 2, 64)), ["forward_h64_e4m3"]),
        (forward_call(recipes.square, Shape(2, 129, 0, 4, 2, 128), restricted=True), ["forward_h128_square"]),
        (row_operands_call(B=0), []),
        (row_operands_call(T=0), []),
        (row_operands_call(N=0), []),
        (row_operands_call(N=0, K=0), []),
    ],
)
def test_what_is_empty_is_not_launched(shared, driver, call, kernels):
    call.run(shared)
    assert [launch.kernel for launch in driver.launches()] == kernels


def text_of(raised):
    """Text of an error, without the place that older releases of JAX add."""
    return str(raised.value).replace("Buffer Definition Event: ", "")


def refused(shared, driver, call, message, code="INVALID_ARGUMENT"):
    with pytest.raises(ERRORS) as raised:
        call.run(shared)
    assert text_of(raised).startswith(f"{code}: jax_fp4attn: {message}")
    assert driver.launches() == []


# Operands that may choose dimensions.
ANY = {
    "query": "[any, any, any, any]",
    "key": "[2, any, any, 64]",
    "query.codes": "[any, any, any, any]",
    "key.codes": "[2, any, 128, 32]",
    "output": "[any, any, any, any]",
    "gradient_scale": "[2, any]",
}
DIVIDED_HEADS = "expected query heads that the key/value heads divide"
BUFFERS = [
    pytest.param(call, kind, name, id=f"{call.step}-{kind}-{name}")
    for call in CALLS.values()
    for kind, found in (("operand", call.operands), ("result", call.results))
    for name in found
]
all_buffers = pytest.mark.parametrize(("call", "kind", "name"), BUFFERS)


def with_buffer(call, kind, name, shape=None, dtype=None):
    found = getattr(call, kind + "s")
    old = found[name]
    new = jax.ShapeDtypeStruct(old.shape if shape is None else tuple(shape), old.dtype if dtype is None else dtype)
    return call._replace(**{kind + "s": found | {name: new}})


def text(struct):
    return f"{struct.dtype} {list(struct.shape)}"


def mismatch(call, kind, name, changed):
    expected, got = (getattr(x, kind + "s")[name] for x in (call, changed))
    expected = f"{expected.dtype} {ANY[name]}" if kind == "operand" and name in ANY else text(expected)
    return f"{call.step}: {kind} {name}: expected {expected}, got {text(got)}"


class TestMalformedBuffers:
    @all_buffers
    def test_dtype(self, shared, driver, call, kind, name):
        wrong = {BF16: F32, F16: BF16, F32: BF16, S32: F32, U8: S32}
        dtype = getattr(call, kind + "s")[name].dtype
        changed = with_buffer(call, kind, name, dtype=wrong[dtype.type])
        refused(shared, driver, changed, mismatch(call, kind, name, changed))

    def test_dtype_that_no_kernel_has(self, shared, driver):
        changed = with_buffer(CALLS["quantize"], "operand", "key", dtype=jnp.int16)
        message = "quantize: operand key: expected bfloat16 [2, any, any, 64], got another type [2, 127, 2, 64]"
        refused(shared, driver, changed, message)

    @all_buffers
    def test_rank(self, shared, driver, call, kind, name):
        shape = getattr(call, kind + "s")[name].shape
        for wrong in {(*shape, 1), shape[:-1]} - {shape}:
            changed = with_buffer(call, kind, name, shape=wrong)
            refused(shared, driver, changed, mismatch(call, kind, name, changed))

    @all_buffers
    def test_dimensions(self, shared, driver, call, kind, name):
        shape = getattr(call, kind + "s")[name].shape
        free = ANY.get(name, "").split(", ") if kind == "operand" else []
        for axis, size in enumerate(shape):
            if axis < len(free) and "any" in free[axis]:
                continue
            changed = with_buffer(call, kind, name, shape=[*shape[:axis], size + 1, *shape[axis + 1 :]])
            refused(shared, driver, changed, mismatch(call, kind, name, changed))

    @pytest.mark.parametrize(
        ("step", "name", "shape", "message"),
        [
            ("quantize", "query", (3, 129, 4, 64), "operand key: expected bfloat16 [3, any, any, 64]"),
            ("quantize", "query", (2, 128, 4, 64), "operand segment_ids.query: expected int32 [2, 128]"),
            ("quantize", "query", (2, 129, 5, 64), "result query.codes: expected uint8 [2, 5, 129, 32]"),
            ("quantize", "query", (2, 129, 4, 65), "operand key: expected bfloat16 [2, any, any, 65]"),
            ("quantize", "key", (2, 126, 2, 64), "operand value: expected bfloat16 [2, 126, 2, 64]"),
            ("quantize", "key", (2, 127, 3, 64), "operand value: expected bfloat16 [2, 127, 3, 64]"),
            ("forward", "query.codes", (3, 4, 129, 32), "operand query.scales: expected uint8 [3, 4, 2, 1, 512]"),
            ("forward", "query.codes", (2, 4, 100, 32), "operand query.scales: expected uint8 [2, 4, 1, 1, 512]"),
            ("forward", "query.codes", (2, 4, 130, 32), "operand segment_ids.query: expected int32 [2, 130]"),
            ("forward", "query.codes", (2, 4, 129, 64), "operand query.scales: expected uint8 [2, 4, 2, 2, 512]"),
            ("forward", "key.codes", (2, 4, 128, 32), "operand key.scales: expected uint8 [2, 4, 1, 1, 512]"),
            ("forward", "key.codes", (2, 3, 128, 32), f"{DIVIDED_HEADS}, got 4 and 3"),
            ("forward", "key.codes", (2, 0, 128, 32), f"{DIVIDED_HEADS}, got 4 and 0"),
            ("row_operands", "output", (3, 129, 4, 64), "operand lse: expected float32 [3, 4, 129]"),
            ("row_operands", "output", (2, 128, 4, 64), "operand lse: expected float32 [2, 4, 128]"),
            ("row_operands", "output", (2, 129, 5, 64), "operand lse: expected float32 [2, 5, 129]"),
            ("row_operands", "output", (2, 129, 4, 128), "operand output_gradient: expected bfloat16 [2, 129, 4, 128]"),
            ("row_operands", "gradient_scale", (2, 3), f"{DIVIDED_HEADS}, got 4 and 3"),
            ("row_operands", "gradient_scale", (2, 0), f"{DIVIDED_HEADS}, got 4 and 0"),
        ],
    )
    def test_operands_that_disagree(self, shared, driver, step, name, shape, message):
        call = with_buffer(CALLS[step], "operand", name, shape=shape)
        refused(shared, driver, call, f"{step}: {message}")

    @all_calls
    def test_missing_operands(self, shared, driver, call):
        for count in range(len(call.operands)):
            names = list(call.operands)
            changed = call._replace(operands={name: call.operands[name] for name in names[:count]})
            refused(shared, driver, changed, f"{call.step}: expected an operand {names[count]}, got {count} operands")

    @all_calls
    def test_missing_results(self, shared, driver, call):
        for count in range(1, len(call.results)):
            names = list(call.results)
            changed = call._replace(results={name: call.results[name] for name in names[:count]})
            refused(shared, driver, changed, f"{call.step}: expected a result {names[count]}, got {count} results")

    @all_calls
    @pytest.mark.parametrize("kind", ["operands", "results"])
    def test_surplus(self, shared, driver, call, kind):
        counts = {"operands": len(call.operands), "results": len(call.results)}
        expected = f"expected {counts['operands']} operands and {counts['results']} results"
        counts[kind] += 1
        got = f"got {counts['operands']} and {counts['results']}"
        changed = call._replace(**{kind: getattr(call, kind) | types({"surplus": (U8, 1)})})
        refused(shared, driver, changed, f"{call.step}: {expected}, {got}")

    def test_a_restriction_that_is_announced_and_not_there(self, shared, driver):
        call = quantize_call().having(has_key_lengths=True)
        refused(shared, driver, call, "quantize: expected an operand key_lengths, got 3 operands")


ATTRIBUTES = {
    "quantize": {
        "has_query_lengths": "bool",
        "has_key_lengths": "bool",
        "has_segment_ids": "bool",
        "recipe_qk_format": "string",
        "recipe_qk_tensor_scale": "string",
        "recipe_qk_scale_fold": "string",
        "recipe_qk_ties": "string",
        "recipe_v_format": "string",
        "recipe_v_multiplier": "float32",
        "recipe_backward_multiplier": "float32",
    },
    "quantize_for_training": {
        "recipe_v_exponent_rule": "float32",
        "recipe_v_channels_per_scale": "int32",
        "recipe_row_reference": "string",
        "recipe_anchor_order": "string",
        "recipe_backward": "string",
        "recipe_backward_qk": "string",
    },
    "forward": {
        "scale": "float32",
        "is_causal": "bool",
        "window_left": "int32",
        "window_right": "int32",
        "num_keys": "int32",
        "has_query_lengths": "bool",
        "has_key_lengths": "bool",
        "has_segment_ids": "bool",
        "has_key_offset": "bool",
        "has_expanded_operands": "bool",
        "has_ordered_key": "bool",
        "recipe_qk_format": "string",
        "recipe_qk_tensor_scale": "string",
        "recipe_p_format": "string",
        "recipe_v_format": "string",
        "recipe_denominator": "string",
        "recipe_code_map": "string",
        "recipe_p_exponent_rule": "float32",
        "recipe_p_scale_shift": "int32",
        "recipe_row_reference": "string",
        "recipe_anchor_keys": "int32",
        "recipe_anchor_order": "string",
        "recipe_margin": "float32",
        "recipe_margin_unit": "string",
    },
    "row_operands": {"recipe_backward": "string", "recipe_backward_multiplier": "float32"},
}
E4M3_FORWARD = forward_call()


class TestMalformedAttributes:
    @pytest.mark.parametrize(
        ("call", "name", "kind"),
        [
            *((CALLS[step], name, kind) for step, names in ATTRIBUTES.items() for name, kind in names.items()),
            (E4M3_FORWARD, "recipe_rescale_threshold_bits", "float32"),
            (E4M3_FORWARD, "recipe_v_multiplier", "float32"),
        ],
        ids=lambda x: x.step if isinstance(x, Call) else x,
    )
    def test_missing_or_of_another_type(self, shared, driver, call, name, kind):
        expected = f"{call.step}: expected an attribute {name} of type {kind}, got"
        missing = call._replace(attributes={key: value for key, value in call.attributes.items() if key != name})
        refused(shared, driver, missing, f"{expected} none")
        # JAX takes attributes that are equal for the same, whatever their types are; nothing equals -7.
        refused(shared, driver, call.having(**{name: np.int16(-7)}), f"{expected} another type")

    @pytest.mark.parametrize(
        ("call", "name", "value", "expected"),
        [
            (CALLS["quantize"], "recipe_qk_format", "bf16", "nvfp4"),
            (CALLS["quantize"], "recipe_qk_tensor_scale", "amax", "unit"),
            (CALLS["quantize"], "recipe_qk_scale_fold", "k64_max", "none or k64_mse"),
            (CALLS["quantize"], "recipe_qk_ties", "away", "even or toward_zero"),
            (CALLS["quantize"], "recipe_v_format", "nvfp4", "mxfp4 or e4m3"),
            (CALLS["quantize_for_training"], "recipe_v_exponent_rule", "best_l2", "floor, ceil, rte or a number"),
            (CALLS["quantize_for_training"], "recipe_backward", "bf16", "fp8"),
            (CALLS["quantize_for_training"], "recipe_backward_qk", "represented", "source"),
            (CALLS["forward"], "recipe_qk_format", "bf16", "nvfp4"),
            (CALLS["forward"], "recipe_qk_tensor_scale", "amax", "unit"),
            (CALLS["forward"], "recipe_p_format", "nvfp4", "mxfp4 or e4m3"),
            (CALLS["forward"], "recipe_v_format", "e4m3", "mxfp4"),
            (CALLS["forward"], "recipe_denominator", "sampled", "represented"),
            (CALLS["forward"], "recipe_p_exponent_rule", "ceil", "a number"),
            (CALLS["forward"], "recipe_row_reference", "zero", "anchor"),
            (CALLS["forward"], "recipe_anchor_keys", np.int32(128), "32"),
            (CALLS["forward"], "recipe_anchor_order", "random", "leading or strided"),
            (CALLS["forward"], "recipe_margin_unit", "octaves", "bits or raw_score"),
            (forward_call(recipes.fast), "recipe_row_reference", "anchor", "zero"),
            (E4M3_FORWARD, "recipe_v_format", "mxfp4", "e4m3"),
            (E4M3_FORWARD, "recipe_denominator", "represented", "unquantized"),
            (E4M3_FORWARD, "recipe_row_reference", "anchor", "online_max"),
            (CALLS["row_operands"], "recipe_backward", "bf16", "fp8"),
        ],
    )
    def test_recipe_without_a_kernel(self, shared, driver, call, name, value, expected):
        prefix = f"{call.step}: "
        message = f"{prefix}{name}: expected {expected}, got {value}"
        refused(shared, driver, call.having(**{name: value}), message, code="UNIMPLEMENTED")

    def test_inference_does_not_ask_for_the_backward(self, shared, driver):
        CALLS["quantize"].having(recipe_backward="bf16", recipe_backward_qk="represented").run(shared)
        assert len(driver.launches()) == 3

    @pytest.mark.parametrize("threshold", [1.0, 2.0, math.nan])
    def test_exponent_rule_out_of_range(self, shared, driver, threshold):
        call = CALLS["quantize_for_training"].having(recipe_v_exponent_rule=np.float32(threshold))
        message = f"{call.step}: recipe_v_exponent_rule: expected a number between 1 and 2, got {threshold:g}"
        refused(shared, driver, call, message)

    @pytest.mark.parametrize("threshold", [1.0, 2.0, math.nan])
    def test_exponent_rule_of_probabilities_out_of_range(self, shared, driver, threshold):
        call = CALLS["forward"].having(recipe_p_exponent_rule=np.float32(threshold))
        message = f"forward: recipe_p_exponent_rule: expected a number between 1 and 2, got {threshold:g}"
        refused(shared, driver, call, message)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "none",
            "cubic(0.1,0.2,0.3,0.4)",
            "maxaffine(0.4:0.9,2.2:-0.9)",
            "affine",
            "affine(1.5)",
            "affine(1.5,1.2",
            "affine(1.5,1.2,)",
            "affine(1.5;1.2)",
            "affine(1.5,much)",
            "affine(1.5,1.2,3.0)",
            "affine(1.5,1.2);affine(1.6,1.2);affine(1.5,1.2);affine(1.5,1.2)",
            "exponential()",
            "exponential(0.0,1.0)",
            "signedsquare(0.64,0.39)",
            "affine(1.65,0.8)|exponential(0.0)|0,4,8,12;1,4,9,12;2,4,10,12;3,4,11,12|-x",
            "affine(1.65,0.8)|exponential(0.5)|0,4,8,12;1,4,9,12;2,4,10,12;3,4,11,12|xx",
            "affine(1.65,0.8)|exponential(0.0)|0,4,8,12;0,4,8,12;0,4,8,12;0,4,8,12|xx",
            "exponential(0.0)|exponential(0.0)|0,4,8,12;1,4,9,12;2,4,10,12;3,4,11,12|xx",
        ],
    )
    def test_code_map_without_a_kernel(self, shared, driver, text):
        expected = "expected one affine, signedsquare or exponential map, or an affine one mixed with the exponential"
        message = f"forward: recipe_code_map: {expected} on a quarter of the pairs, got {text}"
        refused(shared, driver, CALLS["forward"].having(recipe_code_map=text), message, code="UNIMPLEMENTED")

    def test_negative_number_of_keys(self, shared, driver):
        call = CALLS["forward"].having(num_keys=np.int32(-300))
        refused(shared, driver, call, "forward: num_keys: expected at least 0, got -300")

    def test_channels_per_scale(self, shared, driver):
        call = CALLS["quantize_for_training"].having(recipe_v_channels_per_scale=np.int32(2))
        message = f"{call.step}: recipe_v_channels_per_scale: expected 1 or 32, got 2"
        refused(shared, driver, call, message, code="UNIMPLEMENTED")


MOST_ROWS = 65535 * 128


class TestSizes:
    @pytest.mark.parametrize("H", [16, 96, 256])
    def test_head_size(self, shared, driver, H):
        shape = Shape(2, 129, 127, 4, 2, H)
        for call in (quantize_call(shape=shape), forward_call(shape=shape), row_operands_call(H=H)):
            message = f"{call.step}: expected a head size of 64 or 128, got {H}"
            refused(shared, driver, call, message, code="UNIMPLEMENTED")

    # Without heads these arrays are empty.
    @pytest.mark.parametrize(
        "call",
        [
            quantize_call(shape=Shape(65535, 1, 1, 0, 0, 64)),
            forward_call(shape=Shape(65535, 1, 1, 0, 0, 64)),
            forward_call(shape=Shape(1, MOST_ROWS, MOST_ROWS, 0, 0, 64)),
            row_operands_call(B=65535, T=1, N=0, K=0),
            row_operands_call(B=1, T=MOST_ROWS, N=0, K=0),
        ],
    )
    def test_largest(self, shared, call):
        call.run(shared)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (quantize_call(shape=Shape(65536, 1, 1, 0, 0, 64)), "a batch of at most 65535, got 65536"),
            (quantize_call(shape=Shape(1, MOST_ROWS + 1, 1, 0, 0, 64)), "at most 8388480 rows, got 8388481"),
            (quantize_call(shape=Shape(1, 1, MOST_ROWS + 1, 0, 0, 64)), "at most 8388480 rows, got 8388481"),
            (forward_call(shape=Shape(65536, 1, 1, 0, 0, 64)), "a batch of at most 65535, got 65536"),
            (forward_call(shape=Shape(1, MOST_ROWS + 1, 1, 0, 0, 64)), "at most 8388480 rows, got 8388481"),
            (forward_call(shape=Shape(1, 1, MOST_ROWS + 1, 0, 0, 64)), "at most 8388480 rows, got 8388481"),
            (forward_call(shape=Shape(0, 1, 1, 2**20 + 1, 1, 64)), "at most 1048576 heads, got 1048577"),
            (forward_call(shape=Shape(0, 1, 1, 0, 2**20 + 1, 64)), "at most 1048576 heads, got 1048577"),
            (row_operands_call(B=65536, T=1, N=0, K=0), "a batch of at most 65535, got 65536"),
            (row_operands_call(B=1, T=MOST_ROWS + 1, N=0, K=0), "at most 8388480 rows, got 8388481"),
            (quantize_call(shape=Shape(0, 1, 1, 2**20 + 1, 1, 64)), "at most 1048576 heads, got 1048577"),
            (row_operands_call(B=0, T=1, N=2**20 + 1, K=1), "at most 1048576 heads, got 1048577"),
        ],
    )
    def test_too_large(self, shared, driver, call, message):
        not_empty = call._replace(results=call.results | types({"another": (U8, 1)}))
        refused(shared, driver, not_empty, f"{call.step}: expected {message}")


IMAGES = {(9, 0): ["sm_90a"], (10, 0): ["sm_100f"], (10, 3): ["sm_103a", "sm_100f"]}


def cubin(target):
    return (handlers.BUILT / f"kernels.{target}.cubin").read_bytes()


class TestLoading:
    @pytest.mark.parametrize(("capability", "targets"), IMAGES.items(), ids=str)
    def test_images(self, new_process, driver, capability, targets):
        driver.pretend(capability)
        CALLS["quantize"].run(new_process())
        calls = driver.take()
        loads = [call for call in calls if call["call"] == "cuLibraryLoadData"]
        assert [ctypes.string_at(load["image"], load["bytes"]) for load in loads] == [cubin(x) for x in targets]
        assert {load["options"] for load in loads} == {0}
        entries = {call["entry"] for call in calls if call["call"] == "cuLibraryGetKernel"}
        # Of a kernel in several images only the first one's is asked for.
        expected = {}
        for target in targets:
            for name, kernel in handlers.manifest(target).items():
                expected.setdefault(name, kernel["entry"])
        assert entries == set(expected.values())
        assert {call["entry"] for call in calls if call["call"] == "cuKernelSetAttribute"} <= entries

    @pytest.mark.parametrize(("capability", "targets"), IMAGES.items(), ids=str)
    @pytest.mark.parametrize("recipe", [recipes.fast, recipes.train, recipes.exact_map], ids=lambda x: x.name)
    def test_a_forward_is_of_the_first_image(self, new_process, driver, recipe, capability, targets):
        driver.pretend(capability)
        forward_call(recipe).run(new_process())
        launched = [call["entry"] for call in driver.take("cuLaunchKernelEx")]
        first, *others = ({kernel["entry"] for kernel in handlers.manifest(target).values()} for target in targets)
        assert "forward_h64" in launched[-1]
        assert set(launched) <= first.difference(*others)

    def test_what_the_first_image_lacks_is_of_the_second(self, new_process, driver):
        """The key of a strided anchor is ordered by a kernel that is in the family's image alone."""
        driver.pretend((10, 3))
        shape = Shape(2, 129, 127, 4, 2, 64)
        ordered = types({"codes": (U8, 2, 2, 128, 32), "pages": (U8, 2, 2, 1, 1, 512)})
        call = forward_call(recipes.accurate, shape).having(has_ordered_key=True)
        call._replace(results=call.results | ordered).run(new_process())
        launched = [call["entry"] for call in driver.take("cuLaunchKernelEx")]
        own, family = (handlers.manifest(target) for target in IMAGES[10, 3])
        assert "order_key_h64" not in own
        attention = own["blackwell_forward_h64_affine_mixed_anchor32"]
        assert launched == [family["order_key_h64"]["entry"], attention["entry"]]

    @pytest.mark.parametrize("capability", [(8, 9), (9, 1), (10, 1), (10, 2), (11, 0), (12, 0), (12, 1)], ids=str)
    def test_another_compute_capability(self, new_process, driver, capability):
        driver.pretend(capability)
        message = (
            f"expected a GPU of compute capability 9.0, 10.0 or 10.3, got {capability[0]}.{capability[1]}; "
            "use implementation='reference'"
        )
        refused(new_process(), driver, CALLS["quantize"], message)

    def test_once_for_all_launches_and_devices(self, new_process, driver):
        process = new_process()
        process.call("load_kernels")
        assert len(driver.take("cuLibraryLoadData")) == 1
        for device in (0, 1, 0, 1):
            driver.pretend(device=device)
            for call in CALLS.values():
                call.run(process)
        calls = driver.take()
        names = [call["call"] for call in calls]
        assert names.count("cuLaunchKernelEx") == 4 * (3 + 3 + 3 + 1)
        assert "cuLibraryLoadData" not in names
        assert "cuLibraryGetKernel" not in names
        assert {call["device"] for call in calls if call["call"] == "cuLaunchKernelEx"} == {0, 1}
        # The compute capability of device 0 was known before.
        multiprocessor_count = 16
        asked = [(call["attribute"], call["device"]) for call in calls if call["call"] == "cuDeviceGetAttribute"]
        assert {device for attribute, device in asked if attribute != multiprocessor_count} == {1}
        assert {device for attribute, device in asked if attribute == multiprocessor_count} == {0, 1}

    def test_devices_of_two_generations(self, new_process, driver):
        process = new_process()
        images = []
        for device, capability in enumerate([(9, 0), (10, 0), (10, 3), (9, 0)]):
            driver.pretend(capability, device)
            process.call("load_kernels")
            images += [load["bytes"] for load in driver.take("cuLibraryLoadData")]
        # Each once: those of 10.0 serve 10.3 too, but not the other way round.
        assert images == [len(cubin(target)) for target in handlers.TARGETS]

    def test_a_device_of_another_generation_takes_its_own_image(self, new_process, driver):
        """Compute capability 10.0 next to 10.3 in a process, whichever comes first."""
        for order in ([(10, 3), (10, 0)], [(10, 0), (10, 3)]):
            process = new_process()
            for device, capability in enumerate(order):
                driver.pretend(capability, device)
                forward_call(recipes.fast).run(process)
                (launched,) = (call["entry"] for call in driver.take("cuLaunchKernelEx"))
                kernels = handlers.manifest(IMAGES[capability][0])
                assert launched == kernels["blackwell_forward_h64_affine"]["entry"], (order, capability)

    def test_loading_launches_nothing(self, new_process, driver):
        new_process().call("load_kernels")
        assert driver.launches() == []

    def test_shared_memory_above_the_limit_needs_an_attribute_on_each_device(self, new_process, driver):
        process = new_process()
        for device in (0, 3):
            driver.pretend(device=device)
            process.call("load_kernels")
            process.call("load_kernels")
        set_max_dynamic_shared_size = 8
        calls = driver.take("cuKernelSetAttribute")
        sizes = sorted([handlers.LIMIT + 1, *(x["shared_bytes"] for x in handlers.manifest().values())])
        above = [size for size in sizes if size > handlers.LIMIT]
        for device in (0, 3):
            found = [(call["attribute"], call["value"]) for call in calls if call["device"] == device]
            assert sorted(found) == [(set_max_dynamic_shared_size, size) for size in above]
        assert len(calls) == 2 * len(above)

    def test_a_kernel_for_the_other_generation(self, new_process, driver):
        driver.pretend((10, 0))
        message = "no kernel is called forward_h64_affine_mixed_anchor32"
        with pytest.raises(ERRORS, match=message):
            new_process().call("launch_by_name", results=[jax.ShapeDtypeStruct((1,), U8)], name=message.split()[-1])

    def test_parameters_of_another_kernel(self, shared, driver):
        with pytest.raises(ERRORS) as raised:
            shared.call("launch_by_name", results=[jax.ShapeDtypeStruct((1,), U8)], name="quantize_rows_h64")
        assert "quantize_rows_h64: expected parameters ppppppiiiif, got f" in str(raised.value)
        assert driver.launches() == []

    def test_unknown_kernel(self, shared):
        with pytest.raises(ERRORS, match="no kernel is called nothing"):
            shared.call("launch_by_name", results=[jax.ShapeDtypeStruct((1,), U8)], name="nothing")


class TestDriverFailures:
    @pytest.mark.parametrize(
        "function",
        [
            "cuCtxGetDevice",
            "cuDeviceGetAttribute",
            "cuLibraryLoadData",
            "cuLibraryGetKernel",
            "cuKernelSetAttribute",
            "cuLaunchKernelEx",
        ],
    )
    def test_the_drivers_text(self, new_process, driver, function):
        process, call = new_process(), CALLS["quantize"]
        driver.fail(function, 719)
        with pytest.raises(ERRORS) as raised:
            call.run(process)
        what = f"{function} of the image sm_90a" if function == "cuLibraryLoadData" else function
        assert text_of(raised).startswith(f"INTERNAL: jax_fp4attn: {what} failed with 719: text of error 719")
        # The first launch that fails is the last.
        assert len(driver.launches()) == (1 if function == "cuLaunchKernelEx" else 0)
        driver.pretend()
        call.run(process)
        assert len(driver.launches()) == 3

    def test_an_image_that_does_not_load(self, new_process, driver):
        """Nothing runs by another image in its place, and the next call tries it again."""
        process, call = new_process(), forward_call(recipes.fast)
        driver.pretend((10, 3))
        driver.fail("cuLibraryLoadData", 209)
        message = "cuLibraryLoadData of the image sm_103a failed with 209: text of error 209"
        for _ in range(2):
            with pytest.raises(ERRORS, match=message):
                call.run(process)
            assert len(driver.take("cuLibraryLoadData")) == 1
        driver.pretend((10, 3))
        call.run(process)
        assert len(driver.take("cuLibraryLoadData")) == 2

    def test_error_without_a_text(self, new_process, driver):
        driver.fail("cuLaunchKernelEx", 1000)
        with pytest.raises(ERRORS, match="cuLaunchKernelEx failed with 1000: unknown error"):
            CALLS["quantize"].run(new_process())

    def test_no_driver(self, new_process, tmp_path):
        process = new_process(tmp_path / "libcuda.so.1")
        for _ in range(2):
            with pytest.raises(ERRORS) as raised:
                CALLS["quantize"].run(process)
            assert text_of(raised).startswith("UNAVAILABLE: jax_fp4attn: no CUDA driver: ")
            assert "libcuda.so.1: cannot open shared object file" in str(raised.value)

    def test_old_driver(self, new_process, libraries, tmp_path):
        # One of its functions has another name.
        old = tmp_path / "libcuda.so.1"
        old.write_bytes(libraries.driver.read_bytes().replace(b"cuLibraryLoadData", b"cuLibraryXoadData"))
        with pytest.raises(ERRORS) as raised:
            CALLS["quantize"].run(new_process(old))
        message = "UNAVAILABLE: jax_fp4attn: the CUDA driver has no cuLibraryLoadData; version 12.3 or newer is needed"
        assert text_of(raised).startswith(message)
