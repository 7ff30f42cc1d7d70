"""What would run here, and why not."""

import dataclasses
import pathlib

from jax_fp4attn import recipes
from jax_fp4attn.native import library
from jax_fp4attn.native.availability import ComputeCapability, local_gpus, why_unavailable
from jax_fp4attn.native.calls import STEPS
from jax_fp4attn.native.coverage import missing_kernel
from jax_fp4attn.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Info:
    """State of the native implementation in this process; ``str`` of it is for people.

    Attributes:
      path: Of the library, or None if there is none.
      built_for: XLA FFI version that it was built for, or None if it does not load.
      running: XLA FFI version of the installed jaxlib.
      gpus: Compute capability of each CUDA device of this process.
      images: For each of them the images of the library that it takes kernels from, each kernel from the first one that
        has it.
      unavailable: Why no kernel runs here, or None.
      steps: For each step of the operator, why it runs by the reference, or None if it runs by a kernel.
      recipe: Name of the recipe that ``steps`` is about.
      head_size: Head size that ``steps`` is about.
    """

    path: pathlib.Path | None
    built_for: library.Version | None
    running: library.Version
    gpus: dict[str, ComputeCapability]
    images: dict[str, tuple[str, ...]]
    unavailable: str | None
    steps: dict[str, str | None]
    recipe: str
    head_size: int

    def __str__(self) -> str:
        lines = [
            f"library: {self.path or 'none'}",
            f"XLA FFI: built for {_version(self.built_for)}, running {_version(self.running)}",
            f"GPUs: {', '.join(map(self._gpu, self.gpus)) or 'none'}",
        ]
        if self.unavailable is not None:
            lines.append(f"no kernel runs here: {self.unavailable}")
        lines.append(f"steps of recipe {self.recipe!r} with head size {self.head_size}:")
        for step, reason in self.steps.items():
            lines.append(f"  {step}: {'kernel' if reason is None else f'reference, {reason}'}")
        return "\n".join(lines)

    def _gpu(self, name: str) -> str:
        images = self.images[name]
        return f"{name} ({_version(self.gpus[name])}{', image ' if images else ''}{', else '.join(images)})"


def info(recipe: Recipe | None = None, head_size: int = 128) -> Info:
    """Tells what would run here.

    Args:
      recipe: The recipe to tell of; None for `train`.
      head_size: The head size to tell of.

    Returns:
      An :class:`Info`. It initialises JAX's backends, to find the GPUs.

    Example:
      >>> from jax_fp4attn import native
      >>> native.info().steps["partial_forward"]
      "there is no kernel for the step 'partial_forward' yet"
    """
    recipe = recipes.train if recipe is None else recipe
    loaded = library.load()
    unavailable, gpus = why_unavailable(), local_gpus()
    return Info(
        path=library.PATH if library.PATH.is_file() else None,
        built_for=None if isinstance(loaded, str) else loaded.ffi_version,
        running=library.running_ffi_version(),
        gpus=gpus,
        images={name: () if isinstance(loaded, str) else loaded.images(cc) for name, cc in gpus.items()},
        unavailable=unavailable,
        steps={
            step: missing_kernel(step, recipe, head_size) or ("no kernel runs here" if unavailable else None)
            for step in STEPS
        },
        recipe=recipe.name,
        head_size=head_size,
    )


def _version(version: tuple[int, int] | None) -> str:
    return "nothing" if version is None else f"{version[0]}.{version[1]}"
