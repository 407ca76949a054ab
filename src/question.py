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


def page_seed(seed: int, row: int) -> int:
    """Derive the sampling seed (31 bits) of the page in `row` of the split from the run's seed."""
    digest = hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def page_messages(question: Question, image_part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages that ask about one image: the image, then the trained words where the mode has any."""
    content: list[dict[str, Any]] = [dict(image_part)]
    if question.words:
        content.append({"type": "text", "text": question.words})
    return [{"role": "user", "content": content}]


def page_sampling(question: Question, row: int) -> dict[str, Any]:
    """Return the sampling of the page in `row`, by the names that vLLM's server and `SamplingParams` share."""
    sampling: dict[str, Any] = {
        "temperature": question.temperature,
        "top_p": question.top_p,
        "seed": page_seed(question.seed, row),
    }
    if question.max_tokens is not None:
        sampling["max_tokens"] = question.max_tokens
    return sampling
