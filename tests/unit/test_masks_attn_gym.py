"""masks against attention-gym (package attn-gym, test extra only): equal where they overlap, and where theirs is wrong.

What "wrong" means is decided by a loop over pairs in this file, not by either library.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from flexcp import masks
from flexcp.masks import scores

gym = pytest.importorskip("attn_gym.masks")
mods = pytest.importorskip("attn_gym.mods")

S = 48


def dense(mask_mod, seq_len=S, kv_len=None):
    return create_mask(mask_mod, 1, 1, seq_len, kv_len or seq_len, device="cpu")[0, 0]


OFFSETS = torch.tensor([0, 7, 23, 24, 48])
GLOBAL = torch.arange(S) % 13 == 5
PREFIX_OF = torch.tensor([0, 0, 0, 3, 3])
PREFIX_OFFSETS = torch.tensor([0, 6, 15, 20, 30, 48])
GROUPS, BRANCHES = (
    torch.tensor(values).repeat_interleave(PREFIX_OFFSETS.diff()) for values in ([0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
)
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 0]
SAME = {
    "causal": (masks.causal(), gym.causal_mask),
    # Their window counts the distance, ours the keys.
    "sliding_window": (masks.sliding_window(6), gym.generate_sliding_window(5)),
    "dilated": (masks.sliding_window(4, two_sided=True, dilation=3), gym.generate_dilated_sliding_window(9, 3)),
    "document": (
        masks.document_offsets(OFFSETS),
        gym.document_mask.generate_doc_mask_mod(lambda b, h, q, kv: q >= 0, OFFSETS),
    ),
    "packed": (masks.document_offsets(OFFSETS, causal=True), gym.generate_packed_causal_doc_mask_mod(OFFSETS)),
    "prefix": (masks.prefix_lm(10), gym.generate_prefix_lm_mask(10)),
    "shared prefix": (
        masks.shared_prefix(GROUPS, BRANCHES),
        gym.generate_shared_prefix_mask_mod(PREFIX_OFFSETS, PREFIX_OF),
    ),
    "global": (masks.global_local(5, GLOBAL), gym.generate_global_sliding_window(4, GLOBAL)),
    "natten, square": (masks.natten((7, 7), (5, 3)), gym.generate_natten(7, 7, 5, 3)),
    "natten, tiled": (masks.natten((4, 6), (3, 5), tile=(2, 3)), gym.generate_tiled_natten(6, 4, 5, 3, 3, 2)),
    "sta 2d": (masks.sliding_tile((8, 6), (6, 3), (2, 3)), gym.generate_sta_mask_mod_2d((8, 6), (6, 3), (2, 3))),
    "sta 3d": (
        masks.sliding_tile((6, 2, 4), (4, 2, 2), (2, 1, 2)),
        gym.generate_sta_mask_mod_3d((6, 2, 4), (4, 2, 2), (2, 1, 2)),
    ),
    "block diffusion": (masks.block_diffusion(24, 5), gym.generate_block_diffusion_mask(24, 5)),
    "tree": (
        masks.tree(torch.tensor(PARENTS)),
        gym.generate_jetspec_tree_causal_mask_mod(0, gym.build_tree_ancestor_matrix(PARENTS, device="cpu")),
    ),
    "images": (
        masks.image_cross_attention(torch.tensor([[0, 20], [9, 40], [40, 48]]), 16),
        gym.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 20], [9, 40], [40, 48]]), 16),
    ),
}
SEQ_LENS = {"natten, square": 49, "natten, tiled": 24, "tree": 10}


@pytest.mark.parametrize("name", SAME)
def test_masks_agree_where_both_have_them(name):
    ours, theirs = SAME[name]
    seq_len = SEQ_LENS.get(name, S)
    assert torch.equal(dense(ours, seq_len), dense(theirs, seq_len))


def test_scores_agree_where_both_have_them():
    base = torch.randn(1, 4, S, S, generator=torch.Generator().manual_seed(0))
    h, i = torch.arange(4)[:, None, None], torch.arange(S)
    b, q = torch.zeros(1, dtype=torch.int64), i[:, None]
    seen = torch.ones(S, S, dtype=torch.bool).tril()  # their alibi is for causal masks: signed distance

    def agree(ours, theirs):
        return torch.allclose(ours(base, b, h, q, i)[..., seen], theirs(base, b, h, q, i)[..., seen], atol=1e-4)

    assert agree(scores.alibi(4), mods.generate_alibi_bias(4))
    assert agree(scores.softcap(2.0), mods.generate_tanh_softcap(2, approx=False))
    # Their sandwich begins the cosines at i = 0, ours at 1 like the paper: theirs with the first exchanged is ours.
    first, last = torch.cos((q - i).float()), torch.cos((q - i).float() / 10000)
    ratio = 8 * (h + 1) / 4

    def exchanged(score, *index):
        return mods.generate_sandwich_bias(4, S, d_bar=8)(score, *index) + (last - first) / ratio

    assert agree(scores.sandwich(4, S, dim=8), exchanged)


def neighborhood(height, width, kernel):
    """Pair by pair: the kernel x kernel tokens around a query, moved inwards at the borders."""
    seen = torch.zeros(height * width, height * width, dtype=torch.bool)

    def inside(at, key, count):
        start = min(max(at - kernel // 2, 0), count - kernel)
        return start <= key < start + kernel

    for q in range(height * width):
        for kv in range(height * width):
            rows = inside(q // width, kv // width, height)
            seen[q, kv] = rows and inside(q % width, kv % width, width)
    return seen


def test_their_natten_is_wrong_on_a_grid_that_is_not_square():
    """It clamps rows by the width and columns by the height: on 16 rows of 4, most queries lose their neighborhood."""
    right = neighborhood(16, 4, 3)
    assert torch.equal(dense(masks.natten((16, 4), (3, 3)), 64), right)
    theirs = dense(gym.generate_natten(4, 16, 3, 3), 64)
    assert (theirs.sum(-1) < 9).any()
    assert not torch.equal(theirs, right)


def test_their_natten_sees_too_much_with_an_even_kernel():
    assert dense(masks.natten((8, 8), (4, 4)), 64).sum(-1).unique().tolist() == [16]
    assert dense(gym.generate_natten(8, 8, 4, 4), 64).sum(-1).unique().tolist() != [16]


def test_their_fast_causal_mask_is_wrong_for_rectangular_blocks():
    """Query blocks of 32 and key blocks of 16: it counts key blocks as if they were as long as query blocks."""
    q_block, kv_block, seq_len = 32, 16, 128
    fast = gym.causal.create_causal_block_mask_fast(1, 1, seq_len, seq_len, "cpu", block_size=(q_block, kv_block))
    theirs = fast.to_dense().bool()[0, 0]
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    right = seen.unflatten(0, (-1, q_block)).unflatten(2, (-1, kv_block)).any(3).any(1)
    lost = right & ~theirs
    assert lost.any(), "visible blocks that their mask drops"
    q_lo, kv_lo = torch.arange(0, seq_len, q_block), torch.arange(0, seq_len, kv_block)
    assert torch.equal(masks.causal().classify(q_lo, q_lo + q_block, kv_lo, kv_lo + kv_block)[0], right)


def test_their_document_mask_fails_on_a_padded_tail():
    """Rounding 48 tokens up to blocks of 32 asks about token 63: an index error there, the last token here."""
    beyond = torch.arange(64)
    theirs = gym.generate_packed_causal_doc_mask_mod(OFFSETS)
    with pytest.raises(IndexError):
        theirs(0, 0, beyond[:, None], beyond)
    ours = masks.document_offsets(OFFSETS, causal=True)(0, 0, beyond[:, None], beyond)
    assert torch.equal(ours[:S, :S], dense(theirs))
