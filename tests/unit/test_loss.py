"""The loss by chunks equals the loss of all logits, gradients too, and never holds them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexcp.loss import chunked_loss
from tests.live_memory import LiveMemory

B, S, C, V = 2, 45, 16, 300


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Parameter, Tensor, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, C, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(V, C, generator=generator).to(dtype))
    labels = torch.randint(V, (B, S), generator=generator)
    labels[0, 10:30] = -100
    norm = nn.LayerNorm(C).to(dtype)
    return x, weight, labels, norm


def reference(x: Tensor, weight: Tensor, labels: Tensor, norm: nn.Module, z_loss: float, divide_by: float) -> Tensor:
    logits = F.linear(norm(x), weight).flatten(0, 1).double()
    counted = labels.flatten() != -100
    z = (logits.logsumexp(-1).square() * counted).sum()
    return (F.cross_entropy(logits, labels.flatten(), reduction="sum") + z_loss * z) / divide_by


@pytest.mark.parametrize("chunk", [0, 1, 7, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_the_loss_of_all_logits(chunk: int, z_loss: float) -> None:
    x, weight, labels, norm = inputs()
    want = reference(x, weight, labels, norm, z_loss, 17.0) * 3
    leaves = [x, weight, *norm.parameters()]
    want_grads = torch.autograd.grad(want, leaves)
    more = {"norm": norm, "norm_parameters": list(norm.parameters())}
    got = chunked_loss(x, weight, labels, chunk=chunk, divide_by=17.0, z_loss=z_loss, **more) * 3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for one, other in zip(torch.autograd.grad(got, leaves), want_grads):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert chunked_loss(x, weight, labels, chunk=chunk, divide_by=17.0, z_loss=z_loss, **more) * 3 == got


def test_all_ignored_is_zero_and_not_nan() -> None:
    x, weight, labels, _ = inputs()
    loss = chunked_loss(x, weight, torch.full_like(labels, -100), chunk=8)
    loss.backward()
    assert loss == 0
    assert x.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_the_heads_gradient_is_summed_in_fp32() -> None:
    """In bf16 a sum over 90 chunks of one token would lose what is smaller than 1/256 of it."""
    x, weight, labels, norm = inputs()
    want = torch.autograd.grad(reference(x, weight, labels, norm, 0.0, 1.0), weight)[0]
    low = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]
    for chunk in (1, 0):
        loss = chunked_loss(*low, labels, norm=norm.bfloat16(), norm_parameters=list(norm.parameters()), chunk=chunk)
        got = torch.autograd.grad(loss, low[1])[0]
        assert (got.double() - want).abs().max() <= 2**-6 * want.abs().max()


def test_never_holds_the_logits_of_the_sequence() -> None:
    x, weight, labels, _ = inputs(torch.float32)
    peaks = {}
    for chunk in (0, 5):
        with LiveMemory() as memory:
            chunked_loss(x, weight, labels, chunk=chunk).backward()
        peaks[chunk] = memory.peak_bytes
        x.grad = weight.grad = None
    logits = B * S * V * 4
    print(f"peak of {B * S} tokens' loss at once {peaks[0]:,} bytes, by chunks of 5 {peaks[5]:,}; logits {logits:,}")
    assert peaks[0] > logits
    # What remains is the head's gradient, its fp32 sum and one chunk's part, and that of x.
    assert peaks[5] < 3.1 * weight.nbytes + 2 * x.nbytes + 5 * logits / (B * S) * 5


def test_wrong_shapes_and_labels_are_refused() -> None:
    x, weight, labels, _ = inputs()
    with pytest.raises(ValueError, match=r"not \[2, 44\], \[2, 45, 16\] and \[300, 16\]"):
        chunked_loss(x, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="more than 0, got 2048 and 0"):
        chunked_loss(x, weight, labels, divide_by=0)
    for wrong in (V, -1):
        bad = labels.clone()
        bad[1, 3] = wrong
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            chunked_loss(x, weight, bad)


def test_backward_twice_is_refused() -> None:
    x, weight, labels, _ = inputs()
    loss = chunked_loss(x, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
