"""A long-range recall task: pairs of a key and a value in the first part of a row, questions for them in the last.

Only a model that attends from a question back to its pair can answer; one that sees less far is left to
guess among the values. Which is what the task is for: it shows that attention reaches across shards, and
what a mask that is too short costs. After "associative recall" (Ba et al., 2016; Arora et al., 2023), with
a pair in one token, so that one layer can learn it.

Tokens: 0 filler; 1 + key a question; 1 + keys + key * values + value a pair; then the answers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.data import IGNORE, Batch


@dataclass(frozen=True)
class RecallTask:
    """Rows are a function of (seed, step) alone.

    Raises:
        ValueError: pairs that are more than the keys, or than the places for them.
    """

    seq_len: int  # S, tokens in a row
    batch: int  # B, rows in a step
    num_keys: int = 4
    num_values: int = 4
    num_pairs: int = 4  # in a row, of different keys
    num_questions: int = 32  # the last tokens of a row
    seed: int = 0

    def __post_init__(self) -> None:
        places = self.seq_len - self.num_questions
        if not 1 <= self.num_pairs <= min(self.num_keys, places):
            raise ValueError(
                f"num_pairs={self.num_pairs} must be at least 1, and at most num_keys={self.num_keys} and the {places} "
                "tokens before the questions"
            )
        if self.num_values < 2 or self.num_questions < 1:
            raise ValueError(
                f"num_values={self.num_values} must be at least 2, and num_questions={self.num_questions} at least 1"
            )

    @property
    def vocab_size(self) -> int:
        return 1 + self.num_keys + self.num_keys * self.num_values + self.num_values

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / self.num_values

    def rows(self, step: int) -> tuple[Batch, Tensor]:
        """A step's rows, whole, and how far back the answer lies.

        Returns:
            batch: labels are the answers at the questions, IGNORE elsewhere; one document a row.
            distances: [B, S] int64, from a question to its pair in tokens; 0 elsewhere.
        """
        generator = torch.Generator().manual_seed((self.seed << 32) + step)
        size, questions = (self.batch, self.seq_len), self.num_questions

        def distinct(count: int, below: int) -> Tensor:
            return torch.rand(self.batch, below, generator=generator).argsort(1)[:, :count]

        keys, places = distinct(self.num_pairs, self.num_keys), distinct(self.num_pairs, self.seq_len - questions)
        values = torch.randint(self.num_values, keys.shape, generator=generator)
        asked = torch.randint(self.num_pairs, (self.batch, questions), generator=generator)
        first_pair = 1 + self.num_keys
        first_answer = first_pair + self.num_keys * self.num_values
        tokens = torch.zeros(size, dtype=torch.int64)
        tokens.scatter_(1, places, first_pair + keys * self.num_values + values)
        tokens[:, -questions:] = 1 + keys.gather(1, asked)
        labels = torch.full(size, IGNORE)
        labels[:, -questions:] = first_answer + values.gather(1, asked)
        positions = torch.arange(self.seq_len).expand(size)
        distances = torch.zeros(size, dtype=torch.int64)
        distances[:, -questions:] = positions[:, -questions:] - places.gather(1, asked)
        return Batch(tokens, labels, positions, torch.zeros(size, dtype=torch.int64)), distances
