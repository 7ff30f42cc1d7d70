"""What a transformation needs to know of an operation."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from jax_fp4attn.transforms.joining import join_batch, split_batch

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of array pytrees that is independent along the batch and along key/value heads.

    A layout is a string with one character a dimension: ``b`` batch, ``n`` query heads, ``k`` key/value heads, ``s``
    the sequence, ``*`` anything else. A leaf whose batch or head dimension has size 1 by broadcasting has ``*`` there.

    Attributes:
      name: For error messages and the names of custom calls.
      function: ``function(static, *arguments) -> results``, where the sequence is whole.
      split_function: ``split_function(static, axis, *arguments) -> results``, on a shard of a sequence that is split
        over a mesh axis; it communicates over the axis.
      argument_layouts: ``(*arguments) -> layouts``, a pytree of strings of the arguments' structure.
      result_layouts: ``(results) -> layouts``, from a pytree of shapes. ``B`` and ``N`` stand for a dimension of size 1
        because the result was summed over the batch or the query heads, ``K`` for key/value heads whose entries are
        sums over their query heads.
    """

    name: str
    function: Callable[..., PyTree]
    split_function: Callable[..., PyTree]
    argument_layouts: Callable[..., PyTree]
    result_layouts: Callable[[PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class Call:
    """An operation with its static arguments and the structure of its array arguments; hashable.

    Attributes:
      operation: The operation.
      static: Its static arguments.
      structure: Tree structure of the array arguments.
      sequence_axis: The mesh axis over which the sequence is split, or None.
      mapped: For each flat argument, whether it has a leading dimension (``v``) over which the operation is mapped;
        empty if none has. All results then have it.
    """

    operation: Operation
    static: Hashable
    structure: jax.tree_util.PyTreeDef
    sequence_axis: str | None = None
    mapped: tuple[bool, ...] = ()

    def __call__(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the operation on flat arguments with a whole sequence and returns flat results."""
        return self._run(functools.partial(self.operation.function, self.static), leaves)

    def on_shard(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the operation on the flat arguments of one shard, with ``sequence_axis`` bound if there is one."""
        if self.sequence_axis is None:
            return self(*leaves)
        return self._run(functools.partial(self.operation.split_function, self.static, self.sequence_axis), leaves)

    def _run(self, function: Callable[..., PyTree], leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if not self.mapped:
            return tuple(jax.tree.leaves(function(*self.structure.unflatten(leaves))))
        one = self._unmapped()
        shapes = self._shapes_of_one(leaves)
        layouts = one.argument_layouts(shapes)
        # A part of a split sequence does not tell the shapes of a whole one; nothing is summed over the batch then.
        results = None if self.sequence_axis is not None else one.result_shapes(shapes)
        summed = results is not None and any("B" in layout for layout in one.result_layouts(results))
        joined = join_batch(leaves, self.mapped, layouts, summed=summed)
        outputs = tuple(jax.tree.leaves(function(*self.structure.unflatten(joined))))
        batches = tuple(x.shape[0] for x in jax.tree.leaves(results)) if summed else None
        return split_batch(outputs, self._mapped_size(leaves), batches)

    def result_shapes(self, leaves: tuple[Any, ...]) -> PyTree:
        """Shapes of the results, as a pytree."""
        if self.mapped:
            size = self._mapped_size(leaves)
            results = self._unmapped().result_shapes(self._shapes_of_one(leaves))
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), results)
        arguments = self.structure.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        return jax.eval_shape(lambda *args: self.operation.function(self.static, *args), *arguments)

    def argument_layouts(self, leaves: tuple[Any, ...]) -> tuple[str, ...]:
        """Layout of each flat argument."""
        if self.mapped:
            layouts = self._unmapped().argument_layouts(self._shapes_of_one(leaves))
            return tuple(f"v{layout}" if is_mapped else layout for layout, is_mapped in self._zip_mapped(layouts))
        return self._flat(self.operation.argument_layouts(*self.structure.unflatten(leaves)))

    def result_layouts(self, results: PyTree) -> tuple[str, ...]:
        """Layout of each flat result."""
        if self.mapped:
            of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), results)
            return tuple(f"v{layout}" for layout in self._unmapped().result_layouts(of_one))
        return self._flat(self.operation.result_layouts(results))

    def _flat(self, layouts: PyTree) -> tuple[str, ...]:
        flat = tuple(jax.tree.leaves(layouts))
        if self.sequence_axis is None:
            return tuple(layout.replace("s", "*") for layout in flat)
        return flat

    def _unmapped(self) -> "Call":
        return dataclasses.replace(self, mapped=())

    def _zip_mapped(self, items: tuple[Any, ...]) -> Iterable[tuple[Any, bool]]:
        return zip(items, self.mapped, strict=True)

    def _mapped_size(self, leaves: tuple[Any, ...]) -> int:
        size: int = next(x.shape[0] for x, is_mapped in self._zip_mapped(leaves) if is_mapped)
        return size

    def _shapes_of_one(self, leaves: tuple[Any, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct(x.shape[1:] if is_mapped else x.shape, x.dtype)
            for x, is_mapped in self._zip_mapped(leaves)
        )
