"""The native library's custom calls in a program, on a machine that need not have a GPU."""

import re
from collections.abc import Callable
from typing import Any

import jax

import jax_fp4attn


def lower(
    function: Callable[..., Any],
    *arguments: Any,
    capability: tuple[int, int] = (10, 0),
    platforms: tuple[str, ...] = ("cuda",),
) -> str:
    """The program of a function for a GPU that this machine need not have."""
    with jax_fp4attn.cross_compile(capability):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=platforms).as_text()


def calls(program: str) -> list[tuple[str, dict[str, str], list[str], list[str]]]:
    """(target, attributes, operand types, result types) of every custom call of the library, in order."""
    found = re.findall(
        r"custom_call @(jax_fp4attn_\w+)\(.*?\) \{.*?backend_config = \{(.*?)\}, .*?\} : \((.*?)\) -> (.*)", program
    )
    types = lambda text: re.findall(r"tensor<([^>]*)>", text)  # noqa: E731
    return [(target, _attributes(text), types(operands), types(results)) for target, text, operands, results in found]


def _attributes(text: str) -> dict[str, str]:
    pairs = re.findall(r'(\w+) = ("[^"]*"|[^,]+)', text)
    return {name: value.strip('"').split(" : ")[0] for name, value in pairs}


def targets(program: str) -> list[str]:
    return [target for target, *_ in calls(program)]
