"""What `import pd_rerank` costs, and what is said where an optional part is missing or broken."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pd_rerank
from pd_rerank._extras import need
from pd_rerank.errors import MissingExtra, PdRerankError

HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "scipy",
    "pandas",
    "rerankers",
    "ranx",
    "numba",
    "pyserini",
    "jnius",
    "faiss",
    "vllm",
    "gguf",
    "langchain",
    "langchain_core",
    "pydantic",
    "yaml",
    "typer",
    "rich",
    "tqdm",
}

ABSENT = """
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""Makes packages truly absent: nobody finds them, as in an environment where they were never installed."""


def fresh(script: str, *, absent: tuple[str, ...] = ()) -> str:
    """Run a script in a process of its own and return what it printed."""
    head = ABSENT.format(absent=set(absent)) if absent else ""
    run = subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_loads_the_standard_library_and_one_module_of_ours() -> None:
    loaded = json.loads(
        fresh(
            "import json, sys\n"
            "before = set(sys.modules)\n"
            "import pd_rerank\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
    )
    ours = [name for name in loaded if name.partition(".")[0] == "pd_rerank"]
    assert ours == ["pd_rerank"]
    assert {name.partition(".")[0] for name in loaded} - {"pd_rerank"} <= set(sys.stdlib_module_names)
    assert not HEAVY & set(loaded)


def test_errors_and_pools_need_no_model_library() -> None:
    loaded = fresh(
        "import sys, pd_rerank\n"
        "pd_rerank.BadArgument, pd_rerank.Pool, pd_rerank.Threshold, pd_rerank.ScoreTable, pd_rerank.FakeEngine\n"
        "pd_rerank.GradePrompt, pd_rerank.score_pools, pd_rerank.read_pools\n"
        "print(*sys.modules)"
    ).split()
    assert not {"torch", "transformers", "rerankers", "peft", "langchain_core"} & set(loaded)


@pytest.mark.parametrize("name", sorted(pd_rerank._HOME))
def test_every_public_name_resolves(name: str) -> None:
    home = f"pd_rerank.{pd_rerank._HOME[name]}"
    if importlib.util.find_spec(home) is None:
        pytest.skip(f"{home} is not there yet")
    value = getattr(pd_rerank, name)
    assert value is getattr(importlib.import_module(home), name)
    assert name in dir(pd_rerank)
    assert name in pd_rerank.__all__


def test_type_checkers_see_the_names_that_are_there_at_run_time() -> None:
    tree = ast.parse(Path(pd_rerank.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {name: f"pd_rerank.{home}" for name, home in pd_rerank._HOME.items()}
    assert sorted(pd_rerank.__all__) == sorted([*pd_rerank._HOME, "__version__"])


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'pd_rerank' has no attribute 'OCSFTReranker'"):
        pd_rerank.OCSFTReranker  # noqa: B018
    with pytest.raises(ImportError):
        from pd_rerank import OCSFTReranker  # noqa: F401


def test_without_langchain_core_the_compressor_names_the_pip_command_and_is_not_none() -> None:
    said = fresh(
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pd_rerank import FakeEngine, MissingExtra, OCSFTBatchedReranker\n"
        "ranker = OCSFTBatchedReranker('m', 0, engine=FakeEngine())\n"
        "assert [r.text for r in ranker.rank('q', ['a', 'q'])] == ['q', 'a']\n"
        "try:\n"
        "    print(ranker.as_langchain_compressor())\n"
        "except MissingExtra as error:\n"
        "    assert error.__cause__ is None and error.name == 'langchain_core'\n"
        "    print(error)\n",
        absent=("langchain", "langchain_core"),
    )
    assert said.endswith("pip install 'pd-rerank[langchain]'")
    assert "langchain-core" in said


def test_without_torch_and_transformers_everything_but_the_model_engine_works() -> None:
    said = fresh(
        "import asyncio\n"
        "from rerankers import Document, Reranker\n"
        "import pd_rerank\n"
        "pd_rerank.register()\n"
        "ranker = Reranker('m', model_type='ocsft', engine='fake', verbose=0, presentations=2)\n"
        "print([r.rank for r in asyncio.run(ranker.rank_async('q', [Document('a'), 'q']))])\n",
        absent=("torch", "transformers", "peft", "langchain_core", "pandas", "scipy"),
    )
    assert said == "[1, 2]"


@pytest.mark.skipif(
    importlib.util.find_spec("pd_rerank.engines.hf") is None, reason="pd_rerank.engines.hf is not there yet"
)
@pytest.mark.parametrize("absent", [("torch",), ("transformers",), ("torch", "transformers")])
def test_without_its_libraries_the_model_engine_names_the_pip_command_through_rerankers_too(
    absent: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = fresh(
        "from rerankers import Reranker\n"
        "import pd_rerank\n"
        "pd_rerank.register()\n"
        "try:\n"
        f"    print(Reranker({str(tmp_path)!r}, model_type='ocsft', verbose=0))\n"
        "except pd_rerank.MissingExtra as error:\n"
        "    print(error)\n",
        absent=absent,
    )
    assert "pip install 'pd-rerank[hf]'" in said


def test_a_missing_package_is_reported_with_its_name_and_purpose() -> None:
    with pytest.raises(
        MissingExtra, match=r"'no_such_package_x.part' is needed here.*pip install 'pd-rerank\[eval\]'"
    ) as e:
        need("no_such_package_x.part", extra="eval")
    assert isinstance(e.value, ImportError)
    assert isinstance(e.value, PdRerankError)
    assert e.value.name == "no_such_package_x"
    assert e.value.exit_code == 3
    with pytest.raises(MissingExtra, match="plots need it, and it is not installed"):
        need("no_such_package_x", extra="eval", purpose="plots need it")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ImportError('libfoo.so is of another version')", ImportError),
        ("import no_such_package_y", ModuleNotFoundError),
        ("from json import no_such_name", ImportError),
        ("{}['key']", KeyError),
        ("raise RuntimeError('no device')", RuntimeError),
    ],
)
@pytest.mark.parametrize("part", ["", ".part"])
def test_an_error_inside_an_installed_package_is_not_reported_as_missing(
    body: str, error: type[Exception], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torn_package_z"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("" if part else body)
    (tmp_path / name / "part.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(error) as caught:
        need(name + part, extra="hf")
    assert not isinstance(caught.value, MissingExtra)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_broken_langchain_core_shows_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "langchain_core").mkdir()
    (tmp_path / "langchain_core" / "__init__.py").write_text("raise ImportError('an inner part moved')")
    said = fresh(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pd_rerank import FakeEngine, MissingExtra, OCSFTBatchedReranker\n"
        "try:\n"
        "    print(OCSFTBatchedReranker('m', 0, engine=FakeEngine()).as_langchain_compressor())\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert said == "ImportError an inner part moved"
