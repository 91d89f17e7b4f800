"""Activation checkpointing: what a layer computes in forward is forgotten and computed again in backward.

"full" keeps the input of each layer alone. "selective" keeps what attention gave as well: attention is most of the work
of a long sequence and its output no more than another input, so backward makes everything but attention again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flexcp import compat
from flexcp.offload import Store

MODES = ("none", "full", "selective")
_ATTENTION = ("flex_attention", "flexcp.flex_attention.default")  # both doors: torch's operator, and flexcp's own


def checkpoint_layers(layers: Sequence[nn.Module], mode: str, store: Store | None = None) -> None:
    """Replaces the forward of each layer, in place; parameters, their names and the layer's hooks stay.

    Args:
        layers: each called with the residual stream first.
        mode: of MODES.
        store: as in `store_inputs`; None: what is kept stays where it is.

    Raises:
        ValueError: a store, and nothing to be kept in it.
    """
    if mode == "none":
        if store is not None:
            raise ValueError("without checkpoints there is nothing to be stored")
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_attention)}
        options |= compat.selective_checkpoint_options()
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward, options)
    if store is not None:
        store_inputs(layers, store)


def store_inputs(layers: Sequence[nn.Module], store: Store) -> None:
    """Replaces the forward of each layer, in place: what backward keeps of the layer's input lies in the store.

    Around a compiled layer, too, since what a graph keeps for backward is autograd's, as ever.

    Args:
        layers: checkpointed; each called with the residual stream first.
        store: where the inputs lie between forward and backward.
    """
    for layer in layers:
        layer.forward = functools.partial(_stored, layer.forward, store)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


def _stored(forward: Callable[..., Any], store: Store, x: Tensor, *rest: Any) -> Any:
    with store.placing(x):
        return forward(x, *rest)


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operator) in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
