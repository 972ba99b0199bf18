"""Several adapters over one base: one vLLM serves them all, each by its name, against a module with vLLM's names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from pd_rerank import BadArgument, MissingResource, OCSFTBatchedReranker
from pd_rerank.cli.serve import adapters, rerankers
from pd_rerank.config import ServeSettings
from tests.engines.fake_vllm import Behaviour, vllm
from tests.engines.test_server import hf, write_model
from tests.engines.tiny import save_adapter
from tests.served import BODY, DOCS, QUERY, Client, run

__all__ = ["vllm"]


def test_one_vllm_serves_each_adapter_by_its_name(tmp_path: Path, vllm: Behaviour) -> None:
    base = write_model(tmp_path / "base")
    folders = {name: tmp_path / name / "adapter" for name in ("one", "two")}
    for seed, folder in enumerate(folders.values()):
        save_adapter(folder, hf(base).model, seed=seed)
    named = [f"{name}={folder}" for name, folder in folders.items()]
    settings = ServeSettings(engine="vllm", model=str(base), adapter=named, dtype="float32", window_size=2)
    served = rerankers(settings, adapters(settings))
    assert (len(vllm.loads), vllm.loads[0]["max_loras"]) == (1, 2)

    async def work(c: Client) -> list[Any]:
        asked = [{"adapter": "two"}, {"model": "one"}, {"model": "two"}, {}]
        return await asyncio.gather(*(c.post("/v1/rerank", json=BODY | more) for more in asked))

    wanted = {
        name: {
            int(r.document.doc_id): r.score
            for r in OCSFTBatchedReranker(str(base), verbose=0, adapter=folder, dtype="float32", window=2).rank(
                QUERY, DOCS
            )
        }
        for name, folder in folders.items()
    }
    assert any(abs(wanted["one"][i] - wanted["two"][i]) > 1e-3 for i in wanted["one"])
    answers = [response.json() for response in run(work, served, batch_wait=0.1)]
    assert [answer["model"] for answer in answers] == ["two", "one", "two", "one"]
    for answer in answers:
        found = {r["index"]: r["relevance_score"] for r in answer["results"]}
        assert found == pytest.approx(wanted[answer["model"]], abs=1e-5)


def test_what_cannot_be_shared_is_told_before_a_model_loads(tmp_path: Path, vllm: Behaviour) -> None:
    two = {"engine": "vllm", "adapter": ["a=x", "b=y"]}
    with pytest.raises(BadArgument, match="--canary holds scores of one adapter"):
        adapters(ServeSettings(**two, canary=tmp_path))
    settings = ServeSettings(**two, residual=tmp_path / "none.json")
    with pytest.raises(MissingResource, match=r"no file .*none\.json"):
        rerankers(settings, adapters(settings))
    assert vllm.loads == []
