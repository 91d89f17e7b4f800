"""The exception for files that cannot be used."""


class CheckpointError(ValueError):
    """A folder, config.json, index or safetensors file that cannot be read or written, told in one sentence."""
