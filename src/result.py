"""What became of a page."""

from __future__ import annotations

from dataclasses import dataclass

from .confidence import Confidence
from .grounding import Block

SOUND = frozenset({"ok", "blank"})  # every other status counts as a failure
STATUSES = ("ok", "blank", "truncated", "repetition", "error")


@dataclass(frozen=True)
class PageResult:
    """What became of a page.

    `status` is one of `STATUSES`. `text` is what the engine read: for `blank` it is empty, for `error` it is None and
    `error` says why. `tokens` is what the engine generated, `prompt_tokens` what it was given. `attempts` counts the
    requests for this page; `latency_s` is that of the last one.

    `raw`, `blocks` and `confidence` are there where they were asked for; `malformed` counts grounding markers that were
    none.
    """

    text: str | None
    status: str
    error: str | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    attempts: int = 0
    latency_s: float = 0.0
    raw: str | None = None
    blocks: tuple[Block, ...] | None = None
    malformed: int = 0
    confidence: Confidence | None = None


def result_of_answer(
    text: str | None,
    finish_reason: str | None,
    *,
    tokens: int | None,
    prompt_tokens: int | None,
    attempts: int,
    latency_s: float,
    confidence: Confidence | None = None,
) -> PageResult:
    """Sort an engine's answer by its finish reason; an answer without text is an error, for the page had ink."""
    status = {"length": "truncated", "repetition": "repetition"}.get(finish_reason or "", "ok")
    error = None
    if not (text or "").strip():
        status, error = "error", f"the engine returned no text (finish_reason {finish_reason!r})"
    return PageResult(
        text=None if status == "error" else text,
        status=status,
        error=error,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish_reason=finish_reason,
        attempts=attempts,
        latency_s=latency_s,
        confidence=confidence,
    )


def refused(status: str, reason: str) -> PageResult:
    """Return the result of a page that never reached the engine: blank, or a picture that can't be read."""
    return PageResult(
        text="" if status == "blank" else None, status=status, error=None if status == "blank" else reason
    )
