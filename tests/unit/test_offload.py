"""Checkpoints come back as they went, from wherever they were; what lies where is as asked for, to the byte."""

import gc

import pytest
import torch
from torch import Tensor, nn

from flexcp.offload import Store

CPU = torch.device("cpu")
SHAPE = (1, 30, 8)  # 960 bytes in fp32: no power of two
BYTES = 960


def block(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x + torch.tanh(x @ weight) * scale


def chain(store: Store | None, layers: int = 6) -> tuple[Tensor, list[Tensor], int]:
    """Loss and gradients of checkpointed layers; and the most bytes of checkpoints on the device in backward."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(8, 8, generator=generator)) for _ in range(layers)]
    first = torch.randn(SHAPE, generator=generator, requires_grad=True)
    scale = torch.rand(30, 1, generator=generator)
    most = 0

    def watch(grad: Tensor) -> None:
        nonlocal most
        most = max(most, store.device_bytes if store else 0)

    x = first
    for weight in weights:
        x = block(x, weight, scale) if store is None else store.checkpoint(block, x, weight, scale)
        x.register_hook(watch)
    loss = x.square().mean()
    del x
    loss.backward()
    return loss.detach(), [first.grad, *(weight.grad for weight in weights)], most


@pytest.mark.parametrize("kept", [0, 1, 3, 6])
def test_offloaded_checkpoints_change_no_gradient(kept: int) -> None:
    loss, grads, _ = chain(None)
    store = Store(CPU, keep_bytes=kept * BYTES)
    for _ in range(2):  # the second step uses the host memory of the first
        got_loss, got, most = chain(store)
        assert torch.equal(got_loss, loss)
        for one, other in zip(got, grads):
            assert torch.equal(one, other)
        # Exactly what did not stay, in exact sizes.
        assert store.host_bytes == (6 - kept) * BYTES
        # In backward one is in use beside those that are allowed to stay, or beside the one that arrives.
        assert most <= (max(kept, 1) + 1) * BYTES
    assert store.moved_bytes == 2 * (6 - kept) * BYTES
    gc.collect()
    assert store.device_bytes == 0


def test_newest_stay_and_oldest_leave() -> None:
    store = Store(CPU, keep_bytes=2 * BYTES)
    kept = [store.put(torch.full(SHAPE, float(i))) for i in range(5)]
    assert [one.here is not None for one in kept] == [False, False, False, True, True]
    assert kept[4].get()[0, 0, 0] == 4
    # The next ones are on their way back before anyone asks, as many as may lie here.
    assert [one.here is not None for one in kept] == [False, False, True, True, True]
    del kept[4]
    for i in (3, 2, 1, 0):
        assert torch.equal(kept[i].get(), torch.full(SHAPE, float(i)))
        del kept[i:]
    assert store.device_bytes == 0


def test_memory_of_what_left_is_free() -> None:
    """A store that held on to device tensors would save nothing."""
    store = Store(CPU, keep_bytes=0)
    x = torch.randn(SHAPE)
    first = store.put(x)
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    del x
    second = store.put(torch.randn(SHAPE))
    assert storage.expired()
    assert first.here is second.here is None


def test_host_limit_is_kept() -> None:
    store = Store(CPU, keep_bytes=BYTES, host_limit=2 * BYTES)
    kept = [store.put(torch.zeros(SHAPE)) for _ in range(3)]
    with pytest.raises(MemoryError, match=r"need 2,880 bytes of host memory, but may take 1,920; allow more"):
        kept.append(store.put(torch.zeros(SHAPE)))
    with pytest.raises(ValueError, match="at least 0"):
        Store(CPU, keep_bytes=-1)


def test_forgotten_checkpoints_give_their_memory_back() -> None:
    """A forward pass without a backward, as in an evaluation that forgot no_grad."""
    store = Store(CPU)
    for _ in range(3):
        store.put(torch.zeros(SHAPE))
    assert store.host_bytes == BYTES


def test_one_tensor_saved_twice_is_placed_once_and_others_are_left_alone() -> None:
    store = Store(CPU)
    x, other = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))
    with store.placing(x):
        y = x * x + x.exp() * other
    assert store.moved_bytes == BYTES
    y.sum().backward()
    torch.testing.assert_close(x.grad, (2 * x + x.exp() * other).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_halves_the_bytes_within_the_stated_error(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 50, 64, generator=generator).mul(torch.logspace(-6, 6, 50)[:, None]).to(dtype)
    x[0, 3] = 0
    x[1, 4, 1:] = 0
    store = Store(CPU, keep_bytes=0, fp8=True)
    kept = store.put(x)
    assert store.host_bytes == x.numel() + 4 * x[..., 0].numel()
    got = kept.get()
    assert got.dtype == dtype
    # bf16 rounds once more, by half of 2^-8.
    allowed = x.float().abs() * (1 / 16 + 1 / 512) + 2.2e-6 * x.float().abs().amax(-1, keepdim=True)
    error = (got.float() - x.float()).abs()
    assert (error <= allowed).all()
    assert (error.amax(-1)[x.abs().amax(-1) > 0] > 0).any(), "nothing was rounded: this is no fp8"
    whole = torch.arange(6).view(2, 3)
    assert torch.equal(store.put(whole).get(), whole)
    assert torch.equal(store.put(torch.zeros(0, 4)).get(), torch.zeros(0, 4))
