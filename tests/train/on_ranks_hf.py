"""What the tests of checkpoints run in each rank."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import flexcp
from flexcp import masks
from flexcp.gradients import sum_gradients
from flexcp.models import from_pretrained
from tests.train.on_ranks import mesh


def logits_and_gradients(folder: str, tokens: Tensor, labels: Tensor, comm: str) -> dict[str, Any]:
    """Of a folder's model in fp32, causal: logits of the whole row, mean loss, gradients summed over the ranks."""
    model = from_pretrained(folder)
    group_mesh = mesh()
    plan = flexcp.plan(masks.causal(), tokens.shape[1], group_mesh.for_plan, comm=comm, block_size=32)
    mine, targets = plan.shard(tokens, pad=0), plan.shard(labels, pad=-100)
    with flexcp.context_parallel(plan):
        logits = model(mine, plan.positions, plan.block_mask)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        (total / (labels != -100).sum()).backward()
    sum_gradients(model.parameters(), group_mesh.gradient_group)
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"logits": plan.unshard(logits.detach()), "grads": grads}
