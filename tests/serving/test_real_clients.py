"""The client code of docs/serve.md against `pd-rerank serve` with real weights: the scores of the direct call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pd_rerank import OCSFTBatchedReranker
from tests.serving.test_clients import CODE, answer, packages

pytestmark = pytest.mark.real_model

QUERY = "how do bees find flowers?"
TEXTS = ["The ferry leaves at nine.", "Bees smell and see flowers."]


@pytest.fixture(scope="module")
def direct() -> dict[str | int, float]:
    """The library's scores, by text and by place."""
    alone = OCSFTBatchedReranker("smollm2-135m", verbose=0, dtype="float32").rank(QUERY, TEXTS)
    by_text: dict[str | int, float] = {result.document.text: result.score for result in alone}
    return by_text | {int(result.document.doc_id): result.score for result in alone}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `pd-rerank serve` of its own process, ready; it must end with 0 when told to."""
    log = tmp_path_factory.mktemp("serve") / "log"
    words = ["serve", "--model", "smollm2-135m", "--dtype", "float32", "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pd_rerank", *words], env={**os.environ, "PD_RERANK_TOKEN": "of-mine"}, stderr=file
        )
    try:
        address, ready = "", False
        until = time.monotonic() + 300
        while not ready:
            told = log.read_text(encoding="utf-8")
            assert process.poll() is None, told
            assert time.monotonic() < until, told
            time.sleep(0.1)
            address = next((json.loads(line)["url"] for line in told.splitlines() if '"url"' in line), "")
            with suppress(httpx.TransportError):
                ready = bool(address) and httpx.get(f"{address}/ready", timeout=60).status_code == 200
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("code", CODE, ids=lambda code: packages(code)[-1])
@pytest.mark.filterwarnings("default")  # what other packages warn of is their own
def test_a_client_gets_the_scores_of_the_direct_call(code: str, direct: dict[str | int, float], url: str) -> None:
    found = dict(answer(code, url, QUERY, TEXTS))
    assert len(set(found.values())) == len(TEXTS)
    assert found == pytest.approx({place: direct[place] for place in found}, abs=1e-5)
