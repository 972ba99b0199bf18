"""Compare every readout of vLLM that runs here with the transformers engine: grades, order of requests, prefix cache.

    pipelines/vllm_cpu.sh -- --model smollm2-135m --output parity.json
    python pipelines/vllm_parity.py --dtype bfloat16      # on an accelerator

Windows of the demo's pools are read by transformers once, then by vLLM per readout, with and without a random LoRA
adapter, with the prefix cache and without, in both orders and a second time. The figure is the largest difference of an
expected grade (0 to 3). Each readout is a process of its own, with one vLLM for base and adapter; serve_… is a `vllm
serve` on loopback, read by the server engine. The exit code is 7 if a figure is above --tolerance, a grade is missing
or a readout fails; `prompt_ids` may fail where there is no accelerator, because CPU builds have no model runner V2.
--tolerance is 1e-3 in float32, and in other precisions 0.15, the canary's 0.05 of a grade from 0 to 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank.engines.base import Engine, FloatArray, WindowPrompt
from pd_rerank.engines.canary import HALF
from pd_rerank.errors import PdRerankError

READOUTS = ("pooling", "export", "one_token", "top_k", "prompt_ids", "serve_pooling", "serve_one_token")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PASSES = ("in order", "reversed", "again")
VERSIONS = ("vllm", "vllm-cpu", "torch", "transformers")
SMALL = {"enforce_eager": True, "max_num_seqs": 8}
# vllm-cpu's command line asks for the version of a package that is called vllm.
SERVE = (
    "import importlib.metadata as m; real = m.version; "
    "m.version = lambda n: real('vllm-cpu') + '+cpu' if n == 'vllm' else real(n); "
    "from vllm.entrypoints.cli.main import main; main()"
)


def windows_of(tokenizer: Any, args: argparse.Namespace) -> tuple[list[WindowPrompt], tuple[int, ...]]:
    from pd_rerank.pool import read_pools
    from pd_rerank.prompt import GradePrompt

    demo = Path(__file__).resolve().parents[1] / "pd_rerank" / "demo" / "pools.jsonl"
    prompt = GradePrompt(tokenizer, max_doc_chars=args.max_doc_chars)
    made = []
    for pool in read_pools(demo)[: args.queries]:
        sheet = prompt.sheet(pool.query, pool.texts, width=args.window_size, max_tokens=args.max_length)
        for start in range(0, args.window_size * args.windows, args.window_size):
            made.append(sheet.window(range(start, start + args.window_size)))
    return made, prompt.grade_ids


def grades(engine: Engine, windows: Sequence[WindowPrompt], ids: Sequence[int]) -> FloatArray:
    """Expected grades, 0 to the top grade, of all slots of all windows."""
    from pd_rerank.engines.answers import expected

    read = engine.grade_logits(windows, ids)
    return np.concatenate([expected(r) for r in read]) * (len(ids) - 1)


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """What transformers reads: without and with the adapter, which is made here, and exported."""
    from pd_rerank.engines.canary import CANARY, write_canary
    from pd_rerank.engines.hf import HFEngine

    work, found = Path(args.work), {}
    device = {} if args.device is None else {"device": args.device}
    engine = HFEngine(args.model, dtype=args.dtype, **device)
    windows, ids = windows_of(engine.tokenizer, args)
    found["base"] = grades(engine, windows, ids).tolist()
    write_canary(engine, windows[0], ids, work / f"base-{CANARY}")
    adapter = Path(args.adapter) if args.adapter else random_adapter(engine, work / "adapter")
    del engine
    if not args.adapter and "export" in args.only:
        from pd_rerank.training.adapters import export

        export(args.model, work / "classifier", adapter=adapter, form="classifier", dtype=args.dtype)
    with_it = HFEngine(args.model, adapter=adapter, dtype=args.dtype, **device)
    found["lora"] = grades(with_it, windows, ids).tolist()
    write_canary(with_it, windows[0], ids, work / f"lora-{CANARY}")
    import torch

    return {
        "grades": found,
        "adapter": str(adapter),
        "tokens": [len(w.token_ids) for w in windows],
        "accelerator": torch.cuda.is_available(),
    }


def random_adapter(engine: Any, folder: Path) -> Path:
    """A LoRA adapter of random weights on the body, large enough to move every grade."""
    import peft
    import torch

    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = peft.get_peft_model(engine.model, peft.LoraConfig(r=6, lora_alpha=12, target_modules=targets))
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.02)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


def compared(engine: Any, args: argparse.Namespace, wanted: Sequence[float]) -> dict[str, Any]:
    """Read the windows in order, reversed, and in order again; the largest differences and what was missing.

    The largest difference is over the slots that came back with a grade; it is None if none did.
    """
    from pd_rerank.engines.answers import apart

    windows, ids = windows_of(engine.tokenizer, args)
    want = np.array(wanted)
    figures: dict[str, Any] = {}
    for name in PASSES:
        backwards = name == "reversed"
        start, before = time.monotonic(), getattr(engine, "_cached", 0)
        read = grades(engine, windows[::-1] if backwards else windows, ids)
        if backwards:
            read = read.reshape(len(windows), -1)[::-1].reshape(-1)
        there = ~np.isnan(read)
        largest = apart(read[there], want[there])
        figures[name] = {
            "largest": None if np.isnan(largest) else largest,
            "missing": int((~there).sum()),
            "seconds": round(time.monotonic() - start, 2),
            "cached_tokens": getattr(engine, "_cached", 0) - before,
        }
    return figures


def in_process(readout: str, args: argparse.Namespace, said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A vLLM engine in this process: base and adapter, with the prefix cache and without."""
    from pd_rerank.engines.vllm import VLLMEngine

    work, adapter, exported = Path(args.work), said["adapter"], readout == "export"
    engine = VLLMEngine(
        work / "classifier" if exported else args.model,
        adapter=None if exported else adapter,
        slot_readout="pooling" if exported else readout,  # type: ignore[arg-type]
        dtype=args.dtype,
        canary=None if exported else work / "lora-canary.json",
        max_length=args.max_length,
        vllm_kwargs=SMALL,
    )
    for with_adapter in (True,) if exported else (True, False):
        for share in (True, False):
            one = engine.using(adapter if with_adapter and not exported else None, share_prefix=share)
            figures = compared(one, args, said["grades"]["lora" if with_adapter else "base"])
            yield {"lora": with_adapter, "prefix_cache": one.describe()["share_prefix"], **figures}


@contextmanager
def serving(
    readout: str, adapter: str, args: argparse.Namespace, *, cache: bool = True
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a `vllm serve` of its own, once it answers, and what kills it with all its processes."""
    from pd_rerank.embedded import resolve_model
    from pd_rerank.engines.http import Client, Response
    from pd_rerank.engines.loading import load_tokenizer
    from pd_rerank.prompt import GradePrompt

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = resolve_model(args.model, quiet=True)
    words = ["serve", folder, "--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", args.dtype, "--max-model-len", str(args.max_length), "--enforce-eager", "--max-num-seqs", "8"]
    words += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"ad1={adapter}"]
    words.append("--enable-prefix-caching" if cache else "--no-enable-prefix-caching")
    if readout == "serve_pooling":
        tokenizer, config, _ = load_tokenizer(args.model, quiet=True)
        names = [tokenizer.convert_ids_to_tokens(g) for g in GradePrompt(tokenizer).grade_ids]
        kinds = [k.replace("ForCausalLM", "ForSequenceClassification") for k in config.architectures]
        head = {"architectures": kinds, "classifier_from_token": names, "method": "no_post_processing"}
        words += ["--runner", "pooling", "--pooler-config", '{"task": "token_classify"}']
        words += ["--hf-overrides", json.dumps(head)]
    with (Path(args.work) / f"{readout}.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, *words],
            env={**SETTINGS, **os.environ},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + args.patience
        while True:
            with Client(url, attempts=1, timeout_s=5) as client:
                if isinstance(client.get("v1/models"), Response):
                    break
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vllm serve did not start; see {readout}.log")
            time.sleep(1)
        yield url, kill
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        kill()


def over_http(readout: str, args: argparse.Namespace, said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server engine: base and adapter of one server with a prefix cache; slots one by one also without."""
    from pd_rerank.engines.server import ServerEngine

    for cache in (True,) if readout == "serve_pooling" else (True, False):  # /pooling never reads the cache
        with serving(readout, said["adapter"], args, cache=cache) as (url, _):
            for with_adapter in (False, True):
                kind = "lora" if with_adapter else "base"
                engine = ServerEngine(
                    args.model,
                    server=url,
                    adapter="ad1" if with_adapter else None,
                    slot_readout=readout.removeprefix("serve_"),  # type: ignore[arg-type]
                    server_timeout=args.patience,
                    canary=Path(args.work) / f"{kind}-canary.json",
                    quiet=True,
                )
                figures = compared(engine, args, said["grades"][kind])
                yield {"lora": with_adapter, "prefix_cache": cache, **figures}
                engine.close()


def faults(rows: Sequence[dict[str, Any]], *, tolerance: float, accelerator: bool) -> list[str]:
    """Why the comparison does not hold, a line each; none where it does."""
    found, compared = [], 0
    for row in rows:
        what = f"{row['readout']}{' with LoRA' if row.get('lora') else ''}"
        if "error" in row and (accelerator or row["readout"] != "prompt_ids"):
            found.append(f"{what}: {row['error']}")
        for name in PASSES:
            figures = row.get(name, {"largest": 0.0, "missing": 0})
            compared += name in row
            if figures["missing"]:
                found.append(f"{what}, {name}: {figures['missing']} grades are missing")
            if figures["largest"] is None or not figures["largest"] <= tolerance:
                found.append(f"{what}, {name}: grades are {figures['largest']} apart, {tolerance:g} are allowed")
    return found if compared else [*found, "nothing was compared"]


def child(args: argparse.Namespace) -> Any:
    """One readout's comparisons, in the process started for it."""
    if args.child == "reference":
        return reference(args)
    said = json.loads((Path(args.work) / "reference.json").read_text())
    compare = over_http if args.child.startswith("serve_") else in_process
    rows: list[dict[str, Any]] = []
    try:
        for row in compare(args.child, args, said):
            rows.append({"readout": args.child, **row})
            Path(args.work, "answer.json").write_text(json.dumps(rows))
    except PdRerankError as error:
        rows.append({"readout": args.child, "error": str(error)})
    return rows


def run(what: str, args: argparse.Namespace) -> Any:
    """Run `child` in a process of its own and read what it wrote."""
    place = Path(args.work) / "answer.json"
    place.unlink(missing_ok=True)
    log = Path(args.work) / "child.log"
    with log.open("w") as out:
        words = [sys.executable, __file__, *sys.argv[1:], "--child", what, "--work", args.work]
        done = subprocess.run(words, env={**SETTINGS, **os.environ}, stdout=out, stderr=out, check=False)
    found = json.loads(place.read_text()) if place.is_file() else []
    if done.returncode == 0:
        return found
    last = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
    return [*found, {"readout": what, "error": f"the process died: {last}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", help="LoRA folder; left out: a random one")
    parser.add_argument("--only", nargs="+", choices=READOUTS, default=list(READOUTS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", help="where transformers runs")
    parser.add_argument("--queries", type=int, default=2)
    parser.add_argument("--windows", type=int, default=2, help="windows of a query")
    parser.add_argument("--window-size", type=int, default=5)
    parser.add_argument("--max-doc-chars", type=int, help="shorter documents, where LoRA is slow")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--tolerance", type=float, help="of grades 0 to 3; left out: by --dtype")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds for a server to start, or to answer")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = child(args)
        Path(args.work, "answer.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as work:
        args.work = work
        said = run("reference", args)
        if isinstance(said, list):
            sys.exit(said[-1]["error"])
        Path(work, "reference.json").write_text(json.dumps(said))
        moved = float(np.abs(np.subtract(said["grades"]["lora"], said["grades"]["base"])).max())
        rows: list[dict[str, Any]] = []
        for readout in args.only:
            found = run(readout, args)
            print(*map(json.dumps, found), sep="\n", flush=True)
            rows += found
    figures = [row[name]["largest"] for row in rows for name in PASSES if name in row]
    tolerance = args.tolerance if args.tolerance is not None else 1e-3 if args.dtype == "float32" else 3 * HALF
    report = {
        "model": args.model,
        "dtype": args.dtype,
        "tokens": said["tokens"],
        "adapter_moves_grades_by": moved,
        "largest": max((f for f in figures if f is not None), default=None),
        "tolerance": tolerance,
        "faults": faults(rows, tolerance=tolerance, accelerator=said["accelerator"]),
        "rows": rows,
        "versions": {d.name: d.version for d in metadata.distributions() if d.name in VERSIONS},
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    if report["faults"]:
        sys.exit(7)


if __name__ == "__main__":
    main()
