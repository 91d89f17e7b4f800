"""fp8 products in the layers' linear modules, by torchao.

What is converted are the seven matrices of each layer, or some of them, and never the head, whose small probabilities
fp8 cannot tell apart. Weights stay in their own dtype and no activation memory is saved: it is the products that become
faster.

Recipes, as torchao calls them: "rowwise" scales each row, "rowwise_with_gw_hp" too but leaves the weights' gradients in
high precision, "tensorwise" scales whole tensors. Rows are what context parallelism divides, so with the first two a
token's forward is the same bits whichever rank has it; a tensor's scale is that of the tokens that a rank has.
"tensorwise_all_gather" also lets FSDP2 send the weights as fp8.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from flexcp.compat_torchao import torchao
from flexcp.errors import UserError

RECIPES = ("none", "rowwise", "rowwise_with_gw_hp", "tensorwise", "tensorwise_all_gather")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
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


def chosen_modules(text: str) -> Callable[[nn.Module, str], bool]:
    """Which modules become fp8, by module and name.

    Args:
        text: "all" linear modules; "large", those that gain by it (torchao's thresholds for rows: more than 2,048
            outputs, more than 1,024 inputs, and not both at most 4,096 outputs and 2,048 inputs); or names of MODULES
            with commas between.
    Raises:
        UserError: another name.

    >>> q, k = nn.Linear(4096, 4096, device="meta"), nn.Linear(4096, 1024, device="meta")
    >>> large, mlp = chosen_modules("large"), chosen_modules("gate_proj,up_proj,down_proj")
    >>> large(q, "attn.q_proj"), large(k, "attn.k_proj"), mlp(q, "attn.q_proj"), mlp(q, "mlp.up_proj")
    (True, False, False, True)
    """
    if text == "all":
        return lambda module, name: True
    if text == "large":
        return lambda module, name: _gains(*module.weight.shape)
    names = text.split(",")
    for name in names:
        if name not in MODULES:
            raise UserError(f"--fp8-modules takes all, large, or names of {', '.join(MODULES)}, and no {name!r}")
    return lambda module, name: name.rpartition(".")[2] in names


def _gains(outputs: int, inputs: int) -> bool:
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


def convert(layers: Iterable[nn.Module], recipe: str, device_type: str, modules: str = "all") -> None:
    """Replaces linear modules inside the layers, in place; parameters and their names stay.

    Before tensor parallelism, checkpointing, compiling and FSDP2, all of which wrap what is there.

    Args:
        recipe: of RECIPES.
        device_type: "cuda"; anything else emulates the products, rounding alike and saving no time.
        modules: which, as `chosen_modules` reads it.

    Raises:
        UserError: a GPU without fp8, or an unknown module.
    """
    chosen = chosen_modules(modules)
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
        float8.convert_to_float8_training(layer, config=config, module_filter_fn=chosen)
