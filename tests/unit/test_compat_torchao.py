"""torchao's remarks upon its import are silenced, and nothing else is."""

import sys
import warnings
from pathlib import Path

import pytest

from flexcp.compat_torchao import torchao

# As torchao/quantization/quant_api.py has it: a warning where the file is compiled, so only where there is no .pyc.
MODULE = '''
import warnings
"""a regex such as `re:language\\.layers`"""
warnings.warn("torch has renamed something", DeprecationWarning)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a torchao that stands in for the real one, which may have been imported and compiled already."""
    names = [name for name in sys.modules if name.partition(".")[0] == "torchao"]
    for name in [*names, "torchao", "torchao.noisy"]:  # the latter two are taken away again by monkeypatch
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "torchao"


def test_an_import_is_silent(folder: Path) -> None:
    (folder / "noisy.py").write_text(MODULE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a SyntaxWarning is then a SyntaxError
        assert torchao("noisy").__name__ == "torchao.noisy"
        with pytest.raises(DeprecationWarning):
            warnings.warn("afterwards", DeprecationWarning, stacklevel=2)


def test_a_warning_of_another_kind_is_heard(folder: Path) -> None:
    (folder / "noisy.py").write_text("import warnings\nwarnings.warn('this machine has no such kernel', UserWarning)\n")
    with pytest.warns(UserWarning, match="no such kernel"):
        torchao("noisy")
