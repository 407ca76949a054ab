"""Ready: a server lists the model, is no version known to be bad, holds the largest page, and has read the canary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .ask import Endpoint
from .ask_canary import ask_server_about
from .errors import EngineError
from .report import duration, say
from .spawn import LogReader
from .startup import is_progress, phase_of
from .trust import Trust, check_canary, check_context, check_version
from .web import fetch

POLL_S = 0.1
VERSION_TRIES = 3  # a router passes the question on, also to a server that is gone


class Child(Protocol):
    """The process of a server of ours."""

    @property
    def log(self) -> Path:
        """Where it writes."""

    def log_words(self) -> str:
        """Name the log and show its last lines."""

    def check_alive(self) -> None:
        """Raise `EngineError` where there is no sense in waiting on."""


@dataclass(frozen=True)
class Ready:
    """A server that can be trusted: where, what it says it is, and how long the canary page took it."""

    endpoint: Endpoint
    engine: str
    canary_s: float
    context_tokens: int | None  # what page and text may have together, where it says


def get_ready(
    model: str, trust: Trust, url: str, key: str, startup_timeout_s: float, child: Child | None = None
) -> Ready:
    """Wait until the server at `url` lists its models; return it once it has passed all that is required of it."""
    models = _wait_for_models(url, key, startup_timeout_s, child)
    endpoint = Endpoint(f"{url}/v1", key, served_id(models, model, url))
    engine = engine_name(url, models)
    owner, _, version = engine.partition(" ")
    if owner == "vllm" and version:
        check_version(trust, version, serves=True)
    card = next(card for card in models if card["id"] == endpoint.model)
    context = card.get("max_model_len")
    check_context(trust, context)
    alive: Callable[[], None] = child.check_alive if child else lambda: None
    canary_s = check_canary(trust, lambda canary, row: ask_server_about(endpoint, trust, canary, row, alive), engine)
    return Ready(endpoint, engine, canary_s, context if isinstance(context, int) else None)


def is_up(url: str, key: str) -> bool:
    """Whether anything answers HTTP at the URL."""
    try:
        fetch(f"{url}/v1/models", key)
    except (OSError, ValueError):
        return False
    return True


def _wait_for_models(url: str, key: str, startup_timeout_s: float, child: Child | None) -> list[dict[str, Any]]:
    """Wait until the server lists its models. Patience is measured by progress, where its log tells of any."""
    started = last_sign = time.monotonic()
    log = LogReader(child.log) if child else None
    phase, last_error = "start", "nothing answered"
    while True:
        if child:
            child.check_alive()
        for line in log.new_lines() if log else ():
            if is_progress(line):
                last_sign = time.monotonic()
            if (now_in := phase_of(line)) and now_in != phase:
                phase = now_in
                say(f"  after {duration(time.monotonic() - started)}: {phase}")
        try:
            status, body = fetch(f"{url}/v1/models", key)
            if status == 200:
                return _listed_models(body, url)
            if status in {401, 403}:
                raise EngineError(f"{url} refuses our key (HTTP {status}); set the variable that --api-key-env names")
            if status < 500:
                raise EngineError(f"{url}/v1/models answers HTTP {status}: no OpenAI-compatible server; check --server")
            last_error = f"HTTP {status}"
        except OSError as error:
            last_error = str(getattr(error, "reason", error))
        waited = time.monotonic() - last_sign
        if waited > startup_timeout_s:
            tail = f", in the phase {phase!r}. {child.log_words()}" if child else ""
            raise EngineError(
                f"{url} is not ready: {duration(waited)} without a sign of progress (--startup-timeout); "
                f"the last try: {last_error}{tail}"
            )
        time.sleep(POLL_S)


def _listed_models(body: bytes, url: str) -> list[dict[str, Any]]:
    try:
        models = json.loads(body)["data"]
        return [dict(model) for model in models if model["id"]]
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/v1/models is no list of models: {body[:200]!r}; check --server") from error


def served_id(models: Sequence[Mapping[str, Any]], wanted: str, url: str) -> str:
    """Return the id under which the wanted model is served; a server that speaks only others is refused."""
    for key in ("id", "root"):
        for model in models:
            if model.get(key) == wanted:
                return str(model["id"])
    served = ", ".join(str(model["id"]) for model in models) or "nothing"
    raise EngineError(f"{url} serves {served}, not {wanted}; to use what it serves give --model {served}")


def engine_name(url: str, models: Sequence[Mapping[str, Any]]) -> str:
    """Return what serves, as it names itself: owner and version, such as `vllm 0.32.0`."""
    owner = str(models[0].get("owned_by") or "unknown")
    version = next(filter(None, (_version(url) for _ in range(VERSION_TRIES))), "")
    return f"{owner} {version}".strip()


def _version(url: str) -> str:
    try:
        status, body = fetch(f"{url}/version", "")
        return str(json.loads(body)["version"]) if status == 200 else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""
