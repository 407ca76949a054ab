"""The canary page, what is taken for readable, and the sum of the budget."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from src.budget import check_budget, image_tokens
from src.canary import (
    CANARY_LINES,
    CANARY_SIZE_PX,
    Canary,
    draw_canary,
    ends_in_a_loop,
    error_rate,
    plain,
    what_is_wrong,
)
from src.errors import UsageError
from src.ink import is_blank
from src.models import ModelProfile, catalogue, find_profile, serve_option
from src.pages import Page
from src.question import Question
from src.result import result_of_answer

TEXT = "\n".join(CANARY_LINES)


@pytest.fixture(scope="module")
def canary() -> Canary:
    return Canary(Page(draw_canary(), None), TEXT)


def judged(canary: Canary, text: str | None, finish: str = "stop") -> str | None:
    result = result_of_answer(text, finish, tokens=9, prompt_tokens=9, attempts=1, latency_s=0.0)
    return what_is_wrong(canary, result)


def test_the_page_is_drawn_the_same_each_time_and_fits_all_models(canary: Canary) -> None:
    assert canary.page.image.size == CANARY_SIZE_PX
    assert draw_canary().tobytes() == canary.page.image.tobytes()
    assert not is_blank(canary.page.image)
    assert all(max(CANARY_SIZE_PX) <= profile.longest_edge_px for profile in catalogue())
    # nothing is cut off at an edge
    ink = canary.page.image.point(lambda value: 255 - value).getbbox()
    assert ink is not None
    left, top, right, bottom = canary.page.image.point(lambda value: 255 if value < 128 else 0).getbbox() or ink
    assert left > 20
    assert top > 20
    assert right < CANARY_SIZE_PX[0] - 20
    assert bottom < CANARY_SIZE_PX[1] - 20


READABLE = {
    "as it stands": TEXT,
    "as Markdown": "# **Harbour Office**, 14 March 1897\n\n" + " ".join(CANARY_LINES[1:]),
    "in capitals": TEXT.upper(),
    "with a few errors": TEXT.replace("barrels", "barrcls").replace("362", "36Z").replace("salted", "saited"),
    "without spaces": TEXT.replace(" ", ""),
    "with composed letters": TEXT.replace("fi", "\ufb01"),
    "with a line left out": "\n".join(CANARY_LINES[:-1]),
}


@pytest.mark.parametrize("how", READABLE)
def test_what_a_working_engine_may_answer_is_readable(canary: Canary, how: str) -> None:
    assert judged(canary, READABLE[how]) is None


UNREADABLE = {
    "nothing": ("", "stop", "no text"),
    "null": (None, "stop", "no text"),
    "signs": ("--- | ---", "stop", "no letter"),
    "another text": ("The quick brown fox jumps over the lazy dog", "stop", "are wrong"),
    "half of it": (TEXT[: len(TEXT) // 2], "stop", "are wrong"),
    "a loop": ("and the " * 200, "length", "repeats"),
    "a loop after the text": (TEXT + " the end" * 20, "stop", "repeats"),
    "a loop that vLLM saw": (TEXT, "repetition", "repeats"),
    "no end": (TEXT, "length", "does not stop"),
    "a novel": (TEXT + "".join(random.Random(1).choices(string.ascii_letters, k=900)), "stop", "does not stop"),
    "a thought": (f"<think>Let me see.</think>{TEXT}", "stop", "thinks aloud"),
    "an open thought": (f"Let me see.</think>{TEXT}", "stop", "thinks aloud"),
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_what_a_broken_engine_answers_is_named(canary: Canary, how: str) -> None:
    text, finish, told = UNREADABLE[how]
    assert told in (judged(canary, text, finish) or "")


@given(st.text(max_size=60), st.text(max_size=60))
def test_the_error_rate_is_levenshtein_over_the_truth(truth: str, answer: str) -> None:
    wanted = Levenshtein.distance(plain(truth), plain(answer)) / max(1, len(plain(truth)))
    assert error_rate(truth, answer) == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["", "x", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "no no no no no no no", "." * 30, TEXT])
def test_what_people_write_is_no_loop(text: str) -> None:
    assert not ends_in_a_loop(text)


@pytest.mark.parametrize(
    "text", ["ab " * 20, "word " * 99, TEXT + "x" * 50, ("a line of it\n" * 9) + "\n", "y" * 99_999]
)
def test_one_piece_over_and_over_is_a_loop(text: str) -> None:
    assert ends_in_a_loop(text)


# --- the budget ------------------------------------------------------------------------------------------------------


def question(max_tokens: int | None) -> Question:
    return Question("", 0.2, 0.9, max_tokens, 0, {})


def test_image_tokens_are_what_a_real_server_counted() -> None:
    assert image_tokens(1190, 1540, 28) == 2365  # + 19 of the template = 2384, measured
    assert image_tokens(1, 1, 28) == 1
    assert image_tokens(2048, 1448, 32) == 64 * 46


@pytest.mark.parametrize("profile", catalogue(), ids=lambda profile: profile.model_id)
def test_every_profile_fits_its_own_context(profile: ModelProfile) -> None:
    length = serve_option(profile, "--max-model-len")
    assert length is not None
    check_budget(profile, question(profile.sampling.max_tokens), int(length))


def test_a_sum_that_does_not_fit_is_in_the_message() -> None:
    profile = find_profile("lightonai/LightOnOCR-1B-1025").profile
    with pytest.raises(
        UsageError, match=r"3025 tokens .* \+ 64 .* \+ 6500 of text .* = 9589, and --max-model-len is 8192"
    ):
        check_budget(profile, question(6500), 8192)
    check_budget(profile, question(8192 - 3025 - 64), 8192)
    with pytest.raises(UsageError, match="at most --max-tokens 5103, or --max-model-len 8193 or more"):
        check_budget(profile, question(8192 - 3025 - 63), 8192)


def test_without_a_limit_of_the_text_only_the_page_counts() -> None:
    profile = find_profile("lightonai/LightOnOCR-3-1B").profile
    check_budget(profile, question(None), 3025 + 64 + 1)
    with pytest.raises(UsageError, match="at least 1 of text = 3090"):
        check_budget(profile, question(None), 3025 + 64)


def test_an_engine_that_does_not_tell_its_context_passes() -> None:
    check_budget(catalogue()[0], question(99_999), None)
