"""Long shards on a GPU: indices past 2^31, and checkpoints that leave and come back while memory is used again."""

import pytest
import torch
from torch import Tensor, nn

from flexcp.leanlayer import Lean
from flexcp.models import get_config
from flexcp.offload import Store
from tests import sampled_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own internals
]


@pytest.mark.slow
@pytest.mark.parametrize("length", [524_288, 1_048_576])
def test_rows_past_the_32_bit_limit(length: int) -> None:
    """[length, 4096] has 2^31 and 2^32 elements."""
    lean = Lean(tile=16_384, head_groups=8)
    sampled_rows.check(get_config("llama3-8b"), length, lean, torch.bfloat16, "cuda", atol=3e-2)


def block(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.tanh(x @ weight)


@pytest.mark.parametrize("kept", [0, 2])
def test_offloaded_checkpoints_survive_reuse_of_their_memory(kept: int) -> None:
    """Between layers the caching allocator's free blocks are filled with NaN: a block freed too early would show it."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [nn.Parameter(torch.randn(512, 512, device="cuda", generator=generator) / 20) for _ in range(12)]
    first = torch.randn(1, 16_384, 512, device="cuda", generator=generator, requires_grad=True)
    results = []
    for store in (None, Store("cuda", keep_bytes=kept * first.nbytes)):
        for _ in range(2):
            x = first
            for weight in weights:
                x = block(x, weight) if store is None else store.checkpoint(block, x, weight)
                torch.empty_like(first).fill_(torch.nan)
            x.square().mean().backward()
            results.append([first.grad.clone(), *(weight.grad.clone() for weight in weights)])
            first.grad = None
            for weight in weights:
                weight.grad = None
    for other in results[1:]:
        for one, two in zip(results[0], other):
            assert torch.equal(one, two)
    assert store.host_bytes == (12 - kept) * first.nbytes
