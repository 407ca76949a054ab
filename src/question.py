"""What is asked about a page: the same words, the same sampling and the same seed from every script.

Offline, served, asked again or resumed: the question about a page is a function of the options and the page's row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    """What is asked about every page of a run; `words` is the trained prompt beside the image, empty for most modes."""

    words: str
    temperature: float
    top_p: float
    max_tokens: int | None
    seed: int
    chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """How a page is asked this time; `max_tokens` None: the server gives what is left of the context."""

    temperature: float
    seed: int
    max_tokens: int | None


def page_seed(seed: int, row: int, frame: int = 0, attempt: int = 0) -> int:
    """Derive the sampling seed (31 bits) of a page from the run's seed.

    `row` is the page's place in the split, `frame` its place in a picture of several; attempt 0 is its own question.
    """
    place = f"{seed}:{row}" + f"/{frame}" * bool(frame) + f":{attempt}" * bool(attempt)
    digest = hashlib.blake2b(place.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def first_attempt(question: Question, row: int, frame: int = 0) -> Attempt:
    """Return the page's own question: the sampling of the run, and the page's seed."""
    return Attempt(question.temperature, page_seed(question.seed, row, frame), question.max_tokens)


def page_messages(question: Question, image_part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages that ask about one image: the image, then the trained words where the mode has any."""
    content: list[dict[str, Any]] = [dict(image_part)]
    if question.words:
        content.append({"type": "text", "text": question.words})
    return [{"role": "user", "content": content}]


def page_sampling(question: Question, row: int, attempt: Attempt | None = None) -> dict[str, Any]:
    """Return the sampling of the page in `row`, by the names that vLLM's server and `SamplingParams` share.

    `attempt` says how it is asked where that is not the page's own question.
    """
    asked = attempt or first_attempt(question, row)
    sampling: dict[str, Any] = {"temperature": asked.temperature, "top_p": question.top_p, "seed": asked.seed}
    if asked.max_tokens is not None:
        sampling["max_tokens"] = asked.max_tokens
    return sampling
