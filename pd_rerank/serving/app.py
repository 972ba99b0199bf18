"""The application: what comes in over HTTP is checked, queued, scored and answered here."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Depends, FastAPI, Request, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pd_rerank import __version__
from pd_rerank.config import LimitSettings
from pd_rerank.decisions import Threshold
from pd_rerank.errors import BadArgument, EngineFailure, PdRerankError, near_names
from pd_rerank.reranker import OCSFTBatchedReranker, pool_of
from pd_rerank.scoring import Scoring
from pd_rerank.serving.batching import Batcher, Job, QueueFull, Scored
from pd_rerank.serving.metrics import CONTENT_TYPE, Metrics
from pd_rerank.serving.schemas import (
    Problem,
    Refusal,
    RerankRequest,
    RerankResponse,
    number,
    parse,
)

logger = logging.getLogger("pd_rerank.serving")

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""All answer alike; clients differ in the path they call."""

_GONE = 499
"""Logged, never sent: the client went away."""

_SMALL = 2**16
"""Bytes of a body that are read at once, without a thread."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_app(
    rankers: OCSFTBatchedReranker | Mapping[str, OCSFTBatchedReranker],
    *,
    limits: LimitSettings | None = None,
    token: str | None = None,
    log_texts: bool = False,
) -> FastAPI:
    """Make the application that serves `rankers`: one, or several by name, the first of which is the default.

    `token` is what clients must send as `Authorization: Bearer …`; None lets everybody in. `log_texts` puts queries
    and documents into the log. Settings of the rankers are the defaults of a request; `settle` has no part in it.
    """
    if isinstance(rankers, OCSFTBatchedReranker):
        rankers = {rankers.engine.name: rankers}
    if not rankers:
        raise BadArgument("a server needs at least one reranker")
    for name, ranker in rankers.items():
        if ranker.settle is not None:
            raise BadArgument(f"'{name}' settles presentations early, which is for jobs on files; leave settle out")
    service = Service(rankers, limits=limits or LimitSettings(), token=token, log_texts=log_texts)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await service.batcher.close()

    app = FastAPI(
        title="pd-rerank",
        version=__version__,
        description=_description(service),
        lifespan=lifespan,
        redirect_slashes=False,  # not every client sends its body again
    )
    app.state.service = service
    problems: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in _STATUSES}
    for path in (*PATHS, *(f"{path}/" for path in PATHS)):
        app.add_api_route(
            path,
            service.rerank,
            methods=["POST"],
            summary="Rank documents for a query",
            responses={200: {"model": RerankResponse}, **problems},
            openapi_extra=_BODY,
            dependencies=[] if token is None else [Depends(HTTPBearer(auto_error=False))],  # shown, not enforced here
            response_class=Response,
            include_in_schema=path == PATHS[0],
        )
    app.add_api_route("/health", service.health, methods=["GET"], summary="Whether this process can score")
    app.add_api_route("/ready", service.ready, methods=["GET"], summary="Whether requests should be sent here")
    app.add_api_route("/metrics", service.page, methods=["GET"], summary="Counters for Prometheus")
    app.add_exception_handler(HTTPException, service.no_route)  # type: ignore[arg-type]
    return app


_STATUSES = (400, 401, 408, 413, 415, 422, 429, 500, 503, 504)

_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": RerankRequest.model_json_schema()}}}
}


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request on its way: its id, when it came, and what is known of it for the log."""

    id: str
    path: str
    start: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)


class Service:
    """What the routes call."""

    def __init__(
        self,
        rankers: Mapping[str, OCSFTBatchedReranker],
        *,
        limits: LimitSettings,
        token: str | None,
        log_texts: bool,
    ) -> None:
        self.rankers = dict(rankers)
        self.limits = limits
        self.metrics = Metrics()
        self.batcher = Batcher(limits, self.metrics)
        self.draining = False
        self._token = None if token is None else token.encode()
        self._log_texts = log_texts
        self._under_way = 0
        self.metrics.watch(under_way=lambda: self._under_way, queued=lambda: self.batcher.queued)
        for name, ranker in self.rankers.items():
            facts = {key: str(value) for key, value in _facts(ranker).items() if value is not None}
            self.metrics.describe(name, version=__version__, **facts)

    # -- routes -----------------------------------------------------------------------------------------------

    async def rerank(self, request: Request) -> Response:
        """Request and answer have the shapes of Cohere and Jina, with more where asked.

        Also at /v2/rerank and /rerank.
        """
        visit = _visit(request)
        try:
            self._let_in(request)
            if self._under_way >= self.limits.max_requests:
                raise Refusal(
                    429,
                    "queue_full",
                    f"{self.limits.max_requests} requests are under way; try again later",
                    retry_after=self.batcher.retry_after(),
                )
            self._under_way += 1
            try:
                response = await self._answer(request, visit)
            finally:
                self._under_way -= 1
        except Refusal as refusal:
            response = _refused(refusal, visit)
        except ClientDisconnect:
            self.metrics.disconnected.inc()
            response = Response(status_code=_GONE)
        except Exception:
            logger.exception("request failed", extra={"fields": {"id": visit.id}})
            told = f"the server failed on this request; its log says where (id {visit.id})"
            response = _refused(Refusal(500, "internal", told), visit)
        self._note(visit, response.status_code)
        response.headers["x-request-id"] = visit.id
        return response

    async def health(self) -> Response:
        """200 while the engine can be asked; 503 once it fails again and again, and a restart is the cure."""
        works = await self.batcher.works()
        return _json(200 if works else 503, {"status": "ok" if works else "failing"})

    async def ready(self) -> Response:
        """200 where requests are taken; 503 while shutting down or failing."""
        works = await self.batcher.works()
        status = "draining" if self.draining else "ready" if works else "failing"
        return _json(200 if status == "ready" else 503, {"status": status, "models": list(self.rankers)})

    async def page(self, request: Request) -> Response:
        """All counters."""
        try:
            self._let_in(request)
        except Refusal as refusal:
            return _refused(refusal, _visit(request))
        return Response(self.metrics.page(), media_type=CONTENT_TYPE)

    async def no_route(self, request: Request, error: HTTPException) -> Response:
        """Tell of a path or method there is none of, as every refusal is told."""
        codes = {404: "not_found", 405: "method_not_allowed"}
        known = f"; POST {' or '.join(PATHS)}" if error.status_code in codes else ""
        code = codes.get(error.status_code, "invalid_request")
        response = _refused(Refusal(error.status_code, code, f"{str(error.detail).lower()}{known}"), _visit(request))
        response.headers.update(error.headers or {})
        return response

    # -- one request ------------------------------------------------------------------------------------------

    def _let_in(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        # Always compared, so that how long it takes tells nothing.
        right = hmac.compare_digest(sent.strip().encode("latin-1"), self._token)
        if not right or scheme.lower() != "bearer":
            raise Refusal(401, "unauthorized", "send the server's token as 'Authorization: Bearer …'")

    async def _answer(self, request: Request, visit: Visit) -> Response:
        deadline = visit.start + self.limits.timeout
        asked = await self._parsed(await self._body(request, deadline))
        visit.facts["documents"] = len(asked.documents)
        if self._log_texts:
            visit.facts |= {"query": asked.query, "texts": asked.documents}
        name = self._chosen(asked)
        ranker = self.rankers[name]
        scoring = self._scoring(asked, ranker)
        visit.facts |= {"model": name, "presentations": scoring.presentations}
        pool = pool_of(asked.query, asked.texts())
        try:
            job = self.batcher.submit(ranker, scoring, pool)
        except QueueFull as full:
            raise Refusal(429, "queue_full", str(full), retry_after=full.retry_after) from None
        scored = await self._scored(job, request, deadline)
        visit.facts |= {
            "windows": scored.windows,
            "waited_ms": round(1000 * scored.waited, 1),
            "computed_ms": round(1000 * scored.computed, 1),
            "together": scored.together,
        }
        self._count(scored)
        return _json(200, _response(asked, name, ranker, scoring, scored, visit.id))

    async def _body(self, request: Request, deadline: float) -> bytes:
        """The body, within the limits of size and time."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise Refusal(415, "not_json", "send the request as Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal(415, "encoded", "send the request without a Content-Encoding")
        limit = self.limits.max_body
        too_large = Refusal(413, "too_large", f"a request may have {limit} bytes; send fewer or shorter documents")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) > 18:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async for part in request.stream():
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    elif size > 4 * limit:
                        break
                    else:  # read on for a while: a client that is still sending would not see the answer
                        parts.clear()
        except TimeoutError:
            raise Refusal(408, "slow_request", f"the request did not arrive in {self.limits.timeout:g} s") from None
        if size > limit:
            raise too_large
        return b"".join(parts)

    async def _parsed(self, body: bytes) -> RerankRequest:
        """The request in a body; a large one is read on a thread, so that others are answered meanwhile."""
        read = partial(parse, body, max_documents=self.limits.max_documents)
        return read() if len(body) <= _SMALL else await asyncio.to_thread(read)

    def _chosen(self, asked: RerankRequest) -> str:
        """The name of the served model a request is for."""
        if asked.adapter is not None:
            if asked.adapter not in self.rankers:
                hint = near_names(asked.adapter[:80], self.rankers)
                raise Refusal(422, "unknown_adapter", f"adapter: none of that name; {hint}", field="adapter")
            return asked.adapter
        return asked.model if asked.model in self.rankers else next(iter(self.rankers))

    def _scoring(self, asked: RerankRequest, ranker: OCSFTBatchedReranker) -> Scoring:
        """How this request's pool is shown, within the limits."""
        limits = self.limits
        if (asked.presentations or 1) > limits.max_presentations:
            raise Refusal(
                422,
                "too_many_presentations",
                f"presentations: {asked.presentations}, this server takes {limits.max_presentations}",
                field="presentations",
            )
        wanted = {name: getattr(asked, name) for name in ("presentations", "order", "seed")}
        return replace(ranker.scoring, **{name: value for name, value in wanted.items() if value is not None})

    async def _scored(self, job: Job, request: Request, deadline: float) -> Scored:
        """Wait for a job; it is discarded when its client goes away or its time is up."""
        left = asyncio.create_task(_left(request))
        either: set[asyncio.Future[Any]] = {job.answer, left}
        try:
            seconds = deadline - time.monotonic()
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if job.answer.done() and not job.answer.cancelled():
                return job.answer.result()
            if left.done():
                raise ClientDisconnect
            raise Refusal(504, "deadline", f"no answer in {self.limits.timeout:g} s; send fewer documents or try later")
        except EngineFailure as error:
            logger.error("the engine failed: %s", error)
            raise Refusal(500, "engine_failed", "the model could not score this request; the log says why") from None
        except PdRerankError as error:
            raise Refusal(422, "unscorable", str(error)) from None
        finally:
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left
            self.batcher.discard(job)

    # -- counting ---------------------------------------------------------------------------------------------

    def _count(self, scored: Scored) -> None:
        metrics, table = self.metrics, scored.table
        metrics.waited.observe(scored.waited)
        metrics.documents.inc(len(table.doc_ids))
        metrics.windows.inc(scored.windows)
        metrics.tokens.inc(scored.tokens or 0)
        metrics.cut.inc(int((table.cut > 0).sum()))
        metrics.missing.inc(int(table.fallback.sum()))

    def _note(self, visit: Visit, status: int) -> None:
        seconds = time.monotonic() - visit.start
        self.metrics.requests.labels(status=str(status)).inc()
        self.metrics.seconds.observe(seconds)
        told = {"id": visit.id, "path": visit.path, "status": status, "ms": round(1000 * seconds, 1), **visit.facts}
        logger.info("request", extra={"fields": told})


def _visit(request: Request) -> Visit:
    sent = request.headers.get("x-request-id", "")
    return Visit(id=sent if _ID.fullmatch(sent) else uuid.uuid4().hex, path=request.url.path)


async def _left(request: Request) -> None:
    """Return once the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(status: int, content: Any) -> Response:
    # Escaped to ASCII: a document may hold half a surrogate pair, which UTF-8 cannot.
    return Response(json.dumps(content, allow_nan=False), status_code=status, media_type="application/json")


def _refused(refusal: Refusal, visit: Visit) -> Response:
    visit.facts["code"] = refusal.code
    body = Problem(message=refusal.message, detail=refusal.message, code=refusal.code, field=refusal.field, id=visit.id)
    response = _json(refusal.status, body.model_dump())
    if refusal.retry_after is not None:
        response.headers["retry-after"] = str(refusal.retry_after)
    if refusal.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if refusal.status in (408, 413):  # the rest of the body is not read
        response.headers["connection"] = "close"
    return response


# -- answers --------------------------------------------------------------------------------------------------


def _response(
    asked: RerankRequest, name: str, ranker: OCSFTBatchedReranker, scoring: Scoring, scored: Scored, visit_id: str
) -> dict[str, Any]:
    """The answer, a `RerankResponse` as plain values without what was not asked for."""
    table, readout, residual = scored.table, ranker.readout, ranker.residual
    mean = table.mean(readout, residual=residual)
    threshold = _threshold(asked, ranker)
    kept = None if threshold is None else threshold.retain(mean)
    order = table.ranking(readout, residual=residual).tolist()
    ranks = {i: rank for rank, i in enumerate(order, 1)}
    if kept is not None and asked.retained_only:
        order = [i for i in order if kept[i]]
    results = []
    spread = table.spread(readout, residual=residual) if asked.details else None
    grades = table.mean_probabilities() if asked.details else None
    for i in order[: asked.top_n]:
        result: dict[str, Any] = {"index": i, "relevance_score": number(mean[i])}
        if asked.return_documents:
            document = asked.documents[i]
            result["document"] = {"text": document} if isinstance(document, str) else document
        if kept is not None:
            result["retained"] = bool(kept[i])
        if spread is not None and grades is not None:
            result |= {
                "rank": ranks[i],
                "spread": number(spread[i]),
                "grade_probabilities": None if np.isnan(mean[i]) else grades[i].tolist(),
                "cut": int(table.cut[i]),
            }
        results.append(result)
    lost = int(np.isnan(mean).sum())
    warnings = asked.warnings()
    if lost:
        warnings.append(f"the model gave {lost} of {len(mean)} documents no grade; they come last, without a score")
    meta: dict[str, Any] = {"api_version": {"version": "1"}}
    answer: dict[str, Any] = {"id": visit_id, "model": name, "results": results, "usage": None, "meta": meta}
    if scored.tokens is not None:
        answer["usage"] = {"total_tokens": scored.tokens, "prompt_tokens": scored.tokens}
        meta["tokens"] = {"input_tokens": scored.tokens}
    if warnings:
        meta["warnings"] = warnings
    if kept is not None and threshold is not None:
        answer["decision"] = {"threshold": threshold.value, "retained": int(kept.sum())}
    if asked.details:
        answer["scoring"] = scoring.describe() | {
            "readout": readout,
            "template_hash": ranker.prompt.hash,
            "windows": scored.windows,
        }
    return answer


def _threshold(asked: RerankRequest, ranker: OCSFTBatchedReranker) -> Threshold | None:
    if asked.threshold is not None:
        return Threshold(value=asked.threshold, readout=ranker.readout)
    # The server's own marks results only where the request asks for more than the shapes others know.
    return ranker.threshold if asked.details or asked.retained_only else None


# -- the OpenAPI page -----------------------------------------------------------------------------------------


def _facts(ranker: OCSFTBatchedReranker) -> dict[str, Any]:
    """What is served, in plain values; a folder is told by its last part alone."""
    engine = ranker.engine.describe()
    adapter = engine.get("adapter")
    source = adapter.get("source") if isinstance(adapter, Mapping) else adapter
    return {
        "model": _last(engine.get("model")),
        "commit": engine.get("commit"),
        "adapter": _last(source),
        "adapter_sha256": adapter.get("sha256") if isinstance(adapter, Mapping) else None,
        "engine": engine.get("engine"),
        "dtype": engine.get("dtype"),
        "device": engine.get("device"),
        "max_length": ranker.engine.max_length,
        "template_hash": ranker.prompt.hash,
        "rubric": ranker.prompt.rubric.name,
    }


def _last(source: Any) -> str | None:
    """A hub id as it is; of a local folder its name."""
    if source is None:
        return None
    return Path(source).name if Path(str(source)).is_absolute() or Path(str(source)).exists() else str(source)


def _description(service: Service) -> str:
    """The page's text: what each served model is, how it is asked, and what its scores mean."""
    limits = service.limits
    lines = [
        "Documents are shown to a language model in windows; it grades each 0–3, and the expected grade over 3 is the "
        "score. Scores compare within a request.",
        "",
        f"A request may have {limits.max_documents} documents, {limits.max_presentations} presentations and "
        f"{limits.max_body} bytes; it is answered within {limits.timeout:g} s or refused.",
    ]
    for name, ranker in service.rankers.items():
        facts = {key: value for key, value in _facts(ranker).items() if value is not None}
        shown = ranker.scoring.describe() | {"readout": ranker.readout}
        if ranker.threshold is not None:
            shown["threshold"] = ranker.threshold.value
        lines += ["", f"### {name}", "", *(f"* {key}: `{value}`" for key, value in (facts | shown).items())]
    return "\n".join(lines)
