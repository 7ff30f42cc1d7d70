import pytest

from cuda.emulator import DescriptorFaultError
from cuda.emulator.recording import Encoding, Place
from cuda.emulator.recording.descriptor import decode

# Bytes 0 to 63 as CuTe DSL writes them for tensors of known shape, and how those were to be encoded.
RAW = {
    "fp4": (
        "000000005a5a0000 a2652400 22000000003300000000000000000000 00000000"
        "3f0400007f010000020000000000000000000000 000000 ff7f000000 00000000",
        Encoding(Place(0, 0), 13, (1088, 384, 3), (544, 208896), (256, 128, 1), (1, 1, 1), 0, 3, 2),
    ),
    "scales": (
        "000000005c5a0000 b2000400 20000000200200006006000000000000 00000000"
        "ff00000010000000020000000200000000000000 000000 ff03000000 00000000",
        Encoding(Place(2, 0), 1, (256, 17, 3, 3), (512, 8704, 26112), (256, 4, 1, 1), (1,) * 4, 0, 0, 2),
    ),
    "atoms of 32 bytes": (
        "000000005e5a0000 a2630c00 20000000001000000000000000000000 00000000"
        "7f0000007f000000000000000000000000000000 000000 1f1f000000 00000000",
        Encoding(Place(4, 0), 7, (128, 128, 1), (512, 65536), (32, 32, 1), (1, 1, 1), 0, 4, 2),
    ),
    "five dimensions": (
        "000000005a5a0000 42652400 20000000100000001000000000200000 00000000"
        "7f000000ff000000000000000100000000000000 000000 3f7f000000 00000000",
        Encoding(Place(0, 0), 9, (128, 256, 1, 2, 1), (512, 256, 256, 131072), (64, 128, 1, 1, 1), (1,) * 5, 0, 3, 2),
    ),
}


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", "")).ljust(128, b"\xab")


@pytest.mark.parametrize("name", RAW)
def test_known_maps(name: str) -> None:
    text, expected = RAW[name]
    assert decode(_bytes(text)) == expected


def test_high_bits_of_strides_and_element_strides() -> None:
    raw = bytearray(_bytes(RAW["fp4"][0]))
    raw[28] = 0x21
    raw[52:55] = (1 << 3 | 3 << 6).to_bytes(3, "little")
    encoding = decode(bytes(raw))
    assert encoding.strides == (544 + (1 << 36), 208896 + (2 << 36))
    assert encoding.element_strides == (1, 2, 4)


def test_other_addresses_are_not_maps() -> None:
    assert decode(bytes(128)) is None


@pytest.mark.parametrize(
    ("byte", "value"),
    [(8, 0xA1), (9, 0xE5), (10, 0x20), (10, 0x64), (10, 0x25), (60, 1)],
    ids=["kind", "swizzle", "no promotion", "high flag", "low flag", "tail"],
)
def test_unknown_forms_are_refused(byte: int, value: int) -> None:
    raw = bytearray(_bytes(RAW["fp4"][0]))
    raw[byte] = value
    with pytest.raises(DescriptorFaultError, match="unknown form"):
        decode(bytes(raw))


def test_atoms_of_32_bytes_need_the_swizzle_of_128_bytes() -> None:
    raw = bytearray(_bytes(RAW["atoms of 32 bytes"][0]))
    raw[9] = 0x43
    with pytest.raises(DescriptorFaultError, match="without the swizzle"):
        decode(bytes(raw))
