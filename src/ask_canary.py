"""Asks a server about the canary page, before there is an event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from .ask import Endpoint, request_body
from .canary import Canary
from .errors import EngineError
from .result import PageResult, result_of_answer
from .trust import Trust
from .web import fetch

CANARY_PAUSE_S = 1.0


def ask_server_about(
    endpoint: Endpoint, trust: Trust, canary: Canary, row: int, check_alive: Callable[[], None]
) -> PageResult:
    """Ask a server about the canary page, again and again while it says that it is not ready.

    `check_alive` raises where there is no sense in asking on.
    """
    question = replace(trust.question, max_tokens=canary.max_tokens)
    body = request_body(canary.page, row, question, endpoint.model).whole()
    give_up_at = time.monotonic() + trust.patience_s
    while True:
        check_alive()
        left_s = max(0.1, give_up_at - time.monotonic())
        try:
            status, answer = fetch(f"{endpoint.base_url}/chat/completions", endpoint.api_key, body, left_s)
        except (OSError, ValueError) as error:
            status, answer = 0, str(getattr(error, "reason", error)).encode()
        if status == 200:
            return _read_answer(answer)
        words = f"HTTP {status}: " * bool(status) + answer.decode(errors="replace")[:300]
        if status not in {0, 408, 409, 425, 429} and status < 500:
            raise EngineError(f"the server refuses the canary page: {words}; check --server and --model")
        if time.monotonic() + CANARY_PAUSE_S > give_up_at:
            check_alive()
            raise EngineError(f"the server did not answer the canary page in {trust.patience_s:.0f} s: {words}")
        time.sleep(CANARY_PAUSE_S)


def _read_answer(body: bytes) -> PageResult:
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        usage = completion.get("usage") or {}
        return result_of_answer(
            choice["message"]["content"],
            choice.get("finish_reason"),
            tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            attempts=1,
            latency_s=0.0,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(
            f"no chat completion came back from the server, but {body[:200]!r}; check --server"
        ) from error
