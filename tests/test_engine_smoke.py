"""The real vLLM on CPU reads drawn pages through the tiny LightOnOCR."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rapidfuzz.distance import Levenshtein

from tests.tiny_lightonocr.drawn import DrawnPage, drawn_pages
from tests.vllm_cpu import read_pages

if TYPE_CHECKING:
    from tests.vllm_cpu import TinyServer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pages() -> list[DrawnPage]:
    return drawn_pages(8)


@pytest.fixture(scope="module")
def answers(vllm_server: TinyServer, pages: list[DrawnPage]) -> list[str]:
    return read_pages(vllm_server, [page.encoded() for page in pages])


def test_drawn_pages_are_read_with_few_errors(pages: list[DrawnPage], answers: list[str]) -> None:
    errors = sum(Levenshtein.distance(answer, page.text) for answer, page in zip(answers, pages, strict=True))
    assert errors / sum(len(page.text) for page in pages) <= 0.05


def test_no_two_pages_give_one_answer(answers: list[str]) -> None:
    assert len(set(answers)) == len(answers)


def test_asking_again_at_temperature_zero_gives_the_same_text(
    vllm_server: TinyServer, pages: list[DrawnPage], answers: list[str]
) -> None:
    assert read_pages(vllm_server, [page.encoded() for page in pages]) == answers
