"""`pd-rerank doctor`: a sheet for people and for machines, and an exit code that says how it went."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pd_rerank.cli import doctor
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import EngineFailure, MissingExtra, MissingResource

Run = Callable[..., Any]


def test_the_environment_sheet_names_what_matters(cli: Run) -> None:
    done = cli("doctor")
    assert done.exit_code == 0
    assert done.stderr == ""
    for word in ("python", "pd_rerank", "platform", "CPUs", "torch", "accelerators", "Java", "numpy", "GB free"):
        assert word in done.stdout


def test_the_sheet_for_machines_is_one_json_object(cli: Run) -> None:
    done = cli("doctor", "--json", "--engine", "fake", "--model", "x")
    found = json.loads(done.stdout)
    assert found["passed"] is True
    assert found["error"] is None
    assert {p["name"] for p in found["environment"]["packages"]} >= {"numpy", "torch", "transformers"}
    assert "every slot is followed by the placeholder" in {check["name"] for check in found["proof"]}


def test_a_package_not_installed_is_shown_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "numpy>=1.26",
        "no-such-lib>=2; extra == 'pools'",
        "pd-rerank[hf]; extra == 'demo'",
        "x; extra == 'dev'",
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: declared)
    found = {p["name"]: p for p in doctor.packages()}
    assert set(found) == {"numpy", "no-such-lib"}
    assert found["numpy"]["version"]
    assert found["numpy"]["cure"] is None
    assert found["no-such-lib"]["version"] is None
    assert found["no-such-lib"]["cure"] == "pip install 'pd-rerank[pools]'"


def test_java_is_shown_without_being_started_and_is_no_fault_of_reranking(cli: Run) -> None:
    sheet = json.loads(cli("doctor", "--json").stdout)["environment"]["java"]
    assert sheet["running"] is False
    assert sheet["problem"] is None or "pip install" in sheet["problem"]


def test_a_failed_check_is_shown_and_ends_with_5(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant(FakeEngine):
        def __init__(self, **options: Any) -> None:
            super().__init__(relevance=lambda query, text: 0.5, **options)

    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Constant)
    done = cli("doctor", "--engine", "fake", "--model", "x")
    assert done.exit_code == 5
    assert "FAIL" in done.stdout
    assert done.stderr.startswith("error: 1 of ")
    assert "different documents get different scores" in done.stderr
    found = json.loads(cli("doctor", "--engine", "fake", "--model", "x", "--json").stdout)
    assert found["passed"] is False


@pytest.mark.parametrize(
    ("error", "code"), [(MissingExtra("gone"), 3), (MissingResource("gone"), 4), (EngineFailure("gone"), 6)]
)
def test_what_cannot_load_ends_with_its_code_after_the_environment(
    cli: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("pd_rerank.engines.load_engine", fail)
    done = cli("doctor", "--model", "x", "--json")
    assert done.exit_code == code
    found = json.loads(done.stdout)
    assert (found["error"], found["passed"]) == ("gone", False)
    assert "numpy" in {p["name"] for p in found["environment"]["packages"]}


class Adapted(FakeEngine):
    """A fake that takes an adapter: with it, positions matter; its card is `card`."""

    card: dict[str, Any] | None = None

    def __init__(self, *, adapter: str | None = None, **options: Any) -> None:
        super().__init__(position_bias=0.0 if adapter in (None, "idle") else 0.3, **options)
        self.adapter_card = None if adapter is None else self.card


@pytest.mark.parametrize(
    ("adapter", "card", "code", "wrong"),
    [
        ("good", None, 0, []),
        ("good", {"template_hash": "of another prompt"}, 5, ["the adapter was made with this prompt"]),
        ("idle", None, 5, ["the adapter changes the scores"]),
    ],
)
def test_an_adapter_must_change_scores_and_fit_the_prompt(
    cli: Run, monkeypatch: pytest.MonkeyPatch, adapter: str, card: dict[str, Any] | None, code: int, wrong: list[str]
) -> None:
    monkeypatch.setattr(Adapted, "card", card)
    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Adapted)
    done = cli("doctor", "--engine", "fake", "--model", "x", "--adapter", adapter, "--json")
    assert done.exit_code == code
    proof = json.loads(done.stdout)["proof"]
    assert [check["name"] for check in proof if check["passed"] is False] == wrong


def test_a_terminal_gets_tables(cli: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    doctor._table("packages", [("numpy", "2.0", ""), ("torch", "missing", "pip install 'pd-rerank[hf]'")])
    shown = capsys.readouterr().out
    assert "│" in shown
    assert "pd-rerank[hf]" in shown
