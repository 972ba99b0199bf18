"""Tiny random BERT models on disk, in the shapes encoders come in, and a small corpus."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "on", "mat", "river", "bank",
    "money", "tree", "##s", "##ing", "green", "blue", "red", "not", "runs", "fast", "slow", ":", "query", "passage",
]  # fmt: skip

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "",
    "green trees on the river bank " * 20,
    "money money money",
    "unknown zebra words",
    "blue \U0001f600 red",
    "half a pair \ud800 here",
]
"""Short, empty, longer than any limit, repeated, unknown, emoji, and half a surrogate pair."""

CORPUS = {
    "d1": "The cat sat on the mat while the dog runs fast.",
    "d2": "A green tree stands on the river bank.",
    "d3": "Money in the bank is not money in the river.",
    "007": "Slow dogs, blue cats \U0001f600 and red trees; naïve café 北京.",
    "NA": "The dog is not fast; the cat is not slow.",
}


def bert(folder: Path, *, head: bool = False, seed: int = 0) -> Path:
    """Write a random BERT (with a masked-language head if `head`) and its word-piece tokeniser."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (transformers.BertForMaskedLM if head else transformers.BertModel)(config).eval()
    model.save_pretrained(folder)
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}, do_lower_case=True)
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(folder)
    return folder


def sentence_transformer(
    folder: Path,
    *,
    pooling: Mapping[str, Any],
    normalise: bool = True,
    inner: str = "",
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
) -> Path:
    """The same in sentence-transformers' shape: modules.json, a pooling folder, and what else is given."""
    bert(folder / inner)
    modules = [("", inner, "Transformer"), ("1", "1_Pooling", "Pooling")]
    if normalise:
        modules.append(("2", "2_Normalize", "Normalize"))
    _write(
        folder / "modules.json",
        [
            {"idx": i, "name": n, "path": p, "type": f"sentence_transformers.models.{t}"}
            for i, (n, p, t) in enumerate(modules)
        ],
    )
    _write(folder / "1_Pooling" / "config.json", dict(pooling))
    if max_length is not None:
        _write(folder / inner / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    if prompts is not None:
        _write(folder / "config_sentence_transformers.json", {"prompts": dict(prompts)})
    return folder


def write_corpus(path: Path, corpus: Mapping[str, str] = CORPUS) -> Path:
    """A corpus as JSONL."""
    return write_lines(path, [json.dumps({"_id": i, "text": t}) for i, t in corpus.items()])


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
