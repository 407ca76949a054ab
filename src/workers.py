"""Servers behind one address: a `vllm-router` names them, and their gauges count together.

The router itself has none of vLLM's gauges. It hands /metrics and /version on to one server after the other, so that
what comes back is another server's each time.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence

from .gauges import metrics_url
from .web import fetch, is_local


def workers_behind(base_url: str) -> tuple[str, ...]:
    """Return the servers that the router at `base_url` sends requests to; none where that is a server itself."""
    try:
        status, body = fetch(f"{base_url.rstrip('/').removesuffix('/v1')}/workers", "")
        workers = json.loads(body)["workers"] if status == 200 else []
        # "@3" at the end is the rank within a data-parallel server
        urls = [re.sub(r"@\d+$", "", str(worker["url"])) for worker in workers]
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    return tuple(dict.fromkeys(url for url in urls if url.startswith(("http://", "https://"))))


async def metrics_text(key: str, workers: Sequence[str], url: str) -> str | None:
    """Fetch the metrics at `url`, or those of all `workers` where there are any; None where no server shows its own.

    A server that does not answer runs nothing that we know of. Workers are not told our key, for metrics need none; and
    what another machine's router calls loopback is not ours.
    """
    if not workers:
        return await _page(url, key)
    reachable = [metrics_url(worker) for worker in workers if is_local(url) or not is_local(worker)]
    pages = await asyncio.gather(*(_page(worker, "") for worker in reachable), return_exceptions=True)
    return "\n".join(page for page in pages if isinstance(page, str)) or None


async def _page(url: str, key: str) -> str | None:
    """Fetch a page in a thread: its text, or None where it is not there."""
    status, body = await asyncio.to_thread(fetch, url, key)
    return body.decode(errors="replace") if status == 200 else None
