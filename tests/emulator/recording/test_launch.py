import numpy as np
import pytest

from cuda.emulator import Output, Struct, TensorMap
from cuda.emulator.recording import Encoding, Parameter, Place, RecordedLaunch
from cuda.emulator.recording.launch import address_of, place_of

X, Y = np.zeros((4, 64), np.float16), np.zeros(8, np.float32)
ENCODING = Encoding(Place(0, 128), 6, (64, 3), (128,), (64, 3), (1, 1), swizzle=3)


def test_addresses() -> None:
    assert place_of(address_of(7) + 12) == Place(7, 12)
    assert place_of(address_of(0) - 1) is None
    assert place_of(address_of(255) + (1 << 32)) is None
    with pytest.raises(ValueError, match="256 arrays"):
        address_of(256)


def test_plain_parameter_is_its_bytes() -> None:
    assert Parameter(b"\1\2\3\4").argument([]) == b"\1\2\3\4"


def test_pointer_is_the_array_or_output() -> None:
    output = Output(Y)
    assert Parameter(bytes(8), {0: Place(1, 0)}).argument([X, output]) is output


def test_tensor_map_of_a_part_of_an_array() -> None:
    tensor_map = Parameter(bytes(128), {}, {0: ENCODING}).argument([Output(X)])
    assert isinstance(tensor_map, TensorMap)
    assert tensor_map.array is X
    assert (tensor_map.dims, tensor_map.strides, tensor_map.box) == ((64, 3), (128,), (64, 3))
    assert (tensor_map.element.name, tensor_map.swizzle.name, tensor_map.offset_bytes) == ("f16", "128B", 128)


def test_struct_with_a_pointer() -> None:
    raw = bytes(range(24))
    argument = Parameter(raw, {8: Place(1, 0)}).argument([X, Y])
    assert isinstance(argument, Struct)
    assert argument.bytes == raw
    assert list(argument.pieces) == [8]
    assert argument.pieces[8] is Y


def test_pointer_into_an_array_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="4 bytes into"):
        Parameter(bytes(8), {0: Place(0, 4)}).argument([X])


def test_array_numbers_are_in_order_of_the_arguments() -> None:
    parameters = (
        Parameter(bytes(4)),
        Parameter(bytes(8), {0: Place(1, 0)}),
        Parameter(bytes(128), {}, {0: ENCODING}),
        Parameter(bytes(16), {8: Place(1, 0)}),
    )
    launch = RecordedLaunch("", "k", parameters, (2, 1, 1), (32, 1, 1), (2, 1, 1), 64)
    assert launch.array_numbers == [1, 0]
    assert launch.options()["cluster"] == (2, 1, 1)
