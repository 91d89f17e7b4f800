"""A lean layer over many tokens, checked on sampled rows: a row's result must not depend on where it stands."""

from dataclasses import replace

import torch

import flexcp
from flexcp import masks
from flexcp.leanlayer import Lean, make_lean
from flexcp.models import Llama3Config
from flexcp.models.llama3 import Layer
from flexcp.models.rope import rope_table

WINDOW, ROWS = 64, 32


def check(config: Llama3Config, length: int, lean: Lean, dtype: torch.dtype, device: str, atol: float) -> None:
    """Compares output and gradient of rows at the beginning, in the middle and at the end with a layer over those
    rows and the ones they see alone."""
    torch.manual_seed(0)
    layer = Layer(replace(config, num_layers=1)).to(device, dtype)
    pattern = torch.randn(1, 4096, config.dim, device=device, dtype=dtype)
    repeats = -(-length // 4096)
    x = pattern.repeat(1, repeats, 1)[:, :length].requires_grad_()
    mask = masks.causal() & masks.sliding_window(WINDOW)
    firsts = [WINDOW, length // 2 - ROWS // 2, length - ROWS]
    wanted = []
    for first in firsts:
        start = first - WINDOW
        some = x.detach()[:, start : first + ROWS].clone().requires_grad_()
        plan = flexcp.plan(mask, some.shape[1], 1, device=device)
        padded = plan.shard(some, dim=1)
        positions = (torch.arange(padded.shape[1], device=device) + start)[None]
        cos, sin = rope_table(positions, config.head_dim, 5e5, dtype)
        with flexcp.context_parallel(plan):
            y = layer(padded, cos, sin, plan.block_mask, None)[:, WINDOW : WINDOW + ROWS]
            (gradient,) = torch.autograd.grad(y.square().sum(), some)
        wanted.append((y.detach(), gradient))
    make_lean([layer], lean)
    plan = flexcp.plan(mask, length, 1, device=device)
    cos, sin = rope_table(plan.positions, config.head_dim, 5e5, dtype)
    with flexcp.context_parallel(plan):
        y = layer(x, cos, sin, plan.block_mask, None)
        rows = [y[:, first : first + ROWS] for first in firsts]
        sum(part.square().sum() for part in rows).backward()
    for first, part, (y_there, gradient) in zip(firsts, rows, wanted):
        torch.testing.assert_close(part.detach(), y_there, rtol=atol, atol=atol)
        got = x.grad[:, first - WINDOW : first + ROWS]
        torch.testing.assert_close(got, gradient, rtol=atol, atol=atol * float(gradient.abs().max()))
