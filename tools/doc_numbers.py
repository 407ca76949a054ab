"""The numbers in hand-written prose: each must stand in models.json, so that none can be changed by hand.

What is a number, and when it is known:

1. Prose is what is left of a page without generated regions, fenced blocks, inline code, comments, targets of links,
   and the ordinals of headings and lists. A table written by hand is prose.
2. Digits that go on a word are part of a name (LightOnOCR-3-0.8B, A100, x86-64) and are passed over. Digits that a
   word goes on are a number all the same (2.9k, 28px).
3. A number is known if a text of models.json has it with the same word before it, or with the same word after it. The
   words of a number are the nearest ones in its sentence or cell that say something: other numbers, signs but % and $,
   and SMALL_WORDS are stepped over. So `batches of 16` and `16 to 32 pages` vouch for "16 pages" and "a batch of 16"
   does not; 0.80 is 0.8, and 1,024 is 1024. The name of a value is the word before it: `"vllm": "0.27.1"`.
4. EXEMPT lists what is no fact about models and machines, each with its reason.
5. A small count is written as a word: "eight pages".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# What is cut out of a page before its numbers are looked for, in this order. Line breaks in it are kept.
NOT_PROSE = (
    re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1`* *$", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL),
    re.compile(r"(?<=\])\([^)\s]*\)|<?https?://\S+"),
    re.compile(r"^#+ \d+(\.\d+)*\.? |^ *\d+\. ", re.MULTILINE),
)
EXEMPT = {
    r"\bexit codes? (is |was )?\d+(?:(, | and | or )\d+)*": "frozen in CONTRACT.md §3, which tests cite",
    r"\b(400|401|402|403|404|408|412|413|429|4xx|500|502|503|504|5xx)\b(?! *(pages|rows|MB|GB))": "HTTP's own numbers",
}
UNSAID = {"id", "command", "$schema"}  # of models.json: what they hold are names and commands, not facts
SMALL_WORDS = """
    a about above an and another are as at be before below between by for from has here in is it its more most no not
    of on only or over per so some than that the their then there these they this to under up was were which with
"""
TOKEN = re.compile(
    r"(?P<word>[^\W\d][\w.+/-]*(?<![.+/-])|[%$])|(?P<number>\d+(?:,\d{3})*(?:\.\d+)*)|(?P<end>\||[.:;!?](?=\s|$)|\n\s*\n)"
)


@dataclass(frozen=True)
class Number:
    """A number in a text, with the words that it stands between ("" for none), and its line, from 1."""

    text: str
    before: str
    after: str
    line: int

    def __str__(self) -> str:
        words = " or ".join(
            filter(None, [self.before and f"after {self.before!r}", self.after and f"before {self.after!r}"])
        )
        return f"{self.text!r} {words}".strip()

    @property
    def vouchers(self) -> set[tuple[str, ...]]:
        """What a text must have for the number to be known, one of these."""
        value = normal(self.text)
        return {pair for word, pair in ((self.before, (self.before, value)), (self.after, (value, self.after))) if word}


def normal(number: str) -> str:
    """One spelling of a number: 1,024 as 1024, 0.80 as 0.8; a version stays as it is."""
    number = number.replace(",", "")
    return f"{float(number):.15g}" if number.count(".") == 1 else number


def find_numbers(text: str) -> Iterator[Number]:
    """The numbers of a text and their words, sentence by sentence and cell by cell."""
    sentence: list[re.Match[str]] = []
    for token in TOKEN.finditer(text):
        if token["end"]:
            yield from _numbers_of(sentence, text)
            sentence = []
        else:
            sentence.append(token)
    yield from _numbers_of(sentence, text)


def _numbers_of(sentence: list[re.Match[str]], text: str) -> Iterator[Number]:
    for place, token in enumerate(sentence):
        if token["number"]:
            before, after = _nearest_word(reversed(sentence[:place])), _nearest_word(sentence[place + 1 :])
            yield Number(token["number"], before, after, text.count("\n", 0, token.start()) + 1)


def _nearest_word(tokens: Iterable[re.Match[str]]) -> str:
    words = (token["word"].lower() for token in tokens if token["word"])
    return next((word for word in words if word not in SMALL_WORDS.split()), "")


def known_numbers(catalogue: Any) -> frozenset[tuple[str, ...]]:
    """Every number of the catalogue, each with the word before it and with the word after it."""
    texts = _texts("", catalogue)
    return frozenset(pair for text in texts for number in find_numbers(text) for pair in number.vouchers)


def _texts(name: str, node: Any) -> Iterator[str]:
    """What the catalogue says: each value after its name, the values of a list in a row."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in UNSAID:
                yield from _texts(key, value)
    elif isinstance(node, list) and any(isinstance(value, dict | list) for value in node):
        for value in node:
            yield from _texts(name, value)
    else:
        yield f"{name} {' '.join(map(str, node)) if isinstance(node, list) else node}"


def unknown_numbers(page: str, known: frozenset[tuple[str, ...]]) -> list[Number]:
    """The numbers in a page's prose that are not known."""
    prose = page
    for pattern in (*NOT_PROSE, *map(re.compile, EXEMPT)):
        prose = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), prose)
    return [number for number in find_numbers(prose) if not number.vouchers & known]
