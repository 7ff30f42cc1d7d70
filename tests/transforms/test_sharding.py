"""Plans and sharding rules, without compiling anything."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jax_fp4attn.transforms import Operation
from jax_fp4attn.transforms.automatic import sharding_rule
from jax_fp4attn.transforms.operation import Call
from jax_fp4attn.transforms.sharding import Plan, make_plan

MESH = {"data": 2, "model": 4}
WHOLE = P()


def _call(result_layout: str = "b*n") -> Call:
    operation = Operation(
        name="probe",
        function=lambda static, query, key: query,
        split_function=lambda static, axis, query, key: query,
        argument_layouts=lambda query, key: ("b*n", "b*k"),
        result_layouts=lambda result: result_layout,
    )
    return Call(operation, None, jax.tree.structure((0, 0)))


def _plan(query_spec: P, num_heads: int, num_kv_heads: int, *, batch: int = 4, kv_spec: P = WHOLE) -> Plan:
    shapes = (
        jax.ShapeDtypeStruct((batch, 3, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((batch, 3, num_kv_heads), jnp.float32),
    )
    return make_plan(_call(), shapes, (query_spec, kv_spec), MESH)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "expected"),
    [
        (8, 8, Plan(("data",), ("model",), ("model",), 0)),
        (8, 4, Plan(("data",), ("model",), ("model",), 0)),
        (8, 2, Plan(("data",), ("model",), (), 2)),
        (8, 1, Plan(("data",), ("model",), (), 4)),
        (12, 3, Plan(("data",), (), (), 0)),
        (6, 6, Plan(("data",), (), (), 0)),
    ],
)
def test_head_axes_are_kept_where_heads_divide(num_heads, num_kv_heads, expected):
    assert _plan(P("data", None, "model"), num_heads, num_kv_heads) == expected


def test_axes_on_other_dimensions_are_dropped():
    assert _plan(P("data", "model"), 8, 4) == Plan(("data",), (), (), 0)


def test_an_axis_is_used_once():
    assert _plan(P("model"), 8, 4, kv_spec=P(None, None, "model")) == Plan(("model",), (), (), 0)


def test_batch_is_gathered_only_where_its_padding_would_enter_a_sum():
    shapes = (jax.ShapeDtypeStruct((3, 3, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8), jnp.float32))
    specs = (P("data"), P("data"))
    assert make_plan(_call("b*n"), shapes, specs, MESH).batch == ("data",)
    assert make_plan(_call("B*n"), shapes, specs, MESH).batch == ()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "axis_sizes", "expected", "whole"),
    [
        (8, 8, (2, 4), "b x0 k, b x1 k -> b k", ("x0", "x1")),
        (8, 4, (2, 4), "b x0 (k g), b x1 k -> b (k g)", ("x0", "g", "x1")),
        (8, 2, (2, 4), "b x0 n, b x1 k -> b n", ("x0", "x1", "k")),
        (8, 1, (2, 4), "b x0 n, b x1 k -> b n", ("x0", "x1", "k")),
    ],
    ids=["multi-head", "grouped-query", "more shards than heads", "multi-query"],
)
def test_sharding_rules(num_heads, num_kv_heads, axis_sizes, expected, whole):
    operands = (("b*n", (4, 3, num_heads)), ("b*k", (4, 3, num_kv_heads)))
    rule, options = sharding_rule(operands, (("bn", (4, num_heads)),), axis_sizes)
    assert rule == expected
    assert options["need_replication_factors"] == whole
    assert options.get("g") == (num_heads // num_kv_heads if "g" in rule else None)


def test_sequences_in_other_units_share_a_factor():
    rule, options = sharding_rule((("bs*", (4, 256, 8)),), (("bs", (4, 256)), ("b*s", (4, 8, 8))), [2])
    assert rule == "b (s r0) x1 -> b (s r2), b x3 s"
    assert options == {"r0": 32, "r2": 32, "need_replication_factors": ("r0", "x1", "r2", "x3")}


def test_a_factor_that_is_only_part_of_compounds_has_a_size():
    rule, options = sharding_rule((("bs", (4, 256)),), (("bs", (4, 384)),), [2])
    assert rule == "b (s r0) -> b (s r1)"
    assert options == {"s": 128, "r0": 2, "r1": 3, "need_replication_factors": ("r0", "r1")}
