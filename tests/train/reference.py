"""Training without flexcp's engine: the same model over dense float64 attention, one process."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexcp.data import IGNORE, Batch
from flexcp.models import llama3
from tests import oracle


def causal_documents(doc_ids: Tensor) -> Tensor:
    """Visible pairs of causal attention within documents: bool [B, 1, S, S]."""
    size = doc_ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    return ((doc_ids[:, :, None] == doc_ids[:, None, :]) & causal)[:, None]


def loss_and_gradients(model: nn.Module, batch: Batch, visible: Tensor, score=None) -> tuple[float, list[Tensor]]:
    """The mean cross entropy of a batch and its gradient with respect to each parameter; see `token_losses`."""
    loss = token_losses(model, batch, visible, score).sum() / (batch.labels != IGNORE).sum()
    return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))


def token_losses(model: nn.Module, batch: Batch, visible: Tensor, score=None) -> Tensor:
    """The cross entropy of each token, [B, S]; 0 where it has no label.

    Args:
        visible: bool [B or 1, H or 1, S, S].
        score: changes the dense scores s [B, H, S, S], in place of the score_mod that the model passes.
    """

    def dense(q, k, v, *, score_mod=None, block_mask=None, enable_gqa=False):
        return oracle.attention(q, k, v, visible, score)[0]

    attentions = [module for module in model.modules() if isinstance(module, llama3.Attention)]
    originals = [module.attend for module in attentions]
    for module in attentions:
        module.attend = dense
    try:
        logits = model(batch.tokens, batch.positions, None)
    finally:
        for module, original in zip(attentions, originals):
            module.attend = original
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(batch.labels)
