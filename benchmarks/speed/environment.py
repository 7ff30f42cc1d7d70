"""What the results depend on besides the code: the device and the versions of what runs on it."""

import importlib.metadata

import jax

from jax_fp4attn import native

_PACKAGES = ("jax", "jaxlib", "flash-attn3-jax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def environment(launch_seconds: float) -> dict[str, str]:
    """Facts about the machine and the run.

    Args:
      launch_seconds: Seconds of a call that does next to nothing.

    Returns:
      Texts by name.
    """
    missing = native.why_unavailable()
    return {
        "device": jax.devices()[0].device_kind,
        **{package: version for package in _PACKAGES if (version := _version(package))},
        "native kernels": "loaded" if missing is None else f"missing ({missing})",
        "least time of a call": f"{launch_seconds * 1e6:.1f} µs",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
