"""`flexcp.compile`: compiled blocks equal eager ones, through both doors, under checkpointing and FSDP2; one graph a
block through the second, no recompile for new documents."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import masks
from flexcp.activation import checkpoint_layers
from flexcp.models import build
from flexcp.models.llama3 import causal_block_mask

S = 256
OUTSIDE = r"only_inside_context|outside its context"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of itself


def plan_of(mesh: DeviceMesh | int, length: int = S) -> flexcp.Plan:
    return flexcp.plan(masks.causal() & masks.document(torch.arange(S) // length), S, mesh, balance="head_tail")


def results(model: nn.Module, plan: flexcp.Plan) -> list[Tensor]:
    """Logits, and every gradient."""
    tokens = plan.shard(torch.arange(S)[None] * 7 % 256, pad=0)
    model.zero_grad()
    with flexcp.context_parallel(plan):
        logits = model(tokens, plan.positions, block_mask=plan.block_mask)
        logits.logsumexp(-1).mean().backward()
    grads = [param.grad for param in model.parameters()]
    return [logits.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads)]


def fresh() -> nn.Module:
    torch._dynamo.reset()
    counters.clear()
    return build("llama3-debug", seed=0)


def compiled(fullgraph: bool, ac: str, backend: str = "aot_eager") -> nn.Module:
    model = fresh()
    if fullgraph:
        checkpoint_layers(model.layers, ac)
    flexcp.compile(model, fullgraph=fullgraph, backend=backend)
    if not fullgraph:
        checkpoint_layers(model.layers, ac)
    return model


@pytest.mark.parametrize("ac", ["none", pytest.param("full", marks=pytest.mark.slow), "selective"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_blocks_equal_eager_ones(fullgraph: bool, ac: str) -> None:
    want = results(fresh(), plan_of(1))
    model = compiled(fullgraph, ac)
    for got, expected in zip(results(model, plan_of(1)), want):
        torch.testing.assert_close(got, expected)
    # Through the first door a layer is four graphs; the fifth is torch's own, around its operator.
    assert counters["stats"]["unique_graphs"] == (1 if fullgraph else 5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 90):
            results(model, plan_of(1, length))


def sharded(fullgraph: bool, ac: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = plan_of(mesh)
    want = results(fresh(), plan)
    model = compiled(fullgraph, ac)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got = results(model, plan)
    torch.testing.assert_close(got[0], want[0])
    for mine, expected in zip(got[1:], want[1:]):
        torch.distributed.all_reduce(expected)
        torch.testing.assert_close(mine, expected / 2)  # FSDP2 averages
    assert counters["stats"]["unique_graphs"] == (1 if fullgraph else 5)


@pytest.mark.parametrize(("fullgraph", "ac"), [(True, "selective"), (False, "none")])
def test_under_fsdp2_on_two_ranks(ranks, fullgraph: bool, ac: str) -> None:
    ranks(2).run(sharded, fullgraph, ac)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_inductor(fullgraph: bool) -> None:
    want = results(fresh(), plan_of(1))
    for got, expected in zip(results(compiled(fullgraph, "none", "inductor"), plan_of(1)), want):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_block_is_one_graph_with_the_operator_in_it() -> None:
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs) -> object:
        found.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    model = fresh()
    flexcp.compile(model, fullgraph=True, backend=backend)
    results(model, plan_of(1))
    (names,) = found
    assert names.count("flexcp.flex_attention.default") == 1
    assert sum("silu" in name for name in names) == 1
    assert sum("linear" in name for name in names) == 7


def test_the_first_door_in_a_full_graph_says_what_to_do() -> None:
    model = fresh()
    flexcp.compile(model, fullgraph=True, backend="aot_eager")
    for layer in model.layers:
        layer.attn.attend = flex_attention
    plan = plan_of(1)
    with (
        torch.no_grad(),  # on a CPU torch itself refuses more, and first
        flexcp.context_parallel(plan),
        pytest.raises(Exception, match=r"flexcp\.flex_attention goes in"),
    ):
        model(torch.zeros(1, S, dtype=torch.int64), plan.positions, block_mask=plan.block_mask)


def test_compile_refuses_what_it_would_not_compile() -> None:
    model = fresh()
    checkpoint_layers(model.layers, "full")
    with pytest.raises(ValueError, match="compile first, or pass fullgraph=True"):
        flexcp.compile(model)
    with pytest.raises(ValueError, match="no nn.ModuleList"):
        flexcp.compile(nn.Linear(2, 2))


WAYS = {
    "model": lambda model: model.compile(backend="aot_eager"),
    "blocks": lambda model: [layer.compile(backend="aot_eager") for layer in model.layers],
    "attention": lambda model: [
        setattr(layer.attn, "attend", torch.compile(flex_attention, backend="aot_eager")) for layer in model.layers
    ],
    "step": lambda model: None,
}


@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_compiled_the_first_door_is_right_inside_and_raises_outside(way: str) -> None:
    plan = plan_of(1)
    want = results(fresh(), plan)
    model = fresh()
    WAYS[way](model)
    step = torch.compile(results, backend="aot_eager") if way == "step" else results
    for got, expected in zip(step(model, plan), want):
        torch.testing.assert_close(got, expected)
    with torch.no_grad(), pytest.raises(Exception, match=OUTSIDE):
        model(torch.zeros(1, S, dtype=torch.int64), plan.positions, block_mask=plan.block_mask)


def test_code_compiled_outside_the_context_is_right_inside() -> None:
    plan = plan_of(1)
    want = results(fresh(), plan)
    model = fresh()
    model.compile(backend="aot_eager")
    with torch.no_grad():
        model(torch.zeros(1, S, dtype=torch.int64), block_mask=causal_block_mask(S, torch.device("cpu")))  # local
    for got, expected in zip(results(model, plan), want):
        torch.testing.assert_close(got, expected)


def test_no_mask_means_the_whole_sequence_in_compiled_code_too() -> None:
    plan = flexcp.plan(masks.causal(), S, 1)
    q, k, v = torch.randn(3, 1, 2, S, 16)
    attend = torch.compile(lambda q, k, v: flex_attention(q, k, v) * 2, backend="aot_eager")
    with flexcp.context_parallel(plan):
        assert torch.equal(attend(q, k, v), flex_attention(q, k, v) * 2)
        torch.testing.assert_close(attend(q, k, v), nn.functional.scaled_dot_product_attention(q, k, v) * 2)
