"""image_cross_attention: text that sees images, each image visible to a stretch of text."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers, quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import scalar, take


class ImageCrossAttention(Mask):
    def __init__(self, intervals: Tensor, lengths: Tensor, text: str):
        images = torch.arange(lengths.numel(), device=lengths.device)
        self._image = images.repeat_interleave(lengths).to(torch.int32)  # of each key
        self._from, self._until = intervals.to(torch.int32).unbind(1)
        self._last = scalar(self._image.numel() - 1).to(self._image.device)
        self.text = text

    def __call__(self, b, h, q_idx, kv_idx):
        image = self._image[torch.minimum(kv_idx, self._last)]
        return (q_idx >= self._from[image]) & (q_idx < self._until[image])

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        first, last = take(self._image, kv_lo), take(self._image, kv_hi - 1)
        some = torch.zeros(q_lo.numel(), kv_lo.numel(), dtype=torch.bool, device=q_lo.device)
        every = ~some
        for step in range(int((last - first).max()) + 1):
            image = torch.minimum(first + step, last)  # past its last image a range repeats it
            begin, end = take(self._from, image), take(self._until, image)
            some |= (begin < q_hi[:, None]) & (end > q_lo[:, None]) & (begin < end)
            every &= (begin <= q_lo[:, None]) & (end >= q_hi[:, None])
        return some, every

    def __repr__(self) -> str:
        return self.text


def image_cross_attention(intervals: Tensor, tokens_per_image: int | Tensor) -> Mask:
    """Keys are the tokens of several images, one image after the other; image i is seen by text [from_i,
    until_i).

        intervals [[0, 2], [2, 4]], tokens_per_image 2
        kv 0 1 2 3
      q 0  # #
        1  # #
        2      # #
        3      # #

    Args:
        intervals: integer tensor [N, 2]: the first and one past the last text token that see each image;
            equal where none does. They may overlap.
        tokens_per_image: keys of each image, at least 1: an int, or an integer tensor [N].

    Returns:
        A Mask between any number of text queries and N * tokens_per_image keys. Text outside every interval
        sees nothing. Its classes are exact.

    Raises:
        ValueError: intervals is not an integer tensor [N, 2] with 0 <= from <= until, or tokens_per_image is
            not positive or not one for each image.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.image_cross_attention(torch.tensor([[0, 2], [2, 4]]), 2)
        >>> mask(0, 0, torch.tensor(3), torch.arange(4)).int().tolist()
        [0, 0, 1, 1]

    Source: Alayrac et al. 2022, "Flamingo", 3.1.3.
    """
    name = "image_cross_attention"
    intervals = integers(name, "intervals", intervals, (2,), "[N, 2]").long()
    if intervals.shape[1] != 2 or bool((intervals[:, 0] < 0).any() | (intervals[:, 0] > intervals[:, 1]).any()):
        raise ValueError(
            f"{name}: intervals must be [N, 2] rows with 0 <= from <= until, got {intervals.tolist()[:4]}."
        )
    if isinstance(tokens_per_image, Tensor | list | tuple):
        lengths = integers(name, "tokens_per_image", tokens_per_image, (1,), "[N]").long()
        said = f"tokens_per_image[{lengths.numel()}]"
    else:
        lengths = torch.full((intervals.shape[0],), quantity(name, "tokens_per_image", tokens_per_image))
        said = str(tokens_per_image)
    if lengths.numel() != intervals.shape[0] or int(lengths.min()) < 1:
        raise ValueError(
            f"{name}: tokens_per_image must be at least 1 for each of the {intervals.shape[0]} images, got "
            f"{lengths.tolist()[:8]}."
        )
    text = f"{name}(intervals[{intervals.shape[0]}, 2], {said})"
    return ImageCrossAttention(intervals, lengths.to(intervals.device), text)
