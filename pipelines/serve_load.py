"""Ask a server with many clients at once for a while, and check every answer against the library's own.

    python pipelines/serve_load.py --clients 200 --seconds 120
    python pipelines/serve_load.py --model smollm2-135m --window-size 1 --documents 4 --words 12 --batch-windows 1

The server is a process of its own on loopback. Without --model its engine is a fake one that takes --per-call seconds
for a call and --per-window for each window. Prints one JSON object: requests by outcome, wrong answers, requests and
windows per second, latencies, and the server's resident memory. Some clients hang up early on purpose (--hang-up).
A client that gets 429 waits as long as Retry-After says and asks again; latencies count from the first time it asked.
The exit code is 7 if an answer is wrong, lost or refused otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from pd_rerank import FakeEngine, OCSFTBatchedReranker
from pd_rerank.config import LimitSettings

WORDS = "bee hive honey wax ferry harbour island chain oil bicycle rain road apple pear orchard press cider frost"


class TimedEngine(FakeEngine):
    """A fake engine that takes its time, per call and per window, as an accelerator would."""

    def __init__(self, *, per_call: float, per_window: float) -> None:
        super().__init__(position_bias=0.3, companion_bias=0.2, delay=per_window)
        self._per_call = per_call

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        """Grade, after the time a call takes."""
        time.sleep(self._per_call)
        return super().grade_logits(prompts, grade_ids, progress=progress)


def ranker(args: argparse.Namespace, *, timed: bool) -> OCSFTBatchedReranker:
    if args.model is not None:
        share = {"share_prefix": "queries"} if timed and args.share_queries else {}
        return OCSFTBatchedReranker(args.model, verbose=0, window=args.window_size, dtype=args.dtype, **share)
    per_call, per_window = (args.per_call, args.per_window) if timed else (0.0, 0.0)
    return OCSFTBatchedReranker(
        "fake", verbose=0, window=args.window_size, engine=TimedEngine(per_call=per_call, per_window=per_window)
    )


def serve(args: argparse.Namespace, told: Any) -> None:
    from pd_rerank.serving.app import create_app
    from pd_rerank.serving.server import listen, run

    bound = listen("127.0.0.1", 0)
    named = ("timeout", "batch_windows", "batch_wait", "max_requests", "max_queue")
    limits = LimitSettings(**{name: getattr(args, name) for name in named})
    app = create_app(ranker(args, timed=True), limits=limits)
    told.send(bound.getsockname()[1])
    run(app, bound, timeout=args.timeout)


def requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Different requests, of 1 to `documents` documents of 1 to `words` words, some shown more than once."""
    rng = random.Random(args.seed)

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=words))

    return [
        {
            "query": f"{text(4)} {i}",
            "documents": [text(rng.randint(1, args.words)) for _ in range(rng.randint(1, args.documents))],
            "presentations": rng.choice((1, 1, 1, 3)) if args.window_size > 1 else 1,
        }
        for i in range(args.requests)
    ]


def expected(args: argparse.Namespace, bodies: Sequence[Mapping[str, Any]]) -> list[dict[int, float]]:
    """The library's score of each document of each request, asked one by one."""
    alone = ranker(args, timed=False)
    by_count = {
        k: OCSFTBatchedReranker("same", verbose=0, engine=alone.engine, window=args.window_size, presentations=k)
        for k in {body["presentations"] for body in bodies}
    }
    found = []
    for body in bodies:
        results = by_count[body["presentations"]].rank(body["query"], body["documents"])
        found.append({int(r.document.doc_id): r.score for r in results})
    return found


class Tally:
    """What became of the requests."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.told_to_wait = 0
        self.seconds: list[float] = []
        self.apart = 0.0
        self.memory: list[float] = []


async def ask(c: httpx.AsyncClient, body: Mapping[str, Any], tally: Tally) -> httpx.Response:
    """The answer to a request, asked again as long as the server says it is full and when to come back."""
    while True:
        response = await c.post("/v1/rerank", json=body)
        if response.status_code != 429 or "retry-after" not in response.headers:
            return response
        tally.told_to_wait += 1
        await asyncio.sleep(float(response.headers["retry-after"]))


async def client(
    c: httpx.AsyncClient,
    rng: random.Random,
    bodies: Sequence[Mapping[str, Any]],
    scores: Sequence[Mapping[int, float]],
    tally: Tally,
    *,
    until: float,
    args: argparse.Namespace,
) -> None:
    while time.monotonic() < until:
        i = rng.randrange(len(bodies))
        asked = asyncio.create_task(ask(c, bodies[i], tally))
        start = time.monotonic()
        if rng.random() < args.hang_up:
            await asyncio.wait({asked}, timeout=rng.random() * 0.1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            tally.outcomes["hung up"] += 1
            continue
        try:
            response = await asked
        except httpx.HTTPError as error:
            tally.outcomes[f"lost: {type(error).__name__}"] += 1
            continue
        tally.seconds.append(time.monotonic() - start)
        if response.status_code != 200:
            tally.outcomes[f"status {response.status_code}"] += 1
            continue
        found = {r["index"]: r["relevance_score"] for r in response.json()["results"]}
        listed = list(found.values())
        apart = max((abs(found.get(d, 9.0) - s) for d, s in scores[i].items()), default=0.0)
        tally.apart = max(tally.apart, apart)
        right = found.keys() == scores[i].keys() and listed == sorted(listed, reverse=True) and apart <= args.tolerance
        tally.outcomes["right" if right else "wrong"] += 1


async def memory(c: httpx.AsyncClient, tally: Tally, *, until: float) -> None:
    while time.monotonic() < until:
        values = await counters(c)
        tally.memory.append(values["process_resident_memory_bytes"] / 2**20)
        await asyncio.sleep(2)


async def counters(c: httpx.AsyncClient) -> dict[str, float]:
    lines = (await c.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def load(url: str, args: argparse.Namespace, bodies: Any, scores: Any) -> dict[str, Any]:
    tally = Tally()
    room = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=args.timeout + 10, limits=room) as c:
        while True:
            try:
                await c.get("/ready")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
        await c.post("/v1/rerank", json=bodies[0])
        before, start = await counters(c), time.monotonic()
        until = start + args.seconds
        watching = asyncio.create_task(memory(c, tally, until=until))
        clients = (
            client(c, random.Random(args.seed + n), bodies, scores, tally, until=until, args=args)
            for n in range(args.clients)
        )
        await asyncio.gather(*clients)
        took = time.monotonic() - start
        await watching
        after = await counters(c)
    done = {name: after[name] - before.get(name, 0.0) for name in after}
    ordered = sorted(tally.seconds)
    return {
        "outcomes": dict(tally.outcomes),
        "told_to_wait": tally.told_to_wait,
        "largest_difference": tally.apart,
        "requests_per_second": round(tally.outcomes["right"] / took, 2),
        "windows_per_second": round(done["pd_rerank_windows_total"] / took, 2),
        "requests_per_engine_call": round(
            done["pd_rerank_batch_requests_sum"] / max(done["pd_rerank_batch_requests_count"], 1), 2
        ),
        "server_cpu_seconds": round(done["process_cpu_seconds_total"], 1),
        "seconds": {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3) for p in (50, 95, 99)},
        "resident_mib": {
            "first": round(tally.memory[0]), "half": round(tally.memory[len(tally.memory) // 2]),
            "last": round(tally.memory[-1]), "most": round(max(tally.memory)),
        },
        "left_in_server": {
            name: after[f"pd_rerank_{name}"] for name in ("requests_under_way", "queue_windows")
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model to serve instead of the fake engine")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--share-queries", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--per-call", type=float, default=0.005)
    parser.add_argument("--per-window", type=float, default=0.001)
    parser.add_argument("--window-size", type=int, default=20)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, default=300, help="different requests")
    parser.add_argument("--documents", type=int, default=60, help="most documents of a request")
    parser.add_argument("--words", type=int, default=120, help="most words of a document")
    parser.add_argument("--batch-windows", type=int, default=LimitSettings().batch_windows)
    parser.add_argument("--batch-wait", type=float, default=LimitSettings().batch_wait)
    parser.add_argument("--max-requests", type=int, default=LimitSettings().max_requests)
    parser.add_argument("--max-queue", type=int, default=LimitSettings().max_queue)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--hang-up", type=float, default=0.0, help="share of requests whose client goes away early")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    bodies = requests(args)
    scores = expected(args, bodies)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(args, there))
    process.start()
    there.close()
    try:
        report = asyncio.run(load(f"http://127.0.0.1:{here.recv()}", args, bodies, scores))
    finally:
        process.terminate()
        process.join()
    print(json.dumps({"arguments": vars(args), **report, "server_exit_code": process.exitcode}, indent=2))
    return 0 if report["outcomes"].keys() <= {"right", "hung up"} else 7


if __name__ == "__main__":
    sys.exit(main())
