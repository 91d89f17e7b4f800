"""fp8 products in the layers' linear modules, by torchao.

What is converted are the seven matrices of each layer, and not the head, whose small probabilities fp8 cannot tell
apart. Weights stay in their own dtype and no activation memory is saved: it is the products that become faster.

Recipes, as torchao calls them: "rowwise" scales each row, "rowwise_with_gw_hp" too but leaves the weights' gradients in
high precision, "tensorwise" scales whole tensors. Rows are what context parallelism divides, so with the first two a
token's forward is the same bits whichever rank has it; a tensor's scale is that of the tokens that a rank has.
"tensorwise_all_gather" also lets FSDP2 send the weights as fp8.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from flexcp.compat_torchao import torchao
from flexcp.errors import UserError

RECIPES = ("none", "rowwise", "rowwise_with_gw_hp", "tensorwise", "tensorwise_all_gather")
_MULTIPLE = 16  # of torch._scaled_mm, in each dimension; emulation does not ask for it


def check_fp8(recipe: str, sizes: Mapping[str, int]) -> None:
    """Refuses what the products cannot be made of.

    Args:
        sizes: rows and columns of a rank's matrices, and its tokens, by what they are called.
    Raises:
        UserError: a size that is no multiple of 16.
    """
    if recipe == "none":
        return
    for name, size in sizes.items():
        if size % _MULTIPLE:
            raise UserError(
                f"--fp8 {recipe} needs multiples of {_MULTIPLE}, and {name} are {size} on each rank: choose a model, "
                "a --tp and sizes that give one, or --fp8 none"
            )


def convert(layers: Iterable[nn.Module], recipe: str, device_type: str) -> None:
    """Replaces the linear modules inside the layers, in place; parameters and their names stay.

    Before tensor parallelism, checkpointing, compiling and FSDP2, all of which wrap what is there.

    Args:
        recipe: of RECIPES.
        device_type: "cuda"; anything else emulates the products, rounding alike and saving no time.

    Raises:
        UserError: a GPU without fp8.
    """
    if recipe == "none":
        return
    if device_type == "cuda" and (has := torch.cuda.get_device_capability()) < (8, 9):
        raise UserError(
            f"--fp8 {recipe} needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and this one is "
            f"{has[0]}.{has[1]}: use --fp8 none"
        )
    float8 = torchao("float8")
    name = recipe.removesuffix("_all_gather")
    config = float8.Float8LinearConfig.from_recipe_name(name)
    config = dataclasses.replace(
        config, emulate=device_type != "cuda", enable_fsdp_float8_all_gather=recipe.endswith("_all_gather")
    )
    for layer in layers:
        float8.convert_to_float8_training(layer, config=config)
