"""Does a text end in a loop, as a decoder falls into one.

The measure is what a sheet of paper can hold. A school page of one word, a litany, a table of zeros or a row of
dotted leaders repeats itself honestly, but within a page's rows and letters; a decoder in a loop goes on until it is
stopped. So a text that was cut off by max_tokens is judged by `CUT_OFF`, one that ended by itself by the stricter
`FINISHED`. Three finders look at the end of the text; what one of them finds must be more than the bar allows:

1. exact: the suffix has a period in characters (Z-function of the reversed tail).
2. counting: the same with every number taken for equal, where each number of the unit stays or counts up steadily.
   Cut-off texts only: lists that count and end by themselves are honest.
3. nearly: most of the five-word sequences at the end were there shortly before. Running text only, and twice the bar.

A loop that begins so late that it stays under the bar is missed; its page is `truncated`, and asked again all the
same. Measured on `tests/loops/`: precision and recall stand in `tests/test_loops.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .result import PageResult

SEARCHED_CHARACTERS = 32_000  # a period is looked for in so much of the end, and followed back from there
NGRAM = 5
STALE_SHARE = 0.85  # of the five-word sequences in a run that repeats nearly
STALE_WITHIN = 1_500  # words
STEADY_SHARE = 0.9  # of a counter's steps: dates and page numbers wrap
EXCERPT_CHARACTERS = 200
SHORT_LINE_LETTERS = 50
WIDE_LETTER = 3  # one Chinese or Japanese character says as much as so many letters

HTML_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")
LATEX_WORD = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}(?:\{[^{}]{0,40}\})?|\\[a-zA-Z]+")
LETTERS_ONLY = re.compile(r"[^\W\d_]+")
WIDE_LETTERS = re.compile(r"[\u2e80-\ufaff]")
CELL_MARK = re.compile(r"\||</?t[dhr]\b|&|\t")
NUMBER_OR_CHARACTER = re.compile(r"[0-9]{1,9}|[^0-9]", re.DOTALL)
WORD = re.compile(r"[\u2e80-\ufaff]|[^\W\d_\u2e80-\ufaff]+|\d+|_+|[^\w\s]+|\n")
CLOSER = re.compile(r"(?:</[a-zA-Z]{1,12}>|\\end\{[a-z]{1,16}\*?\}|\\[\])]|[\s$`|.}])\Z")
LONGEST_CLOSER = 24


@dataclass(frozen=True)
class Loop:
    """Where a text begins to loop, the unit's length in characters, how often it is there, and its first characters."""

    start: int
    period: int
    repeats: int
    unit: str


@dataclass(frozen=True)
class Bar:
    """The repetition that a page can hold: what reaches this is a loop.

    Running text has to reach `letters`, and `lines` too where its lines are short; cells `table_letters`, or, like all
    that is mostly no letters, `rows` where there are rows, else both `repeats` and `characters` in the one row.
    """

    letters: int
    lines: int
    table_letters: int
    rows: int
    repeats: int
    characters: int

    def times(self, factor: int) -> Bar:
        """Return the bar for weaker evidence."""
        return Bar(
            factor * self.letters,
            factor * self.lines,
            factor * self.table_letters,
            factor * self.rows,
            factor * self.repeats,
            factor * self.characters,
        )


CUT_OFF = Bar(letters=1_000, lines=80, table_letters=5_000, rows=80, repeats=60, characters=400)
FINISHED = Bar(letters=4_000, lines=120, table_letters=10_000, rows=200, repeats=150, characters=1_000)


def find_loop(text: str, *, finished: bool | None) -> Loop | None:
    """Return the loop that `text` ends in, or None.

    `finished`: True where the model ended the text, False where max_tokens did, None where that is not known (which is
    judged like True). Time is linear in the length of the text.
    """
    bar = CUT_OFF if finished is False else FINISHED
    for end in _ends(text, cut_off=finished is False):
        exact = _exact_run(text, end)
        if exact and _is_beyond(exact, text, end, bar):
            return exact
    counting = _counting_run(text) if finished is False else None
    if counting and _is_beyond(counting, text, len(text), bar.times(2)):
        return counting
    nearly = _nearly_run(text) if len(text) > bar.times(2).letters else None
    if nearly and _is_running_text_beyond(nearly, text, bar.times(2)):
        return nearly
    return None


def with_loop_found(result: PageResult) -> PageResult:
    """Return the result with status `repetition` where its text ends in a loop; other statuses stay."""
    if result.status not in {"ok", "truncated"} or result.text is None:
        return result
    finished = {"stop": True, "length": False}.get(result.finish_reason or "")
    return replace(result, status="repetition") if find_loop(result.text, finished=finished) else result


# What a run amounts to


def _is_beyond(run: Loop, text: str, end: int, bar: Bar) -> bool:
    """Whether an exact or counting run is more than a page holds."""
    span, unit = text[run.start : end], text[end - run.period : end]
    letters, rows = count_letters(span), count_rows(span)
    if run.repeats < 3 and letters < 4 * bar.letters:
        return False  # forms come in two copies
    is_table = CELL_MARK.search(unit) is not None
    if is_table and letters >= bar.table_letters:
        return True
    if not is_table and letters >= bar.letters and (rows >= bar.lines or letters >= SHORT_LINE_LETTERS * rows):
        return True
    if letters > 0.4 * len(span) and not is_table:
        return False
    if rows >= run.repeats:
        return rows >= bar.rows
    return run.repeats >= bar.repeats and len(span) >= bar.characters


def _is_running_text_beyond(run: Loop, text: str, bar: Bar) -> bool:
    """Whether a run that repeats nearly is more running text than a page holds."""
    span = text[run.start :]
    letters = count_letters(span)
    if len(CELL_MARK.findall(span)) >= run.repeats:
        return letters >= bar.table_letters
    return letters >= bar.letters and letters > 0.4 * len(span)


def count_letters(text: str) -> int:
    """Count the letters outside of HTML tags and LaTeX commands; a Chinese or Japanese one counts three times."""
    bare = LATEX_WORD.sub(" ", HTML_TAG.sub(" ", text))
    return sum(map(len, LETTERS_ONLY.findall(bare))) + (WIDE_LETTER - 1) * len(WIDE_LETTERS.findall(bare))


def count_rows(text: str) -> int:
    r"""Count the rows that end in a text: by `</tr>`, else by LaTeX's `\\`, else by its lines, without blank ones."""
    if not text.strip():
        return 0
    return text.count("</tr>") or text.count("\\\\") or len(re.findall(r"\n\s*", text))


def _ends(text: str, *, cut_off: bool) -> Iterator[int]:
    """Where a loop may end: at the end; in a finished text also before what closes a table, or before a last row."""
    yield len(text)
    if cut_off:
        return
    searched = text[-SEARCHED_CHARACTERS:]
    bare = searched
    while closer := CLOSER.search(bare, max(0, len(bare) - LONGEST_CLOSER)):
        bare = bare[: closer.start()].rstrip()
    without_last_row = bare.rpartition("\n")[0].rstrip()
    for kept in (bare, without_last_row):
        yield len(text) - len(searched) + len(kept)


# The finders


def longest_repetition(items: Sequence[str]) -> tuple[int, int]:
    """Return (period, length) of the longest suffix that repeats with a period, twice at least; (0, 0) if none does.

    The Z-function: `reach[lag]` is how far the reversed items agree with themselves shifted by `lag`. Linear.
    """
    turned = items[::-1]
    size = len(turned)
    reach = [0] * size
    left = right = period = length = 0
    for lag in range(1, size):
        match = min(right - lag, reach[lag - left]) if lag < right else 0
        while lag + match < size and turned[match] == turned[lag + match]:
            match += 1
        reach[lag] = match
        if lag + match > right:
            left, right = lag, lag + match
        if match >= lag and lag + match > length:
            period, length = lag, lag + match
    return period, length


def _exact_run(text: str, end: int) -> Loop | None:
    first = max(0, end - SEARCHED_CHARACTERS)
    period, length = longest_repetition(text[first:end])
    if not period:
        return None
    start = end - length
    while start > 0 and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return Loop(start, period, (end - start) // period, text[start : start + min(period, EXCERPT_CHARACTERS)])


def _counting_run(text: str) -> Loop | None:
    """Find a suffix that repeats but for numbers that count; positions are in characters again."""
    items = NUMBER_OR_CHARACTER.findall(text[-SEARCHED_CHARACTERS:])
    period, length = longest_repetition(["0" if item.isdigit() else item for item in items])
    run = items[len(items) - length :]
    if not period or not _counts_steadily(run, period):
        return None
    characters = sum(map(len, run))
    unit = "".join(run[:period])
    repeats = length // period
    return Loop(len(text) - characters, characters // repeats, repeats, unit[:EXCERPT_CHARACTERS])


def _counts_steadily(run: Sequence[str], period: int) -> bool:
    """Whether each number of the unit takes one step nearly always, and one of them does move."""
    steps = [0]
    for slot in range(period):
        if not run[slot].isdigit():
            continue
        numbers = [int(item) for item in run[slot::period]][1:-1]  # the first and the last may be cut
        differences = Counter(after - before for before, after in pairwise(numbers))
        if not differences:
            return False
        step, count = differences.most_common(1)[0]
        if count < STEADY_SHARE * differences.total():
            return False
        steps.append(step)
    return any(steps)


def _nearly_run(text: str) -> Loop | None:
    """Find the suffix that is made of five-word sequences which were there shortly before."""
    words = list(WORD.finditer(text))
    grams = [tuple(word[0] for word in words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)]
    first = _stale_from(grams)
    places: dict[tuple[str, ...], list[int]] = {}
    for at in range(first, len(grams)):
        places.setdefault(grams[at], []).append(words[at].start())
    most = max(places.values(), key=len, default=[])
    if len(most) < 3:
        return None
    start = words[first].start()
    unit = text[most[-2] : min(most[-1], most[-2] + EXCERPT_CHARACTERS)]
    return Loop(start, (len(text) - start) // len(most), len(most), unit)


def _stale_from(grams: Sequence[tuple[str, ...]]) -> int:
    """Return from where on the sequences are stale: the suffix with the greatest excess over `STALE_SHARE`."""
    seen: dict[tuple[str, ...], int] = {}
    scores = []
    for at, gram in enumerate(grams):
        is_stale = at - seen.get(gram, -STALE_WITHIN - 1) <= STALE_WITHIN
        scores.append(1 - STALE_SHARE if is_stale else -STALE_SHARE)
        seen[gram] = at
    best = total = 0.0
    first = len(grams)
    for at in range(len(grams) - 1, -1, -1):
        total += scores[at]
        if total > best:
            best, first = total, at
    return first


# What the engine can do about it


def repetition_field(vllm_version: str | None) -> dict[str, dict[str, int]]:
    """Return the request field by which vLLM stops a loop itself, or {} where it is too old, or not known to be vLLM.

    Such a request ends with finish reason `repetition`. In the source of 0.32.0 (since about 0.17, FACTS §2) the field
    is `RepetitionDetectionParams(max_pattern_size=0, min_pattern_size=0, min_count=0)`: a maximum of 0 is off, a
    minimum of 0 means 1, a `min_count` below 2 is refused. After each token it stops where the last
    `size * min_count` tokens are `min_count` copies of one pattern of `size` tokens, for any size in the range. The
    offline engine's `SamplingParams` wants that object (`vllm.sampling_params`), not a mapping.

    The engine can't know whether a text would end by itself, and one count has to do for all sizes. So the count lies
    above the rows of a page: a table of equal rows is not stopped. A loop of one token is, after 128 of them, one of 16
    tokens after 2048; a longer one is cut off by max_tokens as before, and found here.
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", vllm_version or "")
    if not numbers or (int(numbers[1]), int(numbers[2])) < (0, 17):
        return {}
    return {"repetition_detection": {"max_pattern_size": 32, "min_pattern_size": 1, "min_count": 128}}
