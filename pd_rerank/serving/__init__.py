"""Rerankers over HTTP, in the request and answer shapes search engines and frameworks already call.

`app.create_app` makes the application; what a request may hold and what an answer holds is in `schemas`, how
requests are scored together in `batching`, what is counted in `metrics`, what is logged in `logs`.
"""

from __future__ import annotations

from pd_rerank._extras import need

for _library in ("fastapi", "prometheus_client", "uvicorn"):
    need(_library, extra="serve", purpose=f"a server needs {_library}")
