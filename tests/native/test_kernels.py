"""The kernels on a GPU write the bytes of the reference on a CPU."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4attn
from jax_fp4attn import SegmentIds, native, recipes, reference, steps
from jax_fp4attn.config import OperatorConfig, Visibility
from jax_fp4attn.native import library
from tests import kernels
from tests.assertions import assert_same_bytes

pytestmark = pytest.mark.gpu

CHANNELS_SHARE = dataclasses.replace(
    recipes.square, name="channels_share", v_channels_per_scale=32, v_exponent_rule="ceil"
)
FLOOR = dataclasses.replace(recipes.square_rte_v, name="floor", v_exponent_rule="floor", qk_ties="even")
RECIPES = [
    recipes.train,
    recipes.fp8_pv,
    recipes.fast,
    recipes.square,
    recipes.accurate,
    recipes.causal_mxfp4,
    recipes.guarded(10, 16),
    CHANNELS_SHARE,
    FLOOR,
]
KINDS = {
    "random": lambda x, rng: x,
    "tiny": lambda x, rng: x * 1e-6,
    "huge": lambda x, rng: x * 1e4,
    "vast": lambda x, rng: x * 1e30,
    "of all sizes": lambda x, rng: x * np.exp2(rng.integers(-20, 20, x.shape)),
    "with many ties": lambda x, rng: np.round(x * 8) / 8,
    "with zero blocks": lambda x, rng: np.where(_zero_blocks(x.shape), 0.0, x),
    "negative": lambda x, rng: -np.abs(x),
    "with NaN and infinity": lambda x, rng: _poison(x, rng),
}
# batch, queries, keys, query heads, key/value heads
SHAPES = [(1, 1, 1, 1, 1), (2, 200, 333, 4, 2), (1, 128, 256, 2, 2), (3, 127, 129, 6, 1)]


@pytest.fixture(autouse=True)
def _needs_library():
    reason = native.why_unavailable()
    if reason is not None:
        pytest.skip(reason)


def _zero_blocks(shape):
    zero = np.zeros(shape, bool)
    zero[:, :64], zero[..., 16:32] = True, True
    return zero


def _poison(x, rng):
    x = x.copy()
    for value in (np.nan, np.inf, -np.inf):
        x[rng.random(x.shape) < 1e-3] = value
    return x


def make_inputs(kind, shape, head_size):
    batch, num_queries, num_keys, heads, kv_heads = shape
    rng = np.random.default_rng(0)
    shapes = [(batch, num_queries, heads), (batch, num_keys, kv_heads), (batch, num_keys, kv_heads)]
    arrays = [KINDS[kind](rng.standard_normal((*s, head_size)), rng) for s in shapes]
    return [np.asarray(x, np.float32).astype(jnp.bfloat16) for x in arrays]


def config_of(recipe, implementation="cuda or reference"):
    return OperatorConfig(recipe, 0.125, is_causal=False, window=None, implementation=implementation)


def on_cpu(function, *arguments):
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(function)(*jax.device_put(arguments, cpu))


def on_gpu(function, *arguments, jit=True):
    arguments = jax.device_put(arguments, jax.devices("cuda")[0])
    return (jax.jit(function) if jit else function)(*arguments)


def custom_calls(function, *arguments):
    program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return program.count("custom_call @jax_fp4attn_")


STEPS = {
    "quantize": (steps.quantize, reference.quantize_operands),
    "quantize_for_training": (steps.quantize_for_training, reference.quantize_for_training),
}


def run_step(name, recipe, implementation, *arguments):
    kernel, oracle = STEPS[name]
    if implementation == "reference":
        return oracle(config_of(recipe, implementation), *arguments)
    return kernel(config_of(recipe), *arguments)


def check_step(name, recipe, arguments, jit=True):
    kernel, oracle = (functools.partial(run_step, name, recipe, which) for which in ("kernel", "reference"))
    assert custom_calls(kernel, *arguments) == 1
    assert_same_bytes(on_gpu(kernel, *arguments, jit=jit), on_cpu(oracle, *arguments))


class TestQuantize:
    @pytest.mark.parametrize("head_size", [64, 128])
    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_input(self, kind, recipe, head_size):
        arguments = (*make_inputs(kind, SHAPES[1], head_size), Visibility())
        check_step("quantize_for_training", recipe, arguments)

    @pytest.mark.parametrize("name", STEPS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("recipe", [recipes.train, recipes.square], ids=lambda recipe: recipe.name)
    def test_every_shape(self, recipe, shape, name):
        for head_size in (64, 128):
            check_step(name, recipe, (*make_inputs("random", shape, head_size), Visibility()))

    @pytest.mark.parametrize("recipe", [recipes.train, recipes.accurate], ids=lambda recipe: recipe.name)
    def test_lengths_and_segments_hide_what_lies_behind_them(self, recipe):
        batch, num_queries, num_keys = 3, 300, 270
        inputs = make_inputs("with NaN and infinity", (batch, num_queries, num_keys, 4, 2), 128)
        rng = np.random.default_rng(1)
        segments = [rng.integers(0, 3, (batch, length), np.int32) for length in (num_queries, num_keys)]
        visibility = Visibility(
            query_lengths=np.array([300, 0, 129], np.int32),
            key_lengths=np.array([5, 270, 0], np.int32),
            segment_ids=SegmentIds(*segments),
        )
        for given in (
            visibility,
            dataclasses.replace(visibility, segment_ids=None),
            Visibility(segment_ids=visibility.segment_ids),
        ):
            check_step("quantize_for_training", recipe, (*inputs, given))

    def test_eager(self):
        arguments = (*make_inputs("random", SHAPES[1], 128), Visibility())
        check_step("quantize_for_training", recipes.square, arguments, jit=False)

    def test_float32_is_rounded_first(self):
        rng = np.random.default_rng(2)
        inputs = [rng.standard_normal((1, 150, 2, 64), np.float32) for _ in range(3)]
        check_step("quantize", recipes.train, (*inputs, Visibility()))

    def test_empty(self):
        for shape in ((0, 5, 7, 2, 1), (2, 0, 7, 2, 1)):
            check_step("quantize", recipes.train, (*make_inputs("random", shape, 64), Visibility()))

    @pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
    def test_the_reference_writes_the_same_bytes_on_a_gpu(self, recipe):
        arguments = (*make_inputs("of all sizes", SHAPES[1], 128), Visibility())
        oracle = functools.partial(run_step, "quantize_for_training", recipe, "reference")
        assert custom_calls(oracle, *arguments) == 0
        assert_same_bytes(on_gpu(oracle, *arguments), on_cpu(oracle, *arguments))


def make_row_inputs(kind, head_size, num_rows=200):
    output, *_ = make_inputs(kind, (2, num_rows, num_rows, 4, 2), head_size)
    rng = np.random.default_rng(3)
    gradient = KINDS[kind](rng.standard_normal(output.shape), rng).astype(np.float32).astype(jnp.bfloat16)
    lse, lse_gradient = rng.standard_normal((2, 2, 4, num_rows)).astype(np.float32)
    lse[rng.random(lse.shape) < 0.05] = -np.inf
    lse[rng.random(lse.shape) < 0.02] = np.inf
    scale = np.exp2(rng.integers(-3, 9, (2, 2))).astype(np.float32)
    return output, lse, gradient, lse_gradient, scale


class TestRowOperands:
    @pytest.mark.parametrize("head_size", [64, 128])
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_input(self, kind, head_size):
        self.check(make_row_inputs(kind, head_size))

    @pytest.mark.parametrize("num_rows", [1, 127, 128, 129])
    def test_every_length(self, num_rows):
        self.check(make_row_inputs("random", 128, num_rows))

    def check(self, arguments):
        kernel = functools.partial(steps.row_operands, config_of(recipes.train))
        oracle = functools.partial(reference.row_operands, config_of(recipes.train, "reference"))
        assert custom_calls(kernel, *arguments) == 1
        assert_same_bytes(on_gpu(kernel, *arguments), on_cpu(oracle, *arguments))


class TestOperator:
    def test_attention_takes_the_kernels_of_exact_steps_and_gives_the_reference(self):
        query, key, value = make_inputs("random", (2, 300, 300, 4, 2), 128)

        def loss(query, key, value, implementation):
            output, lse = jax_fp4attn.attention(
                query, key, value, is_causal=True, implementation=implementation, return_residual=True
            )
            return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(lse)

        run = lambda name: jax.value_and_grad(functools.partial(loss, implementation=name), (0, 1, 2))  # noqa: E731
        with kernels.for_steps("quantize", "quantize_for_training", "row_operands"):
            assert custom_calls(run(None), query, key, value) == 2
            value_of, gradients = on_gpu(run(None), query, key, value)
        expected, expected_gradients = on_gpu(run("reference"), query, key, value)
        np.testing.assert_array_equal(value_of, expected)
        jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)

    def test_vmap_and_scan(self):
        query, key, value = (x[None].repeat(3, 0) for x in make_inputs("random", (2, 140, 140, 4, 2), 64))
        attend = functools.partial(jax_fp4attn.attention, is_causal=True)
        mapped = on_gpu(jax.vmap(attend), query, key, value)
        scanned = on_gpu(lambda *x: jax.lax.map(lambda y: attend(*y), x), query, key, value)
        np.testing.assert_array_equal(mapped, scanned)


class TestExecution:
    def quantize(self, *inputs):
        return steps.quantize(config_of(recipes.train), *inputs, Visibility())

    def handler_calls(self):
        return library.load().handle.jax_fp4attn_handler_calls()

    def test_calls_are_captured_in_a_cuda_graph(self):
        runs, calls = 20, 8
        inputs = jax.device_put(make_inputs("random", SHAPES[1], 128), jax.devices("cuda")[0])

        def many(query, key, value):
            return [self.quantize(query * 2.0**-i, key, value) for i in range(calls)]

        program = jax.jit(many)
        first = jax.block_until_ready(program(*inputs))
        # Calls are captured anew until XLA has seen every place where its allocator puts the results; which these are
        # depends on how long results are kept.
        for _ in range(runs):
            last = jax.block_until_ready(program(*inputs))
        before = self.handler_calls()
        for _ in range(runs):
            last = jax.block_until_ready(program(*inputs))
        assert self.handler_calls() - before <= calls, "more than one run of twenty was captured anew"
        assert_same_bytes(last, first)

    def test_concurrent_programs(self):
        shapes = [(2, 100 + 30 * i, 200, 4, 2) for i in range(6)]
        all_inputs = [make_inputs("random", shape, 64) for shape in shapes]
        expected = [on_gpu(self.quantize, *inputs) for inputs in all_inputs]
        results = [None] * len(shapes)

        def run(i):
            for _ in range(10):
                results[i] = on_gpu(self.quantize, *all_inputs[i])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(shapes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_same_bytes(results, expected)

    def test_every_device(self):
        devices = jax.devices("cuda")
        if len(devices) < 2:
            pytest.skip(f"needs two CUDA devices, found {len(devices)}")
        inputs = make_inputs("random", SHAPES[1], 128)
        program = jax.jit(self.quantize)
        results = [program(*jax.device_put(inputs, device)) for device in devices]
        for device, result in zip(devices, results, strict=True):
            assert all(x.devices() == {device} for x in jax.tree.leaves(result))
            assert_same_bytes(result, results[0])

    @pytest.mark.slow
    @pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
    def test_sanitizer(self, tool):
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            pytest.skip("needs compute-sanitizer on the path")
        # Only our kernels, whose names hold the head size.
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=3", "--kernel-name=kns=_h"]
        if tool == "racecheck":
            # It wants a warp barrier between the reads of a warp's statistics and the arrival of its first lane. The
            # source has it, but the assembler leaves it out, since all lanes are together there.
            command.append("--kernel-name-exclude=kns=backward_h")
        environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        finished = subprocess.run(
            [*command, sys.executable, "-m", "tests.native.run_every_kernel"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
        assert "every kernel ran" in finished.stdout
