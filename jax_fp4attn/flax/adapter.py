"""`attention_fn`: the operator in the signature that Flax's attention layers call.

Linen passes only the arguments that it finds by name in the signature, NNX passes all of its own; hence one signature
that names every argument of both. Each is honoured or refused, never dropped.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import dtypes
from jax.typing import ArrayLike, DTypeLike

from jax_fp4attn.api import attention
from jax_fp4attn.config import ContextOrder
from jax_fp4attn.recipe import Recipe

__all__ = ["AttentionFn", "attention_fn", "make_attention_fn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFn:
    """A function for the ``attention_fn`` of Flax's attention layers; made by :func:`make_attention_fn`.

    Adapters with equal attributes are equal, so building a model again does not compile it again.

    Attributes:
      is_causal: Whether attention is causal even if the layer does not ask for it.
      recipe: As in :func:`jax_fp4attn.attention`.
      scale: As in :func:`jax_fp4attn.attention`.
      implementation: As in :func:`jax_fp4attn.attention`.
      local_window_size: As in :func:`jax_fp4attn.attention`.
      context_axis: As in :func:`jax_fp4attn.attention`.
      context_order: As in :func:`jax_fp4attn.attention`.
    """

    is_causal: bool = False
    recipe: Recipe | None = None
    scale: float | None = None
    implementation: str | tuple[str, ...] | None = None
    local_window_size: int | tuple[int, int] | None = None
    context_axis: str | None = None
    context_order: ContextOrder = "contiguous"

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        *,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Any] | None = None,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
        promote_dtype: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attention, as Flax's layers call it.

        Args:
          query: [*B, T, N, H].
          key: [*B, S, K, H]; K divides N.
          value: [*B, S, K, H].
          bias: Floating, broadcastable to [*B, N, T, S] with all its dimensions present.
          mask: Broadcastable to [*B, N, T, S] with all its dimensions present; what is not 0 (or False) keeps, as in
            Flax, whose helpers make float32 masks of 0 and 1. Values cannot be checked under ``jit``: an additive mask
            (0 keeps, -inf drops) would be inverted; pass it as ``bias``.
          broadcast_dropout: Has no effect, because dropout is refused.
          dropout_rng: Has no effect, because dropout is refused.
          dropout_rate: 0 unless ``deterministic``.
          deterministic: Whether dropout is off.
          dtype: Query, key and value are cast to it; None for the dtype that the three promote to. The result must be
            bfloat16 or float32.
          precision: None or ``jax.lax.Precision.DEFAULT``: the recipe fixes every rounding.
          module: None; the attention weights that ``sow_weights`` asks for never exist.
          force_fp32_for_softmax: Has no effect: scores and softmax are float32 always.
          einsum_dot_general: None.
          qk_attn_weights_einsum: None.
          attn_weights_value_einsum: None.
          promote_dtype: Called as ``promote_dtype((query, key, value), dtype=dtype)``, as NNX does; None for Flax's.
          is_causal: Query i sees keys j <= i; also on if the adapter was made so.

        Returns:
          [*B, T, N, H].

        Raises:
          NotImplementedError: For dropout, ``module``, a precision, custom einsums, and a causal query of length 1
            against more keys.
          ValueError: For a shape or a value that does not fit; the message names the argument.
          TypeError: For a dtype or a type that is not accepted.
        """
        _refuse_dropout(dropout_rate, deterministic)
        _refuse_module(module)
        _refuse_precision(precision)
        _refuse_einsums(
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if promote_dtype is None:
            query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        if not isinstance(is_causal, bool | np.bool_):
            raise TypeError(f"is_causal: expected a Python bool, got {type(is_causal).__name__}")
        is_causal = bool(is_causal) or self.is_causal
        _refuse_causal_decoding(is_causal, query, key)
        return attention(
            query,
            key,
            value,
            _check_rank("bias", bias, query, key),
            _keep(_check_rank("mask", mask, query, key)),
            scale=self.scale,
            is_causal=is_causal,
            local_window_size=self.local_window_size,
            recipe=self.recipe,
            implementation=self.implementation,
            context_axis=self.context_axis,
            context_order=self.context_order,
        )


def make_attention_fn(
    *,
    is_causal: bool = False,
    recipe: Recipe | None = None,
    scale: float | None = None,
    implementation: str | Sequence[str] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    context_axis: str | None = None,
    context_order: ContextOrder = "contiguous",
) -> AttentionFn:
    """Makes an ``attention_fn`` for the attention layers of Linen and NNX.

    Prefer ``is_causal`` here, or in the call of the NNX layer, to a dense causal mask. The mask gives the same visible
    keys, but it is read in full, skips no work, runs in the reference implementation only, and does not count as
    causal when the recipe is chosen: with ``recipe=None`` attention uses ``recipes.train`` under ``is_causal`` and
    ``recipes.square`` otherwise, whatever the mask holds.

    When a layer decodes against a cache it passes one query and a mask of the positions filled so far, so decode with
    an adapter that is not causal. It then needs the recipe of training by name:
    ``make_attention_fn(recipe=recipes.train)``.

    Args:
      is_causal: Whether query i sees only keys j <= i. Linen's layers cannot ask for it themselves; NNX's can, from
        Flax 0.12.8 on.
      recipe: Numerical choices; None for ``recipes.train`` if causal and ``recipes.square`` otherwise.
      scale: Softmax scale, a positive Python number; None for ``1 / sqrt(H)``.
      implementation: None for the best that can run, "cuda", "reference", or a sequence to try in order.
      local_window_size: (left, right) or one int for both: query i sees keys i - left <= j <= i + right.
      context_axis: Mesh axis over which the sequence is split, for ring attention.
      context_order: Order of the split sequence, see :func:`jax_fp4attn.attention`.

    Returns:
      The function. It raises what :class:`AttentionFn` says; the arguments above are checked when it is called.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jax_fp4attn.flax import make_attention_fn
      >>> causal = make_attention_fn(is_causal=True)
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=causal)
      >>> x = jnp.ones((1, 4, 32))
      >>> output, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x)
      >>> output.shape
      (1, 4, 32)
    """
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        implementation = tuple(implementation)
    if isinstance(local_window_size, Sequence | np.ndarray) and np.ndim(local_window_size) == 1:
        local_window_size = tuple(local_window_size)  # type: ignore[assignment]  # attention() checks how many.
    return AttentionFn(
        is_causal=is_causal,
        recipe=recipe,
        scale=scale,
        implementation=implementation,
        local_window_size=local_window_size,
        context_axis=context_axis,
        context_order=context_order,
    )


attention_fn = make_attention_fn()
"""The adapter with all defaults, for ``linen.MultiHeadDotProductAttention`` and ``nnx.MultiHeadAttention`` alike."""


def _refuse_dropout(rate: float, deterministic: bool) -> None:
    if not deterministic and rate > 0:
        raise NotImplementedError(
            f"dropout_rate: expected 0 or deterministic=True, got {rate} with deterministic={deterministic}; attention "
            "weights are not stored, so they cannot be dropped; apply dropout to the layer's output instead"
        )


def _refuse_module(module: Any) -> None:
    if module is not None:
        raise NotImplementedError(
            f"module: expected None, got {type(module).__name__}; attention weights are not stored, so they cannot be "
            "sown; call the layer with sow_weights=False"
        )


def _refuse_precision(precision: Any) -> None:
    if not _is_default(precision):
        raise NotImplementedError(
            f"precision: expected None or jax.lax.Precision.DEFAULT, got {precision!r}; the recipe fixes every rounding"
            " of attention. Choose another recipe, such as recipes.bf16, and raise the precision of the layer's "
            "projections with jax.default_matmul_precision"
        )


def _is_default(precision: Any) -> bool:
    if precision is None:
        return True
    if isinstance(precision, tuple | list):
        return all(_is_default(side) for side in precision)
    try:
        return jax.lax.Precision(precision) is jax.lax.Precision.DEFAULT
    except ValueError:
        return False


def _refuse_einsums(**einsums: Callable[..., Any] | None) -> None:
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(
                f"{name}: expected None, got {einsum!r}; the operator has its own matrix products. Leave it out, or "
                "use Flax's own attention_fn for this layer"
            )


def _refuse_causal_decoding(is_causal: bool, query: jax.Array, key: jax.Array) -> None:
    if is_causal and query.ndim >= 3 and key.ndim >= 3 and query.shape[-3] == 1 < key.shape[-3]:
        raise NotImplementedError(
            f"is_causal: expected False for one query and S={key.shape[-3]} keys, got True; causality is aligned at "
            "the first key, so the query would see that key alone. To decode against a cache, rely on the mask that "
            "the layer makes and pass attention_fn=make_attention_fn(recipe=recipes.train), without is_causal"
        )


def _check_rank(name: str, x: ArrayLike | None, query: jax.Array, key: jax.Array) -> jax.Array | None:
    if x is None:
        return None
    array = jnp.asarray(x)
    # Queries and keys that do not fit each other are left to the operator's own checks.
    if array.ndim != query.ndim and query.ndim == key.ndim >= 3:
        *batch, length, num_heads, _ = query.shape
        expected = (*batch, num_heads, length, key.shape[-3])
        if array.ndim > query.ndim:
            advice = "flax's make_causal_mask takes token ids [*B, T], not features [*B, T, D]"
        else:
            advice = "insert axes of size 1"
        raise ValueError(
            f"{name}: expected [*B, N, T, S] = {expected} or 1 in place of any of them, got shape {array.shape}; "
            f"{advice}"
        )
    return array


def _keep(mask: jax.Array | None) -> jax.Array | None:
    return mask if mask is None or mask.dtype == jnp.bool_ else mask != 0
