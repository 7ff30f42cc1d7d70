"""Sizes of meshes, partition rules and the arguments about processes, without training anything."""

import argparse
import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from examples.language_model import processes, sharding
from examples.language_model.meshes import MeshSizes, place_batch
from examples.language_model.model import ModelConfig

CONFIG = ModelConfig(width=32, hidden=48, layers=1, heads=4, kv_heads=2, head_size=32)


@pytest.fixture
def mesh(cpu_devices):
    assert len(cpu_devices) == jax.device_count()
    return MeshSizes(2, 4).make(AxisType.Auto)


class TestMeshSizes:
    @pytest.mark.parametrize(
        ("text", "sizes"),
        [
            ("data=2,model=4", MeshSizes(2, 4)),
            ("model=4,data=2", MeshSizes(2, 4)),
            ("data=8", MeshSizes(8, 1)),
            ("model=8", MeshSizes(1, 8)),
            ("data=2,seq=4", MeshSizes(2, 1, 4)),
        ],
    )
    def test_parse(self, text, sizes):
        assert MeshSizes.parse(text) == sizes
        assert MeshSizes.parse(str(sizes)) == sizes

    @pytest.mark.parametrize("text", ["", "data", "data=", "data=0", "data=-2", "rows=2", "data=2,data=4", "data=2;"])
    def test_parse_refuses_anything_else(self, text):
        with pytest.raises(ValueError, match=rf"mesh: expected sizes such as data=2,model=4, got '{text}'"):
            MeshSizes.parse(text)

    @pytest.mark.parametrize(("devices", "sizes"), [(1, (1, 1)), (3, (3, 1)), (8, (4, 2)), (64, (32, 2))])
    def test_default_takes_all_devices_and_keeps_key_and_value_heads_whole(self, devices, sizes):
        assert MeshSizes.default(devices, kv_heads=2) == MeshSizes(*sizes)

    def test_only_a_split_sequence_has_an_axis(self):
        assert MeshSizes(2, 4).make(AxisType.Auto).axis_names == ("data", "model")
        mesh = MeshSizes(2, 2, 2).make(AxisType.Auto)
        assert dict(mesh.shape) == {"data": 2, "model": 2, "seq": 2}

    @pytest.mark.parametrize("sizes", [(1, 1), (4, 2), (2, 4), (4, 1), (2, 2, 2)])
    def test_check_accepts_what_divides(self, sizes):
        MeshSizes(*sizes).check(math.prod(sizes), CONFIG, batch=4)

    @pytest.mark.parametrize(
        ("sizes", "devices", "changes", "batch", "message"),
        [
            (
                (2, 2),
                8,
                {},
                4,
                r"mesh: data=2,model=2 takes 4 devices, but there are 8; choose sizes whose product is 8",
            ),
            ((2, 1, 2), 8, {}, 4, r"mesh: data=2,model=1,seq=2 takes 4 devices, but there are 8"),
            ((4, 2), 8, {}, 6, r"batch: expected a multiple of the mesh axis data=4, got 6; take another batch"),
            ((3, 1), 3, {}, 3, r"mesh: data=3 does not divide the 32 features"),
            ((1, 8), 8, {}, 4, r"mesh: model=8 does not divide the 4 query heads; take a smaller model axis"),
            ((1, 4), 4, {"hidden": 50}, 4, r"mesh: model=4 does not divide the 50 hidden features"),
            ((1, 4), 4, {"vocabulary": 129}, 4, r"mesh: model=4 does not divide the 129 tokens of the vocabulary"),
            ((1, 2), 2, {"heads": 6, "kv_heads": 3}, 4, r"mesh: model=2 is neither .* multiple of the 3 key and value"),
        ],
    )
    def test_check_names_what_does_not_divide(self, sizes, devices, changes, batch, message):
        with pytest.raises(ValueError, match=message):
            MeshSizes(*sizes).check(devices, dataclasses.replace(CONFIG, **changes), batch)


def test_a_batch_is_read_by_the_rows_that_devices_need(mesh):
    batch = np.arange(4 * 5, dtype=np.int32).reshape(4, 5)
    rows = []

    def read(chosen):
        rows.append(chosen)
        return batch[chosen]

    placed = place_batch(mesh, read, batch.shape)
    np.testing.assert_array_equal(placed, batch)
    assert {(x.start, x.stop) for x in rows} == {(0, 2), (2, 4)}
    assert placed.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P("data")), 2)


class TestSharding:
    @pytest.mark.parametrize(
        ("path", "shape", "stored", "computing"),
        [
            ("blocks/0/attention/query/kernel", (32, 4, 64), P("data", "model", None), P(None, "model", None)),
            ("1/0/mu/blocks/0/mlp/down/kernel", (48, 32), P("model", "data"), P("model", None)),
            ("blocks/0/attention_norm/scale", (32,), P(None), P(None)),
            ("1/0/count", (), P(), P()),
        ],
    )
    def test_what_is_stored_over_both_axes_is_gathered_along_data(self, path, shape, stored, computing, mesh):
        assert sharding.stored_spec(path, shape, mesh) == stored
        assert sharding.computing_spec(stored) == computing

    def test_heads_that_are_fewer_than_the_shards_stay_whole(self, mesh):
        assert sharding.stored_spec("key/kernel", (32, 4, 64), mesh) == P("data", "model", None)
        assert sharding.stored_spec("key/kernel", (32, 2, 64), mesh) == P("data", None, None)

    def test_a_parameter_without_a_rule_is_refused(self, mesh):
        with pytest.raises(ValueError, match="blocks/0/gate/bias: no rule says how to split it; add one to RULES"):
            sharding.stored_spec("blocks/0/gate/bias", (48,), mesh)


class TestStart:
    """What reaches JAX, whose own functions would change the process that the tests run in."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        calls = []
        monkeypatch.setattr(jax.config, "update", lambda *arguments: calls.append(arguments))
        monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: calls.append(arguments))
        return calls

    def start(self, arguments):
        parser = argparse.ArgumentParser()
        processes.add_arguments(parser)
        processes.start(parser.parse_args(arguments.split()))

    def test_a_process_alone_joins_nobody(self, calls):
        self.start("")
        assert calls == []

    def test_virtual_devices_are_those_of_the_cpu(self, calls):
        self.start("--devices 4")
        assert calls == [("jax_platforms", "cpu"), ("jax_num_cpu_devices", 4)]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ("--coordinator host:1 --num-processes 2 --process-id 1", ("host:1", 2, 1)),
            ("--cluster", (None, None, None)),
        ],
    )
    def test_processes_join_after_choosing_collectives_that_the_cpu_has(self, arguments, expected, calls):
        self.start(arguments)
        assert calls == [("jax_cpu_collectives_implementation", "gloo"), expected]

    def test_says_so_where_there_is_no_cluster(self, monkeypatch):
        def initialize(*_):
            raise ValueError("coordinator_address should be defined.")

        monkeypatch.setattr(jax.distributed, "initialize", initialize)
        with pytest.raises(ValueError, match=r"cluster: JAX found none .* Pass coordinator, num-processes"):
            self.start("--cluster")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--process-id 0", r"coordinator: needed with process-id"),
            ("--coordinator localhost:1 --num-processes 2", r"process-id: needed with coordinator, num-processes"),
            ("--cluster --process-id 0", r"cluster: goes without process-id, which the cluster knows"),
            ("--coordinator localhost:1 --num-processes 2 --process-id 2", r"process-id: expected 0 to 1, got 2"),
            (
                "--coordinator localhost:1 --num-processes 0 --process-id 0",
                r"num-processes: expected at least 1",
            ),
            ("--devices 0", r"devices: expected at least 1, got 0"),
        ],
    )
    def test_arguments_that_do_not_go_together_are_refused(self, arguments, message, calls):
        with pytest.raises(ValueError, match=message):
            self.start(arguments)
        assert calls == []
