"""Java for the tests that need it: started once for all of them, or skipped with the reason."""

from __future__ import annotations

import pytest

from pd_rerank.retrieval.java import java_report, start_java


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "java: needs Pyserini and Java 21 or newer (the extra 'pools')")


@pytest.fixture(scope="session")
def started_java() -> None:
    start_java(max_heap="512m")


@pytest.fixture(autouse=True)
def _java_where_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("java") is None:
        return
    problem = java_report()["problem"]
    if problem:
        pytest.skip(problem)
    request.getfixturevalue("started_java")
