"""Activation checkpointing: what a layer computes in forward is forgotten and computed again in backward.

"full" keeps the input of each layer alone. "selective" keeps what attention gave as well: attention is most of the work
of a long sequence and its output no more than another input, so backward makes everything but attention again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flexcp.offload import Store

MODES = ("none", "full", "selective")
_ATTENTION = ("flex_attention", "flexcp.flex_attention.default")  # both doors: torch's operator, and flexcp's own


def checkpoint_layers(layers: Sequence[nn.Module], mode: str, store: Store | None = None) -> None:
    """Replaces the forward of each layer, in place; parameters, their names and the layer's hooks stay.

    Args:
        layers: each called with the residual stream first.
        mode: of MODES.
        store: where the layers' inputs lie between forward and backward; None: where they are.

    Raises:
        ValueError: a store, and nothing to be kept in it.
    """
    if mode == "none":
        if store is not None:
            raise ValueError("without checkpoints there is nothing to be stored")
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer.forward, store, options)


def _checkpointed(forward: Callable[..., Any], store: Store | None, options: dict[str, Any], *inputs: Any) -> Any:
    if store is None:
        return checkpoint(forward, *inputs, use_reentrant=False, **options)
    return store.checkpoint(forward, *inputs, **options)


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operator) in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
