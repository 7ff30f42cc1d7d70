"""Compiles the attention kernels of a CUTLASS checkout and records a launch of each case."""

import functools
import importlib.machinery
import importlib.util
import math
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.emulator.apart import run_apart
from benchmarks.emulator.attention import CASES, HEAD_SIZE, SCALE, Attention, arrays_of, errors
from benchmarks.emulator.subjects import Subject
from cuda.emulator.recording import RecordedLaunch, cute_dsl

EXAMPLES = Path("examples/python/CuTeDSL")
SOURCES = {
    "sm_100a": EXAMPLES / "cute/blackwell/kernel/attention/fmha/fmha.py",
    "sm_90a": EXAMPLES / "cute/hopper/kernel/attention/fmha.py",
}
"""By target, in a checkout."""

_TYPES = {"bfloat16": "BFloat16", "float8_e4m3fn": "Float8E4M3FN"}


def subjects(checkout: Path, target: str, cases: Sequence[Attention] = CASES) -> Iterator[Subject]:
    """Those of some cases that are for a target."""
    launches = run_apart(record_cases, checkout.resolve(), target, cases)
    for case, launch in launches.items():
        yield Subject(
            kernel=case.kernel,
            shape=case.shape,
            launch=launch,
            arrays=arrays_of(case),
            outputs=2,
            errors=functools.partial(errors, case),
            many_seeds=case.many_seeds,
        )


def record_cases(checkout: Path, target: str, cases: Sequence[Attention]) -> dict[Attention, RecordedLaunch]:
    """The launches of those cases that are for a target. Arrays: query, key, value, output, lse."""
    with tempfile.TemporaryDirectory() as folder:
        cute_dsl.prepare(target, Path(folder))
        module = _load_example(checkout, target)
        kernel_call = {"sm_100a": _call_blackwell, "sm_90a": _call_hopper}[target]
        return {case: _record(kernel_call(module, case), case) for case in cases if case.target == target}


def _load_example(checkout: Path, target: str) -> Any:
    """An example as a module. Its tests of itself use PyTorch; its kernel does not."""
    for name in ("torch", "cutlass.torch"):
        stand_in = types.ModuleType(name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = stand_in
    sys.path.insert(0, str(checkout / EXAMPLES))
    spec = importlib.util.spec_from_file_location("attention_example", checkout / SOURCES[target])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _record(call: Callable[..., None], case: Attention) -> RecordedLaunch:
    """Compiles a call of a kernel and records it with the sizes of a case."""
    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    @cute.jit
    def host(
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        output: cute.Pointer,
        lse: cute.Pointer,
        batch: cutlass.Int32,
        length: cutlass.Int32,
        heads: cutlass.Int32,
        kv_heads: cutlass.Int32,
        scale_log2: cutlass.Float32,
        scale: cutlass.Float32,
        scale_output: cutlass.Float32,
        window: cutlass.Int32,
        stream: driver.CUstream,
    ) -> None:
        pointers, sizes = (query, key, value, output, lse), (batch, length, heads, kv_heads)
        call(pointers, sizes, (scale_log2, scale, scale_output), window, stream)

    types_ = [getattr(cutlass, _TYPES[case.type])] * 3 + [cutlass.BFloat16, cutlass.Float32]
    pointers = [cute_dsl.pointer(type_, i) for i, type_ in enumerate(types_)]
    symbolic = [cutlass.Int32(1)] * 4 + [cutlass.Float32(1)] * 3 + [cutlass.Int32(0)]
    compiled = cute.compile(host, *pointers, *symbolic, make_fake_stream())
    sizes = case.batch, case.length, case.heads, case.kv_heads
    scales = SCALE * math.log2(math.e), SCALE, 1.0
    (launch,) = cute_dsl.record(compiled, *pointers, *sizes, *scales, 0, driver.CUstream(0))
    return launch


class _OneMultiprocessor:
    """For persistent kernels, which ask the driver how many there are."""

    def get_device_multiprocessor_count(self) -> int:
        return 1


def _call_blackwell(example: Any, case: Attention) -> Callable[..., None]:
    import cutlass

    example.fmha_utils.HardwareInfo = _OneMultiprocessor
    kernel = example.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32, cutlass.Float32, (128, 128), HEAD_SIZE, case.persistent, _causal(example), False, True
    )

    def call(pointers: Any, sizes: Any, scales: Any, window: Any, stream: Any) -> None:
        (query, key, value, output, lse), (batch, length, heads, kv_heads) = pointers, sizes
        group = heads // kv_heads
        lengths = (batch, length, length, length, heads, kv_heads, cutlass.Int32(HEAD_SIZE), cutlass.Int32(HEAD_SIZE))
        kernel(
            _ordered(query, (batch, length, kv_heads, group, HEAD_SIZE)),
            _ordered(key, (batch, length, kv_heads, 1, HEAD_SIZE)),
            _ordered(value, (batch, length, kv_heads, 1, HEAD_SIZE)),
            _ordered(output, (batch, length, kv_heads, group, HEAD_SIZE)),
            lengths,
            None,
            None,
            _ordered(lse, (batch, length, heads)),
            None,
            *scales,
            None,
            None,
            window,
            None,
            None,
            stream,
            False,
        )

    return call


def _call_hopper(example: Any, case: Attention) -> Callable[..., None]:
    import cutlass

    kernel = example.HopperFusedMultiHeadAttentionForward(
        cutlass.Float32, cutlass.Float32, (64, 128, HEAD_SIZE), case.persistent, _causal(example)
    )

    def call(pointers: Any, sizes: Any, scales: Any, window: Any, stream: Any) -> None:
        (query, key, value, output, lse), (batch, length, heads, kv_heads) = pointers, sizes
        group = heads // kv_heads
        kernel(
            _length_first(query, (batch, length, kv_heads, group, HEAD_SIZE)),
            _length_first(key, (batch, length, kv_heads, 1, HEAD_SIZE)),
            _length_first(value, (batch, length, kv_heads, 1, HEAD_SIZE)),
            _length_first(output, (batch, length, kv_heads, group, HEAD_SIZE)),
            _length_first(lse, (batch, length, kv_heads, group, 1)),
            *scales,
            None,
            window,
            stream,
        )

    return call


def _causal(example: Any) -> Any:
    """A window of 0 keys to the right."""
    return example.fmha_utils.MaskEnum.WINDOW_MASK


def _ordered(pointer: Any, shape: tuple[Any, ...]) -> Any:
    """A tensor in row-major order."""
    import cutlass.cute as cute

    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))))


def _length_first(pointer: Any, shape: tuple[Any, ...]) -> Any:
    """A tensor in row-major order as (length, size, group, kv_heads, batch)."""
    import cutlass.cute as cute

    tensor = _ordered(pointer, shape)
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 4, 3, 2, 0]))
