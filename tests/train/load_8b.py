"""Loads one rank's rows of an 8B-shaped checkpoint and reports the memory: a process of test_checkpoint."""

import json
import resource
import struct
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from flexcp.models import Checkpoint, Llama3, check_names, config_to_hf, get_config, load_weights, to_hf

FILES = 4


def make(folder: Path) -> int:
    """Sparse files: headers, and holes that read as zeros; the head ends in 1, 2, 3. Returns the bytes of tensors."""
    config = get_config("llama3-8b")
    with torch.device("meta"):
        shapes = {to_hf(name): list(param.shape) for name, param in Llama3(config).named_parameters()}
    names, weight_map, total = list(shapes), {}, 0
    for number in range(FILES):
        file, header, at = f"model-{number + 1:05}-of-{FILES:05}.safetensors", {}, 0
        for name in names[number * len(names) // FILES : (number + 1) * len(names) // FILES]:
            size = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
            if "lm_head.weight" in header:
                out.seek(-6, 2)
                out.write(torch.tensor([1.0, 2.0, 3.0]).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
        total += at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, torch.bfloat16)))
    return total


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    total = make(folder)
    with torch.device("meta"):
        model = Llama3(get_config("llama3-8b"))
    shards: dict[str, Tensor] = {}

    def last_rank(name: str, param: nn.Parameter) -> tuple[Tensor, tuple[int, ...]]:
        rows = -(-len(param) // ranks)
        start = (ranks - 1) * rows
        shards[name] = torch.empty(len(param) - start, *param.shape[1:], dtype=torch.bfloat16)
        return shards[name], (start, *(0 for _ in param.shape[1:]))

    before = peak()
    with Checkpoint(folder) as checkpoint:
        check_names(model.config, checkpoint)
        load_weights(model, checkpoint, last_rank)
    report = {
        "checkpoint_bytes": total,
        "shard_bytes": sum(shard.nbytes for shard in shards.values()),
        "peak_bytes": peak() - before,
        "last_row": shards["head.weight"][-1, -3:].tolist(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
