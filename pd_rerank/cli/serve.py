"""`pd-rerank serve`: a model over HTTP, in the shapes search engines and frameworks call."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.config import LimitSettings, ServeSettings, load
from pd_rerank.errors import BadArgument, MissingResource

if TYPE_CHECKING:
    from pd_rerank.reranker import OCSFTBatchedReranker

logger = logging.getLogger("pd_rerank.serving")

TOKEN = "PD_RERANK_TOKEN"
"""The environment variable that holds the token clients must send."""


@flags(ServeSettings)
def serve(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the options below as keys; what is typed wins.")
    ] = None,
    **given: Any,
) -> None:
    """Serve a model: POST /v1/rerank (also /v2/rerank and /rerank), as Cohere's and Jina's clients call it.

    Requests that arrive together are scored together. /health, /ready and /metrics are for whoever watches, /docs
    describes the requests. With PD_RERANK_TOKEN in the environment, clients must send it as 'Authorization: Bearer'.
    SIGTERM ends the server once everything it took on is answered.
    """
    settings = load(ServeSettings, file=config, given=given)
    named = adapters(settings)
    secret = token()

    from pd_rerank.serving.app import create_app
    from pd_rerank.serving.logs import json_lines
    from pd_rerank.serving.server import listen, run

    bound = listen(settings.host, settings.port)
    try:
        rankers = rerankers(settings, named)
        limits = LimitSettings(**{name: getattr(settings, name) for name in LimitSettings.model_fields})
        app = create_app(rankers, limits=limits, token=secret, log_texts=settings.log_texts)
    except BaseException:
        bound.close()
        raise
    host, port = bound.getsockname()[:2]
    with json_lines():
        if secret is None and not _loopback(host):
            logger.warning("anybody who reaches %s may ask this server; set %s to ask for a token", host, TOKEN)
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("serving", extra={"fields": {"url": where, "models": list(rankers), "token": secret is not None}})
        run(app, bound, timeout=settings.timeout, drain=settings.drain)
        logger.info("stopped")


def adapters(settings: ServeSettings) -> Mapping[str, str | None]:
    """What is served: adapters by name, or under the model's name the model alone."""
    if not settings.adapter:
        model = "fake" if settings.engine == "fake" else _short(settings.model)
        return {settings.served_name or model: None}
    if len(settings.adapter) == 1 and settings.served_name is not None:
        return {settings.served_name: settings.adapter[0].rpartition("=")[2]}
    if settings.served_name is not None:
        raise BadArgument("--served-name names one model; name several adapters as --adapter NAME=PATH")
    if len(settings.adapter) > 1 and settings.served_as is not None:
        raise BadArgument(
            "--served-as is the model server's name for one adapter, and here are several; give them as "
            "--adapter NAME=THEIRS, THEIRS what the server calls it"
        )
    if len(settings.adapter) > 1 and settings.canary is not None:
        raise BadArgument(
            "--canary holds scores of one adapter, and here are several; leave it out, and each is held to the "
            "canary.json in its own folder"
        )
    found: dict[str, str | None] = {}
    for spoken in settings.adapter:
        name, _, path = spoken.rpartition("=")
        name = name or _short(path)
        if name in found:
            raise BadArgument(f"two adapters are called '{name}'; name them as --adapter NAME=PATH")
        found[name] = path
    return found


def _short(source: str) -> str:
    """A hub id or short name as it is; of a folder its name."""
    return Path(source).resolve().name if Path(source).exists() else source


def token() -> str | None:
    """The token from the environment; one no client could send is refused without being shown."""
    given = os.environ.get(TOKEN)
    if given is None:
        return None
    if not given or not given.isascii() or not given.isprintable() or " " in given:
        raise BadArgument(f"{TOKEN} is empty or holds what no header can carry; use letters, digits and -._~+/=")
    return given


def rerankers(settings: ServeSettings, named: Mapping[str, str | None]) -> dict[str, OCSFTBatchedReranker]:
    """A reranker for each of `adapters`; vLLM holds several over one base, other engines load one each."""
    if settings.residual is not None and not settings.residual.exists():
        raise MissingResource(f"--residual: no file {settings.residual}")
    paths = [path for path in dict.fromkeys(named.values()) if path is not None]
    if settings.engine == "fake" and paths:
        raise BadArgument("--adapter means nothing to --engine fake; leave it out")
    options = settings.engine_options(without=("adapter",))
    if settings.engine == "hf":
        options.setdefault("share_prefix", "queries")  # requests scored together start alike
    if settings.engine != "vllm" or len(named) < 2:
        return {
            name: reranker(settings, engine=settings.engine, adapter=path, **options) for name, path in named.items()
        }
    from pd_rerank.engines.vllm import VLLMEngine

    engine = VLLMEngine(settings.model, adapter=paths[0], adapters=paths[1:], **options)
    return {name: reranker(settings, engine=engine.using(path)) for name, path in named.items()}


def reranker(settings: ServeSettings, *, engine: Any, **options: Any) -> OCSFTBatchedReranker:
    """A reranker that shows, reads and decides as the settings say, on an engine, or one by name and `options`."""
    from pd_rerank.reranker import OCSFTBatchedReranker

    return OCSFTBatchedReranker(
        settings.model,
        engine=engine,
        window=settings.window_size,
        partition=settings.partition,
        order=settings.order,
        presentations=settings.presentations,
        seed=settings.seed,
        shuffle=settings.shuffle,
        calibration=settings.calibration,
        readout=settings.readout,
        slot_residual=settings.residual,
        threshold=settings.threshold,
        rubric=settings.rubric,
        instruction=settings.instruction,
        markers=settings.markers,
        placeholder=settings.placeholder,
        max_doc_chars=settings.max_doc_chars,
        chat="auto" if settings.chat is None else settings.chat,
        check_template=settings.check_template,
        **options,
    )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
