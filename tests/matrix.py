"""The oracle matrix: masks x comm x layout x cp x KV heads x length x block x score, and how one case is checked."""

import itertools
import random
from dataclasses import astuple, dataclass, fields
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import flexcp
from flexcp import masks
from tests import oracle

DIM = 16


@dataclass(frozen=True)
class Case:
    mask: str
    comm: str
    balance: str
    cp: int
    kv_heads: str
    seq_len: int
    block: int
    score: str

    def __str__(self) -> str:
        return "-".join(str(x) for x in astuple(self))

    @property
    def heads(self) -> int:
        """Query heads: 4, or the next number that the ranks can share."""
        return {3: 6, 8: 8}.get(self.cp, 4) if self.comm.startswith("ulysses") else 4

    @property
    def groups(self) -> int:
        return {"all": self.heads, "two": 2, "one": 1}[self.kv_heads]


AXES = {
    "mask": (
        "causal",
        "full",
        "window",
        "document",
        "prefix",
        "per_batch",
        "per_head",
        "block_sparse",
        "dead_rows",
    ),
    # *n: in n groups of KV heads
    "comm": (
        "gather",
        "ring",
        "exchange",
        "gather*4",
        "exchange*2",
        "ulysses",
        "ulysses+gather",
        "ulysses+ring",
        "ulysses+exchange",
    ),
    "balance": ("contiguous", "head_tail", "per_document", "ptrr", "min_heap", "affinity"),
    "cp": (1, 2, 3, 4),
    "kv_heads": ("all", "two", "one"),
    "seq_len": (384, 500, 1000, 1024, 129),
    "block": (128, 32),
    "score": ("none", "distance", "bias", "window_by_inf", "slope_by_head"),
}
assert tuple(AXES) == tuple(f.name for f in fields(Case))

WHOLE_CP = (*AXES["cp"], 8)
SHORT = (129, 250, 384)


def whole() -> list[Case]:
    """Every mask over every comm, layout and cp; numbers of KV heads, lengths and scores are drawn, always the same.

    Left out is only what is the same thing again: layouts of one rank, and ulysses with another kind on so few ranks
    that it is ulysses alone. Short sequences in small blocks: what a case costs is its messages.
    """
    rng = random.Random(0)
    cases = []
    for cp, comm, balance, mask in itertools.product(WHOLE_CP, AXES["comm"], AXES["balance"], AXES["mask"]):
        one_rank = cp == 1 or comm == "ulysses"
        if (one_rank and balance != "contiguous") or (comm.startswith("ulysses+") and cp < 4):
            continue
        kv_heads, seq_len, score = (rng.choice(some) for some in (AXES["kv_heads"], SHORT, AXES["score"]))
        cases.append(Case(mask, comm, balance, cp, kv_heads, seq_len, 32, score))
    # Neighbours in the list share the oracle's result, which is cached.
    return sorted(cases, key=lambda c: (c.cp, c.seq_len, c.mask, c.heads, c.groups, c.score, c.comm, c.balance))


def sample(seed: int, at_least: int) -> list[Case]:
    """Cases in which every pair of values of any two axes meets, and more at random up to the number asked for."""
    rng = random.Random(seed)
    names = list(AXES)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]}

    def pairs(case: Case) -> set:
        return set(itertools.combinations([(n, getattr(case, n)) for n in names], 2))

    chosen: dict[Case, None] = {}
    while missing:
        candidates = []
        for fixed in rng.sample(sorted(missing), min(20, len(missing))):
            values = {n: rng.choice(AXES[n]) for n in names} | dict(fixed)
            candidates.append(Case(**values))
        best = max(candidates, key=lambda c: len(pairs(c) & missing))
        chosen[best] = None
        missing -= pairs(best)
    while len(chosen) < at_least:
        chosen[Case(**{n: rng.choice(AXES[n]) for n in names})] = None
    return sorted(chosen, key=lambda c: (c.cp, str(c)))


def document_ids(seq_len: int) -> Tensor:
    lengths = torch.tensor([seq_len // 2 - 7, seq_len // 8, 19, seq_len])
    return torch.repeat_interleave(torch.arange(4), lengths)[:seq_len]


def block_sparse(seq_len: int, heads: int) -> BlockMask:
    """A random table of 128 x 64 blocks without a mask_mod."""
    generator = torch.Generator().manual_seed(seq_len)
    rows, columns = -(-seq_len // 128), -(-seq_len // 64)
    table = torch.rand(1, heads, rows, columns, generator=generator) < 0.4
    counts = table.sum(-1, dtype=torch.int32)
    indices = torch.argsort(table.to(torch.uint8), dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(128, 64), seq_lengths=(seq_len, seq_len))


def flexcp_mask(name: str, seq_len: int, heads: int = 4, device: str = "cpu"):
    """(mask, keyword arguments of flexcp.plan)"""
    mask, more = _mask(name, seq_len, heads, device)
    return (mask.to(device) if isinstance(mask, masks.Mask | BlockMask) else mask), more


def _mask(name: str, seq_len: int, heads: int, device: str):
    if name == "causal":
        return masks.causal(), {}
    if name == "full":
        return masks.full(), {}
    if name == "window":
        return masks.sliding_window(100), {}
    if name == "document":
        return masks.causal() & masks.document(document_ids(seq_len)), {}
    if name == "prefix":
        return masks.prefix_lm(70), {}
    if name == "per_batch":
        return (lambda b, h, q, kv: (q >= kv) & (q - kv < (b + 1) * 90)), {"batch": 2}
    if name == "per_head":
        return (lambda b, h, q, kv: (q >= kv) & (q - kv < (h + 1) * 64)), {"heads": heads}
    if name == "block_sparse":
        return block_sparse(seq_len, heads), {}
    if name == "dead_rows":
        # Rows of the second third see nothing at all.
        third = torch.tensor(seq_len // 3, device=device)
        return (lambda b, h, q, kv: (q // third != 1) & (q >= kv)), {}
    raise KeyError(name)


def dense_mask(name: str, seq_len: int, heads: int = 4) -> Tensor:
    """The same mask written out, [B or 1, H or 1, S, S]."""
    q, kv = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    causal = q >= kv
    if name == "causal":
        return causal[None, None]
    if name == "full":
        return torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool)
    if name == "window":
        return (causal & (q - kv < 100))[None, None]
    if name == "document":
        ids = document_ids(seq_len)
        return (causal & (ids[:, None] == ids))[None, None]
    if name == "prefix":
        return (causal | (kv < 70))[None, None]
    if name == "per_batch":
        return torch.stack([causal & (q - kv < (b + 1) * 90) for b in range(2)])[:, None]
    if name == "per_head":
        return torch.stack([causal & (q - kv < (h + 1) * 64) for h in range(heads)])[None]
    if name == "block_sparse":
        mask = block_sparse(seq_len, heads)
        dense = torch.zeros(1, heads, seq_len, seq_len, dtype=torch.bool)
        for h, i in itertools.product(range(heads), range(mask.kv_indices.shape[2])):
            for j in mask.kv_indices[0, h, i, : mask.kv_num_blocks[0, h, i]].tolist():
                dense[0, h, i * 128 : (i + 1) * 128, j * 64 : (j + 1) * 64] = True
        return dense
    if name == "dead_rows":
        return ((q // (seq_len // 3) != 1) & causal)[None, None]
    raise KeyError(name)


def score_mod(name: str, bias: Tensor):
    if name == "none":
        return None
    if name == "distance":
        return lambda s, b, h, q, kv: s - (q - kv).abs() * 0.05
    if name == "bias":
        return lambda s, b, h, q, kv: s + bias[(q - kv).abs()]
    if name == "window_by_inf":
        return lambda s, b, h, q, kv: torch.where((q - kv).abs() < 64, s, -float("inf"))
    if name == "slope_by_head":
        return lambda s, b, h, q, kv: s - (q - kv).abs() * 0.02 * (h + 1)
    raise KeyError(name)


def dense_score(name: str, seq_len: int, heads: int, device: str = "cpu"):
    kv = torch.arange(seq_len, device=device)
    distance = (kv[:, None] - kv).abs()
    slopes = torch.arange(1, heads + 1, device=device)[:, None, None]
    return {
        "none": None,
        "distance": lambda s, bias: s - distance * 0.05,
        "bias": lambda s, bias: s + bias[distance],
        "window_by_inf": lambda s, bias: torch.where(distance < 64, s, -torch.inf),
        "slope_by_head": lambda s, bias: s - distance * 0.02 * slopes,
    }[name]


def inputs(batch: int, heads: int, groups: int, seq_len: int, dim: int = DIM) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1000 * groups + seq_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "q": normal(batch, heads, seq_len, dim),
        "k": normal(batch, groups, seq_len, dim),
        "v": normal(batch, groups, seq_len, dim),
        "bias": normal(seq_len),
        "dout": normal(batch, heads, seq_len, dim),
        "dlse": normal(batch, heads, seq_len),
    }


@lru_cache(maxsize=2)
def reference(mask: str, heads: int, groups: int, seq_len: int, score: str, dtype: torch.dtype) -> dict[str, Tensor]:
    x = {k: t.to(dtype) for k, t in inputs(_batch(mask), heads, groups, seq_len).items()}
    visible = dense_mask(mask, seq_len, heads)
    dense = dense_score(score, seq_len, heads)
    return oracle.results(x["q"], x["k"], x["v"], visible, dense, x["bias"], x["dout"], x["dlse"])


def _batch(mask: str) -> int:
    return 2 if mask == "per_batch" else 1


def flexcp_results(
    case: Case, dtype: torch.dtype, device: str = "cpu", dim: int = DIM, with_lse: bool = True, alone: bool = False
) -> dict[str, Tensor]:
    """The same, computed by flexcp on this rank's group and put together; on every rank.

    Args:
        dim: of a head.
        with_lse: lse is asked for, and has a gradient.
        alone: by this rank, as a group of one.
    """
    mask, more = flexcp_mask(case.mask, case.seq_len, case.heads, device)
    comm, _, groups = case.comm.partition("*")
    if alone:
        more |= {"mesh": 1, "device": device}
    else:
        mesh = init_device_mesh(device, (case.cp,), mesh_dim_names=("cp",))
        more |= {"mesh": mesh, "comm": comm, "balance": case.balance, "head_groups": int(groups or 1)}
    if case.mask != "block_sparse":
        more["block_size"] = case.block
    plan = flexcp.plan(mask, case.seq_len, **more)
    x = inputs(_batch(case.mask), case.heads, case.groups, case.seq_len, dim)
    x = {name: t.to(device, _dtype_of(name, dtype)) for name, t in x.items()}
    q, k, v, dout, dlse = (plan.shard(x[name], dim=2) for name in ("q", "k", "v", "dout", "dlse"))
    leaves = [t.requires_grad_() for t in (q, k, v, x["bias"])]
    score = score_mod(case.score, x["bias"])
    with flexcp.context_parallel(plan, captured_grads="sum"):
        call = partial(flex_attention, q, k, v, score_mod=score, block_mask=plan.block_mask, enable_gqa=True)
        if with_lse:
            out, aux = call(return_aux=AuxRequest(lse=True))
            loss = (out * dout).sum() + torch.where(aux.lse == -torch.inf, 0.0, aux.lse).mul(dlse).sum()
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        else:
            out = call()
            grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    padded = ~plan.valid[0]
    assert (out[:, :, padded] == 0).all(), "padded rows must give 0"
    dq, dk, dv = (plan.unshard(g, dim=2) for g in grads[:3])
    dbias = torch.zeros_like(x["bias"]) if grads[3] is None else grads[3]
    results = {"out": plan.unshard(out.detach(), dim=2), "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}
    if with_lse:
        assert (aux.lse[:, :, padded] == -torch.inf).all(), "padded rows must give lse -inf"
        results["lse"] = plan.unshard(aux.lse.detach(), dim=2)
    return results


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of an input: what is learned and lse's gradient are never of a lower precision than fp32."""
    return torch.promote_types(dtype, torch.float32) if name in ("bias", "dlse") else dtype


def check(case: Case, *dtypes: torch.dtype) -> dict[str, float]:
    """Compares flexcp with the oracle, by default in float64 and float32, on rank 0; returns the errors."""
    # Computed before anything is compared: a rank that fails must not leave the others waiting.
    each = {dtype: flexcp_results(case, dtype) for dtype in dtypes or (torch.float64, torch.float32)}
    errors = {}
    if torch.distributed.get_rank() != 0:
        return errors
    for dtype, got in each.items():
        want = reference(case.mask, case.heads, case.groups, case.seq_len, case.score, dtype)
        for name, reference_value in want.items():
            value = got[name].double()
            dead = reference_value == -torch.inf
            assert torch.equal(value == -torch.inf, dead), f"{name}: rows that see nothing differ"
            gap = torch.where(dead, 0.0, value - reference_value).abs().max().item()
            largest = torch.where(dead, 0.0, reference_value).abs().max().item()
            bound = 1e-10 if dtype == torch.float64 else 1e-5 * max(largest, 1e-30)
            assert gap <= bound or gap == 0.0, f"{name} in {dtype}: error {gap:.2e} > {bound:.2e}"
            errors[f"{name} {dtype}"] = gap
    return errors
