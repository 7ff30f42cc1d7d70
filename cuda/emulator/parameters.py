"""The bytes of scalar arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from .ptx.syntax import TYPE_BYTES, Parameter

_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
# Types that say nothing of what the bits are.
_BITS = {"b32": np.float32, "b64": np.float64}


def scalar_bytes(argument: Any, parameter: Parameter) -> bytes:
    """The bytes of a Python or NumPy scalar, or of bytes, as a parameter.

    Raises:
      ValueError: the parameter is of another type, or too small for the value.
    """
    if isinstance(argument, (bytes, bytearray)):
        return bytes(argument)
    if not isinstance(argument, (int, float, np.generic)):
        raise ValueError(f"{parameter.name}: an argument of type {type(argument).__name__} is not supported")
    kind = parameter.type
    if parameter.size != TYPE_BYTES[kind]:
        raise ValueError(f"{parameter.name}: pass {parameter.size} bytes or a Struct, not {argument!r}")
    if isinstance(argument, np.generic):
        return _numpy_bytes(argument, parameter)
    if isinstance(argument, float):
        if kind not in _FLOATS | _BITS:
            raise ValueError(f"{parameter.name}: a float ({argument!r}) for a parameter of type .{kind}")
        return np.asarray(argument, (_FLOATS | _BITS)[kind]).tobytes()
    if kind in _FLOATS:
        return np.asarray(argument, _FLOATS[kind]).tobytes()
    bits = 8 * parameter.size
    if not -(1 << bits - 1) <= argument < 1 << bits:
        raise ValueError(f"{parameter.name}: {argument} does not fit a parameter of type .{kind}")
    return (argument & (1 << bits) - 1).to_bytes(parameter.size, "little")


def _numpy_bytes(argument: np.generic, parameter: Parameter) -> bytes:
    kind = parameter.type
    if (argument.dtype.kind == "f" and kind[0] in "us") or (argument.dtype.kind in "iub" and kind in _FLOATS):
        raise ValueError(f"{parameter.name}: a {argument.dtype} for a parameter of type .{kind}")
    return argument.tobytes()
