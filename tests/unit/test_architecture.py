"""Who may import whom, who may use torch's private names, and how long a file may be: read from the source."""

import ast
import fnmatch
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# With all that these import: see `planning`.
PLANNING = {"layout", "balance", "blockmask", "blocksource", "planner"}
# The engine: what `import flexcp` brings in, and these where they are there. The application is the rest of flexcp/; it
# may know masks and models, and the engine may know neither these nor the application.
ENGINE = {"comm", "kernel", "merge", "attention", "dispatch", "op", "mesh", "parallelize", "fp8", "tiling", "offload"}
ENGINE |= {"loss", "headserial", "leanlayer", "simulate"}
APPLICATION = {"train", "checks", "config", "data", "launch", "metrics", "estimate", "usermask", "evaluate"}
APPLICATION |= {"step", "plans", "gradients", "optim"}
APPLICATION |= {"memory", "memoryadvice", "fit", "options", "flags"}
MAY_TOUCH_PRIVATE_TORCH = ("flexcp.kernel", "flexcp.dispatch", "flexcp.compat")
MOST_LINES = 400


def _modules() -> dict[str, Path]:
    """Every module of the product by the name it is imported under."""
    found = {}
    for folder, package in (("flexcp", "flexcp"), ("masks", "flexcp.masks"), ("models", "flexcp.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def room(module: str) -> str:
    """masks, models, engine or application."""
    parts = module.split(".")
    if parts[1:2] in (["masks"], ["models"]):
        return parts[1]
    if parts[1:] and parts[1] in APPLICATION:
        return "application"
    return "engine" if module in engine() else "application"


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def statements(module: str, typing_too: bool) -> Iterator[ast.AST]:
    """Every node, without the bodies of `if TYPE_CHECKING:` unless typing_too; those import nothing at run time."""
    todo: list[ast.AST] = [tree_of(module)]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not typing_too:
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def imported(module: str, typing_too: bool = True) -> set[tuple[str, int]]:
    """(full name, line) of everything imported; `from a import b` gives a.b, which may be a module or not."""
    names = set()
    for node in statements(module, typing_too):
        if isinstance(node, ast.Import):
            names |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: absolute imports only"
            names |= {(f"{node.module}.{alias.name}", node.lineno) for alias in node.names}
    return names


def of_flexcp(module: str, typing_too: bool = True) -> set[tuple[str, int]]:
    """The modules of the product that a module imports, with the line."""
    found = set()
    for name, line in imported(module, typing_too):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name:
            found.add((name, line))
    return found


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_the_rooms_are_there() -> None:
    top = {name.split(".")[1] for name in MODULES if name.count(".") == 1}
    assert top >= PLANNING | {"train", "comm", "dispatch"}, "a room was renamed: tell this test"
    assert len(MODULES) > 50


def reached(first: list[str], stop: tuple[str, ...] = ()) -> set[str]:
    """Modules with everything of the product that they import, directly or not; not looked into are those in stop."""
    found, todo = set(), list(first)
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += [] if module.startswith(stop) else [name for name, _ in of_flexcp(module)]
    return found


@functools.cache
def engine() -> set[str]:
    known = [f"flexcp.{name}" for name in ENGINE if f"flexcp.{name}" in MODULES]
    return reached(["flexcp", *known], ("flexcp.masks", "flexcp.models"))


def planning() -> set[str]:
    return reached([f"flexcp.{name}" for name in PLANNING])


def test_planning_knows_no_collective() -> None:
    wrong = []
    for module in planning():
        wrong += [
            f"{where(module, line)} imports {name}"
            for name, line in imported(module)
            if name.startswith(("torch.distributed", "flexcp.comm"))
        ]
        wrong += [
            f"{where(module, node.lineno)} uses torch.distributed"
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
    assert not wrong


def test_planning_is_type_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    wanted = {str(MODULES[module].relative_to(ROOT)) for module in planning()}
    assert wanted - {"flexcp/errors.py"} <= set(settings["include"]), "pyright's `include` in pyproject.toml"


ALLOWED = {
    "engine": {"engine"},
    "application": {"application", "engine", "masks", "models"},
    "masks": {"masks"},
    "models": {"models"},
}


def test_imports_run_one_way() -> None:
    wrong = [
        f"{where(module, line)} ({room(module)}) imports {name} ({room(name)})"
        for module in MODULES
        for name, line in of_flexcp(module)
        if room(name) not in ALLOWED[room(module)]
    ]
    assert not wrong


def test_only_comm_calls_collectives() -> None:
    """Of the engine; the application sums gradients and losses itself, and sharding and api go through a Link."""
    calls = {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "isend",
        "irecv",
        "send",
        "recv",
    }
    calls |= {"barrier", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather_single", "batch_isend_irecv"}
    wrong = []
    for module in MODULES:
        if module == "flexcp.comm" or room(module) == "application":
            continue
        for node in ast.walk(tree_of(module)):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if text.startswith(("dist.", "torch.distributed.")) and text.rpartition(".")[2] in calls:
                wrong.append(f"{where(module, node.lineno)} uses {text}")
    assert not wrong


def test_no_import_cycle() -> None:
    edges = {module: {name for name, _ in of_flexcp(module, typing_too=False)} - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for name in sorted(edges[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def private_torch_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) wherever a name with a leading underscore is reached through torch."""
    aliases = {}
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        for full, bound in names:
            if full.split(".")[0] == "torch":
                aliases[bound] = full if bound != "torch" else "torch"
                if is_private(full):
                    yield full, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            # The innermost private attribute only: torch._C, not also torch._C.f.
            if root in aliases and is_private(rest[-1]) and not any(map(is_private, rest[:-1])):
                yield ".".join((aliases[root], *rest)), node.lineno


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_torch_names_stay_in_their_rooms() -> None:
    wrong = [
        f"{where(module, line)} uses {name}"
        for module in MODULES
        if not module.startswith(MAY_TOUCH_PRIVATE_TORCH)
        for name, line in private_torch_names(tree_of(module))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C.f()", ["torch._C"]),
        ("import torch.distributed as dist\ndist._x", ["torch.distributed._x"]),
        ("from torch.nn.attention.flex_attention import _ask", ["torch.nn.attention.flex_attention._ask"]),
        ("from torch._dynamo import f", ["torch._dynamo.f"]),
        ("import torch\ntorch.nn.functional.relu(self._x).__class__", []),
    ],
)
def test_private_names_are_found(source: str, found: list[str]) -> None:
    assert [name for name, _ in private_torch_names(ast.parse(source))] == found


def test_what_is_imported_is_declared() -> None:
    """Also what only the tests import: a package that lies here by chance is missing in a fresh environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {normal(re.match(r"[\w.-]+", text)[0]) for text in requirements}  # type: ignore[index]

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    product = names(project["dependencies"]) | {
        "triton"
    }  # a part of torch where there is a GPU, and imported there alone
    everything = product | names(project["optional-dependencies"]["test"])
    with_data = product | names(project["optional-dependencies"]["data"])  # imported where such data is read
    distributions = packages_distributions()
    undeclared = set()
    for folder, declared in (("flexcp", with_data), ("masks", product), ("models", product), ("tests", everything)):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found = [alias.name for alias in node.names]
                else:
                    found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for top in {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"flexcp", "tests"}:
                    if not declared & {normal(name) for name in distributions.get(top, [top])}:
                        undeclared.add(f"{path.relative_to(ROOT)}:{node.lineno} imports {top}")
    assert not undeclared


def test_no_file_is_too_long() -> None:
    folders = ("flexcp", "masks", "models", "tests", "scripts")
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and (path.suffix == ".py" or (folder == "scripts" and not path.suffix))
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_test_is_skipped_by_the_name_of_its_folder(pytestconfig: pytest.Config) -> None:
    """pytest by default does not look into `dist` and `build`, and says nothing."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = [path.name for path in (ROOT / "tests").rglob("*") if path.is_dir() and path.name != "__pycache__"]
    assert "dist" in folders
    assert not [name for name in folders for pattern in patterns if fnmatch.fnmatch(name, pattern)]


def test_git_ignores_no_source() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folders = ["flexcp", "masks", "models", "tests", "scripts", "docs"]
    listing = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *folders]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert not [name for name in found if "__pycache__" not in name]
