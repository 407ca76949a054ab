"""The numbers in hand-written prose: each must stand in models.json, so that none can be changed by hand.

What is a number, and when it is known:

1. Prose is what is left of a page without generated regions, fenced blocks, inline code, comments, targets of links,
   and the ordinals of headings and lists. A table written by hand is prose.
2. Digits that go on a word are part of a name (LightOnOCR-3, A100, x86-64, SM12) and are passed over. Digits that a
   word goes on are a number all the same (5xx, 2.9k, 16 GB).
3. A number of two digits or more, or with a fraction, is known if models.json has it: as a value, or anywhere in a
   text, whatever stands around it there. 0.8 and 0.80 are one number, and so are 1,024 and 1024.
4. A number of one digit is known if a text of models.json has it together with the word or sign after it (`5 minutes`,
   `2 to`), for nearly every digit stands somewhere. A count is better written as a word: "eight pages".
5. EXEMPT lists what is no fact about models and machines, each with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)*")
NAME_OR_NUMBER = re.compile(
    r"[^\W\d][\w.+-]*(?<![.+-])|(?P<number>\d+(?:,\d{3})*(?:\.\d+)*)(?P<after>[ \n]?(?:\w+|\S)?)"
)


@dataclass(frozen=True)
class Number:
    """A number in prose, with what follows it where that matters, and its line, from 1."""

    text: str
    line: int


def known_numbers(catalogue: Any) -> frozenset[str]:
    """What `unknown_numbers` looks up: every number of the catalogue, and each single digit with what follows it."""
    known: set[str] = set()
    for text in _texts(catalogue):
        known |= {normal(number) for number in NUMBER.findall(text)}
        for match in re.finditer(r"(?<![\d.,])\d(?![\d]|[.,]\d)(?P<after>[ \n]?(?:\w+|\S)?)", text):
            known.add(_with_after(match[0][0], match["after"]))
    return frozenset(known)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield name
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
    else:
        yield str(node)


def normal(number: str) -> str:
    """One spelling of a number: 1,024 as 1024, 0.80 as 0.8; a version stays as it is."""
    number = number.replace(",", "")
    return f"{float(number):.15g}" if number.count(".") == 1 else number


def _with_after(digit: str, after: str) -> str:
    return f"{digit} {after.strip()}"


def unknown_numbers(page: str, known: frozenset[str]) -> list[Number]:
    """The numbers in a page's prose that are not known."""
    prose = page
    for pattern in NOT_PROSE:
        prose = pattern.sub(_blanked, prose)
    for exempt in EXEMPT:
        prose = re.sub(exempt, _blanked, prose)
    return list(_unknown(prose, known))


def _blanked(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _unknown(prose: str, known: frozenset[str]) -> Iterator[Number]:
    at = 0
    while match := NAME_OR_NUMBER.search(prose, at):
        at = match.end("number") if match["number"] else match.end()
        if not match["number"]:
            continue
        number = normal(match["number"])
        one_digit = len(number) == 1
        if (_with_after(number, match["after"]) if one_digit else number) not in known:
            text = match["number"] + (match["after"].rstrip().replace("\n", " ") if one_digit else "")
            yield Number(text, prose.count("\n", 0, match.start()) + 1)
