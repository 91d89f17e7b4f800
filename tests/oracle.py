"""Dense attention in float64: what every path is compared with. Imports nothing from flexcp."""

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, score=None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Args: q [B, H, S, D]; k, v [B, G, S, D]; visible bool [B or 1, H or 1, S, S]; score: s [B, H, S, S] -> same.

    Returns out [B, H, S, D] and lse [B, H, S]; rows that see nothing give 0 and -inf.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    s = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score is not None:
        s = score(s)
    s = torch.where(visible, s, -torch.inf)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    # A dead row is given finite scores, so that no NaN reaches its gradient, and is then set to what it must be.
    weights = torch.where(dead, 0.0, torch.softmax(torch.where(dead, 0.0, s), -1))
    lse = torch.where(dead[..., 0], -torch.inf, torch.logsumexp(torch.where(dead, 0.0, s), -1))
    return weights @ v, lse


def results(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, score, bias: Tensor, dout: Tensor, dlse: Tensor):
    """out, lse, dq, dk, dv, dbias of the loss sum(out * dout) + sum(lse * dlse) over rows that see something."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    out, lse = attention(*leaves[:3], visible, None if score is None else lambda s: score(s, leaves[3]))
    loss = (out * dout.double()).sum() + torch.where(lse == -torch.inf, 0.0, lse).mul(dlse.double()).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    values = (out.detach(), lse.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)))
    return dict(zip(names, values))
