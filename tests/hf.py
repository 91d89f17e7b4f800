"""Small random Llamas of `transformers`, the reference that checkpoints are compared with."""

import logging
import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    # transformers imports torchao, which warns of what this machine's torch does not have.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from transformers import LlamaConfig, LlamaForCausalLM

    logging.disable(logging.NOTSET)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(seed: int = 0, scaling: dict[str, Any] | None = None, **fields: Any) -> LlamaForCausalLM:
    """A model in fp32 with weights large enough that every part of it shows in the logits."""
    shape = {
        **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2},
        **{"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2},
    }
    rope = {"rope_theta": 500_000.0, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(**shape | fields, rope_parameters=rope, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.data.uniform_(0.5, 1.5)
    return model.eval()
