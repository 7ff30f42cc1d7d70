"""Attention to a sequence that is split over a mesh axis gives what one device gives."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_fp4attn
from jax_fp4attn import SegmentIds, recipes, reference, zigzag_order
from jax_fp4attn.config import OperatorConfig, Visibility
from tests import meshes, oracles
from tests.assertions import relative_l2
from tests.meshes import compile_sharded, describe, one_device, random_inputs, run_sharded, sent_bytes

HEADS, HEAD_SIZE = 4, 64
SEQUENCE_SPLIT = P("data", "seq")
TO_MERGING = "to the rounding of merges"
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.fixture(name="make_mesh")
def _make_mesh(cpu_devices):
    def make(kind=AxisType.Auto, **sizes):
        devices = np.array(cpu_devices[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
        return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))

    return make


def attend(query, key, value, **options):
    return jax_fp4attn.attention(query, key, value, return_residual=True, **options)


def gradients(options, lengths=None, segments=None):
    """Output, lse and gradients of both."""

    def run(query, key, value, d_out):
        def call(*operands):
            ids = None if segments is None else SegmentIds(segments, segments)
            return attend(*operands, key_value_seq_lengths=lengths, segment_ids=ids, **options)

        (out, lse), vjp = jax.vjp(call, query, key, value)
        d_lse = jnp.sum(d_out.astype(jnp.float32), -1) / 8
        return out, lse, *vjp((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0.0)))

    return run


def inputs(shards, *, part=128, batch=2, kv_heads=2, head_size=HEAD_SIZE):
    return random_inputs(batch, part * shards, HEADS, kv_heads, head_size)


def assert_equal_to_merging(actual, expected):
    """bfloat16 results may round to the neighbour where float32 sums differ in their last bits."""
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        x, y = oracles.float64(x), oracles.float64(y)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        x, y = x[finite], y[finite]
        assert np.isfinite(x).all()
        assert np.linalg.norm(x - y) < 6e-4 * np.linalg.norm(y)
        assert np.mean(np.abs(x - y) > 1e-5 * np.abs(y) + 1e-6) < 0.05


# name: (mesh, query spec, key/value spec, key/value heads, options)
CASES = {
    "causal": ({"seq": 4}, P(None, "seq"), P(None, "seq"), 2, {"recipe": recipes.square, "is_causal": True}),
    "not causal": ({"seq": 3}, P(None, "seq"), P(None, "seq"), 2, {}),
    "batch and sequence": (
        {"data": 2, "seq": 2},
        SEQUENCE_SPLIT,
        SEQUENCE_SPLIT,
        2,
        {"recipe": recipes.fast, "is_causal": True},
    ),
    "batch, sequence and heads": (
        {"data": 2, "seq": 2, "model": 2},
        P("data", "seq", "model"),
        P("data", "seq", "model"),
        2,
        {"recipe": recipes.square, "is_causal": True},
    ),
    "sequence and heads, multi-query": (
        {"seq": 2, "model": 2},
        P(None, "seq", "model"),
        P(None, "seq"),
        1,
        {"recipe": recipes.square, "is_causal": True},
    ),
    "causal window": (
        {"seq": 4},
        P(None, "seq"),
        P(None, "seq"),
        2,
        {"recipe": recipes.square, "is_causal": True, "local_window_size": (150, 0)},
    ),
    "window": ({"seq": 2}, P(None, "seq"), P(None, "seq"), 4, {"local_window_size": (100, 70)}),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, AxisType.Auto) for case in CASES]
    + [(case, AxisType.Explicit) for case in ("batch, sequence and heads", "sequence and heads, multi-query")],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_shiftless_direct_p_equals_one_device(case, kind, make_mesh, record_row):
    sizes, query_spec, kv_spec, kv_heads, options = CASES[case]
    mesh = make_mesh(kind, **sizes)
    arrays = inputs(sizes["seq"], kv_heads=kv_heads)
    expected = one_device(gradients(options), *arrays)
    run = gradients({**options, "context_axis": "seq"})
    actual, counts = run_sharded(mesh, run, arrays, (query_spec, kv_spec, kv_spec, query_spec))
    if "multi-query" in case:
        meshes.assert_equal(actual[-2:], expected[-2:], sums=True)
        actual, expected = actual[:-2], expected[:-2]
    assert_equal_to_merging(actual, expected)
    assert "all-gather" not in counts
    record_row(f"ring attention, {case}", describe(mesh), TO_MERGING, counts)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_orders_of_the_sequence(order, make_mesh, record_row):
    mesh = make_mesh(seq=4)
    arrays = inputs(4)
    lengths = jnp.array([512, 333], jnp.int32)
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, (2, 512)), axis=1), jnp.int32)
    options = {"recipe": recipes.square, "is_causal": True}
    expected = one_device(gradients(options, lengths, segments), *arrays)
    permutation = zigzag_order(512, 4) if order == "zigzag" else np.arange(512)
    given = tuple(x[:, permutation] for x in arrays)
    sharded_options = {**options, "context_axis": "seq", "context_order": order}
    spec = P(None, "seq")

    def on_shard(query, key, value, d_out, segments):
        return gradients(sharded_options, lengths, segments)(query, key, value, d_out)

    mapped = jax.shard_map(on_shard, mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 5)
    actual, counts = run_sharded(mesh, mapped, (*given, segments[:, permutation]), (spec,) * 5)
    back = np.argsort(permutation)
    assert_equal_to_merging([np.asarray(x)[:, back] for x in actual], expected)
    record_row(f"ring attention, shard_map, {order}, lengths and segments", describe(mesh), TO_MERGING, counts)


def test_zigzag_order_on_an_explicit_mesh_takes_lengths_as_positions(make_mesh):
    mesh = make_mesh(AxisType.Explicit, seq=2)
    arrays = inputs(2, batch=1)
    lengths = jnp.array([201], jnp.int32)
    options = {"recipe": recipes.square, "is_causal": True}
    expected = one_device(gradients(options, lengths), *arrays)
    permutation = zigzag_order(256, 2)
    run = gradients({**options, "context_axis": "seq", "context_order": "zigzag"}, lengths)
    actual, _ = run_sharded(mesh, run, tuple(x[:, permutation] for x in arrays), (P(None, "seq"),) * 4)
    assert_equal_to_merging([np.asarray(x)[:, np.argsort(permutation)] for x in actual], expected)


class TestRunningMaximum:
    """A running maximum sees the keys in another order, so codes of P differ; the sum of parts defines the result."""

    OPTIONS: ClassVar = {"is_causal": True, "recipe": recipes.train}

    @pytest.fixture(scope="class")
    @classmethod
    def arrays(cls):
        return inputs(2)

    @pytest.fixture(scope="class")
    @classmethod
    def sharded(cls, arrays):
        mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("seq",))
        results, counts = run_sharded(
            mesh, gradients({**cls.OPTIONS, "context_axis": "seq"}), arrays, (P(None, "seq"),) * 4
        )
        return [oracles.float64(np.asarray(x)) for x in results], counts

    def test_output_is_the_merged_attention_to_each_part(self, arrays, sharded):
        """Parts 0 and 3 are one shard's and 1 and 2 the other's: merged in float64, of partial attention in float32."""
        config = OperatorConfig(recipes.train, 1 / math.sqrt(HEAD_SIZE), is_causal=True, window=None)
        square = dataclasses.replace(config, is_causal=False)
        parts = [tuple(x[:, 64 * i : 64 * (i + 1)] for x in arrays[:3]) for i in range(4)]

        @functools.partial(jax.jit, static_argnums=0)
        def attend_part(config, query, key, value):
            operands = reference.quantize_operands(config, query, key, value, Visibility())
            return reference.partial_forward(config, operands, None, Visibility(), num_keys=key.shape[1])

        def both(first, second):
            return tuple(jnp.concatenate(pair, 1) for pair in zip(parts[first], parts[second], strict=True))

        own = [attend_part(config, *both(first, second)) for first, second in ((0, 3), (1, 2))]
        halves = {
            0: (own[0], slice(64)),
            3: (own[0], slice(64, 128)),
            1: (own[1], slice(64)),
            2: (own[1], slice(64, 128)),
        }
        for row, seen in {0: [], 1: [0], 2: [0], 3: [1, 2]}.items():
            (output, lse), rows = halves[row]
            pieces = [(oracles.float64(output)[:, :, rows], oracles.float64(lse)[:, :, rows])]
            for key in seen:
                piece = attend_part(square, parts[row][0], *parts[key][1:])
                pieces.append(tuple(oracles.float64(x) for x in piece))
            total = np.logaddexp.reduce([lse for _, lse in pieces])
            merged = sum(output * np.exp(lse - total)[..., None] for output, lse in pieces)
            place = slice(64 * row, 64 * (row + 1))
            output, lse = (np.swapaxes(x[:, place], 1, 2) for x in sharded[0][:2])
            np.testing.assert_allclose(lse, total, rtol=1e-6)
            rounded = oracles.bfloat16(merged)
            assert np.mean(output != rounded) < 0.005
            np.testing.assert_allclose(output, rounded, rtol=2**-7, atol=1e-6)

    def test_is_as_near_to_exact_attention_as_one_device(self, arrays, sharded, record_row):
        expected = [oracles.float64(np.asarray(x)) for x in one_device(gradients(self.OPTIONS), *arrays)]
        query, key, value, d_out = (oracles.float64(np.asarray(x)) for x in arrays)

        @jax.jit
        def exact(query, key, value, d_out):
            def call(*operands):
                out, lse = attend(*operands, is_causal=True, recipe=recipes.bf16)
                return out.astype(jnp.float32), lse

            (out, lse), vjp = jax.vjp(call, query, key, value)
            return out, lse, *vjp((d_out, jnp.sum(d_out, -1) / 8))

        ideal = [oracles.float64(x) for x in exact(*(jnp.asarray(x, jnp.float32) for x in (query, key, value, d_out)))]
        for x, one, wanted in zip(sharded[0], expected, ideal, strict=True):
            error, error_of_one = (np.linalg.norm(y - wanted) / np.linalg.norm(wanted) for y in (x, one))
            assert error < 1.02 * error_of_one
            assert relative_l2(x, one) < 0.02  # E4M3
        record_row("ring attention, train, causal", "auto seq=2", "to the rounding of P", sharded[1])


def test_under_vmap_remat_and_scan(make_mesh, record_row):
    mesh = make_mesh(seq=2)
    x = (
        jnp.stack([inputs(2, batch=1, kv_heads=HEADS)[0]] * 2)
        * jnp.array([1, 0.5], jnp.bfloat16)[:, None, None, None, None]
    )

    def make(**options):
        def layer(x, _):
            return x + jax_fp4attn.attention(x, x, x, is_causal=True, recipe=recipes.fast, **options), None

        def loss(x):
            body = jax.checkpoint(layer, policy=jax_fp4attn.checkpoint_policies.save_attention)
            return jnp.sum(jax.lax.scan(body, x, None, length=2)[0].astype(jnp.float32) ** 2)

        return lambda x: (jax.vmap(jax.grad(loss))(x),)

    expected = one_device(make(), x)
    actual, counts = run_sharded(mesh, make(context_axis="seq"), (x,), (P(None, None, "seq"),))
    assert_equal_to_merging(actual, expected)
    record_row(
        "ring attention, vmap of the gradient of two scanned layers with remat", describe(mesh), TO_MERGING, counts
    )


@KINDS
def test_two_batch_dimensions_with_lengths_of_another_sharding(kind, make_mesh, record_row):
    mesh = make_mesh(kind, data=2, seq=2)
    arrays = tuple(x.reshape(2, 1, *x.shape[1:]) for x in inputs(2))
    lengths = jnp.array([[256], [99]], jnp.int32)
    options = {"recipe": recipes.fast, "is_causal": True}
    expected = one_device(gradients(options, lengths), *arrays)
    spec = P("data", None, "seq")
    actual, counts = run_sharded(mesh, gradients({**options, "context_axis": "seq"}, lengths), arrays, (spec,) * 4)
    assert_equal_to_merging(actual, expected)
    record_row("ring attention, two batch dimensions, lengths replicated", describe(mesh), TO_MERGING, counts)


def test_uncommitted_arrays_are_split_over_the_mesh_in_scope(make_mesh):
    query, key, value, _ = inputs(2)
    options = {"recipe": recipes.square, "is_causal": True}
    expected = one_device(functools.partial(jax_fp4attn.attention, **options), query, key, value)
    permutation = zigzag_order(256, 2)
    run = functools.partial(jax_fp4attn.attention, context_axis="seq", context_order="zigzag", **options)
    with jax.set_mesh(make_mesh(seq=2)):
        for function in (run, jax.jit(run)):
            actual = function(*(x[:, permutation] for x in (query, key, value)))
            assert_equal_to_merging([np.asarray(actual)[:, np.argsort(permutation)]], [expected])


@pytest.mark.parametrize("cotangent", [np.nan, np.inf])
@pytest.mark.parametrize("place", [5, 200])
def test_an_overflow_on_one_shard_is_not_hidden_on_others(place, cotangent, make_mesh):
    query, key, value, d_out = inputs(2)
    d_out = d_out.at[0, place, 1, 3].set(cotangent)
    mesh, spec = make_mesh(seq=2), P(None, "seq")
    run = gradients({"recipe": recipes.train, "is_causal": True, "context_axis": "seq"})
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 5)
    (_, _, *found), _ = run_sharded(mesh, mapped, (query, key, value, d_out), (spec,) * 4)
    for gradient in found:
        assert np.isnan(np.asarray(gradient, np.float32)[0, :, 0]).all()


def test_one_shard_and_one_device_need_no_ring(make_mesh):
    arrays = inputs(1)
    options = {"recipe": recipes.square, "is_causal": True}
    expected = one_device(gradients(options), *arrays)
    mesh = make_mesh(seq=1)
    spec = P(None, "seq")
    run = gradients({**options, "context_axis": "seq"})
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 5)
    actual, counts = run_sharded(mesh, mapped, arrays, (spec,) * 4)
    meshes.assert_equal(actual, expected)
    assert "collective-permute" not in counts


@pytest.mark.parametrize(
    ("recipe", "shards", "key_bytes", "value_bytes"),
    [(recipes.square, 2, 0.5625, 0.53125), (recipes.square, 4, 0.5625, 0.53125), (recipes.train, 4, 0.5625, 1)],
    ids=["square over 2", "square over 4", "train over 4"],
)
def test_a_shard_sends_quantised_keys_and_values(recipe, shards, key_bytes, value_bytes, make_mesh):
    length, kv_heads = 128, 2
    arrays = inputs(shards, batch=1)[:3]
    run = functools.partial(jax_fp4attn.attention, recipe=recipe, context_axis="seq")
    _, program = compile_sharded(make_mesh(seq=shards), run, arrays, (P(None, "seq"),) * 3)
    elements = length * kv_heads * HEAD_SIZE
    assert sent_bytes(program) == (shards - 1) * elements * (key_bytes + value_bytes)


def test_gradients_of_keys_and_values_travel_in_float32(make_mesh):
    shards, length, kv_heads = 4, 128, 2
    arrays = inputs(shards, batch=1)
    spec = P(None, "seq")

    def run(query, key, value, d_out):
        _, vjp = jax.vjp(
            lambda *x: jax_fp4attn.attention(*x, recipe=recipes.square, context_axis="seq"), query, key, value
        )
        return vjp(d_out)

    _, program = compile_sharded(make_mesh(seq=shards), run, arrays, (spec,) * 4)
    elements = length * kv_heads * HEAD_SIZE
    forward = (shards - 1) * (0.5625 + 0.53125)
    backward = (shards - 1) * (0.5625 + 1 + 1) + shards * (4 + 4)
    assert sent_bytes(program) == elements * (forward + backward)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"bias": np.zeros((1, 1, 256, 256))}, NotImplementedError, "bias: expected None with context_axis"),
            ({"mask": np.ones((1, 1, 256, 256), bool)}, NotImplementedError, "mask: expected None with context_axis"),
            ({"recipe": recipes.accurate}, NotImplementedError, "recipe: .*'accurate'.* anchored.*recipes.square"),
            ({"context_axis": 3}, TypeError, "context_axis: expected the name of a mesh axis or None, got int"),
            ({"context_axis": None, "context_order": "zigzag"}, ValueError, "context_order: .*without context_axis"),
            ({"context_order": "striped"}, ValueError, "context_order: expected one of .*'striped'"),
            (
                {"context_axis": "model"},
                ValueError,
                r"context_axis: expected one of the mesh axes \('seq',\), got 'model'",
            ),
        ],
        ids=lambda x: None if isinstance(x, type | str) else "-".join(x),
    )
    @KINDS
    def test_what_cannot_be_split(self, options, error, message, kind, make_mesh):
        query, key, value, _ = inputs(2)
        options = {"context_axis": "seq", **options}
        with jax.set_mesh(make_mesh(kind, seq=2)), pytest.raises(error, match=message):
            jax_fp4attn.attention(query, key, value, **options)

    @pytest.mark.parametrize(
        ("length", "options", "message"),
        [
            (
                192,
                {},
                r"query: expected a length that is a multiple of 256 .*2 shards of mesh axis 'seq'.*got 192; pad",
            ),
            (255, {}, r"query: expected a length that is a multiple of 256 .*'seq'.*got 255; pad"),
            (
                256,
                {"is_causal": True, "recipe": recipes.sampled_denominator},
                r"query: expected parts of 128 positions with recipe 'sampled_denominator'.*parts of 64.*'seq'",
            ),
        ],
        ids=["tiles", "shards", "place in a tile"],
    )
    @KINDS
    def test_lengths(self, length, options, message, kind, make_mesh):
        query, key, value, _ = random_inputs(1, length, HEADS, 2, HEAD_SIZE)
        with jax.set_mesh(make_mesh(kind, seq=2)), pytest.raises(ValueError, match=message):
            jax_fp4attn.attention(query, key, value, context_axis="seq", **options)

    @pytest.mark.parametrize(
        ("axis", "length", "message"),
        [
            ("model", 256, r"context_axis: expected one of the mesh axes \('model',\), got 'seq'"),
            ("seq", 192, r"query: expected a length that is a multiple of 256 .*got 192; pad"),
            ("seq", 255, r"context_axis: expected a sequence that the 2 shards of mesh axis 'seq' divide.*255.*pad"),
        ],
        ids=["axis", "tiles", "shards"],
    )
    def test_what_only_the_compiler_knows(self, axis, length, message, make_mesh):
        run = functools.partial(jax_fp4attn.attention, context_axis="seq")
        arrays = random_inputs(1, length, HEADS, 2, HEAD_SIZE)[:3]
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run_sharded(make_mesh(**{axis: 2}), run, arrays, (P(),) * 3)

    def test_explicit_batch_over_the_axis(self, make_mesh):
        run = functools.partial(jax_fp4attn.attention, context_axis="seq")
        with pytest.raises(ValueError, match=r"context_axis: mesh axis 'seq' already shards dimension 0 .*reshard"):
            run_sharded(make_mesh(AxisType.Explicit, seq=2), run, inputs(2)[:3], (P("seq"),) * 3)

    def test_explicit_sequence_over_another_axis(self, make_mesh):
        run = functools.partial(jax_fp4attn.attention, context_axis="seq")
        mesh = make_mesh(AxisType.Explicit, seq=2, model=2)
        with pytest.raises(ValueError, match=r"dimension 1 .*sharded over mesh axes \('model',\).*context_axis"):
            run_sharded(mesh, run, inputs(2)[:3], (P(None, "model"),) * 3)

    def test_an_axis_that_is_automatic_inside_shard_map(self, make_mesh):
        mesh = make_mesh(seq=2, data=2)
        mapped = jax.shard_map(
            functools.partial(jax_fp4attn.attention, context_axis="seq"),
            mesh=mesh,
            in_specs=(P("data"),) * 3,
            out_specs=P("data"),
            axis_names={"data"},
        )
        with pytest.raises(
            NotImplementedError, match=r"mesh axis 'seq' is automatic inside a shard_map over \['data'\]"
        ):
            run_sharded(mesh, mapped, inputs(2)[:3], (P("data"),) * 3)

    def test_queries_and_keys_of_different_lengths_under_a_causal_mask(self, make_mesh):
        query, key, value, _ = inputs(2)
        with jax.set_mesh(make_mesh(seq=2)), pytest.raises(ValueError, match="key: expected the query's length T=256"):
            jax_fp4attn.attention(query, key[:, :128], value[:, :128], is_causal=True, context_axis="seq")

    def test_eager_execution(self, make_mesh):
        query, key, value, _ = inputs(2)
        with (
            jax.disable_jit(),
            pytest.raises(NotImplementedError, match=r"context_axis: under jax.disable_jit .*'seq'"),
        ):
            jax_fp4attn.attention(query, key, value, context_axis="seq")

    def test_zigzag_order_without_a_mesh_in_scope(self):
        query, key, value, _ = inputs(2)
        with pytest.raises(ValueError, match=r"context_order: expected a mesh with axis 'seq' in scope.*jax.set_mesh"):
            jax_fp4attn.attention(query, key, value, context_axis="seq", context_order="zigzag")

    def test_an_axis_of_vmap(self):
        query, key, value, _ = inputs(2)
        run = functools.partial(jax_fp4attn.attention, context_axis="seq")
        with pytest.raises(NotImplementedError, match="context_axis: 'seq' is bound, but as no axis of a mesh"):
            jax.vmap(run, axis_name="seq")(query[None], key[None], value[None])

    def test_keys_that_are_the_same_on_all_shards(self, make_mesh):
        spec = P(None, "seq")
        mapped = jax.shard_map(
            functools.partial(jax_fp4attn.attention, context_axis="seq"),
            mesh=make_mesh(seq=2),
            in_specs=(spec, P(), P()),
            out_specs=spec,
        )
        with pytest.raises(ValueError, match=r"key: expected a shard's part .* axis 'seq'; split its sequence"):
            jax.jit(mapped)(*inputs(2)[:3])

    def test_an_automatic_axis_beside_an_explicit_one(self, cpu_devices):
        devices = np.array(cpu_devices[:4]).reshape(2, 2)
        mesh = Mesh(devices, ("data", "seq"), axis_types=(AxisType.Explicit, AxisType.Auto))
        query, key, value, _ = inputs(2)
        message = r"mesh axis 'seq' is automatic and \['data'\] Explicit; make 'seq' Explicit too"
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=message):
            jax.jit(functools.partial(jax_fp4attn.attention, context_axis="seq"))(query, key, value)
