"""fp8, emulated: the same bits for a token whichever rank has it, the same gradients within rounding, and no head."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flexcp.checks import check_world
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.fp8 import RECIPES, check_fp8, convert
from flexcp.models import build
from tests.ranks import Ranks
from tests.train import on_ranks

GetRanks = Callable[[int], Ranks]
ARGS = (256, 2, "gather", "contiguous", False, None)


def converted(recipe: str, modules: str = "all") -> nn.Module:
    model = build(on_ranks.TINY, seed=0)
    convert(model.layers, recipe, "cpu", modules)
    return model


def in_fp8(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


def test_the_matrices_of_the_layers_are_converted_and_not_the_head() -> None:
    names = [name for name, _ in build(on_ranks.TINY, seed=0).named_parameters()]
    for recipe in RECIPES:
        if recipe.endswith("all_gather"):  # its weights are FSDP2's to gather
            continue
        model = converted(recipe)
        found = in_fp8(model)
        assert len(found) == (0 if recipe == "none" else 7 * on_ranks.TINY.num_layers)
        assert "head" not in found
        assert [name for name, _ in model.named_parameters()] == names


def test_some_modules_alone_are_converted() -> None:
    found = in_fp8(converted("rowwise", "gate_proj,o_proj"))
    assert {name.split(".", 2)[2] for name in found} == {"mlp.gate_proj", "attn.o_proj"}
    assert len(found) == 2 * on_ranks.TINY.num_layers
    assert not in_fp8(converted("rowwise", "large"))  # TINY is small
    with pytest.raises(UserError, match=r"--fp8-modules takes all, large, or names of q_proj, .*, and no 'head'"):
        check_world(TrainConfig(fp8="rowwise", fp8_modules="o_proj,head"), None)
    with pytest.raises(UserError, match="name a recipe with --fp8, too"):
        check_world(TrainConfig(fp8_modules="large"), None)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_a_tokens_forward_does_not_know_its_neighbours(recipe: str) -> None:
    """And differs from the product without fp8, or nothing would have been tested."""
    linear = converted(recipe).layers[0].mlp.gate_proj
    x = torch.randn(1, 256, on_ranks.TINY.dim, generator=torch.Generator().manual_seed(0))
    out = linear(x)
    for size in (128, 64, 16):
        assert torch.equal(torch.cat([linear(part) for part in x.split(size, dim=1)], dim=1), out)
    exact = x @ linear.weight.T
    assert 1e-3 < relative([out.detach()], [exact.detach()]) < 0.1


def relative(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.slow)])
def test_gradients_across_cp(ranks: GetRanks, recipe: str) -> None:
    """The loss is the same number; a weight's gradient, whose rows of tokens are scaled anew, is within 1e-2."""
    alone = on_ranks.gradients(*ARGS, None, 1, False, "none", recipe)
    plain = on_ranks.gradients(*ARGS)
    off = relative(alone["grads"], plain["grads"])
    assert off > 1e-2, "fp8 changes nothing"
    for degrees, fsdp in (({"cp": 2}, True), ({"cp": 2}, False)):
        for result in ranks(2).run(on_ranks.gradients, *ARGS, degrees, 1, fsdp, "selective", recipe):
            on = relative(result["grads"], alone["grads"])
            print(f"{recipe} at {degrees}: gradients {on:.1e} from one rank's, which are {off:.1e} from those of fp64")
            assert result["loss"] == alone["loss"]
            assert on < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_fp8_with_tp_and_fsdp(ranks: GetRanks, recipe: str) -> None:
    """A tensor's scale is that of a rank's tokens, so that over cp the tensorwise recipes are only near."""
    alone = on_ranks.gradients(*ARGS, None, 1, False, "none", recipe.removesuffix("_all_gather"))
    degrees = {"tp": 2, "dp_shard": 2} if recipe.startswith("tensorwise") else {"tp": 2, "cp": 2}
    for result in ranks(4).run(on_ranks.gradients, *ARGS, degrees, 1, True, "none", recipe):
        assert result["loss"] == pytest.approx(alone["loss"], rel=0.02 if "tensorwise" in recipe else 1e-6)
        assert relative(result["grads"], alone["grads"]) < (0.5 if "tensorwise" in recipe else 1e-2)


def test_sizes_that_fp8_cannot_take() -> None:
    with pytest.raises(UserError, match="needs multiples of 16, and tokens of a micro-batch are 24 on each rank"):
        check_fp8("rowwise", {"tokens of a micro-batch": 24})
    check_fp8("none", {"tokens of a micro-batch": 24})
    check_world(TrainConfig(fp8="rowwise", tp=2), None)
    with pytest.raises(UserError, match="is about the gathering of FSDP2, and parameters are not divided"):
        check_world(TrainConfig(fp8="tensorwise_all_gather"), None)
