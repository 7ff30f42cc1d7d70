"""What a transformation needs to know of an operation."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax

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
    """

    operation: Operation
    static: Hashable
    structure: jax.tree_util.PyTreeDef
    sequence_axis: str | None = None

    def __call__(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the operation on flat arguments with a whole sequence and returns flat results."""
        arguments = self.structure.unflatten(leaves)
        return tuple(jax.tree.leaves(self.operation.function(self.static, *arguments)))

    def on_shard(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the operation on the flat arguments of one shard, with ``sequence_axis`` bound if there is one."""
        if self.sequence_axis is None:
            return self(*leaves)
        arguments = self.structure.unflatten(leaves)
        return tuple(jax.tree.leaves(self.operation.split_function(self.static, self.sequence_axis, *arguments)))

    def result_shapes(self, leaves: tuple[Any, ...]) -> PyTree:
        """Shapes of the results, as a pytree."""
        arguments = self.structure.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        return jax.eval_shape(lambda *args: self.operation.function(self.static, *args), *arguments)

    def argument_layouts(self, leaves: tuple[Any, ...]) -> tuple[str, ...]:
        """Layout of each flat argument."""
        return self._flat(self.operation.argument_layouts(*self.structure.unflatten(leaves)))

    def result_layouts(self, results: PyTree) -> tuple[str, ...]:
        """Layout of each flat result."""
        return self._flat(self.operation.result_layouts(results))

    def _flat(self, layouts: PyTree) -> tuple[str, ...]:
        flat = tuple(jax.tree.leaves(layouts))
        if self.sequence_axis is None:
            return tuple(layout.replace("s", "*") for layout in flat)
        return flat
