"""The shared object with the kernels: where it is, whether it can be loaded here, and its registration with XLA."""

import ctypes
import dataclasses
import functools
import itertools
import pathlib
import re

import jax

PATH = pathlib.Path(__file__).with_name("libjax_fp4attn.so")

Version = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Library:
    """A loaded library.

    Attributes:
      handle: Of the shared object.
      ffi_version: The version of XLA's FFI that it was built for.
    """

    handle: ctypes.CDLL
    ffi_version: Version

    def images(self, compute_capability: Version) -> tuple[str, ...]:
        """Names of the images that a GPU takes kernels from: each kernel from the first one that has it.

        Args:
          compute_capability: Of the GPU.

        Returns:
          Their targets, such as ``("sm_103a", "sm_100f")``; none for a GPU that no kernel runs on.
        """
        names = (self.handle.jax_fp4attn_image(*compute_capability, rank) for rank in itertools.count())
        return tuple(name.decode() for name in itertools.takewhile(bool, names))


def running_ffi_version() -> Version:
    """Version of XLA's FFI in the installed jaxlib, from the headers that it ships.

    Returns:
      Major and minor version.
    """
    header = (pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR"))
    assert major and minor
    return int(major[1]), int(minor[1])


def load() -> Library | str:
    """Loads the library, once a process.

    Returns:
      The library, or the reason why there is none: it is missing, does not load, or was built for a newer FFI than that
      of the installed jaxlib. XLA runs handlers of its own or an older version, and after the registration of a newer
      one no backend would start.
    """
    return _load(PATH)


@functools.cache
def _load(path: pathlib.Path) -> Library | str:
    if not path.is_file():
        return f"this installation has no native library ({path.name}); install a wheel that has it, or run make native"
    try:
        handle = ctypes.CDLL(str(path))
        built = handle.jax_fp4attn_ffi_major(), handle.jax_fp4attn_ffi_minor()
        _ = handle.jax_fp4attn_initialize
        handle.jax_fp4attn_image.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return f"the native library does not load ({error}); build it again with make native"
    running = running_ffi_version()
    if built > running:
        return (
            f"the native library was built for XLA FFI {_text(built)}, and the installed jaxlib has {_text(running)}; "
            "install a newer jaxlib, or run make native with this one"
        )
    return Library(handle, built)


@functools.cache
def register(target_name: str) -> None:
    """Registers a handler with XLA, once a process; without the library there is nothing to register.

    Args:
      target_name: Of the custom call, which is also the symbol's.

    Raises:
      RuntimeError: If the library is of another version of the package and has no such handler.
    """
    library = load()
    if isinstance(library, Library):
        handler = getattr(library.handle, target_name, None)
        if handler is None:
            raise RuntimeError(f"the native library has no {target_name}; build it again with make native")
        stages = {"initialize": library.handle.jax_fp4attn_initialize, "execute": handler}
        capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
        jax.ffi.register_ffi_target(target_name, capsules, platform="CUDA")


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
