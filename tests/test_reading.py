"""The text that is stored is the one that was asked for, whatever the frames and the markers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.confidence import Confidence
from src.grounding import Block
from src.reading import FRAME_SEPARATOR, PAGE_BREAK, TextRules, as_wanted, joined
from src.result import STATUSES, PageResult, refused

BOX = (1, 2, 3, 4)


def ok(text: str, **fields: object) -> PageResult:
    return PageResult(text, "ok", tokens=10, prompt_tokens=100, attempts=1, **fields)  # type: ignore[arg-type]


def test_code_keeps_its_escaped_dollars_and_other_blocks_do_not() -> None:
    raw = "before \\$b\\$\n\n![text](1,2,3,4)\n\\$x\\$\n\n![code](1,2,3,4)\n\\$y\\$"
    read = as_wanted(ok(raw), TextRules(grounding=True))
    assert read.text == "before $b$\n\n$x$\n\n\\$y\\$"
    assert read.blocks == (Block("text", BOX, "$x$"), Block("code", BOX, "\\$y\\$"))
    assert as_wanted(ok(raw), TextRules(grounding=True, fix_dollars=False)).text == raw.replace(
        "![text](1,2,3,4)\n", ""
    ).replace("![code](1,2,3,4)\n", "")


def test_a_page_whose_only_blocks_are_dropped_stays_ok_with_no_text() -> None:
    rules = TextRules(grounding=True, drop_labels=frozenset({"header"}), keep_raw=True)
    read = as_wanted(ok("![header](1,2,3,4)\nThe Mill"), rules)
    assert (read.status, read.text, read.raw) == ("ok", "", "![header](1,2,3,4)\nThe Mill")
    assert read.blocks == (Block("header", BOX, "The Mill"),)


@given(st.text(), st.booleans(), st.booleans())
def test_the_raw_text_is_kept_as_it_was_and_status_and_tokens_are_not_touched(
    text: str, grounding: bool, fix: bool
) -> None:
    read = as_wanted(ok(text), TextRules(grounding=grounding, fix_dollars=fix, keep_raw=True))
    assert (read.raw, read.status, read.tokens) == (text, "ok", 10)
    assert read.text is not None


def test_a_result_without_text_stays_as_it_is() -> None:
    failed = PageResult(None, "error", error="no")
    assert as_wanted(failed, TextRules(grounding=True, keep_raw=True)) == failed


def test_one_frame_is_the_picture() -> None:
    assert joined([ok("text")]) == ok("text")


def test_frames_are_joined_in_order_with_all_they_cost() -> None:
    first = ok("a", blocks=(Block("text", BOX, "a"),), raw="A", malformed=1, confidence=Confidence(0.9, 0.8, 3))
    second = ok("b", blocks=(Block("list", BOX, "b"),), raw="B", malformed=2, confidence=Confidence(0.7, 0.1, 5))
    whole = joined([first, refused("blank", "no ink"), second])
    assert whole.text == f"a{FRAME_SEPARATOR}{FRAME_SEPARATOR}b"
    assert whole.raw == f"A{FRAME_SEPARATOR}{FRAME_SEPARATOR}B"
    assert [block.label for block in whole.blocks or ()] == ["text", PAGE_BREAK, PAGE_BREAK, "list"]
    assert (whole.status, whole.tokens, whole.prompt_tokens, whole.attempts) == ("ok", 20, 200, 2)
    assert whole.malformed == 3
    assert whole.confidence is not None
    assert whole.confidence.mean == pytest.approx(0.8)
    assert whole.confidence.lowest == 0.1


@given(st.lists(st.sampled_from(STATUSES), min_size=2, max_size=5))
def test_a_picture_is_as_its_worst_frame_and_frames_without_ink_spoil_nothing(statuses: list[str]) -> None:
    frames = [
        PageResult(None if status == "error" else "", status, error="why" if status == "error" else None)
        for status in statuses
    ]
    whole = joined(frames)
    worst_first = ("error", "repetition", "truncated", "ok", "blank")
    assert whole.status == min(statuses, key=worst_first.index)
    assert (whole.text is None) == (whole.error is not None) == ("error" in statuses)
