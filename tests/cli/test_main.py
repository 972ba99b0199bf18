"""The command line as a whole: exit codes, one line per error, quick to start."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pd_rerank
from pd_rerank import cli as module
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, MissingExtra, MissingResource, ModelMismatch


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadArgument("no good"), 2),
        (MissingExtra("no good"), 3),
        (MissingResource("no good"), 4),
        (InvalidData("no good"), 5),
        (ModelMismatch("no good"), 5),
        (EngineFailure("no good"), 6),
        (OSError(28, "No space left on device", "out/run.trec"), 6),
        (ZeroDivisionError("no good"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_kind_of_error_has_its_exit_code_and_one_line(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("pd_rerank.cli.doctor.doctor", fail)
    result = cli("doctor")
    assert result.exit_code == code
    assert result.stdout == ""
    if code != 130:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
        assert "Traceback" in cli("doctor", "--debug").stderr


def test_a_message_of_many_lines_becomes_one(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise InvalidData("first\n  second\nthird")

    monkeypatch.setattr("pd_rerank.cli.doctor.doctor", fail)
    assert cli("doctor").stderr == "error: first second third\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rerank", "--windw-size", "3"], "No such option: --windw-size"),
        (["rerank", "--window-size", "many"], "valid integer"),
        (["rernk"], "No such command 'rernk'. Did you mean 'rerank'?"),
        (["rerank", "--seed"], "requires an argument"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(cli: Callable[..., Any], words: list[str], says: str) -> None:
    result = cli(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_command_shows_the_help_on_stderr(cli: Callable[..., Any]) -> None:
    result = cli()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(name in result.stderr for name in module.COMMANDS)


def test_help_lists_every_command_and_every_option(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from pd_rerank.config import RerankSettings

    monkeypatch.setenv("COLUMNS", "200")
    result = cli("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in module.COMMANDS)
    text = cli("rerank", "-h").stdout
    assert all(f"--{name.replace('_', '-')}" in text for name in RerankSettings.model_fields)


@pytest.mark.parametrize("command", ["rerank", "doctor", "demo"])
def test_every_command_has_help(cli: Callable[..., Any], command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_the_version_is_the_packages(cli: Callable[..., Any]) -> None:
    result = cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"pd-rerank {pd_rerank.__version__}\n")


def test_python_m_and_the_script_are_alike() -> None:
    script = str(Path(sys.executable).with_name("pd-rerank"))
    by_module = python("-m", "pd_rerank", "rerank", "--no-such")
    by_script = subprocess.run(
        [script, "rerank", "--no-such"], capture_output=True, text=True, timeout=120, check=False
    )
    assert by_module.returncode == by_script.returncode == 2
    assert by_module.stderr == by_script.stderr != ""
    assert by_module.stdout == by_script.stdout == ""


@pytest.mark.parametrize("words", [["--help"], ["rerank", "--help"], ["rerank", "--pools", "nowhere"]])
def test_nothing_heavy_is_loaded_for_help_or_bad_arguments(words: list[str]) -> None:
    heavy = "{'torch', 'transformers', 'peft', 'rerankers', 'scipy', 'pandas'}"
    light = "" if "--pools" in words else " | {'numpy'}"
    code = (
        "import sys; from pd_rerank.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print(sorted(({heavy}{light}) & set(sys.modules)), file=sys.stderr)"
    )
    assert python("-c", code).stderr.splitlines()[-1] == "[]"


def test_logging_is_set_up_for_the_command_and_taken_down_after_it(cli: Callable[..., Any]) -> None:
    logger = logging.getLogger("pd_rerank")
    before = (logger.level, logger.propagate, list(logger.handlers))
    cli("doctor", "--engine", "fake", "--model", "x", "--quiet")
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
