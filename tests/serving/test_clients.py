"""The client code of docs/serve.md, run as it stands: other packages' own clients get the library's answer."""

from __future__ import annotations

import gc
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_rerank import FakeEngine
from tests.served import on_socket, ranker

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
PAGE = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text(encoding="utf-8")
PART = PAGE.split("## Clients")[1].split("## Serve an adapter")[0]
CODE = re.findall(r"```python\n(.*?)```", PART, flags=re.DOTALL)

QUERY = "how often to oil a bicycle chain?"
TEXTS = [f"text {i}: {words}" for i, words in enumerate(["the shop opens", "oil a chain", "", "ünïcode 🚲 chain"] * 12)]
"""48 documents: three windows, blank ones among them."""


def packages(code: str) -> list[str]:
    """What a block imports."""
    return re.findall(r"^(?:from|import) ([\w.]+)", code, flags=re.MULTILINE)


def installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # imported already, and one of those that load their parts when they are asked for
        return True


def placed(result: Any) -> tuple[str | int, float]:
    """Which document a client's result is of, by its text or its place, and its score."""
    if hasattr(result, "relevance_score"):
        return result.index, result.relevance_score  # Cohere's SDK
    if hasattr(result, "page_content"):
        return result.page_content, result.metadata["relevance_score"]
    if hasattr(result, "node"):
        return result.node.get_content(), result.score
    if hasattr(result, "document"):
        return result.document.text, result.score  # rerankers
    return result.content or "", result.score


def answer(code: str, url: str, query: str, texts: list[str]) -> list[tuple[str | int, float]]:
    """What a block gets from the server at `url`, placed; skips where a package of it is not installed."""
    if absent := [name for name in packages(code) if not installed(name)]:
        pytest.skip(f"this client needs {absent[0]}, which is not installed")
    names: dict[str, Any] = {"query": query, "texts": texts}
    exec(compile(code.replace("http://localhost:8000", url), "docs/serve.md", "exec"), names)
    found = [placed(result) for result in names["results"]]
    names.clear()
    gc.collect()  # some clients leave sockets to the collector, whose warning would meet another test
    return found


def test_the_page_has_a_client_of_each_kind() -> None:
    known = " ".join(CODE)
    for package in ("rerankers", "cohere", "langchain_cohere", "llama_index", "haystack"):
        assert f" {package}" in known


@pytest.mark.parametrize("code", CODE, ids=lambda code: packages(code)[-1])
@pytest.mark.filterwarnings("default")  # what other packages warn of is their own
def test_a_client_gets_the_librarys_answer(code: str) -> None:
    engine = FakeEngine(position_bias=0.3, companion_bias=0.2)
    alone = ranker(engine).rank(QUERY, TEXTS)
    with on_socket(ranker(engine), token="of-mine") as (url, _):
        found = answer(code, url, QUERY, TEXTS)
    assert len(found) == len(TEXTS)
    first = found[0][0]
    expected = [(int(r.document.doc_id) if isinstance(first, int) else r.document.text, r.score) for r in alone]
    assert [score for _, score in found] == [score for _, score in expected]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_elasticsearchs_request_and_paths_fit() -> None:
    """As its custom service does: values put into the request as JSON, lists read by their paths."""
    (block,) = re.findall(r"PUT _inference/\S+\n(\{.*?)```", PAGE, flags=re.DOTALL)
    settings = json.loads(block)["service_settings"]
    filled = settings["request"].replace("${query}", json.dumps(QUERY)).replace("${input}", json.dumps(TEXTS))
    headers = {name: value.replace("${api_key}", "of-mine") for name, value in settings["headers"].items()}
    with on_socket(token="of-mine") as (url, _):
        response = httpx.post(f"{url}/v1/rerank", content=filled.encode(), headers=headers)
    assert response.status_code == 200, response.text
    read = {}
    for name, path in settings["response"]["json_parser"].items():
        before, _, after = path.removeprefix("$.").partition("[*].")
        values = response.json()[before]
        for key in after.split("."):
            values = [value[key] for value in values]
        read[name] = values
    alone = ranker().rank(QUERY, TEXTS)
    assert read["reranked_index"] == [int(r.document.doc_id) for r in alone]
    assert read["relevance_score"] == [r.score for r in alone]
    assert read["document_text"] == [r.document.text for r in alone]
