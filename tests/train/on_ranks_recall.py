"""Training and evaluating the recall task on the ranks of a group."""

from typing import Any

import torch

import flexcp
from flexcp import masks
from flexcp.evaluate import Evaluation, evaluate
from flexcp.models import Llama3Config, build
from flexcp.optim import Optimizer, learning_rate
from flexcp.recall import RecallTask
from flexcp.step import accumulate
from tests.train.on_ranks import mesh

TASK = RecallTask(seq_len=128, batch=16)
# RoPE with so large a base turns most pairs of features slowly: a key is the same key from far away.
MODEL = Llama3Config(
    vocab_size=TASK.vocab_size,
    **{"dim": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 128, "head_dim": 32},
    rope_theta=1e8,
    init_std=0.1,
)
HELD_OUT = 1_000_000  # steps from here on are never trained on
EDGES = [0, 32, 64, 96]


def run(steps: int, weights: dict[str, torch.Tensor] | None = None, window: int | None = None) -> dict[str, Any]:
    """Trains from the weights (or anew), with an evaluation before and after; window: a mask that sees no further."""
    group_mesh = mesh()
    mask = masks.causal() if window is None else masks.causal() & masks.sliding_window(window)
    plan = flexcp.plan(mask, TASK.seq_len, group_mesh.for_plan, block_size=32)
    model = build(MODEL, seed=0)
    if weights is not None:
        model.load_state_dict(weights)

    def held_out() -> Evaluation:
        batches = (TASK.rows(HELD_OUT + step) for step in range(8))
        return evaluate(model, batches, lambda batch: plan, group_mesh, EDGES)

    before = held_out()
    optimizer = Optimizer(model, weight_decay=0.0, group=group_mesh.gradient_group)
    losses = []
    for step in range(steps):
        batch, _ = TASK.rows(step + (0 if weights is None else 10_000))
        optimizer.begin(step, learning_rate(step, steps, 20, 5e-3) if weights is None else 1e-3)
        loss, *_ = accumulate(model, batch, lambda micro: plan, group_mesh)
        losses.append(loss)
        optimizer.step(1.0)
    return {"before": before, "after": held_out(), "losses": losses, "weights": model.state_dict()}
