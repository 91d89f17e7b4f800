"""Plain PyTorch model definitions: they call flex_attention and know nothing of context parallelism."""

from flexcp.models.configs import CONFIGS, Llama3Config, get_config
from flexcp.models.hf_names import from_hf, to_hf
from flexcp.models.llama3 import Llama3, build

__all__ = ["CONFIGS", "Llama3", "Llama3Config", "build", "from_hf", "get_config", "to_hf"]
