"""Where activation checkpoints lie between forward and backward: the newest on the device, the rest in host memory.

Backward asks for checkpoints in the reverse of the order in which forward made them. So the newest stay where they are,
the oldest leave as newer ones come, and while backward works on one the next is on its way back. Each way has a stream
of its own. Host memory is taken in exact sizes, since torch rounds pinned memory up to powers of two, and kept from
step to step.

On a CPU, whose streams are empty shells, the same code copies from memory to memory.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_ENCODED_AT_ONCE = 1 << 24  # elements that are turned into fp8 at a time, through fp32


class Store:
    """Keeps tensors for backward, the newest on the device and older ones in host memory.

    A block of device memory is never reused too early: a tensor that leaves is held until the stream that computes has
    been told to wait for its copy, and one that comes back is written only after whatever used its memory before.

    >>> store = Store(torch.device("cpu"), keep_bytes=0)
    >>> kept = store.put(torch.arange(3.0))
    >>> store.host_bytes, store.get(kept).tolist()
    (12, [0.0, 1.0, 2.0])

    Args:
        device: where the tensors are needed.
        keep_bytes: of checkpoints that stay on the device, the newest ones; 0: each leaves at once.
        host_limit: bytes of host memory that may be taken; None: whatever there is.
        fp8: store floating-point tensors of at least two dimensions in float8_e4m3fn with one fp32 scale for each row
            (the last dimension), on the device as on the host. Lossy: an element comes back within 1/16 of itself, or
            of 2.2e-6 of the largest in its row.
    Raises:
        ValueError: a negative limit.
    """

    def __init__(
        self, device: torch.device | str, *, keep_bytes: int = 0, host_limit: int | None = None, fp8: bool = False
    ) -> None:
        if keep_bytes < 0 or (host_limit is not None and host_limit < 0):
            raise ValueError(f"limits are bytes, at least 0, got keep_bytes={keep_bytes} and host_limit={host_limit}")
        self.device = torch.device(device)
        self.keep_bytes, self.fp8 = keep_bytes, fp8
        self._slabs = _Slabs(self.device, host_limit)
        self._module = torch.get_device_module(self.device)
        self._leaves, self._returns = self._module.Stream(), self._module.Stream()
        # In the order of `put`. Weak, since what forgets a checkpoint (autograd, after use) frees it.
        self._kept: dict[int, weakref.ref[Kept]] = {}
        self._leaving: list[tuple[Any, tuple[Tensor, ...]]] = []
        self._number = 0
        self.moved_bytes = 0  # to the host, since the store was made

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the store holds, whether they are in use or wait for the next step."""
        return self._slabs.total_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of checkpoints that lie on the device, those on their way included."""
        return sum(kept.nbytes for kept in self._alive() if kept.here is not None)

    def put(self, x: Tensor) -> "Kept":
        """Takes a tensor over; nothing may write into it any more, and the caller drops it to free its memory."""
        x = x.detach()
        parts = _to_fp8(x) if self.fp8 and x.is_floating_point() and x.ndim >= 2 else (x.contiguous(),)
        kept = Kept(self, self._number, x.dtype, parts)
        self._kept[self._number] = weakref.ref(kept)
        self._number += 1
        here = [other for other in self._alive() if other.here is not None]
        total = sum(other.nbytes for other in here)
        for oldest in here:
            if total <= self.keep_bytes:
                break
            total -= oldest.nbytes
            self._send(oldest)
        return kept

    def get(self, kept: "Kept") -> Tensor:
        """The tensor again, on the device; starts to bring back those that will be wanted next."""
        self._forget_left()
        if kept.here is None:
            self._bring(kept)
        older = [other for other in self._alive() if other.number < kept.number]
        room = self.keep_bytes - sum(other.nbytes for other in older if other.here is not None)
        for other in reversed([other for other in older if other.here is None]):
            # One is always on its way, though nothing was to stay.
            if room < other.nbytes and any(one.here is not None for one in older):
                break
            self._bring(other)
            room -= other.nbytes
        kept.settle()
        assert kept.here is not None
        return kept.here[0] if len(kept.here) == 1 else _from_fp8(*kept.here, kept.dtype)

    @contextmanager
    def placing(self, *tensors: Tensor) -> Iterator[None]:
        """Inside, what autograd saves of these tensors goes through the store, once each; the rest is saved as ever."""
        wanted = {_identity(x) for x in tensors}
        placed: weakref.WeakValueDictionary[tuple, Kept] = weakref.WeakValueDictionary()

        def pack(x: Tensor) -> "Tensor | Kept":
            if (key := _identity(x)) not in wanted:
                return x
            if (kept := placed.get(key)) is None:
                kept = placed[key] = self.put(x)
            return kept

        def unpack(saved: "Tensor | Kept") -> Tensor:
            return self.get(saved) if isinstance(saved, Kept) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def checkpoint(self, function: Callable[..., Any], x: Tensor, *rest: Any, **options: Any) -> Any:
        """torch's non-reentrant checkpoint of function(x, *rest), with x in the store.

        Args:
            rest: further arguments, saved as ever.
            options: of torch.utils.checkpoint.checkpoint, such as context_fn.
        """
        with self.placing(x):
            return checkpoint(function, x, *rest, use_reentrant=False, **options)

    def _alive(self) -> "list[Kept]":
        return [kept for reference in self._kept.values() if (kept := reference()) is not None]

    def _send(self, kept: "Kept") -> None:
        """Starts a copy to the host. The tensor is let go with the next such call: two are never held for this."""
        assert kept.here is not None
        kept.settle()
        if kept.slabs is None:  # else the host has it already
            self._forget_left()
            kept.slabs = [self._slabs.take(part.nbytes) for part in kept.here]
            self._leaves.wait_stream(self._here_and_now())
            with self._module.stream(self._leaves):
                for part, slab in zip(kept.here, kept.slabs):
                    slab.view(part).copy_(part, non_blocking=True)
                left = self._event(self._leaves)
            self._leaving = [(left, kept.here)]
            self.moved_bytes += kept.nbytes
        kept.shapes = [(part.shape, part.dtype) for part in kept.here]
        kept.here = None

    def _bring(self, kept: "Kept") -> None:
        """Starts a copy from the host; `Kept.settle` waits for it."""
        assert kept.slabs is not None
        # Allocated on the stream that computes, whose earlier work may still use this memory: hence the wait.
        kept.here = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in kept.shapes)
        self._returns.wait_stream(self._here_and_now())
        self._returns.wait_stream(self._leaves)
        with self._module.stream(self._returns):
            for part, slab in zip(kept.here, kept.slabs):
                part.copy_(slab.view(part), non_blocking=True)
            kept.arrived = self._event(self._returns)

    def _forget_left(self) -> None:
        """Lets the tensors go that have left; their memory is reused after the copy only."""
        for left, _ in self._leaving:
            self._here_and_now().wait_event(left)
        self._leaving = []

    def _drop(self, kept: "Kept") -> None:
        self._kept.pop(kept.number, None)
        kept.settle()
        if kept.slabs is not None:
            # A later copy into them must come after this one out of them.
            self._leaves.wait_stream(self._returns)
            self._slabs.give_back(kept.slabs)

    def _here_and_now(self) -> Any:
        """The stream that computes."""
        return self._module.current_stream(self.device)

    def _event(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event


class Kept:
    """One tensor in a `Store`. It lies there for as long as somebody holds this.

    Attributes:
        number: counts what was put into the store.
        dtype: of the tensor.
        nbytes: what it takes, on the device or on the host.
        here: what it consists of on the device, perhaps still on its way; None while only the host has it.
        slabs: the same on the host; None as long as it has not left.
    """

    def __init__(self, store: Store, number: int, dtype: torch.dtype, here: tuple[Tensor, ...]) -> None:
        self.store, self.number, self.dtype = store, number, dtype
        self.here: tuple[Tensor, ...] | None = here
        self.nbytes = sum(part.nbytes for part in here)
        self.shapes = [(part.shape, part.dtype) for part in here]
        self.slabs: list[_Slab] | None = None
        self.arrived: Any = None

    def get(self) -> Tensor:
        """The tensor, on the device."""
        return self.store.get(self)

    def settle(self) -> None:
        """Makes the stream that computes wait for a copy under way."""
        if self.arrived is not None:
            self.store._here_and_now().wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        self.store._drop(self)


@dataclass(frozen=True, eq=False)
class _Slab:
    """A piece of host memory of exactly the size that was asked for."""

    memory: Tensor

    def view(self, like: Tensor) -> Tensor:
        return self.memory.view(like.dtype).view(like.shape)


@dataclass
class _Slabs:
    """Host memory, pinned where there is a GPU, in pieces of exact sizes that are used again."""

    device: torch.device
    limit: int | None
    total_bytes: int = 0
    free: dict[int, list[_Slab]] = field(default_factory=dict)

    def take(self, nbytes: int) -> _Slab:
        if waiting := self.free.get(nbytes):
            return waiting.pop()
        if self.limit is not None and self.total_bytes + nbytes > self.limit:
            raise MemoryError(
                f"checkpoints need {self.total_bytes + nbytes:,} bytes of host memory, but may take {self.limit:,}; "
                "allow more, keep more of them on the device, or checkpoint fewer layers"
            )
        # Written to by all threads before it is registered, which would find its pages one by one.
        slab = _Slab(torch.empty(nbytes, dtype=torch.uint8).zero_())
        if self.device.type == "cuda" and nbytes:
            _pin(slab)
        self.total_bytes += nbytes
        return slab

    def give_back(self, slabs: list[_Slab]) -> None:
        for slab in slabs:
            self.free.setdefault(slab.memory.nbytes, []).append(slab)


def _pin(slab: _Slab) -> None:
    """Registers memory with CUDA, so that copies run beside the computation, until it is freed."""
    address, nbytes = slab.memory.data_ptr(), slab.memory.nbytes
    status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if int(status) != 0:
        raise MemoryError(f"{nbytes:,} bytes of host memory cannot be pinned (CUDA error {int(status)}); offload less")
    weakref.finalize(slab, _unpin, address, slab.memory)


def _unpin(address: int, memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
    del memory  # held until here


def _identity(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [..., N], fp32 scale [..., 1])."""
    rows = x.reshape(-1, x.shape[-1])
    codes = torch.empty(rows.shape, dtype=_FP8, device=x.device)
    scale = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=x.device)
    step = max(1, _ENCODED_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        wide = rows[start : start + step].float()
        largest = wide.abs().amax(1, keepdim=True)
        scale[start : start + step] = torch.where(largest > 0, largest / _FP8_MAX, 1.0)
        codes[start : start + step] = (wide / scale[start : start + step]).to(_FP8)
    return codes.view(x.shape), scale.view(*x.shape[:-1], 1)


def _from_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows, factors = codes.reshape(-1, codes.shape[-1]), scale.reshape(-1, 1)
    out = torch.empty(rows.shape, dtype=dtype, device=codes.device)
    step = max(1, _ENCODED_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        out[start : start + step] = rows[start : start + step].float() * factors[start : start + step]
    return out.view(codes.shape)
