"""Measure what pd_rerank costs, each figure as a ratio of two things timed in turn in the same run.

    python pipelines/benchmark.py --output runs/benchmark

writes `benchmark.json` and `benchmark.md`, again after each group, and prints the table. CPU time is the process's own,
all threads together; the two sides of a ratio alternate, so a busy machine slows both. `--rounds`, `--documents` and
`--layers` set the size: fewer layers make it quick and the vocabulary head heavier. `--only bootstrap` measures one
group and loads no model.

Memory is the peak of what is resident (VmHWM), set back once the model is loaded and unused memory given back, for
loading needs more than scoring and would hide it. Where the system cannot set it back there is no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pd_rerank._extras import need
from pd_rerank.errors import MissingExtra
from pd_rerank.files import versions, write_json

Measured = Mapping[str, list[float]]
Cases = Mapping[str, Callable[[], Any]]

MODEL = "smollm2-135m"
RANDOM = "random-qwen3-0.6b"


@dataclass(frozen=True, slots=True)
class Ratio:
    """One line of the table: CPU time of `over` in units of `under`, to stay at or below `limit` where there is one."""

    name: str
    over: str
    under: str
    limit: float | None


RATIOS = (
    Ratio("slot rows only / logits of every position", "window 20", "window 20, all logits", 0.88),
    Ratio(
        "rendering and tokenising 10 presentations / encoding every window", "K=10, sheet", "K=10, whole windows", 0.10
    ),
    Ratio("window=1 with shared prefix / window=20", "window 1, shared", "window 20", 0.80),
    Ratio("window=1 with shared prefix / without", "window 1, shared", "window 1, unshared", 0.50),
    Ratio("everything in rerankers' rank() but the forward / the forward", "rank() without forward", "window 20", 0.03),
)

TRAINING_RATIOS = (
    Ratio("training step on two views of a window / on one", "training step, two views", "training step", 2.1),
    Ratio("training step, slot rows / logits of every position", "training step", "training step, all logits", 0.90),
    Ratio("dropout of an adapter / torch's, forward and backward", "dropout", "dropout, torch", 0.60),
)

BOOTSTRAP_RATIOS = (
    Ratio("paired bootstrap, 20,000 x 5,000 / numpy loop", "paired bootstrap", "paired bootstrap, numpy loop", 0.70),
    Ratio("2,000 x 699 groups / joining their rows", "group bootstrap", "group bootstrap, rows joined", 0.03),
)

LABEL_RATIOS = (
    Ratio(
        "labels of T=10 / ten runs, each with its own loading", "window labels, T=10", "window labels, ten runs", 0.95
    ),
    Ratio("labels of T=10 / ten passes of a loaded model", "window grades, T=10", "window grades, ten passes", None),
)

STABILITY_RATIOS = (
    Ratio(
        "tau-PSI of 1,000 x 10 x 100 scores / scipy's kendalltau in a loop", "tau-PSI", "tau-PSI, scipy loop", 0.0066
    ),
    Ratio("retained-set overlap / Python sets in a loop", "overlap", "overlap, set loop", 0.10),
)

FUSION_RATIOS = (
    Ratio("weighted fusion of 3 x 5,000 x 150 hits in arrays / ranx from dicts", "fusion", "fusion, ranx", 0.05),
    Ratio("weighted fusion of hits in arrays / plain Python on dicts", "fusion", "fusion, plain dicts", 0.50),
    Ratio("weighted fusion from dicts / ranx from dicts", "fusion, from dicts", "fusion, ranx", 0.05),
    Ratio("weighted fusion from dicts / plain Python on dicts", "fusion, from dicts", "fusion, plain dicts", 0.50),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is measured by itself: its ratios, what makes its cases, and the modules that takes, each with its extra."""

    ratios: tuple[Ratio, ...]
    make: Callable[[argparse.Namespace], Cases]
    needs: Mapping[str, str]


def main() -> int:
    args = arguments()
    if args.scale_probe or args.training_probe:
        print(json.dumps(scale_probe(args) if args.scale_probe else training_probe(args)))
        return 0
    chosen = {name: group for name, group in groups().items() if args.only in (None, name)}
    try:
        for name, group in chosen.items():
            for module, extra in group.needs.items():
                need(module, extra=extra, purpose=f"the group '{name}' is measured against or with '{module}'")
    except MissingExtra as error:
        print(f"error: {error}; or measure other groups with --only", file=sys.stderr)
        return error.exit_code
    times: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    memory: dict[str, list[dict[str, float]]] = {}
    if "training" in chosen:  # before this process holds gigabytes of its own
        memory |= training_probes(args)
        rows += training_rows(memory)
        report(args, times, rows, memory)
    for group in chosen.values():
        times |= alternate(group.make(args), rounds=args.rounds)
        rows += [ratio_row(ratio, times) for ratio in group.ratios]
        report(args, times, rows, memory)
    if "scoring" in chosen and not args.skip_scale:
        memory |= scale_probes(args)
        rows += scale_rows(memory)
        report(args, times, rows, memory)
    print((args.output / "benchmark.md").read_text(encoding="utf-8"))
    return 0


def groups() -> dict[str, Group]:
    """What can be measured by itself, by name."""
    return {
        "scoring": Group(ratios=RATIOS, make=cases, needs={"torch": "hf", "transformers": "hf"}),
        "labels": Group(ratios=LABEL_RATIOS, make=label_cases, needs={"torch": "hf", "transformers": "hf"}),
        "training": Group(ratios=TRAINING_RATIOS, make=training_cases, needs={"torch": "train", "peft": "train"}),
        "bootstrap": Group(ratios=BOOTSTRAP_RATIOS, make=bootstrap_cases, needs={}),
        "stability": Group(ratios=STABILITY_RATIOS, make=stability_cases, needs={"scipy": "eval"}),
        "fusion": Group(ratios=FUSION_RATIOS, make=fusion_cases, needs={"ranx": "eval"}),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default=MODEL,
        help=f"any HFEngine loads, or for training {RANDOM}, sizes alone (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, help="keep only the first layers of the model")
    parser.add_argument("--documents", type=int, default=100, help="documents of the pool (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=110, help="tokens of a document, about (default: %(default)s)")
    parser.add_argument("--queries", type=int, default=2, help="queries to label (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side is measured (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--skip-scale", action="store_true", help="leave out 100 against 1,000 documents")
    parser.add_argument("--scale-layers", type=int, default=2, help="layers for 100 against 1,000 documents")
    parser.add_argument("--only", choices=sorted(groups()), help="one group of figures (default: all)")
    parser.add_argument("--scale-probe", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--training-probe", choices=_STEPS, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- what is measured ---------------------------------------------------------------------------------------------


def load(args: argparse.Namespace, *, layers: int | None, **options: Any) -> Any:
    """An engine on the model, cut to its first layers where asked."""
    import torch

    from pd_rerank import HFEngine

    torch.set_num_threads(args.threads)
    if args.model == RANDOM:
        options |= {"tokenizer": HFEngine(MODEL, device="cpu").tokenizer}
    engine = HFEngine(qwen3() if args.model == RANDOM else args.model, dtype=args.dtype, device="cpu", **options)
    if layers:
        engine.model.model.layers = engine.model.model.layers[:layers]
        engine.model.config.num_hidden_layers = layers
    return engine


def qwen3() -> Any:
    """Random weights in the sizes of Qwen3-0.6B, float32 unless --dtype says else: time does not depend on values."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=40_960, tie_word_embeddings=True))


def documents(tokenizer: Any, *, count: int, tokens: int) -> list[str]:
    """Different texts of about `tokens` tokens, put together from the words of the demo's passages."""
    lines = resources.files("pd_rerank").joinpath("demo/pools.jsonl").read_text(encoding="utf-8").splitlines()
    words = [w for line in lines for c in json.loads(line)["candidates"] for w in re.split(r"\s+", c["doc"]["text"])]
    per_word = len(tokenizer.encode(" ".join(words[:2000]), add_special_tokens=False)) / 2000
    length = round(tokens / per_word)
    return [" ".join(words[(i * 37 + j) % len(words)] for j in range(length)) for i in range(count)]


def cases(args: argparse.Namespace) -> Cases:
    """The things timed, by name; every one is a call without arguments."""
    import torch

    from pd_rerank import Candidate, GradePrompt, OCSFTBatchedReranker, Pool, Scoring, score_pools
    from pd_rerank.windows import partition, permutation

    engine = load(args, layers=args.layers)
    unshared = load(args, layers=args.layers, share_prefix=False)
    prompt = GradePrompt(engine.tokenizer)
    query = "how often should a bicycle chain be oiled?"
    texts = documents(engine.tokenizer, count=args.documents, tokens=args.tokens)
    candidates = tuple(Candidate(doc_id=str(i), text=text) for i, text in enumerate(texts))
    pool = Pool(query_id="q", query=query, candidates=candidates)

    sheet = prompt.sheet(query, texts, width=20, max_tokens=engine.max_length)
    windows = [sheet.window(positions) for positions in partition(permutation(len(texts), seed=0), width=20)]

    def score(with_engine: Any, window: int) -> Any:
        return score_pools([pool], engine=with_engine, prompt=prompt, scoring=Scoring(window=window))

    def all_logits() -> None:
        with torch.inference_mode():
            for window in windows:
                ids = torch.from_numpy(window.token_ids)[None]
                logits = engine.model(input_ids=ids, use_cache=False).logits
                logits[0, window.slots][:, list(prompt.grade_ids)].float().numpy()

    presented = [
        engine.tokenizer.decode(sheet.window(positions).token_ids)
        for seed in range(10)
        for positions in partition(permutation(len(texts), seed=seed), width=20)
    ]

    def whole_windows() -> None:
        for text in presented:
            engine.tokenizer.encode(text, add_special_tokens=False)

    def ten_presentations() -> None:
        prepared = prompt.sheet(query, texts, width=20, max_tokens=engine.max_length)
        for seed in range(10):
            for positions in partition(permutation(len(texts), seed=seed), width=20):
                prepared.window(positions)

    reranker = OCSFTBatchedReranker(args.model, verbose=0, engine=_NoForward(engine))
    return {
        "window 20": lambda: engine.grade_logits(windows, prompt.grade_ids),
        "window 20, all logits": all_logits,
        "window 1, shared": lambda: score(engine, 1),
        "window 1, unshared": lambda: score(unshared, 1),
        "K=10, sheet": ten_presentations,
        "K=10, whole windows": whole_windows,
        "rank() without forward": lambda: reranker.rank(query, texts),
    }


def label_cases(args: argparse.Namespace) -> Cases:
    """Grades of the demo's queries over ten shuffles, at once and shuffle by shuffle; imports count for none."""
    from dataclasses import replace

    from pd_rerank import GradePrompt, Pool, Scoring, read_pools, score_pools
    from pd_rerank.windows import permutation

    with resources.as_file(resources.files("pd_rerank") / "demo/pools.jsonl") as path:
        pools = read_pools(path)[: args.queries]
    loaded = load(args, layers=args.layers)

    def shuffled(pool: Pool, seed: int) -> Pool:
        order = permutation(len(pool), seed=seed)
        return replace(pool, candidates=tuple(pool.candidates[i] for i in order))

    def grade(engine: Any, some: list[Pool], presentations: int = 1) -> Any:
        scoring = Scoring(presentations=presentations)
        return score_pools(some, engine=engine, prompt=GradePrompt(engine.tokenizer), scoring=scoring)

    single = [[shuffled(pool, seed) for pool in pools] for seed in range(10)]
    return {
        "window labels, T=10": lambda: grade(load(args, layers=args.layers), pools, 10),
        "window labels, ten runs": lambda: [grade(load(args, layers=args.layers), some) for some in single],
        "window grades, T=10": lambda: grade(loaded, pools, 10),
        "window grades, ten passes": lambda: [grade(loaded, some) for some in single],
    }


def fusion_cases(args: argparse.Namespace) -> Cases:
    """The NevIR paper's fusion of 3 routes x 5,000 queries x 150 hits; ranx compiled and warm, its weighted sum."""
    import numpy as np
    import ranx

    from pd_rerank.retrieval.fusion import NEVIR_PAPER, Scaled, WeightedFusion

    rng = np.random.default_rng(0)
    ranges = {"dense": (0.2, 0.9), "sparse": (0.1, 30.0), "bm25": (0.0, 25.0)}

    def hits(query: int, low: float, high: float) -> dict[str, float]:
        ids = (query * 37 + rng.choice(600, size=150, replace=False)) % 100_000
        scores = np.sort(rng.uniform(low, high, size=150))[::-1]
        return {f"doc{i:06d}": s for i, s in zip(ids.tolist(), scores.tolist(), strict=True)}

    runs = {name: {f"q{q}": hits(q, *span) for q in range(5000)} for name, span in ranges.items()}
    fusion = WeightedFusion(rules=NEVIR_PAPER)
    table = fusion.tabulate(runs)

    def from_arrays() -> Any:
        scores, kept = fusion.scores(table, Scaled.of(table, fusion.rules))
        return table.rankings(scores, kept)

    def ranx_path() -> Any:
        weights = [rule.weight for rule in NEVIR_PAPER.values()]
        fused = ranx.fuse([ranx.Run(run) for run in runs.values()], params={"weights": weights})
        return {query: dict(scored) for query, scored in fused.run.items()}

    return {
        "fusion": from_arrays,
        "fusion, from dicts": lambda: fusion.fuse(runs),
        "fusion, plain dicts": lambda: {
            q: plain_fusion({r: runs[r][q] for r in runs}, NEVIR_PAPER) for q in table.queries
        },
        "fusion, ranx": ranx_path,
    }


def plain_fusion(runs: Mapping[str, Mapping[str, float]], rules: Mapping[str, Any]) -> dict[str, float]:
    """One query's weighted fusion as one would write it first: dicts, a sort, nothing else."""
    fused = {doc_id: 0.0 for hits in runs.values() for doc_id in hits}
    kept: dict[str, dict[str, float]] = {}
    for name, hits in runs.items():
        rule = rules[name]
        passed = {doc_id: score for doc_id, score in hits.items() if score >= rule.threshold}
        if rule.transform == "log1p":
            passed = {doc_id: math.log1p(score) for doc_id, score in passed.items()}
        if passed:
            kept[name] = passed
    total = sum(rules[name].weight for name in kept)
    for name, hits in kept.items():
        low, high, weight = min(hits.values()), max(hits.values()), rules[name].weight / total
        for doc_id, score in hits.items():
            fused[doc_id] += weight if high == low else weight * (score - low) / (high - low)
    survivors = {doc_id for hits in kept.values() for doc_id in hits}
    ranked = sorted(fused.items(), key=lambda item: (item[0] not in survivors, -item[1], item[0]))
    return dict(ranked)


class _NoForward:
    """An engine that answers at once, so that what is left of rank() can be timed."""

    def __init__(self, engine: Any) -> None:
        self.name, self.tokenizer, self.max_length = engine.name, engine.tokenizer, engine.max_length

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> list[Any]:
        import numpy as np

        shapes = [(len(p.slots), len(grade_ids)) for p in prompts]
        return [np.arange(n * g, dtype=np.float32).reshape(n, g) for n, g in shapes]

    def describe(self) -> dict[str, Any]:
        return {}


def training_cases(args: argparse.Namespace) -> Cases:
    """Forward and backward pass of one window of 20 documents, with an adapter of rank 16 on every projection."""
    import torch

    from pd_rerank.training.losses import order_consistency, supervised, total

    student, example, grades = training_window(args)

    def step(views: int) -> None:
        loss = supervised if views == 1 else order_consistency
        total([loss(student.example(example, views=views), student.batch(example))], 5.0).backward()
        student.model.zero_grad()

    def all_logits() -> None:
        shown, half = example.views[0].prompts[0], student.model.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):  # as the student does
            logits = student.model(input_ids=torch.from_numpy(shown.token_ids)[None], use_cache=False).logits
        read = logits[0, torch.from_numpy(shown.slots)][:, grades].float()
        total([supervised(read[None], student.batch(example))], 0.0).backward()
        student.model.zero_grad()

    dropout = next(m for m in student.model.modules() if getattr(m, "lora_dropout", None)).lora_dropout["default"]
    x = torch.ones(2000, 1536, dtype=student.model.dtype, requires_grad=True)

    def drop(how: Callable[[Any], Any]) -> None:
        how(x).backward(torch.ones_like(x))
        x.grad = None

    return {
        "dropout": lambda: drop(dropout),
        "dropout, torch": lambda: drop(lambda x: torch.nn.functional.dropout(x, dropout.p)),
        "training step": lambda: step(1),
        "training step, two views": lambda: step(2),
        "training step, all logits": all_logits,
    }


def training_window(args: argparse.Namespace, *, checkpointing: bool = False) -> tuple[Any, Any, list[int]]:
    """A student on the model, a labelled window of 20 documents in two orders, and the grades' token ids."""
    from pd_rerank import Candidate, GradePrompt, Pool
    from pd_rerank.training.examples import Examples, Recipe
    from pd_rerank.training.labels import labels_of_qrels
    from pd_rerank.training.student import Lora, Student, with_lora

    engine = load(args, layers=args.layers)
    prompt = GradePrompt(engine.tokenizer)
    texts = documents(engine.tokenizer, count=20, tokens=args.tokens)
    candidates = tuple(Candidate(doc_id=str(i), text=text) for i, text in enumerate(texts))
    pool = Pool(query_id="q", query="how often should a bicycle chain be oiled?", candidates=candidates)
    labels = labels_of_qrels({"q": {str(i): i % 4 for i in range(20)}}, [pool])
    examples = Examples([pool], labels, prompts=prompt, recipe=Recipe(), max_tokens=engine.max_length)
    model = with_lora(engine.model, Lora(), seed=0)
    return Student(model, prompt.grade_ids, checkpointing=checkpointing), examples[0], list(prompt.grade_ids)


def bootstrap_cases(args: argparse.Namespace) -> Cases:
    """Both bootstraps against the way one would write them first; each side gives the same interval."""
    import numpy as np

    from pd_rerank.evaluation.resampling import GROUPS, QUERIES, group_bootstrap, paired_bootstrap

    rng = np.random.default_rng(0)
    differences = rng.normal(size=5000)
    strict = rng.choice([-1.0, 0.0, 1.0], size=2736)
    names = [f"{i:04d}" for i in [*range(699), *rng.integers(0, 699, 2736 - 699)]]
    rows = [strict[[i for i, name in enumerate(names) if name == group]] for group in sorted(set(names))]

    def numpy_loop() -> tuple[float, ...]:
        draw = np.random.default_rng(QUERIES.seed)
        means = [differences[draw.integers(0, 5000, 5000)].mean() for _ in range(QUERIES.resamples)]
        return tuple(np.quantile(means, [0.025, 0.975]).tolist())

    def rows_joined() -> tuple[float, ...]:
        drawn = np.random.default_rng(GROUPS.seed).integers(0, len(rows), (GROUPS.resamples, len(rows)))
        means = [np.concatenate([rows[i] for i in draw]).mean() for draw in drawn]
        return tuple(np.quantile(means, [0.025, 0.975]).tolist())

    return {
        "paired bootstrap": lambda: paired_bootstrap(differences),
        "paired bootstrap, numpy loop": numpy_loop,
        "group bootstrap": lambda: group_bootstrap(strict, names),
        "group bootstrap, rows joined": rows_joined,
    }


def stability_cases(args: argparse.Namespace) -> Cases:
    """Stability of 1,000 queries x 10 presentations x 100 candidates against loops over pairs of presentations."""
    from itertools import combinations

    import numpy as np
    from scipy.stats import kendalltau

    from pd_rerank.evaluation.presentations import strict_ranks
    from pd_rerank.evaluation.stability import retained_overlap, tau_psi

    rng = np.random.default_rng(0)
    scores = rng.normal(size=(1000, 1, 100)) + 0.5 * rng.normal(size=(1000, 10, 100))
    kept = scores > 0.8

    def scipy_loop() -> list[float]:
        taus = [[kendalltau(a, b).statistic for a, b in combinations(query, 2)] for query in scores]
        return [(1 - statistics.fmean(query)) / 2 for query in taus]

    def set_loop() -> list[float]:
        means = []
        for query in kept:
            sets = [set(np.flatnonzero(row).tolist()) for row in query]
            means.append(statistics.fmean(len(a & b) / len(a | b) if a | b else 1.0 for a, b in combinations(sets, 2)))
        return means

    return {
        "tau-PSI": lambda: tau_psi(strict_ranks(scores)),
        "tau-PSI, scipy loop": scipy_loop,
        "overlap": lambda: retained_overlap(kept),
        "overlap, set loop": set_loop,
    }


def alternate(todo: Cases, *, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every case, in turn, `rounds` times after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(rounds + 1):
        for name, call in todo.items():
            if turn == 0 and name.startswith("window"):
                continue  # a forward needs no warm-up of its own length; the short cases fill caches
            start = time.process_time()
            call()
            if turn:
                times[name].append(time.process_time() - start)
            print(f"round {turn} of {rounds}: {name} {time.process_time() - start:.3f} s", file=sys.stderr)
    return times


# -- 100 against 1,000 documents, each in a process of its own ------------------------------------------------------


def scale_probe(args: argparse.Namespace) -> dict[str, float]:
    """Score a pool of `scale_probe` documents: CPU seconds, and MiB resident after loading and at most from then on."""
    from pd_rerank import Candidate, GradePrompt, Pool, Scoring, score_pools

    engine = load(args, layers=args.scale_layers)
    texts = documents(engine.tokenizer, count=args.scale_probe, tokens=args.tokens)
    candidates = tuple(Candidate(doc_id=str(i), text=text) for i, text in enumerate(texts))
    pool = Pool(query_id="q", query="how often should a chain be oiled?", candidates=candidates)
    prompt = GradePrompt(engine.tokenizer)
    loaded = peak_from_now()
    start = time.process_time()
    score_pools([pool], engine=engine, prompt=prompt, scoring=Scoring())
    found = {"cpu_s": time.process_time() - start}
    if loaded is not None:
        peak = _status_mib("VmHWM")
        found |= {"loaded_mib": loaded, "peak_mib": peak, "growth_mib": peak - loaded}
    return found


def peak_from_now() -> float | None:
    """Give unused memory back, set the peak of the resident memory to what is resident, and return that in MiB.

    None where the system does not let a process do so (Linux does).
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_mib("VmRSS")


def _status_mib(field: str) -> float:
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def scale_probes(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What `scale_probe` found for 100 and 1,000 documents, in turn, by the number of documents."""
    probes: dict[str, list[dict[str, float]]] = {"100": [], "1000": []}
    for _ in range(args.rounds):
        for count, found in probes.items():
            command = [sys.executable, __file__, "--scale-probe", count]
            for name in ("model", "tokens", "threads", "dtype", "scale_layers"):
                command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    return probes


def scale_rows(probes: Mapping[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for name, key, limit in (
        ("CPU time, 1,000 documents / 100", "cpu_s", 11.0),
        ("peak memory of the process from loading on, 1,000 documents / 100", "peak_mib", 1.5),
        ("growth of its memory after loading, 1,000 documents / 100", "growth_mib", None),
    ):
        pairs = [(many, few) for many, few in zip(probes["1000"], probes["100"], strict=True) if key in few]
        if pairs:
            rows.append(row(name, [many[key] / max(few[key], 0.1) for many, few in pairs], limit))
    return rows


# -- memory of a training step, each in a process of its own ---------------------------------------------------------

_STEPS = ("plain", "checkpointing")


def training_probe(args: argparse.Namespace) -> dict[str, float]:
    """MiB resident after loading, and at most in a training step on one view; the first step makes the gradients."""
    from pd_rerank.training.losses import supervised, total

    student, example, _ = training_window(args, checkpointing=args.training_probe == "checkpointing")
    loaded = peak_from_now()
    total([supervised(student.example(example, views=1), student.batch(example))], 0.0).backward()
    if loaded is None:
        return {}
    peak = _status_mib("VmHWM")
    return {"loaded_mib": loaded, "peak_mib": peak, "growth_mib": peak - loaded}


def training_probes(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What `training_probe` found with and without checkpointing, in turn."""
    probes: dict[str, list[dict[str, float]]] = {f"training step, {name}": [] for name in _STEPS}
    for _ in range(args.rounds):
        for name, found in zip(_STEPS, probes.values(), strict=True):
            command = [sys.executable, __file__, "--training-probe", name]
            for option in ("model", "tokens", "threads", "dtype", *(("layers",) if args.layers else ())):
                command += [f"--{option}", str(getattr(args, option))]
            found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    return probes


def training_rows(probes: Mapping[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    plain, checkpointed = (probes[f"training step, {name}"] for name in _STEPS)
    rows = []
    for name, key, limit in (
        ("memory of a training step beyond the model, with checkpointing / without", "growth_mib", 0.6),
        ("peak memory of the process in it, with checkpointing / without", "peak_mib", None),
    ):
        values = [a[key] / b[key] for a, b in zip(checkpointed, plain, strict=True) if key in a and key in b]
        if values:
            rows.append(row(name, values, limit))
    return rows


# -- what is written --------------------------------------------------------------------------------------------------


def ratio_row(ratio: Ratio, times: Measured) -> dict[str, Any]:
    values = [a / b for a, b in zip(times[ratio.over], times[ratio.under], strict=True)]
    return row(ratio.name, values, ratio.limit)


def row(name: str, values: list[float], limit: float | None) -> dict[str, Any]:
    """One line: median and range, and whether the median is within the limit, where there is one."""
    median = statistics.median(values)
    return {
        "name": name,
        "median": median,
        "low": min(values),
        "high": max(values),
        "limit": limit,
        "reached": None if limit is None else median <= limit,
    }


def report(
    args: argparse.Namespace,
    times: Measured,
    rows: list[dict[str, Any]],
    memory: Mapping[str, list[dict[str, float]]],
) -> None:
    """Write what has been measured so far."""
    setting = {
        **{
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(args).items()
            if k not in ("scale_probe", "training_probe")
        },
        "processor": _processor(),
        **versions(("torch", "transformers", "rerankers")),
    }
    lines = ["| ratio | median | range | limit | reached |", "|---|---|---|---|---|"]
    for r in rows:
        mark = {True: "yes", False: "no", None: ""}[r["reached"]]
        limit = "" if r["limit"] is None else r["limit"]
        lines.append(f"| {r['name']} | {r['median']:.3f} | {r['low']:.3f}–{r['high']:.3f} | {limit} | {mark} |")
    seconds = ", ".join(f"{name} {statistics.median(values):.3f} s" for name, values in times.items())
    text = "\n".join(lines) + f"\n\nMedian CPU seconds: {seconds}.\n"
    for count, found in memory.items():
        what = f"{count} documents" if count.isdigit() else count
        text += f"Memory, {what}: {_memory([probe for probe in found if 'peak_mib' in probe])}.\n"
    text += f"Setting: {json.dumps(setting)}\n"
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(
        args.output / "benchmark.json", {"setting": setting, "ratios": rows, "cpu_seconds": times, "scale": memory}
    )
    (args.output / "benchmark.md").write_text(text, encoding="utf-8")


def _memory(probes: list[dict[str, float]]) -> str:
    if not probes:
        return "not measured, this system does not let a process set its peak back"
    keys = ("loaded_mib", "peak_mib", "growth_mib")
    loaded, peak, growth = (statistics.median(probe[key] for probe in probes) for key in keys)
    return f"{loaded:.0f} MiB loaded, at most {peak:.0f} from then on (+{growth:.1f})"


def _processor() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo)
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
