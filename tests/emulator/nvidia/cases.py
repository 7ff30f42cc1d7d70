"""Which of NVIDIA's kernels are run, with which tiles, types and shapes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compilation of C = A B.

    Attributes:
      target: that it is compiled for.
      a: type of A, by its name in ml_dtypes.
      b: type of B.
      c: type of C.
      tile: rows and columns of C that one MMA makes, or one CTA on sm_90a.
      cluster: CTAs along rows and columns.
      majors: "k" or "m", "k" or "n", "m" or "n": the contiguous dimensions of A, B and C.
      scale: type of the scales, or "" for none.
      block: elements that share a scale.
      pairs: whether two CTAs make one MMA; block-scaled kernels do so with 256 rows.
      stores_by_tma: whether C goes through shared memory and TMA; all but the dense sm_100a kernels always do.
      clusters: that the launch may have at most, so that one CTA makes several tiles; 0 to ask for the next
        tile at run time (cluster launch control).
    """

    target: str
    a: str
    b: str
    c: str
    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    majors: tuple[str, str, str] = ("k", "k", "n")
    scale: str = ""
    block: int = 0
    pairs: bool = False
    stores_by_tma: bool = True
    clusters: int = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch of a kernel: `l` products of m by k and k by n."""

    name: str
    kernel: Kernel
    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741

    def __str__(self) -> str:
        return self.name


E2M1, E4M3, E5M2, E8M0 = "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
F16, BF16, F32 = "float16", "bfloat16", "float32"


def _nvfp4(c: str, tile: tuple[int, int], **options) -> Kernel:
    return Kernel("sm_100a", E2M1, E2M1, c, tile, **{"scale": E4M3, "block": 16} | options)


def _mx(a: str, b: str, c: str, tile: tuple[int, int], **options) -> Kernel:
    return Kernel("sm_100a", a, b, c, tile, scale=E8M0, block=32, **options)


def _dense(type_: str, c: str, tile: tuple[int, int], **options) -> Kernel:
    return Kernel("sm_100a", type_, type_, c, tile, **options)


def _hopper(type_: str, c: str, tile: tuple[int, int], **options) -> Kernel:
    return Kernel("sm_90a", type_, type_, c, tile, **options)


_NVFP4_128 = _nvfp4(F32, (128, 128), clusters=2)
_NVFP4_PAIR = _nvfp4(F16, (256, 128), cluster=(2, 1), clusters=1)
_E5M2_PAIR = _dense(E5M2, F16, (256, 64), cluster=(2, 1), majors=("m", "n", "n"), pairs=True)
_HOPPER_BF16 = _hopper(BF16, F32, (128, 128), clusters=2)

BLOCK_SCALED = (
    Case("nvfp4", _NVFP4_128, 128, 128, 768),
    Case("nvfp4-tails-persistent", _NVFP4_128, 160, 224, 544, l=2),
    Case("nvfp4-pair-persistent", _NVFP4_PAIR, 512, 256, 768),
    Case("nvfp4-pair-tails", _NVFP4_PAIR, 320, 96, 800),
    Case("nvfp4-64-columns", _nvfp4(BF16, (128, 64)), 128, 128, 512),
    Case("nvfp4-192-columns", _nvfp4(BF16, (128, 192)), 128, 384, 512),
    Case("nvfp4-multicast", _nvfp4(F16, (128, 128), cluster=(2, 2)), 256, 256, 512),
    Case("nvfp4-e8m0", _nvfp4(F32, (128, 128), scale=E8M0), 128, 128, 512),
    Case("nvfp4-column-major", _nvfp4(F32, (128, 128), majors=("k", "k", "m")), 128, 128, 512),
    Case("mxfp4", _mx(E2M1, E2M1, F32, (128, 128)), 128, 160, 1056),
    Case("mxfp4-pair", _mx(E2M1, E2M1, BF16, (256, 128), cluster=(2, 1)), 256, 128, 512),
    Case("mxfp8", _mx(E4M3, E4M3, F32, (128, 128)), 160, 128, 416),
    Case("mxfp8-e5m2-transposed", _mx(E5M2, E5M2, BF16, (128, 128), majors=("m", "n", "n")), 128, 128, 256),
    Case("mxfp8-pair", _mx(E4M3, E4M3, E4M3, (256, 128), cluster=(2, 1)), 256, 128, 256),
    Case("mxfp4-mxfp8", _mx(E2M1, E4M3, F32, (128, 128)), 128, 128, 256),
    Case("mxfp8-mxfp4", _mx(E5M2, E2M1, F32, (128, 128)), 128, 128, 256),
)

# With 256 columns one elected thread of each epilogue warp releases the accumulator, for a barrier that counts all of
# them (nvidia-cutlass-operators 0.3.0).
HANGING = (
    Case("nvfp4-256-columns", _nvfp4(F16, (128, 256)), 128, 256, 512),
    Case("nvfp4-pair-256-columns", _nvfp4(F16, (256, 256), cluster=(2, 1)), 256, 256, 512),
)

DENSE = (
    Case("f16", _dense(F16, F32, (128, 128), clusters=2), 160, 224, 208, l=2),
    Case("f16-64-rows", _dense(F16, F16, (64, 64)), 128, 64, 192),
    Case("bf16-pair", _dense(BF16, BF16, (256, 128), cluster=(2, 1), pairs=True, clusters=1), 512, 128, 192),
    Case("bf16-pair-128-rows", _dense(BF16, F32, (128, 128), cluster=(2, 1), pairs=True), 128, 128, 192),
    Case("bf16-transposed", _dense(BF16, F32, (128, 64), majors=("m", "n", "m")), 128, 64, 128),
    Case("bf16-multicast", _dense(BF16, BF16, (128, 64), cluster=(2, 2)), 256, 128, 192),
    Case("bf16-plain-stores", _dense(BF16, BF16, (128, 128), stores_by_tma=False), 128, 256, 128),
    Case("e4m3", _dense(E4M3, F32, (128, 128)), 128, 144, 416),
    Case("e5m2-pair-transposed", _E5M2_PAIR, 256, 64, 256),
)

# They ask for the next tile with clusterlaunchcontrol.try_cancel.
UNSUPPORTED = (Case("bf16-dynamic", _dense(BF16, BF16, (128, 64), clusters=0), 256, 128, 128),)

HOPPER = (
    Case("bf16", _HOPPER_BF16, 128, 128, 256),
    Case("bf16-tails-persistent", _HOPPER_BF16, 160, 272, 208, l=2),
    Case("f16-multicast", _hopper(F16, F16, (128, 128), cluster=(2, 1)), 256, 128, 128),
    Case("f16-transposed", _hopper(F16, F32, (64, 64), majors=("m", "n", "m")), 128, 64, 128),
    Case("f16-256-columns", _hopper(F16, BF16, (128, 256), cluster=(1, 2)), 128, 512, 128),
    Case("e4m3", _hopper(E4M3, F32, (128, 128)), 128, 144, 416),
    Case("e5m2", _hopper(E5M2, F16, (64, 128)), 64, 128, 256),
)


def cases_of(target: str) -> list[Case]:
    """The cases for one target."""
    cases = (*BLOCK_SCALED, *HANGING, *DENSE, *UNSUPPORTED, *HOPPER)
    return [case for case in cases if case.kernel.target == target]


def key(case: Case) -> str:
    """A name that is unique among all cases of a target."""
    return f"{'scaled' if case.kernel.scale else 'dense'}-{case.name}"
