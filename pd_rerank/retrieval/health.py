"""What is wrong with pools, what they can give at best, and what reranking them costs, before anything is spent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pd_rerank.errors import BadArgument
from pd_rerank.pool import Pool
from pd_rerank.retrieval.texts import normal_text

Qrels = Mapping[str, Mapping[str, int]]

PROMPT_TOKENS, SLOT_TOKENS = 170, 13
"""What a window adds to its documents and query, and what each document adds to its text: measured on the default
prompt with the tokenizer of SmolLM2; other tokenizers differ by a tenth or so."""

CHARACTERS_PER_TOKEN = 4
DOCUMENT_CHARACTERS = 1200
"""The default prompt cuts documents there."""


def check_pools(
    pools: Sequence[Pool],
    *,
    qrels: Qrels | None = None,
    corpus_ids: Collection[str] | None = None,
    relevant: int = 1,
    window: int = 20,
    presentations: int = 1,
    count_tokens: Callable[[str], int] | None = None,
    tokens_per_second: float | None = None,
    price_per_hour: float | None = None,
    for_queries: int | None = None,
) -> dict[str, Any]:
    """A report on pools, as plain values: sizes, texts, routes, namespaces, recall ceiling, cost.

    `qrels` adds the recall ceiling (documents graded `relevant` or more), what each route alone contributes to it, and
    whether ids meet; `corpus_ids` (such an index's or corpus's) adds whether documents are of that corpus. Tokens are
    counted by `count_tokens`, else four characters each; the last three arguments are `cost`'s.
    """
    judged = None if qrels is None else _judged(qrels, relevant)
    return {
        "queries": len(pools),
        "candidates": sum(map(len, pools)),
        "empty_pools": [pool.query_id for pool in pools if not len(pool)],
        "pool_size": _distribution([len(pool) for pool in pools]),
        "texts": _texts(pools),
        "routes": _routes(pools, judged),
        "namespaces": _namespaces(pools, qrels, corpus_ids),
        "ceiling": None if judged is None else _ceiling(pools, judged, relevant),
        "cost": cost(
            pools,
            window=window,
            presentations=presentations,
            count_tokens=count_tokens,
            tokens_per_second=tokens_per_second,
            price_per_hour=price_per_hour,
            for_queries=for_queries,
        ),
    }


def cost(
    pools: Sequence[Pool],
    *,
    window: int = 20,
    presentations: int = 1,
    count_tokens: Callable[[str], int] | None = None,
    tokens_per_second: float | None = None,
    price_per_hour: float | None = None,
    for_queries: int | None = None,
) -> dict[str, Any]:
    """What `presentations` passes over the pools take, `window` candidates a prompt: windows, prompt tokens, price.

    A model's `tokens_per_second` gives seconds, and with its machine's `price_per_hour` a price; `for_queries` is the
    number of queries, where these pools are a sample. The default prompt is assumed. `window=1` needs one pass however
    many presentations are asked for, and shares what its prompts have in common, which is left out here.
    """
    if window < 1 or presentations < 1:
        raise BadArgument(f"window and presentations are at least 1, got {window} and {presentations}")
    passes = 1 if window == 1 else presentations
    windows = tokens = 0
    for pool in pools:
        mine = math.ceil(len(pool) / window)
        texts = sum(_tokens(text[:DOCUMENT_CHARACTERS], count_tokens) + SLOT_TOKENS for text in pool.texts)
        windows += passes * mine
        tokens += passes * (texts + mine * (PROMPT_TOKENS + _tokens(pool.query, count_tokens)))
    if for_queries is not None:
        if not pools:
            raise BadArgument("there are no pools to tell from what others would cost")
        windows, tokens = (round(count * for_queries / len(pools)) for count in (windows, tokens))
    seconds = None if not tokens_per_second else round(tokens / tokens_per_second, 1)
    return {
        "queries": len(pools) if for_queries is None else for_queries,
        "window": window,
        "presentations": presentations,
        "windows": windows,
        "tokens": tokens,
        "tokens_counted_by": "characters / 4" if count_tokens is None else "tokenizer",
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
        "price_per_hour": price_per_hour,
        "price": None if seconds is None or price_per_hour is None else round(seconds / 3600 * price_per_hour, 2),
    }


def _tokens(text: str, count: Callable[[str], int] | None) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN) if count is None else count(text)


def _judged(qrels: Qrels, relevant: int) -> dict[str, set[str]]:
    """The relevant documents of the queries that have any."""
    found = {q: {d for d, grade in grades.items() if grade >= relevant} for q, grades in qrels.items()}
    return {query: documents for query, documents in found.items() if documents}


def _distribution(sizes: Sequence[int]) -> dict[str, float]:
    if not sizes:
        return {}
    marks = dict(zip(("min", "p10", "median", "p90", "max"), np.percentile(sizes, [0, 10, 50, 90, 100]), strict=True))
    return {name: round(float(value), 2) for name, value in {**marks, "mean": np.mean(sizes)}.items()}


def _texts(pools: Iterable[Pool]) -> dict[str, Any]:
    """Blank texts, texts a pool shows twice, and ids that have one text here and another there."""
    blank = twice = 0
    queries: list[str] = []
    text_of: dict[str, str] = {}
    normal_of: dict[str, str] = {}
    differing: dict[str, None] = {}
    for pool in pools:
        seen: Counter[str] = Counter()
        for c in pool.candidates:
            if text_of.setdefault(c.doc_id, c.text) != c.text:
                differing[c.doc_id] = None
            if c.text not in normal_of:
                normal_of[c.text] = normal_text(c.text)
            seen[normal_of[c.text]] += 1
        blank += seen[""]
        repeated = sum(n - 1 for text, n in seen.items() if text)
        twice += repeated
        if repeated:
            queries.append(pool.query_id)
    return {
        "documents": len(text_of),
        "blank": blank,
        "duplicates": twice,
        "queries_with_duplicates": len(queries),
        "ids_with_two_texts": list(differing),
    }


def _routes(pools: Sequence[Pool], judged: Mapping[str, set[str]] | None) -> dict[str, dict[str, Any]]:
    """What each route found, alone and with others, and the queries it found nothing for."""
    names = dict.fromkeys(name for pool in pools for c in pool.candidates for name in c.routes)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        hits, alone, relevant, relevant_alone = 0, 0, 0, 0
        empty: list[str] = []
        for pool in pools:
            wanted = set() if judged is None else judged.get(pool.query_id, set())
            mine = [c for c in pool.candidates if name in c.routes]
            hits += len(mine)
            alone += sum(len(c.routes) == 1 for c in mine)
            relevant += sum(c.doc_id in wanted for c in mine)
            relevant_alone += sum(c.doc_id in wanted and len(c.routes) == 1 for c in mine)
            if not mine:
                empty.append(pool.query_id)
        found[name] = {"hits": hits, "unique": alone, "empty_queries": len(empty), "empty": empty[:10]}
        if judged is not None:
            found[name] |= {"relevant": relevant, "unique_relevant": relevant_alone}
    return found


def _namespaces(pools: Sequence[Pool], qrels: Qrels | None, corpus_ids: Collection[str] | None) -> dict[str, Any]:
    """Whether ids of pools, judgements and corpus are of one kind: how many of one are known to the other."""
    pooled = {c.doc_id for pool in pools for c in pool.candidates}
    queries = {pool.query_id for pool in pools}
    found: dict[str, Any] = {"pool_example": {"query": _first(queries), "document": _first(pooled)}}
    if qrels is not None:
        documents = {d for query_id in qrels.keys() & queries for d in qrels[query_id]}
        every = {d for grades in qrels.values() for d in grades}
        found["qrels"] = {
            "queries": len(qrels),
            "queries_in_pools": len(qrels.keys() & queries),
            "pools_without_judgement": len(queries - qrels.keys()),
            "documents": len(documents),
            "documents_in_pools": len(documents & pooled),
            "example": {"query": _first(qrels), "document": _first(every)},
        }
    if corpus_ids is not None:
        corpus = set(corpus_ids)
        found["corpus"] = {
            "documents": len(corpus),
            "pooled": len(pooled),
            "pooled_in_corpus": len(pooled & corpus),
            "example": _first(corpus),
        }
        if qrels is not None:
            found["corpus"] |= {"judged": len(every), "judged_in_corpus": len(every & corpus)}
    return found


def _ceiling(pools: Sequence[Pool], judged: Mapping[str, set[str]], relevant: int) -> dict[str, Any]:
    """The most recall any reranking of these pools can have; judged queries without a pool count 0."""
    held = {pool.query_id: set(pool.doc_ids) & judged.get(pool.query_id, set()) for pool in pools}
    shares = [len(held.get(query_id, ())) / len(wanted) for query_id, wanted in judged.items()]
    return {
        "relevant_from": relevant,
        "queries": len(judged),
        "recall": float(np.mean(shares)) if shares else None,
        "relevant": sum(map(len, judged.values())),
        "relevant_in_pools": sum(len(held.get(query_id, ())) for query_id in judged),
        "queries_with_none": sum(not share for share in shares),
        "queries_without_pool": sum(query_id not in held for query_id in judged),
    }


def faults(report: Mapping[str, Any]) -> list[str]:
    """What makes pools useless for the purpose, a sentence each: ids that do not meet, one id with two texts."""
    found = []
    spaces = report["namespaces"]
    here = spaces["pool_example"]
    qrels, corpus = spaces.get("qrels"), spaces.get("corpus")
    if qrels is not None and report["queries"] and not qrels["queries_in_pools"]:
        found.append(
            f"pools and qrels share no query id: '{here['query']}' here, '{qrels['example']['query']}' there; "
            "give the qrels of these queries, or bring the ids to one form"
        )
    elif qrels is not None and report["candidates"] and qrels["documents"] and not qrels["documents_in_pools"]:
        found.append(
            f"no judged document is in any pool: '{here['document']}' here, '{qrels['example']['document']}' there; "
            "the ids are of different collections or forms"
        )
    if corpus is not None and corpus["pooled"] and not corpus["pooled_in_corpus"]:
        found.append(
            f"no candidate is in the corpus: '{here['document']}' here, '{corpus['example']}' there; "
            "the ids are of different collections or forms"
        )
    if corpus is not None and corpus.get("judged") and not corpus["judged_in_corpus"]:
        found.append(
            f"no judged document is in the corpus: '{qrels['example']['document']}' in the qrels, "
            f"'{corpus['example']}' in the corpus"
        )
    if two := report["texts"]["ids_with_two_texts"]:
        found.append(f"{len(two)} documents have different texts in different pools, first '{two[0]}'")
    return found


def problems(report: Mapping[str, Any]) -> list[str]:
    """What is worth a warning, a sentence each; faults first."""
    found = faults(report)
    queries, texts = report["queries"], report["texts"]
    if empty := report["empty_pools"]:
        found.append(f"{len(empty)} of {queries} pools are empty, first '{empty[0]}'")
    for name, route in report["routes"].items():
        if route["empty_queries"]:
            found.append(
                f"route '{name}' found nothing for {route['empty_queries']} of {queries} queries, "
                f"first '{route['empty'][0]}'"
            )
    if texts["blank"]:
        found.append(f"{texts['blank']} candidates have no text")
    if texts["duplicates"]:
        found.append(
            f"{texts['duplicates']} candidates repeat the text of another in their pool "
            f"({texts['queries_with_duplicates']} queries); fold_texts makes them one"
        )
    corpus = report["namespaces"].get("corpus")
    if corpus is not None and 0 < corpus["pooled_in_corpus"] < corpus["pooled"]:
        found.append(
            f"{corpus['pooled'] - corpus['pooled_in_corpus']} of {corpus['pooled']} candidates are not in the corpus"
        )
    qrels = report["namespaces"].get("qrels")
    if qrels is not None and qrels["queries_in_pools"] and qrels["pools_without_judgement"]:
        found.append(f"{qrels['pools_without_judgement']} of {queries} queries have no judgements")
    ceiling = report["ceiling"]
    if ceiling is not None and ceiling["queries_without_pool"]:
        found.append(
            f"{ceiling['queries_without_pool']} of {ceiling['queries']} judged queries have no pool and count 0"
        )
    return found


def in_words(report: Mapping[str, Any]) -> str:
    """The report as lines to read, problems last."""
    size, texts, ceiling, price = report["pool_size"], report["texts"], report["ceiling"], report["cost"]
    lines = [f"{report['queries']} queries, {report['candidates']} candidates, {texts['documents']} documents"]
    if size:
        lines.append(
            f"pool size: mean {size['mean']:g}, min {size['min']:g}, 10 % {size['p10']:g}, median {size['median']:g}, "
            f"90 % {size['p90']:g}, max {size['max']:g}"
        )
    for name, route in report["routes"].items():
        share = route["unique"] / route["hits"] if route["hits"] else 0.0
        line = (
            f"route {name}: {route['hits']} candidates, {share:.1%} found by no other, "
            f"nothing for {route['empty_queries']} queries"
        )
        if "relevant" in route:
            line += f"; {route['relevant']} relevant, {route['unique_relevant']} found by no other"
        lines.append(line)
    if ceiling is not None and ceiling["recall"] is not None:
        lines.append(
            f"recall ceiling: {ceiling['recall']:.4f} over {ceiling['queries']} queries "
            f"({ceiling['relevant_in_pools']} of {ceiling['relevant']} documents graded {ceiling['relevant_from']} or "
            f"more; {ceiling['queries_with_none']} queries have none in their pool)"
        )
    seconds = "" if price["seconds"] is None else f", {price['seconds']:g} s at {price['tokens_per_second']:g} tokens/s"
    if price["price"] is not None:
        seconds += f", {price['seconds'] / 3600:.3g} hours for {price['price']:.2f}"
    lines.append(
        f"reranking {price['queries']} queries at B={price['window']}, K={price['presentations']}: "
        f"{price['windows']} windows, about {price['tokens']} tokens ({price['tokens_counted_by']}){seconds}"
    )
    found = problems(report)
    lines += [f"problem: {problem}" for problem in found] or ["no problems found"]
    return "\n".join(lines)


def _first(ids: Iterable[str]) -> str | None:
    return min(ids, default=None)
