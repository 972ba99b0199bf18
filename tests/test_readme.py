"""The README's own code and options, so that what a newcomer copies works."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from pd_rerank.config import RerankSettings
from pd_rerank.engines.hf import HFEngine
from pd_rerank.reranker import OCSFTBatchedReranker

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_the_code_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert sorted(re.findall(r"\((\d), 0\.\d+\)", shown)) == ["0", "1", "2"]


def test_every_option_of_the_table_exists() -> None:
    table = README.split("## Options")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    known = {*inspect.signature(OCSFTBatchedReranker).parameters, *inspect.signature(HFEngine).parameters}
    flags = {f"--{name.replace('_', '-')}" for name in RerankSettings.model_fields}
    for python, flag, *_ in rows:
        names = [name.split("=")[0] for name in re.findall(r"`([^`]+)`", python)]
        assert set(names) <= known, names
        given = re.findall(r"`(?:--no-)?(-*[^`]+)`", flag)
        spelt = {f"--{name.replace('_', '-')}" for name in names} if flag.startswith("same") else set()
        assert spelt | {f"--{name.removeprefix('--')}" for name in given} <= flags, flag


def messages() -> list[str]:
    """Every string in the package's code, with … where a value goes in."""
    found = []
    for path in (Path(__file__).parent.parent / "pd_rerank").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_quoted_under_troubleshooting_are_those_that_are_said() -> None:
    page = (Path(__file__).parent.parent / "docs/troubleshooting.md").read_text(encoding="utf-8")
    symptoms = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")][1:]
    spans = [span for s in symptoms for span in re.findall(r"`([^`]+)`", s)]
    quoted = [span for span in spans if " " in span and "KeyError" not in span]
    said = messages()
    assert quoted
    for quote in quoted:
        parts = [part.strip() for part in quote.split("…") if part.strip()]
        pattern = re.compile(".*".join(map(re.escape, parts)), flags=re.DOTALL)
        assert any(pattern.search(text) for text in said), quote
