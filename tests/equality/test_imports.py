"""What imports what: logic without torch, one direction between the folders, and a light `import hf_paged`."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_paged"

NO_TORCH = sorted(
    [f"hf_paged.{name}" for name in ("request", "config", "errors")]
    + [f"hf_paged.cache.{name}" for name in ("block_pool", "block_table", "prefix", "allocator")]
    + ["hf_paged.scheduler"]
    + [f"hf_paged.scheduler.{path.stem}" for path in (PACKAGE / "scheduler").glob("*.py") if path.stem != "__init__"]
)
HEAVY = ("accelerate", "triton", "typer", "rich")

# Each folder may import from itself, from those named here, and from the plain modules at the top.
ALLOWED = {
    "cache": {"kernels"},
    "scheduler": {"cache"},
    "kernels": set(),
    "linears": {"kernels"},
    "fused": {"kernels", "linears"},
    "engine": {"cache", "scheduler", "kernels", "linears", "fused"},
    "integrations": {"cache", "scheduler", "kernels", "linears", "fused", "engine"},
    "server": {"cache", "scheduler", "kernels", "linears", "fused", "engine", "integrations"},
    "distributed": {"cache", "scheduler", "kernels", "linears", "fused", "engine", "integrations"},
    "simulate": {"cache", "scheduler"},
    "commands": {
        "cache",
        "scheduler",
        "kernels",
        "linears",
        "fused",
        "engine",
        "integrations",
        "server",
        "distributed",
        "simulate",
    },
}


def _file_of(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _is_type_checking(node: ast.If) -> bool:
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


class _Imports(ast.NodeVisitor):
    """Every import that can run: those in functions too, those for type checkers not."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        for child in node.orelse if _is_type_checking(node) else [*node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            parts = parts[: len(parts) - node.level + 1]
            base = ".".join([*parts, base] if base else parts)
        self.found.add(base)
        for alias in node.names:
            if base.startswith("hf_paged") and _file_of(f"{base}.{alias.name}"):
                self.found.add(f"{base}.{alias.name}")


@functools.cache
def _imports(module: str) -> frozenset[str]:
    path = _file_of(module)
    assert path is not None, f"{module} has no file"
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    visitor = _Imports(package)
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(visitor.found)


def _reaches(module: str) -> dict[str, tuple[str, ...]]:
    """Everything a module reaches through its own imports -> the chain that leads there.

    The folders' `__init__` files on the way count; the package's own doesn't, since it is the front door that brings
    everything together.
    """
    chains: dict[str, tuple[str, ...]] = {module: (module,)}
    queue = [module]
    while queue:
        current = queue.pop()
        if current.split(".")[0] != "hf_paged" or _file_of(current) is None:
            continue
        names = set(_imports(current))
        names |= {name.rpartition(".")[0] for name in (*names, current) if name.startswith("hf_paged.")}
        for name in names - {"hf_paged"}:
            if name not in chains:
                chains[name] = (*chains[current], name)
                queue.append(name)
    return chains


def _all_modules() -> list[str]:
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return modules


@pytest.mark.parametrize("module", NO_TORCH)
def test_logic_reaches_neither_torch_nor_transformers(module: str) -> None:
    for name, chain in _reaches(module).items():
        assert name.split(".")[0] not in ("torch", "transformers", "numpy"), " -> ".join(chain)


def test_logic_runs_where_torch_can_not_be_imported() -> None:
    code = f"""
import sys, types, importlib
for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None
package = types.ModuleType("hf_paged")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["hf_paged"] = package
for module in {NO_TORCH!r}:
    importlib.import_module(module)
from hf_paged.cache.block_pool import BlockPool
pool = BlockPool(2)
pool.free([pool.allocate()])
pool.check()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", _all_modules())
def test_imports_go_one_way(module: str) -> None:
    parts = module.split(".")
    if len(parts) < 3 and module.removeprefix("hf_paged.") not in ALLOWED:
        return  # a module at the top of the package brings folders together
    folder = parts[1]
    for name in _imports(module):
        target = name.split(".")
        if target[0] != "hf_paged" or len(target) < 2 or target[1] not in ALLOWED or target[1] == folder:
            continue
        assert target[1] in ALLOWED[folder], f"{module} imports {name}; {folder} may use {sorted(ALLOWED[folder])}"


@pytest.mark.parametrize("module", [name for name in _all_modules() if name.startswith("hf_paged.kernels")])
def test_kernels_know_tensors_and_metadata_only(module: str) -> None:
    for name, chain in _reaches(module).items():
        parts = name.split(".")
        if parts[0] == "hf_paged" and len(parts) > 1:
            assert parts[1] not in ("request", "scheduler", "engine", "integrations", "cache"), " -> ".join(chain)


def test_only_one_file_knows_versions_of_transformers() -> None:
    for module in _all_modules():
        if module == "hf_paged.compat":
            continue
        path = _file_of(module)
        assert path is not None
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            version = isinstance(node, ast.Attribute) and node.attr == "__version__"
            if version and isinstance(node.value, ast.Name):  # type: ignore[attr-defined]
                assert node.value.id != "transformers", f"{module} asks for the version of transformers"  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"""
import sys
from transformers.generation.utils import GenerationMixin
before = set(sys.modules)
import hf_paged
added = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(added & set({HEAVY!r})))
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_importing_the_package_registers_and_wraps() -> None:
    code = """
import hf_paged
from transformers import AttentionInterface
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
assert "hf_paged" in AttentionInterface().valid_keys()
assert "hf_paged" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
assert "hf_paged" in GenerationMixin.generate.__code__.co_filename
assert "hf_paged" in GenerationMixin._sample.__code__.co_filename
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
