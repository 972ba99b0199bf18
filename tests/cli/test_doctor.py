"""`pd-rerank doctor`: a sheet for people and for machines, and an exit code that says how it went."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.cli import doctor
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import EngineFailure, MissingExtra, MissingResource
from pd_rerank.prompt import GradePrompt
from pd_rerank.retrieval.java import java_report
from pd_rerank.rubrics import RUBRICS
from tests.engines.fake_vllm import Behaviour, vllm
from tests.engines.tiny import save_adapter, tiny
from tests.tokenizers_for_tests import byte_level

__all__ = ["vllm"]

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
    before = java_report()["running"]  # another test of this process may have started it
    sheet = json.loads(cli("doctor", "--json").stdout)["environment"]["java"]
    assert sheet["running"] is java_report()["running"] is before
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
    """A fake in the place of the real engine that takes an adapter: with it, positions matter; its card is `card`."""

    card: dict[str, Any] | None = None

    def __init__(self, model: str, *, adapter: str | None = None) -> None:
        super().__init__(position_bias=0.0 if adapter in (None, "idle") else 0.3, name=model)
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
    monkeypatch.setattr("pd_rerank.engines.hf.HFEngine", Adapted)
    done = cli("doctor", "--model", "x", "--adapter", adapter, "--json")
    assert done.exit_code == code
    proof = json.loads(done.stdout)["proof"]
    assert [check["name"] for check in proof if check["passed"] is False] == wrong


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that names its base, a random tiny model, and whose card asks for other wording than usual."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = byte_level()
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    tiny(**shape).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    save_adapter(folder / "adapter", tiny(**shape))
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": str(folder / "base"), "revision": None}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    prompt = GradePrompt(
        tokenizer, rubric="answer_support", instruction="Grade it's use.", markers="alpha", placeholder="?", chat=False
    )
    (folder / "adapter" / "reranker.json").write_text(json.dumps(prompt.describe()))
    return folder


def test_an_adapter_alone_is_proved_on_the_base_it_names_with_the_wording_it_was_made_with(
    cli: Run, trained: Path
) -> None:
    """The failing line names the options; with them, everything passes."""
    alone = ("doctor", "--adapter", trained / "adapter", "--device", "cpu", "--dtype", "fp32")
    done = cli(*alone)
    assert done.exit_code == 5
    (title,) = [line for line in done.stdout.splitlines() if line.startswith(str(trained / "base"))]
    assert title == f"{trained / 'base'} with {trained / 'adapter'}:"
    (line,) = [line for line in done.stdout.splitlines() if "FAIL" in line]
    assert "the adapter was made with this prompt" in line
    options = shlex.split(line.partition("; give ")[2])
    assert options == [
        *("--rubric", "answer_support", "--instruction", "Grade it's use."),
        *("--markers", "alpha", "--placeholder", "?", "--no-chat"),
    ]
    done = cli(*alone, *options, "--max-length", "2000", "--merge-adapter", "--json")
    assert done.exit_code == 0, done.stderr
    proof = {check["name"]: check for check in json.loads(done.stdout)["proof"]}
    assert "plain layout, prompts up to 2000 tokens" in proof["prompt"]["detail"]
    assert proof["the adapter changes the scores"]["passed"] is True
    assert proof["the adapter was made with this prompt"]["passed"] is True


def test_the_line_names_a_rubric_that_is_no_shipped_one_and_nothing_that_fits(trained: Path) -> None:
    tokenizer = byte_level()
    own = replace(RUBRICS["passage_relevance"], name="mine", grades=("a", "b", "c", "d"))
    prompt = GradePrompt(tokenizer)
    card = json.loads(json.dumps(GradePrompt(tokenizer, rubric=own).describe()))
    assert list(doctor._asked_for(prompt, card)) == ["--rubric, the adapter's folder, for its rubric 'mine'"]
    assert list(doctor._asked_for(GradePrompt(tokenizer, rubric=own), card)) == []
    assert list(doctor._asked_for(prompt, {"rubric": "response_quality"})) == ["--rubric response_quality"]


def test_a_model_is_not_taken_for_an_adapter(cli: Run, trained: Path) -> None:
    done = cli("doctor", "--adapter", trained / "base", "--device", "cpu")
    assert done.exit_code == 2
    assert "give it as --model" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "fake", "--dtype", "bf16"), "--dtype means nothing to --engine fake"),
        (("--engine", "fake", "--model", "x", "--adapter", "y"), "--adapter means nothing to --engine fake"),
        (("--engine", "fake", "--trust-remote-code"), "--trust-remote-code means nothing to --engine fake"),
        (("--engine", "vlm", "--model", "x"), "unknown engine 'vlm'; choose one of hf, vllm, server, gen"),
        (("--engine", "vllm", "--model", "x", "--device", "cuda"), "--device means nothing to --engine vllm"),
        (("--engine", "server", "--model", "x"), "--engine server needs the server's address"),
        (("--engine", "generated", "--model", "x"), "--engine generated needs the server's address"),
        (("--engine", "server", "--server", "http://h:1", "--adapter", "a"), "needs the base of an adapter"),
        (("--engine", "generated", "--server", "http://h:1", "--no-chat"), "--engine generated has none"),
        (("--server", "http://h:1", "--model", "x"), "--server means nothing to --engine hf"),
        (("--model", "x", "--dtype", "fp8"), "--dtype"),
        (("--model", "x", "--markers", "beta"), "unknown markers 'beta'"),
        (("--model", "x", "--rubric", "nonesuch"), "unknown rubric 'nonesuch'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(
    cli: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(doctor, "environment", lambda: pytest.fail("looked around first"))
    done = cli("doctor", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


# -- engines other than transformers ---------------------------------------------------------------------------------


def checks(done: Any) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(done.stdout)["proof"]}


def test_a_server_is_proved_like_a_model_with_and_without_its_adapter(cli: Run, trained: Path) -> None:
    from pd_rerank.engines.hf import HFEngine
    from tests.engines.model_servers import ModelServer

    wording = ("--rubric", "answer_support", "--instruction", "Grade it's use.", "--markers", "alpha", "--no-chat")
    wording = (*wording, "--placeholder", "?")
    how = {"dtype": "float32", "device": "cpu"}
    bare, put_on = HFEngine(trained / "base", **how), HFEngine(trained / "base", adapter=trained / "adapter", **how)
    ids = GradePrompt(bare.tokenizer).grade_ids
    model = ModelServer("vllm_pooling", bare.model, bare.tokenizer, adapters={"adapter": put_on.model}, grade_ids=ids)
    with model.running():
        words = ("doctor", "--engine", "server", "--server", model.url, "--model", trained / "base", "--json")
        done = cli(*words)
        assert done.exit_code == 0, done.output
        assert "slot_readout pooling" in checks(done)["loaded"]["detail"]
        done = cli(*words, "--adapter", trained / "adapter", "--slot-readout", "pooling", *wording)
        assert done.exit_code == 0, done.output
        assert checks(done)["the adapter changes the scores"]["passed"] is True
        assert cli(*words, "--slot-readout", "one_token").exit_code == 5
    done = cli(*words)
    assert (done.exit_code, "no model server at" in done.stderr) == (4, True)


def test_vllm_is_proved_with_one_load_for_adapter_and_base(cli: Run, trained: Path, vllm: Behaviour) -> None:
    words = ("--rubric", "answer_support", "--instruction", "Grade it's use.", "--markers", "alpha", "--no-chat")
    given = ("--model", trained / "base", "--adapter", trained / "adapter", "--dtype", "fp32", "--placeholder", "?")
    done = cli("doctor", "--engine", "vllm", *given, *words, "--json")
    assert done.exit_code == 0, done.output
    assert checks(done)["the adapter changes the scores"]["passed"] is True
    assert len(vllm.loads) == 1


def test_a_chat_model_is_asked_five_times_and_must_tell_documents_apart(cli: Run) -> None:
    from tests.engines.chat_server import ChatServer, answer, closed_port, completion, graded

    words = ("doctor", "--engine", "generated", "--model", "judge", "--json", "--server")
    with ChatServer() as server:
        done = cli(*words, server.url)
        assert done.exit_code == 0, done.output
        assert len(server.requests) == 5
        assert checks(done)["every slot has its grades"]["passed"] is True
        server.replies = lambda body, n: completion(answer(dict.fromkeys(graded(body), 2)))
        done = cli(*words, server.url)
        assert (done.exit_code, "different documents get different scores" in done.stderr) == (5, True)
        server.replies = lambda body, n: completion("2, I think" if n % 2 else answer(graded(body)))
        done = cli(*words, server.url)
        assert (done.exit_code, "every slot has its grades" in done.stderr) == (5, True)
    assert cli(*words, closed_port()).exit_code == 6


@pytest.mark.parametrize(("computes", "said"), [(True, "bf16: in hardware"), (False, "bf16: emulated and slow")])
def test_what_the_sheet_says_of_bfloat16_is_what_the_engine_goes_by(
    cli: Run, monkeypatch: pytest.MonkeyPatch, computes: bool, said: str
) -> None:
    monkeypatch.setattr("pd_rerank.engines.loading.cpu_computes_bfloat16", lambda: computes)
    assert said in cli("doctor").stdout


def test_a_terminal_gets_tables(cli: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    doctor._table("packages", [("numpy", "2.0", ""), ("torch", "missing", "pip install 'pd-rerank[hf]'")])
    shown = capsys.readouterr().out
    assert "│" in shown
    assert "pd-rerank[hf]" in shown
