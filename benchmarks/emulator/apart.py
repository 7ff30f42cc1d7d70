"""Functions in processes of their own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def run_apart(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Calls a function in a process that has done nothing else.

    CuTe DSL reads its settings once, when it is imported; and the memory of a process is that of all it has done.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments, **options).result()
