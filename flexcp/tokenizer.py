"""Text to tokens: a `tokenizers` JSON file, or the bytes of the text where there is none."""

from pathlib import Path
from typing import Any

import numpy as np

from flexcp.errors import UserError

_HEADER, _HEADER_END, _END, _BEGIN = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: int64."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64)

    def encode_part(self, text: str, markup: bool) -> np.ndarray:
        """Tokens of a part of a text, with nothing added; markup: the part may name special tokens."""
        return self.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens; bytes that are no UTF-8, and tokens that are no bytes, show as a replacement character."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens).decode("utf-8", "replace")


class JsonTokenizer:
    """The tokenizer of a `tokenizer.json`, as the `tokenizers` library reads it.

    `encode` adds what the file says belongs to a text, such as Llama 3's <|begin_of_text|>.

    Raises:
        UserError: the library is not installed, or the file is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"--tokenizer {path} needs the package tokenizers: pip install tokenizers") from None
        self.name = str(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"--tokenizer {path} is no tokenizer.json ({' '.join(str(error).split())[:200]})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        if self.vocab_size == 0:
            raise UserError(f"--tokenizer {path} has no tokens at all")

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: int64."""
        return np.array(self._encode(text, True), dtype=np.int64)

    def encode_part(self, text: str, markup: bool) -> np.ndarray:
        """Tokens of a part of a text, with nothing added; markup: the part may name special tokens."""
        self._tokenizer.encode_special_tokens = not markup
        try:
            return np.array(self._encode(text, False), dtype=np.int64)
        finally:
            self._tokenizer.encode_special_tokens = False

    def _encode(self, text: str, add: bool) -> list[int]:
        # A lone surrogate, which JSON can hold, is no text for the library.
        return self._tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=add).ids

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones too."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def knows(self, token: str) -> bool:
        """Whether a special token is one of the vocabulary."""
        return self._tokenizer.token_to_id(token) is not None


Tokenizer = ByteTokenizer | JsonTokenizer


def find_tokenizer(path: str | None, origin: str | None = None) -> Path | None:
    """The tokenizer.json that a run uses; None where it takes bytes.

    Args:
        path: of --tokenizer: a file, or a folder with a tokenizer.json; "bytes" for bytes in any case.
        origin: the model's folder, whose tokenizer.json is taken where there is no --tokenizer.

    Raises:
        UserError: there is no such file.
    """
    if path == "bytes":
        return None
    if path is None:
        own = None if origin is None else Path(origin).expanduser() / "tokenizer.json"
        return own if own is not None and own.is_file() else None
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"--tokenizer {path}: there is no file {file}: name a tokenizer.json, or its folder, or bytes")
    return file


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a file, or of bytes."""
    return ByteTokenizer() if path is None else JsonTokenizer(path)


def encode_chat(tokenizer: Tokenizer, messages: Any) -> tuple[np.ndarray, np.ndarray]:
    """A conversation in the form of Llama 3, and which of its tokens the model is to learn.

    Each message is a header with the role, two newlines, the content and an end-of-turn token. Learned are
    content and end of turn of the role "assistant". A special token that a content spells out is plain text.

    Args:
        messages: a list of {"role": text, "content": text}.

    Returns:
        (tokens, learned): int64 and bool, of one length.

    Raises:
        UserError: no such list, or a tokenizer without the tokens of the form.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("a conversation must be a list of messages")
    tokens, learned = [], []
    begins = True
    if isinstance(tokenizer, JsonTokenizer):
        missing = [token for token in (_HEADER, _HEADER_END, _END) if not tokenizer.knows(token)]
        if missing:
            raise UserError(f"--tokenizer {tokenizer.name} has no {missing[0]}, which conversations need")
        begins = tokenizer.knows(_BEGIN)

    def add(text: str, markup: bool, learn: bool) -> None:
        part = tokenizer.encode_part(text, markup)
        tokens.append(part)
        learned.append(np.full(len(part), learn))

    if begins:
        add(_BEGIN, True, False)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError('a message must be an object with the texts "role" and "content"')
        learn = message["role"] == "assistant"
        add(_HEADER, True, False)
        add(message["role"], False, False)
        add(_HEADER_END, True, False)
        add("\n\n", False, False)
        add(message["content"], False, learn)
        add(_END, True, learn)
    return np.concatenate(tokens), np.concatenate(learned)
