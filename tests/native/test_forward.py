"""The forward's kernels on a GPU against the reference on a CPU: equal but for the order of sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4attn
from jax_fp4attn import SegmentIds, native, recipes, reference, steps
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.native import library
from tests.assertions import assert_same_bytes, relative_l2
from tests.code_bounds import assert_same_attention, code_bounds, one_hot_values
from tests.custom_calls import targets

pytestmark = pytest.mark.gpu

LEADING = dataclasses.replace(recipes.accurate, name="leading", anchor_order="leading", margin=0)
GUARDED = recipes.guarded(10, 16)
RECIPES = [
    recipes.train,
    recipes.fp8_pv,
    recipes.fast,
    recipes.square,
    recipes.exact_map,
    recipes.accurate,
    recipes.accurate_raw_margin,
    LEADING,
    GUARDED,
]
DIRECT_P = [recipe for recipe in RECIPES if recipe.p_format == "mxfp4"]
MOST_DIFFERENT_CODES = 1e-4
all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
one_of_each = pytest.mark.parametrize(
    "recipe", [recipes.train, recipes.square, recipes.accurate], ids=lambda recipe: recipe.name
)
both_head_sizes = pytest.mark.parametrize("head_size", [64, 128])


@pytest.fixture(autouse=True)
def _needs_kernels():
    reason = native.why_unavailable() or native.missing_kernel("forward", recipes.train, 64)
    if reason is not None:
        pytest.skip(reason)


def skip_if_missing(recipe, head_size):
    """Skips what not every GPU has a kernel for."""
    reason = native.missing_kernel("forward", recipe, head_size)
    if recipe is GUARDED and reason is not None:
        pytest.skip(f"on this GPU {reason}")


def make_inputs(batch, num_queries, num_keys, heads, kv_heads, head_size, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, num_queries, heads), (batch, num_keys, kv_heads), (batch, num_keys, kv_heads)]
    return [rng.standard_normal((*shape, head_size), np.float32).astype(jnp.bfloat16) for shape in shapes]


def on_cpu(function, *arguments):
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(function)(*jax.device_put(arguments, cpu))


def on_gpu(function, *arguments, jit=True):
    arguments = jax.device_put(arguments, jax.devices("cuda")[0])
    return (jax.jit(function) if jit else function)(*arguments)


def is_a_kernel(function, *arguments):
    program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return "jax_fp4attn_forward_v1" in targets(program)


def assert_close(config, operands, visibility, num_keys, actual, expected):
    """Of output [B, N, T, H] and lse [B, N, T]."""
    (output, lse), (expected_output, expected_lse) = (
        [np.asarray(x, np.float32) for x in y] for y in (actual, expected)
    )
    finite = np.isfinite(expected_lse)
    error = np.abs(lse[finite] - expected_lse[finite]).max(initial=0)
    print(f"{config.recipe.name}: output {relative_l2(output, expected_output):.1e}, lse {error:.1e}")
    assert_same_attention(config, operands, visibility, num_keys, (output, lse), (expected_output, expected_lse))


def run(config, step, operands, visibility, num_keys, head_size):
    if step is steps.forward:
        return step(config, operands, None, visibility, num_keys=num_keys, head_size=head_size)
    return step(config, operands, None, visibility, num_keys=num_keys)


class TestStep:
    """The same operands on both sides."""

    def check(self, recipe, inputs, visibility=Visibility(), is_causal=False, window=None):  # noqa: B008
        _, _, _, head_size = inputs[0].shape
        num_keys = inputs[1].shape[1]
        skip_if_missing(recipe, head_size)
        config = OperatorConfig(recipe, head_size**-0.5, is_causal, window, implementation="cuda or reference")
        operands = on_cpu(functools.partial(reference.quantize_operands, config), *inputs, visibility)
        kernel, oracle = (
            functools.partial(run, config, step, num_keys=num_keys, head_size=head_size)
            for step in (steps.forward, reference.forward)
        )
        assert is_a_kernel(kernel, operands, visibility)
        actual = on_gpu(kernel, operands, visibility)
        output, lse = actual
        heads_first = np.asarray(output).swapaxes(1, 2), lse
        assert_close(config, operands, visibility, num_keys, heads_first, on_cpu(oracle, operands, visibility))
        return actual

    @both_head_sizes
    @pytest.mark.parametrize(
        "shape",
        [(1, 1, 1, 1, 1), (2, 200, 333, 4, 2), (1, 1000, 1000, 2, 2), (3, 127, 129, 6, 1), (1, 129, 31, 140, 4)],
        ids=str,
    )
    @all_recipes
    def test_shapes(self, recipe, shape, head_size):
        self.check(recipe, make_inputs(*shape, head_size))

    @both_head_sizes
    @all_recipes
    def test_a_nan_key(self, recipe, head_size):
        """One score of every row is NaN, in a tile that is not masked."""
        query, key, value = make_inputs(1, 70, 256, 1, 1, head_size)
        key = np.array(key)
        key[0, 77, 0, 5] = np.nan
        skip_if_missing(recipe, head_size)
        config = OperatorConfig(recipe, head_size**-0.5, False, None, implementation="cuda or reference")
        operands = on_cpu(functools.partial(reference.quantize_operands, config), query, key, value, Visibility())
        kernel = functools.partial(run, config, steps.forward, num_keys=256, head_size=head_size)
        output, lse = on_gpu(kernel, operands, Visibility())
        assert np.isnan(np.asarray(output, np.float32)).all() and np.isnan(lse).all()

    @both_head_sizes
    @all_recipes
    def test_causal(self, recipe, head_size):
        self.check(recipe, make_inputs(2, 500, 500, 4, 2, head_size), is_causal=True)

    @pytest.mark.parametrize("window", [(0, 0), (100, 30), (17, 0), (0, 300)], ids=str)
    @one_of_each
    def test_windows(self, recipe, window):
        self.check(recipe, make_inputs(1, 700, 700, 2, 1, 64), window=window)

    @pytest.mark.parametrize("is_causal", [False, True])
    @both_head_sizes
    @one_of_each
    def test_lengths_and_segments(self, recipe, head_size, is_causal):
        rng = np.random.default_rng(1)
        segments = [np.sort(rng.integers(0, 4, (3, length)), axis=1).astype(np.int32) for length in (500, 470)]
        visibility = Visibility(
            query_lengths=np.array([500, 0, 129], np.int32),
            key_lengths=np.array([5, 470, 300], np.int32),
            segment_ids=SegmentIds(*segments),
        )
        inputs = make_inputs(3, 500, 470, 4, 2, head_size)
        for given in (
            visibility,
            dataclasses.replace(visibility, segment_ids=None),
            Visibility(segment_ids=visibility.segment_ids),
        ):
            self.check(recipe, inputs, given, is_causal)

    @pytest.mark.parametrize("offset", [-400, 0, 90])
    def test_offsets(self, offset):
        visibility = Visibility(key_offset=np.int32(offset))
        self.check(recipes.train, make_inputs(1, 300, 500, 2, 1, 64), visibility, is_causal=True)

    @one_of_each
    def test_rows_that_see_nothing(self, recipe):
        visibility = Visibility(key_lengths=np.array([0, 3], np.int32))
        output, lse = self.check(recipe, make_inputs(2, 150, 5, 2, 1, 64), visibility)
        assert (np.asarray(output[0], np.float32) == 0).all() and (np.asarray(lse[0]) == -np.inf).all()

    @one_of_each
    def test_every_run_gives_the_same_bytes(self, recipe):
        inputs = make_inputs(2, 1000, 1000, 16, 2, 128)
        config = OperatorConfig(recipe, 128**-0.5, is_causal=True, window=None, implementation="cuda or reference")
        operands = on_cpu(functools.partial(reference.quantize_operands, config), *inputs, Visibility())
        program = jax.jit(functools.partial(run, config, steps.forward, num_keys=1000, head_size=128))
        operands = jax.device_put(operands, jax.devices("cuda")[0])
        first = program(operands, Visibility())
        for _ in range(20):
            assert_same_bytes(program(operands, Visibility()), first)


class TestCodes:
    """The codes and scales themselves: the values show the probability of each key."""

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("recipe", DIRECT_P, ids=lambda recipe: recipe.name)
    def test_they_are_the_reference_s(self, recipe, is_causal):
        skip_if_missing(recipe, 128)
        num_keys = 400
        query, key, _ = make_inputs(1, 500, num_keys, 4, 1, 128)
        config = OperatorConfig(recipe, 128**-0.5, is_causal, window=None, implementation="cuda or reference")
        quantize = functools.partial(reference.quantize_operands, config)
        different = count = 0
        for tile in range(4):
            value = one_hot_values(recipe, num_keys, tile).astype(jnp.bfloat16)
            operands = on_cpu(quantize, query, key, value, Visibility())
            run_step = functools.partial(run, config, num_keys=num_keys, head_size=128)
            output, lse = on_gpu(functools.partial(run_step, steps.forward), operands, Visibility())
            expected, expected_lse = on_cpu(functools.partial(run_step, reference.forward), operands, Visibility())
            bounds = code_bounds(config, operands, Visibility(), num_keys)
            keys = slice(tile * 128, (tile + 1) * 128)
            low, high = (x[..., keys] for x in (bounds.low, bounds.high))
            actual = bounds.probabilities(np.asarray(output, np.float64).swapaxes(1, 2), np.asarray(lse, np.float64))
            of_reference = bounds.probabilities(*(np.asarray(x, np.float64) for x in (expected, expected_lse)))
            # Neighbouring codes differ by a fifth at least.
            for found in (actual, of_reference):
                assert ((found >= low * 0.98) & (found <= high * 1.02)).all()
            different += np.sum(np.abs(actual - of_reference) > 0.02 * of_reference)
            count += np.sum(high > 0)
        print(f"{recipe.name}: {different} of {count} codes differ from the reference's")
        assert different <= MOST_DIFFERENT_CODES * count


class TestOperator:
    def attend(self, recipe, implementation, **options):
        return functools.partial(
            jax_fp4attn.attention, recipe=recipe, implementation=implementation, return_residual=True, **options
        )

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("is_causal", [False, True])
    @all_recipes
    def test_attention(self, recipe, is_causal, jit):
        skip_if_missing(recipe, 128)
        inputs = make_inputs(2, 300, 300, 4, 2, 128)
        actual = on_gpu(self.attend(recipe, "cuda", is_causal=is_causal), *inputs, jit=jit)
        expected = on_cpu(self.attend(recipe, "reference", is_causal=is_causal), *inputs)
        config = OperatorConfig(recipe, 128**-0.5, is_causal, window=None)
        operands = on_cpu(functools.partial(reference.quantize_operands, config), *inputs, Visibility())
        heads_first = [[np.asarray(x).swapaxes(1, 2) for x in pair] for pair in (actual, expected)]
        assert_close(config, operands, Visibility(), 300, *heads_first)

    @one_of_each
    def test_vmap_and_scan(self, recipe):
        inputs = [
            x[None] * np.array([1, 2, 3], x.dtype)[:, None, None, None, None]
            for x in make_inputs(2, 140, 140, 24, 2, 64)
        ]
        attend = self.attend(recipe, "cuda", is_causal=True)
        mapped = on_gpu(jax.vmap(attend), *inputs)
        scanned = on_gpu(lambda *x: jax.lax.map(lambda y: attend(*y), x), *inputs)
        assert_same_bytes(mapped, scanned)
        for i in range(3):
            alone = on_gpu(attend, *(x[i] for x in inputs))
            assert_same_bytes(jax.tree.map(lambda x, i=i: x[i], mapped), alone)

    def test_calls_are_captured_in_a_cuda_graph(self):
        runs, calls = 20, 4
        inputs = jax.device_put(make_inputs(2, 200, 333, 40, 2, 128), jax.devices("cuda")[0])
        attend = self.attend(recipes.square, "cuda")

        def many(query, key, value):
            return [attend(query * 2.0**-i, key, value) for i in range(calls)]

        program = jax.jit(many)
        first = jax.block_until_ready(program(*inputs))
        count = library.load().handle.jax_fp4attn_handler_calls
        # Calls are captured anew until XLA has seen every place where its allocator puts the results.
        for _ in range(runs):
            last = jax.block_until_ready(program(*inputs))
        before = count()
        for _ in range(runs):
            last = jax.block_until_ready(program(*inputs))
        assert count() - before <= 2 * calls, "more than one run of twenty was captured anew; a run has two each"
        assert_same_bytes(last, first)
