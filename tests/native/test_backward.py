"""The backward: what its handler launches and refuses, and on a GPU its gradients against the reference's."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4attn
from jax_fp4attn import SegmentIds, native, recipes, reference, steps
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.native.attributes import recipe_attributes
from jax_fp4attn.reference.row_operands import lift_bits
from tests.assertions import assert_same_bytes, relative_l2
from tests.custom_calls import targets
from tests.native.stand_in.handlers import Handlers, Launch, TensorMap
from tests.native.test_handlers import (
    BF16,
    DIVIDED_HEADS,
    F16,
    F32,
    LOG2_SCALE,
    MOST_ROWS,
    S32,
    SCALE,
    U8,
    UNLIMITED,
    Call,
    Shape,
    address,
    refused,
    text,
    types,
    with_buffer,
    zeros,
)

ORDERED = dataclasses.replace(recipes.train, name="ordered", dq_accumulation="float32_ordered")
OTHER_FACTORS = dataclasses.replace(
    recipes.square, name="other", backward_multiplier=16.0, backward_p_lift_bits=3, backward_lse_correction=0.25
)
both_accumulations = pytest.mark.parametrize("recipe", [recipes.train, ORDERED], ids=lambda recipe: recipe.name)
both_head_sizes = pytest.mark.parametrize("head_size", [64, 128])


@pytest.fixture(scope="module")
def shared(libraries):
    """Handlers, of which that of the backward has the name of the custom call, too."""
    shared = Handlers(*reversed(libraries))
    shared.register("backward", native.target_name("backward"))
    return shared


def padded(rows):
    return math.ceil(rows / 128) * 128


def operands_of(config, shape, visibility):
    """Zeros like the step's operands."""
    B, T, S, N, K, H = shape
    bf16 = [jax.ShapeDtypeStruct(x, BF16) for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))]
    *inputs, output = bf16
    lse, scale = jax.ShapeDtypeStruct((B, N, T), F32), jax.ShapeDtypeStruct((B, K), F32)
    quantized = jax.eval_shape(functools.partial(reference.quantize_for_training, config), *inputs, visibility)
    rows = jax.eval_shape(functools.partial(reference.row_operands, config), output, lse, output, lse, scale)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (quantized.for_backward(), rows, lse, scale))


def matrix_map(element, data, rows, columns, box_rows, box_bytes):
    size = {"f16": 2, "u8": 1}[element]
    l2_256b = 3
    box = (box_bytes // size, box_rows)
    return TensorMap(element, data, (columns, rows), (columns * size,), box, (1, 1), 0, f"{box_bytes}B", l2_256b, 0)


def paired_rows_map(data, rows, columns, box_rows):
    """Of each 16 rows first the even and then the odd ones."""
    extents, strides = (columns, 8, 2, rows // 16), (2 * columns, columns, 16 * columns)
    box = (columns, 8, 2, box_rows // 16)
    return TensorMap("u8", data, extents, strides, box, (1, 1, 1, 1), 0, f"{columns}B", 3, 0)


def check_backward(driver, recipe, shape, visibility=Visibility(), is_causal=False, window=None, section=None):  # noqa: B008
    """All heads, of all batch entries, come together unless ``section`` says how many."""
    B, T, S, N, K, H = shape
    config = OperatorConfig(recipe, SCALE, is_causal, window)
    operands, rows, lse, scale = operands_of(config, shape, visibility)
    results = [jax.ShapeDtypeStruct(x, BF16) for x in ((B, T, N, H), (B, S, K, H), (B, S, K, H))]
    gradients = jax.block_until_ready(
        native.call(
            "backward",
            config,
            {"num_keys": S, "head_size": H},
            results,
            operands,
            rows,
            lse,
            scale,
            None,
            visibility,
            workspace=steps._backward_workspace(config, operands),
        )
    )
    launches = driver.launches()
    ordered = recipe.dq_accumulation == "float32_ordered"
    query_rows, key_rows = padded(T), padded(S)
    key_values = launches[0].parameters["values"]
    query_values, statistics, query_sums = (
        launches[1].parameters[name] for name in ("values", "statistics", "query_sums")
    )
    others = [address(x) for x in jax.tree.leaves((operands, rows, lse, scale, visibility, gradients))]
    workspace = [key_values, query_values, statistics, *([] if ordered else [query_sums])]
    assert 0 not in workspace and len({*workspace, *others}) == len(workspace) + len(others)
    assert (query_sums == 0) == ordered

    m, lift = recipe.backward_multiplier, float(lift_bits(recipe))
    factor, unit = float(np.float32(SCALE / m**2)), float(np.float32(1 / (2.0**lift * m)))
    left, right = (UNLIMITED, UNLIMITED) if window is None else window
    segments = visibility.segment_ids or SegmentIds(None, None)
    common = {
        "statistics": statistics,
        "gradient_scale": address(scale),
        "query_lengths": address(visibility.query_lengths),
        "key_lengths": address(visibility.key_lengths),
        "query_segments": address(segments.query),
        "key_segments": address(segments.key_value),
        "key_offset": address(visibility.key_offset),
        "num_queries": T,
        "num_keys": S,
        "query_heads": N,
        "kv_heads": K,
        "window_left": left,
        "window_right": 0 if is_causal else right,
        "log2_scale": LOG2_SCALE,
        "lift": lift,
        "factor": factor,
        "unit": unit,
    }

    def row_maps(query_box, key_box):
        return {
            "query_map": matrix_map("f16", query_values, B * N * query_rows, H, query_box, 128),
            "key_map": matrix_map("f16", key_values, B * K * key_rows, H, key_box, 128),
            "value_map": paired_rows_map(address(operands.value), B * K * key_rows, H, key_box),
            "gradient_map": paired_rows_map(address(rows.output_gradient), B * N * query_rows, H, query_box),
        }

    def columns(x, heads, slots, box_bytes):
        return matrix_map("u8", address(x), B * heads * H, slots, H, box_bytes)

    expansion = {
        "codes": address(operands.score_key.codes),
        "pages": address(operands.score_key.scales),
        "order": 0,
        "counter": 0,
        "values": key_values,
        "num_keys": S,
        "num_heads": K,
    }
    preparation = {
        "query_codes": address(operands.score_query.codes),
        "query_pages": address(operands.score_query.scales),
        "lse": address(lse),
        "row_statistic": address(rows.row_statistic),
        "values": query_values,
        "statistics": statistics,
        "query_sums": query_sums,
        "num_rows": T,
        "num_heads": N,
        "lift": lift,
        "correction": float(np.float32(recipe.backward_lse_correction)),
        "factor": factor,
    }
    of_keys = {
        **row_maps(64, 128),
        "query_columns_map": columns(operands.query, N, query_rows, 64),
        "gradient_columns_map": columns(rows.output_gradient_columns, N, query_rows, 64),
        "key_columns_map": columns(operands.key, K, key_rows, 128),
        "query_sums": query_sums,
        "key_gradient": address(gradients[1]),
        "value_gradient": address(gradients[2]),
        "section": B * K if section is None else section,
    }
    of_queries = {
        **row_maps(128, 64),
        "key_columns_map": columns(operands.key, K, key_rows, 64),
        "query_gradient": address(gradients[0]),
    }
    finish = {
        "sums": query_sums,
        "lse": address(lse),
        "gradient_scale": address(scale),
        "query_gradient": address(gradients[0]),
        "num_rows": T,
        "num_heads": N,
        "heads_a_group": N // K,
        "unit": unit,
    }
    key_tiles, query_tiles = key_rows // 128, query_rows // 128
    last = (
        Launch(f"backward_query_h{H}", (N, query_tiles, B), common | of_queries)
        if ordered
        else Launch(f"backward_finish_query_h{H}", (N, math.ceil(T / 64), B), finish)
    )
    assert launches == [
        Launch(f"expand_key_h{H}", (K, key_tiles, B), expansion),
        Launch(f"backward_prepare_h{H}", (N, query_tiles, B), preparation),
        Launch(f"backward_h{H}" + "_ordered" * ordered, (B * K * key_tiles, 1, 1), common | of_keys),
        last,
    ]


@pytest.mark.usefixtures("shared")
class TestLaunches:
    @both_head_sizes
    @pytest.mark.parametrize(
        "recipe", [recipes.train, ORDERED, recipes.accurate, OTHER_FACTORS], ids=lambda recipe: recipe.name
    )
    def test_recipes(self, driver, recipe, head_size):
        check_backward(driver, recipe, Shape(2, 129, 127, 4, 2, head_size))

    @both_accumulations
    @pytest.mark.parametrize(
        "shape",
        [
            Shape(1, 1, 1, 1, 1, 64),
            Shape(2, 192, 128, 4, 4, 64),
            Shape(2, 193, 129, 6, 1, 128),
            Shape(3, 64, 1000, 4, 2, 128),
            Shape(1, 1000, 33, 8, 2, 64),
        ],
        ids=str,
    )
    def test_shapes(self, driver, shape, recipe):
        check_backward(driver, recipe, shape)

    @pytest.mark.parametrize(
        ("shape", "is_causal", "section"),
        # A head of 8192 queries of 128 channels takes 9 MiB of the 20 MiB.
        [
            (Shape(1, 8192, 1, 24, 24, 128), False, 2),
            (Shape(1, 4096, 1, 32, 8, 128), False, 1),
            (Shape(1, 8192, 1, 4, 2, 64), False, 2),
            (Shape(1, 2**16, 1, 2, 2, 128), False, 1),
            # Two batch entries in a section; and two sections of five heads.
            (Shape(6, 8192, 1, 1, 1, 128), False, 2),
            (Shape(5, 8192, 1, 1, 1, 128), False, 3),
            # More heads occupy the device, but with at most 80 MiB.
            (Shape(1, 4096, 1, 32, 8, 128), True, 4),
            (Shape(1, 2**16, 1, 2, 2, 128), True, 1),
            # Keys of one head occupy three of the five multiprocessors; or those of two heads four.
            (Shape(1, 8192, 300, 16, 8, 128), True, 1),
            (Shape(1, 8192, 250, 16, 8, 128), True, 2),
        ],
        ids=str,
    )
    def test_heads_that_come_together(self, driver, shape, is_causal, section):
        check_backward(driver, recipes.train, shape, is_causal=is_causal, section=section)

    @both_accumulations
    @pytest.mark.parametrize("present", ["query", "key", "segments", "offset", "query, key, segments, offset"])
    def test_restrictions(self, driver, present, recipe):
        lengths = zeros((2,), (2,), dtype=S32)
        visibility = Visibility(
            query_lengths=lengths[0] if "query" in present else None,
            key_lengths=lengths[1] if "key" in present else None,
            segment_ids=SegmentIds(*zeros((2, 129), (2, 127), dtype=S32)) if "segments" in present else None,
            key_offset=jnp.zeros((), S32) if "offset" in present else None,
        )
        check_backward(driver, recipe, Shape(2, 129, 127, 4, 2, 128), visibility)

    @both_accumulations
    @pytest.mark.parametrize("window", [None, (0, 0), (7, 300), (UNLIMITED, UNLIMITED)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_windows(self, driver, is_causal, window, recipe):
        check_backward(driver, recipe, Shape(2, 129, 127, 4, 2, 64), is_causal=is_causal, window=window)


def backward_call(recipe=recipes.train, shape=Shape(2, 129, 127, 4, 2, 64), *, restricted=False):  # noqa: B008
    B, T, S, N, K, H = shape
    queries, keys = padded(T), padded(S)
    operands = {
        "score_query.codes": (U8, B, N, T, H // 2),
        "score_query.scales": (U8, B, N, queries // 128, H // 64, 512),
        "score_key.codes": (U8, B, K, keys, H // 2),
        "score_key.scales": (U8, B, K, keys // 128, H // 64, 512),
        "query": (U8, B, N, H, queries),
        "key": (U8, B, K, H, keys),
        "value": (U8, B, K, keys, H),
        "output_gradient": (U8, B, N, queries, H),
        "output_gradient_columns": (U8, B, N, H, queries),
        "row_statistic": (F32, B, N, T),
        "lse": (F32, B, N, T),
        "gradient_scale": (F32, B, K),
    }
    if restricted:
        operands |= {"query_lengths": (S32, B), "key_lengths": (S32, B)}
        operands |= {"segment_ids.query": (S32, B, T), "segment_ids.key_value": (S32, B, S), "key_offset": (S32,)}
    results = {
        "query gradient": (BF16, B, T, N, H),
        "key gradient": (BF16, B, S, K, H),
        "value gradient": (BF16, B, S, K, H),
        "expanded query": (F16, B, N, queries, H),
        "expanded key": (F16, B, K, keys, H),
        "row statistics": (F32, B, N, queries // 64, 2, 64),
    }
    if recipe.dq_accumulation == "float32":
        results |= {"sums of the query gradient": (F32, B, N, queries, H)}
    flags = ["has_query_lengths", "has_key_lengths", "has_segment_ids", "has_key_offset"]
    attributes = {
        "scale": np.float32(SCALE),
        "is_causal": False,
        "num_keys": np.int32(S),
        **dict.fromkeys(["window_left", "window_right"], np.int32(-1)),
        **dict.fromkeys(flags, restricted),
        **recipe_attributes(recipe),
    }
    return Call("backward", types(operands), types(results), attributes)


CALL, ORDERED_CALL = backward_call(restricted=True), backward_call(ORDERED, restricted=True)
both_calls = pytest.mark.parametrize("call", [CALL, ORDERED_CALL], ids=["float32", "float32_ordered"])


@both_calls
def test_calls_that_the_tests_below_spoil_are_right(shared, driver, call):
    call.run(shared)
    assert len(driver.launches()) == 4


KEYS, PREPARE, FINISH = ["expand_key_h64"], ["backward_prepare_h64"], ["backward_finish_query_h64"]


@pytest.mark.parametrize(
    ("recipe", "shape", "kernels"),
    [
        (recipes.train, Shape(0, 129, 127, 4, 2, 64), []),
        (recipes.train, Shape(2, 0, 0, 4, 2, 64), []),
        (recipes.train, Shape(2, 129, 127, 0, 0, 64), []),
        # The gradients of those that have no partner are zeros, which have to be written.
        (recipes.train, Shape(2, 0, 127, 4, 2, 64), [*KEYS, "backward_h64"]),
        (recipes.train, Shape(2, 129, 127, 0, 2, 64), [*KEYS, "backward_h64"]),
        (recipes.train, Shape(2, 129, 0, 4, 2, 64), [*PREPARE, *FINISH]),
        (ORDERED, Shape(0, 129, 127, 4, 2, 64), []),
        (ORDERED, Shape(2, 0, 127, 4, 2, 64), [*KEYS, "backward_h64_ordered"]),
        (ORDERED, Shape(2, 129, 0, 4, 2, 64), [*PREPARE, "backward_query_h64"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("restricted", [False, True])
def test_what_is_empty_is_not_launched(shared, driver, recipe, shape, kernels, restricted):
    backward_call(recipe, shape, restricted=restricted).run(shared)
    launches = driver.launches()
    assert [launch.kernel for launch in launches] == kernels
    # A tensor map has no empty dimension.
    maps = [x for launch in launches for x in launch.parameters.values() if isinstance(x, TensorMap)]
    assert all(min(found.extents) > 0 for found in maps)


# Operands that may choose dimensions.
ANY = {"score_query.codes": "[any, any, any, any]", "score_key.codes": "[2, any, 128, 32]"}
BUFFERS = [
    pytest.param(call, kind, name, id=f"{kind}-{name}")
    for call, kind, names in (
        (CALL, "operand", CALL.operands),
        (CALL, "result", CALL.results),
        (ORDERED_CALL, "result", ORDERED_CALL.results),
    )
    for name in names
]
all_buffers = pytest.mark.parametrize(("call", "kind", "name"), BUFFERS)


def mismatch(call, kind, name, changed):
    expected, got = (getattr(x, kind + "s")[name] for x in (call, changed))
    expected = f"{expected.dtype} {ANY[name]}" if name in ANY else text(expected)
    return f"backward: {kind} {name}: expected {expected}, got {text(got)}"


class TestMalformedBuffers:
    @all_buffers
    def test_dtype(self, shared, driver, call, kind, name):
        wrong = {BF16: F32, F16: BF16, F32: BF16, S32: F32, U8: S32}
        dtype = getattr(call, kind + "s")[name].dtype
        changed = with_buffer(call, kind, name, dtype=wrong[dtype.type])
        refused(shared, driver, changed, mismatch(call, kind, name, changed))

    @all_buffers
    def test_rank(self, shared, driver, call, kind, name):
        shape = getattr(call, kind + "s")[name].shape
        for wrong in {(*shape, 1), shape[:-1]} - {shape}:
            changed = with_buffer(call, kind, name, shape=wrong)
            refused(shared, driver, changed, mismatch(call, kind, name, changed))

    @all_buffers
    def test_dimensions(self, shared, driver, call, kind, name):
        shape = getattr(call, kind + "s")[name].shape
        free = ANY.get(name, "").split(", ")
        for axis, size in enumerate(shape):
            if axis < len(free) and "any" in free[axis]:
                continue
            changed = with_buffer(call, kind, name, shape=[*shape[:axis], size + 1, *shape[axis + 1 :]])
            refused(shared, driver, changed, mismatch(call, kind, name, changed))

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("score_query.codes", (3, 4, 129, 32), "operand score_query.scales: expected uint8 [3, 4, 2, 1, 512]"),
            ("score_query.codes", (2, 4, 100, 32), "operand score_query.scales: expected uint8 [2, 4, 1, 1, 512]"),
            ("score_query.codes", (2, 4, 130, 32), "operand row_statistic: expected float32 [2, 4, 130]"),
            ("score_query.codes", (2, 4, 129, 64), "operand score_query.scales: expected uint8 [2, 4, 2, 2, 512]"),
            ("score_key.codes", (2, 4, 128, 32), "operand score_key.scales: expected uint8 [2, 4, 1, 1, 512]"),
            ("score_key.codes", (2, 3, 128, 32), f"{DIVIDED_HEADS}, got 4 and 3"),
            ("score_key.codes", (2, 0, 128, 32), f"{DIVIDED_HEADS}, got 4 and 0"),
        ],
    )
    def test_operands_that_disagree(self, shared, driver, name, shape, message):
        refused(shared, driver, with_buffer(CALL, "operand", name, shape=shape), f"backward: {message}")

    @both_calls
    def test_missing_and_surplus(self, shared, driver, call):
        for kind, article in (("operand", "an"), ("result", "a")):
            found = getattr(call, kind + "s")
            for count in range(0 if kind == "operand" else 1, len(found)):
                changed = call._replace(**{kind + "s": dict(itertools.islice(found.items(), count))})
                expected = f"expected {article} {kind} {list(found)[count]}, got {count} {kind}s"
                refused(shared, driver, changed, f"backward: {expected}")
            changed = call._replace(**{kind + "s": found | types({"surplus": (U8, 1)})})
            expected = f"expected {len(call.operands)} operands and {len(call.results)} results"
            refused(shared, driver, changed, f"backward: {expected}, got ")

    def test_memory_of_the_other_accumulation(self, shared, driver):
        call = CALL.having(recipe_dq_accumulation="float32_ordered")
        refused(shared, driver, call, "backward: expected 17 operands and 6 results, got 17 and 7")
        call = ORDERED_CALL.having(recipe_dq_accumulation="float32")
        refused(shared, driver, call, "backward: expected a result sums of the query gradient, got 6 results")


ATTRIBUTES = {
    **dict.fromkeys(["scale", "recipe_backward_multiplier", "recipe_backward_lse_correction"], "float32"),
    **dict.fromkeys(["window_left", "window_right", "num_keys", "recipe_backward_p_lift_bits"], "int32"),
    **dict.fromkeys(["is_causal", "has_query_lengths", "has_key_lengths", "has_segment_ids", "has_key_offset"], "bool"),
    **dict.fromkeys(["recipe_backward", "recipe_backward_qk", "recipe_qk_format", "recipe_qk_tensor_scale"], "string"),
    "recipe_dq_accumulation": "string",
}


class TestMalformedAttributes:
    @pytest.mark.parametrize(("name", "kind"), ATTRIBUTES.items())
    def test_missing_or_of_another_type(self, shared, driver, name, kind):
        expected = f"backward: expected an attribute {name} of type {kind}, got"
        missing = CALL._replace(attributes={key: value for key, value in CALL.attributes.items() if key != name})
        refused(shared, driver, missing, f"{expected} none")
        # JAX takes attributes that are equal for the same, whatever their types are; nothing equals -7.
        refused(shared, driver, CALL.having(**{name: np.int16(-7)}), f"{expected} another type")

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("recipe_backward", "bf16", "fp8"),
            ("recipe_backward_qk", "represented", "source"),
            ("recipe_qk_format", "bf16", "nvfp4"),
            ("recipe_qk_tensor_scale", "amax", "unit"),
            ("recipe_dq_accumulation", "bfloat16_per_tile", "float32 or float32_ordered"),
        ],
    )
    def test_recipe_without_a_kernel(self, shared, driver, name, value, expected):
        message = f"backward: {name}: expected {expected}, got {value}"
        refused(shared, driver, CALL.having(**{name: value}), message, code="UNIMPLEMENTED")

    def test_negative_number_of_keys(self, shared, driver):
        call = CALL.having(num_keys=np.int32(-300))
        refused(shared, driver, call, "backward: num_keys: expected at least 0, got -300")

    def test_the_forward_does_not_matter(self, shared, driver):
        forward = {"recipe_p_format": "nvfp4", "recipe_v_format": "nvfp4", "recipe_code_map": "cubic"}
        CALL.having(**forward).run(shared)
        assert len(driver.launches()) == 4


class TestSizes:
    @pytest.mark.parametrize("head_size", [16, 96, 256])
    def test_head_size(self, shared, driver, head_size):
        call = backward_call(shape=Shape(2, 129, 127, 4, 2, head_size))
        message = f"backward: expected a head size of 64 or 128, got {head_size}"
        refused(shared, driver, call, message, code="UNIMPLEMENTED")

    # Without heads these arrays are empty.
    @pytest.mark.parametrize("shape", [Shape(65535, 1, 1, 0, 0, 64), Shape(1, MOST_ROWS, MOST_ROWS, 0, 0, 64)], ids=str)
    def test_largest(self, shared, shape):
        backward_call(shape=shape).run(shared)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            (Shape(65536, 1, 1, 0, 0, 64), "a batch of at most 65535, got 65536"),
            (Shape(1, MOST_ROWS + 1, 1, 0, 0, 64), "at most 8388480 rows, got 8388481"),
            (Shape(1, 1, MOST_ROWS + 1, 0, 0, 64), "at most 8388480 rows, got 8388481"),
            (Shape(0, 1, 1, 2**20 + 1, 1, 64), "at most 1048576 heads, got 1048577"),
            (Shape(0, 1, 1, 0, 2**20 + 1, 64), "at most 1048576 heads, got 1048577"),
        ],
        ids=str,
    )
    def test_too_large(self, shared, driver, shape, message):
        call = backward_call(shape=shape)
        not_empty = call._replace(results=call.results | types({"another": (U8, 1)}))
        refused(shared, driver, not_empty, f"backward: expected {message}")


def test_launches_that_fail(shared, driver):
    """The first is the last."""
    driver.fail("cuTensorMapEncodeTiled", 1)
    refused_launches = ["expand_key_h64", "backward_prepare_h64"]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="cuTensorMapEncodeTiled failed with 1"):
        CALL.run(shared)
    assert [launch.kernel for launch in driver.launches()] == refused_launches


# Relative, in the L2 norm, of a gradient.
ERROR = 5e-3
# A score's gradient within rounding of a threshold gets the next code of E4M3, an eighth more or less. Where it is the
# largest of its row, the row shows it; two of 470000 such codes make an error of 6e-3 in the gradients of 500 rows.
ROW, FLIPPED_ROW, FLIPPED_ROWS = 0.02, 0.15, 0.01


def make_inputs(shape, seed=0):
    """Query, key, value and the cotangents of output and lse, as small as a mean loss's."""
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H = shape
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    *inputs, d_output = (rng.standard_normal(x, np.float32) for x in shapes)
    d_lse = rng.standard_normal((B, T, N), np.float32)
    return *(x.astype(BF16) for x in inputs), (d_output / 512).astype(BF16), d_lse / 512


def differentiate(implementation, recipe, options, query, key, value, d_output, d_lse, restrictions):
    """Gradients of attention with respect to query, key and value."""

    def attend(query, key, value):
        return jax_fp4attn.attention(
            query,
            key,
            value,
            recipe=recipe,
            implementation=implementation,
            return_residual=True,
            **options,
            **restrictions,
        )

    return jax.vjp(attend, query, key, value)[1]((d_output, d_lse))


def on_device(kind, *arguments):
    device = jax.devices(kind)[0]
    with jax.default_device(device):
        implementation = {"cpu": "reference", "cuda": "cuda"}[kind]
        recipe, options, *arrays = arguments
        function = jax.jit(functools.partial(differentiate, implementation, recipe, options))
        return function(*jax.device_put(arrays, device))


def assert_same_gradient(actual, expected):
    """But for the order of additions, and the codes that it decides."""
    assert actual.dtype == BF16
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    errors, norms = (np.linalg.norm(x, axis=-1) for x in (actual - expected, expected))
    flipped = errors > ROW * norms
    assert np.mean(flipped) < FLIPPED_ROWS
    assert (errors <= FLIPPED_ROW * norms)[flipped].all()
    assert relative_l2(actual[~flipped], expected[~flipped]) < ERROR


def random_segments(batch, num_queries, num_keys):
    rng = np.random.default_rng(1)
    lengths = (num_queries, num_keys)
    return SegmentIds(*(np.sort(rng.integers(0, 4, (batch, x)), axis=1).astype(np.int32) for x in lengths))


@pytest.mark.gpu
class TestGradients:
    """Kernels on a GPU and the reference on a CPU, from the same inputs to the gradients."""

    @pytest.fixture(autouse=True)
    def _needs_kernels(self):
        reason = native.why_unavailable() or native.missing_kernel("backward", recipes.train, 64)
        if reason is not None:
            pytest.skip(reason)

    def check(self, recipe, shape, options=None, restrictions=None):
        arguments = (recipe, options or {}, *make_inputs(shape), restrictions or {})
        actual, expected = on_device("cuda", *arguments), on_device("cpu", *arguments)
        errors = [relative_l2(*pair) for pair in zip(actual, expected, strict=True)]
        print(f"{recipe.name} {shape} {options}: {errors}")
        for x, y in zip(actual, expected, strict=True):
            assert_same_gradient(x, y)
        return actual

    @pytest.mark.parametrize("recipe", [recipes.train, ORDERED], ids=lambda recipe: recipe.name)
    def test_it_is_a_kernel(self, recipe):
        arguments = (*make_inputs(Shape(1, 128, 128, 2, 1, 64)), {})
        function = jax.jit(functools.partial(differentiate, "cuda", recipe, {}))
        program = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert native.target_name("backward") in targets(program)

    @both_head_sizes
    @both_accumulations
    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ((1, 500, 500, 2, 2), {}),
            ((2, 500, 500, 4, 2), {"is_causal": True}),
            ((1, 1000, 1000, 8, 1), {"is_causal": True}),
            ((1, 200, 700, 4, 2), {}),
            ((1, 700, 200, 4, 4), {}),
            ((1, 700, 700, 2, 1), {"local_window_size": (100, 30)}),
            ((1, 700, 700, 2, 1), {"local_window_size": (150, 0), "is_causal": True}),
        ],
        ids=str,
    )
    def test_masks_and_shapes(self, recipe, shape, options, head_size):
        self.check(recipe, Shape(*shape, head_size), options)

    @both_head_sizes
    @both_accumulations
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_lengths_and_segments(self, recipe, is_causal, head_size):
        lengths = {
            "query_seq_lengths": np.array([500, 0, 300], np.int32),
            "key_value_seq_lengths": np.array([130, 470, 300], np.int32),
        }
        segments = {"segment_ids": random_segments(3, 500, 470)}
        for restrictions in (lengths, segments, lengths | segments):
            shape = Shape(3, 500, 470, 4, 2, head_size)
            query, key, value = self.check(recipe, shape, {"is_causal": is_causal}, restrictions)
            if "query_seq_lengths" in restrictions:
                assert not np.asarray(query[1], np.float32).any() and not np.asarray(query[2, 300:], np.float32).any()
                assert not any(np.asarray(x[1], np.float32).any() for x in (key, value))
                assert not any(np.asarray(x[2, 300:], np.float32).any() for x in (key, value))

    @both_head_sizes
    def test_every_run_of_the_ordered_form_gives_the_same_bytes(self, head_size):
        inputs = jax.device_put(make_inputs(Shape(2, 1000, 1000, 4, 2, head_size)), jax.devices("cuda")[0])
        program = jax.jit(functools.partial(differentiate, "cuda", ORDERED, {"is_causal": True}))
        first = program(*inputs, {})
        for _ in range(20):
            assert_same_bytes(program(*inputs, {}), first)

    def test_only_the_query_gradient_depends_on_the_order(self):
        inputs = jax.device_put(make_inputs(Shape(2, 1000, 1000, 4, 2, 128)), jax.devices("cuda")[0])
        unordered, ordered = (
            jax.jit(functools.partial(differentiate, "cuda", recipe, {"is_causal": True}))(*inputs, {})
            for recipe in (recipes.train, ORDERED)
        )
        assert_same_bytes(unordered[1:], ordered[1:])
        assert relative_l2(unordered[0], ordered[0]) < 1e-3
