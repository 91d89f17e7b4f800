"""What the tests of checkpoints run in each rank: a small model under any mesh, stepped, saved, loaded."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flexcp.checkpoint import Checkpointer, Ranks
from flexcp.manifest import newest, read_manifest
from flexcp.restore import fill
from flexcp.saves import make_states, state_tensors

# Halves of the matrices are just large enough for 8-bit states, quarters are not.
DIM, HIDDEN = 32, 256


# torchao compiles its steps, which takes longer on a CPU than all of these tests.
as_written = torch.compiler.set_stance("force_eager")


class Net(nn.Module):
    """Two matrices as tensor parallelism divides them, rows that ranks do not divide equally, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.gain, self.odd = nn.Parameter(torch.ones(5)), nn.Parameter(torch.randn(7, 3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def build(layout: dict[str, int], seed: int, dtype: torch.dtype = torch.float32) -> Net:
    """The same model at every layout: axes of {"replicate", "shard", "tp"}; none: plain tensors."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    if not layout:
        return net
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    if "tp" in layout:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if names := tuple(name for name in ("replicate", "shard") if name in layout):
        fully_shard(net, mesh=mesh[names] if len(names) > 1 else mesh[names[0]])
    return net


def optimizer_of(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    """"adamw", or torchao's "8bit" and "8bit+sr" (bf16, rounded stochastically)."""
    if kind == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns of torch when it is imported
        from torchao.optim import AdamW8bit
    return AdamW8bit(net.parameters(), lr=1e-3, bf16_stochastic_round=kind == "8bit+sr")


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step on gradients that are the same numbers at any layout."""
    for number, param in enumerate(net.parameters()):
        torch.manual_seed(1000 * seed + number)
        whole = torch.randn(param.shape).to(param.dtype)
        param.grad = whole if not isinstance(param, DTensor) else _like(whole, param)
    optimizer.step()
    net.seen += seed


def _like(whole: Tensor, param: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    if any(hasattr(placement, "split_factor") for placement in param.placements):
        from flexcp.shards import box_of

        box = box_of(param)
        local = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))].clone()
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    return distribute_tensor(whole, param.device_mesh, param.placements)


def all_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    params = list(net.parameters())
    return state_tensors(net, SimpleNamespace(params=params, masters=params, inner=optimizer))


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor, gathered, as values."""
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            if hasattr(local, "dequantize"):
                tensor = DTensor.from_local(
                    local.dequantize(), tensor.device_mesh, tensor.placements, run_check=False,
                    shape=tensor.shape, stride=tensor.stride(),
                )  # fmt: skip
            tensor = tensor.full_tensor()
        elif hasattr(tensor, "dequantize") and type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
            tensor = tensor.dequantize()
        found[name] = tensor.detach().clone()
    return found


@as_written
def save(root: str, layout: dict[str, int], kind: str, dtype: str = "float32") -> dict[str, Tensor]:
    """Two steps, a save; the values that were saved."""
    net = build(layout, seed=0, dtype=getattr(torch, dtype))
    optimizer = optimizer_of(kind, net)
    for seed in (1, 2):
        step(net, optimizer, seed)
    saver = Checkpointer(Path(root), Ranks(dist.get_world_size()), asynchronous=True)
    saver.save(2, all_tensors(net, optimizer), {"by": layout}, {})
    saver.close()
    return whole(all_tensors(net, optimizer))


@as_written
def load(root: str, layout: dict[str, int], kind: str, dtype: str = "float32", further: int = 0) -> dict[str, Any]:
    """A fresh model of other weights at any layout, filled; `further` steps on."""
    net = build(layout, seed=9, dtype=getattr(torch, dtype))
    optimizer = optimizer_of(kind, net)
    make_states(optimizer)
    folder = newest(Path(root))[0]
    fill(folder, read_manifest(folder), all_tensors(net, optimizer))
    for seed in range(3, 3 + further):
        step(net, optimizer, seed)
    return whole(all_tensors(net, optimizer))


@as_written
def save_and_go_on(root: str, layout: dict[str, int], kind: str, dtype: str) -> dict[str, Tensor]:
    """Two steps, a save, two more steps in the same process."""
    net = build(layout, seed=0, dtype=getattr(torch, dtype))
    optimizer = optimizer_of(kind, net)
    for seed in (1, 2):
        step(net, optimizer, seed)
    saver = Checkpointer(Path(root), Ranks(dist.get_world_size()), asynchronous=True)
    saver.save(2, all_tensors(net, optimizer), {}, {})
    for seed in (3, 4):
        step(net, optimizer, seed)
    saver.close()
    return whole(all_tensors(net, optimizer))


def save_where_one_rank_cannot(root: str) -> str:
    """Rank 1 has no room: what each rank is told."""
    import flexcp.checkpoint as module

    saver = Checkpointer(Path(root), Ranks(dist.get_world_size()), asynchronous=True)
    if dist.get_rank() == 1:
        real = module.save_file

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device", "rank-00001.safetensors")

        module.save_file = full
    try:
        saver.save(5, {"a": torch.zeros(3), "b": torch.zeros(3)}, {}, {})
        saver.wait()
        return "no error"
    except ValueError as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            module.save_file = real
        saver.ranks.close()
