"""--mask: expressions, functions and factories, and whose fault an error is."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from flexcp import masks
from flexcp.errors import UserError
from flexcp.usermask import load_mask

MODULE = """
import torch
from flexcp import masks

TABLE = torch.arange(100)

def plain(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def by_batch(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx + b

def by_head(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= TABLE[h]

def factory(doc_ids, seq_len):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (doc_ids[b, q_idx] == doc_ids[b, kv_idx])
    return mask_mod

def library(seq_len, window=4):
    return masks.causal() & masks.sliding_window(window)

made = masks.causal()

def raises(b, h, q_idx, kv_idx):
    return helper(q_idx)

def helper(x):
    raise ZeroDivisionError("my own\\nwords")  # line 30

def bad_factory(doc_ids):
    return doc_ids.no_such_method()

def none_factory(doc_ids):
    return None

def flow(b, h, q_idx, kv_idx):
    if q_idx > 3:
        return q_idx >= kv_idx
    return kv_idx >= 0

def floats(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) * 1.0

def in_vain(b, h, q_idx, kv_idx):
    TABLE[h], b + 1
    return q_idx >= kv_idx

def strange(window):
    return None

number = 3
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "user_masks.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('at import')\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    return str(tmp_path / "user_masks.py")


DOC_IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])


def dense(mask: object) -> torch.Tensor:
    return create_mask(mask, 2, 1, 12, 12, device="cpu")


def test_expression() -> None:
    source = load_mask("causal & document")
    same = DOC_IDS[:, None, :, None] == DOC_IDS[:, None, None, :]
    assert torch.equal(dense(source.make(DOC_IDS)), same & torch.ones(12, 12, dtype=torch.bool).tril())
    source.probe(DOC_IDS)
    assert source.varies(12)
    assert not load_mask("causal & sliding_window(4)").varies(12)


def test_functions_and_factories(module: str) -> None:
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    for name in ("plain", "made"):
        source = load_mask(f"{module}:{name}")
        assert torch.equal(dense(source.make(DOC_IDS)), causal)
        assert not source.varies(12)
        source.probe(DOC_IDS)
    source = load_mask(f"{module}:factory")
    assert source.varies(12)
    assert torch.equal(dense(source.make(DOC_IDS)), dense(load_mask("causal & document").make(DOC_IDS)))
    library = load_mask(f"{module}:library")
    assert isinstance(library.make(DOC_IDS), masks.Mask)
    assert not library.varies(12)


def test_a_module_is_found_in_the_working_directory(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(module).parent)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    monkeypatch.delitem(__import__("sys").modules, "user_masks", raising=False)
    load_mask("user_masks:plain").probe(DOC_IDS)


def test_what_a_function_reads(module: str) -> None:
    for name, expected in {
        "plain": (False, False),
        "by_batch": (True, False),
        "by_head": (False, True),
        "factory": (True, False),
        "library": (False, False),
        "in_vain": (False, False),  # as flexcp.plan sees it, which then asks for no heads=
    }.items():
        source = load_mask(f"{module}:{name}")
        assert source.reads(source.make(DOC_IDS)) == expected, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "raised ZeroDivisionError (my own words) at {module} line 30"),
        ("bad_factory", "raised AttributeError"),
        ("none_factory", "the factory returned NoneType"),
        ("flow", "data-dependent control flow"),
        ("floats", "returns torch.float32"),
    ],
)
def test_errors_of_the_users(module: str, name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_mask(f"{module}:{name}").probe(DOC_IDS)
    assert words.format(module=module) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{module}:plan", "did you mean plain"),
        ("{module}:number", "is of type int"),
        ("{module}:strange", "window is neither"),
        ("{folder}/nothing.py:f", "does not exist"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("no.such.module:f", "there is no module"),
        ("..:f", "there is no module"),
        (":f", "write module:function"),
        ("module:", "write module:function"),
        ("{folder}/broken.py:f", "RuntimeError (at import) at {folder}/broken.py line 2"),
        ("{folder}/syntax.py:f", "SyntaxError"),
    ],
)
def test_values_that_name_no_mask(module: str, text: str, words: str) -> None:
    names = {"module": module, "folder": str(Path(module).parent)}
    with pytest.raises(UserError) as caught:
        load_mask(text.format(**names))
    assert words.format(**names) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["casual", "causal & documnt", "import os", "", "causal(", "__import__('os')"])
def test_expressions_with_an_error(text: str) -> None:
    with pytest.raises(UserError, match="--mask"):
        load_mask(text).make(DOC_IDS)
