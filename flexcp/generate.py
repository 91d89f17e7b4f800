"""flexcp.generate: continues a text with a model, for a look at what it has learned.

    python -m flexcp.generate --model runs/a/model --prompt "Once upon" --tokens 50

Greedy, on one device, the whole text anew for each token: a look, and no product.
"""

import argparse
import sys

import torch

from flexcp.errors import UserError
from flexcp.models import CheckpointError, Llama3, from_pretrained
from flexcp.tokenizer import find_tokenizer, load_tokenizer


@torch.no_grad()
def greedy(model: Llama3, tokens: list[int], count: int, stop: set[int] = frozenset()) -> list[int]:
    """The `count` likeliest tokens after `tokens`, one after the other; fewer where one of `stop` is met.

    Raises:
        ValueError: there is no token to begin with.
    """
    if not tokens:
        raise ValueError("greedy needs at least one token to begin with")
    device = next(model.parameters()).device
    made: list[int] = []
    while len(made) < count and not (made and made[-1] in stop):
        logits = model(torch.tensor([tokens + made], dtype=torch.int64, device=device))
        made.append(int(logits[0, -1].argmax()))
    return made


def main(argv: list[str] | None = None) -> int:
    """The program. Returns its exit code: 0, or 2 after one sentence for a wrong use."""
    parser = argparse.ArgumentParser(prog="flexcp.generate", description="Continues a text, greedily.")
    parser.add_argument("--model", required=True, help="a folder with config.json and safetensors")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=50, help="how many tokens to add")
    parser.add_argument("--tokenizer", help="a tokenizer.json, its folder, or bytes; the model's own where left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args(argv)
    try:
        if given.tokens < 1:
            raise UserError(f"--tokens is {given.tokens}, and must be at least 1")
        if given.device not in ("cpu", "cuda"):
            raise UserError(f"--device is {given.device!r}, and must be cpu or cuda")
        if given.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device is cuda, and there is no GPU here: use cpu")
        tokenizer = load_tokenizer(find_tokenizer(given.tokenizer, given.model))
        model = from_pretrained(given.model, device=given.device)
        tokens = tokenizer.encode(given.prompt).tolist()
        if not tokens:
            raise UserError("--prompt is empty: give it at least one character")
        if max(tokens) >= model.config.vocab_size:
            raise UserError(
                f"the prompt has the token {max(tokens)} ({tokenizer.name}), and the model's vocabulary ends at "
                f"{model.config.vocab_size - 1}: name the tokenizer that belongs to the model"
            )
        made = greedy(model, tokens, given.tokens)
    except (UserError, CheckpointError) as error:
        print(f"flexcp.generate: error: {error}", file=sys.stderr)
        return 2
    print(tokenizer.decode(tokens + made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
