"""What may be made equal before two texts are compared, by name."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Normaliser: TypeAlias = Callable[[str], str]
MARKDOWN_MARKS = re.compile(r"(?<!\w)(?:\*{1,3}|_{1,3}|~~)(?=\S)|(?<=\S)(?:\*{1,3}|_{1,3}|~~)(?!\w)|`+")
MARKDOWN_BREAK = re.compile(r"<br ?/?>")
MARKDOWN_LINK = re.compile(r"!?\[([^\[\]\n]*)\]\([^()\s]*\)")
MARKDOWN_LINE_START = re.compile(r"^[ \t]*(?:#{1,6} +|> ?|[-*+] +)")
MARKDOWN_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+\-.!|$~<>])")
QUOTES = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u2039\u203a\u0060\u00b4", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"')
)
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def strip_markdown(text: str) -> str:
    """The words of a Markdown page without its marks."""
    lines = []
    for line in text.split("\n"):
        bare = line.strip()
        if bare.startswith(("```", "~~~")) or (bare and "-" in bare and not bare.strip("|:- \t")):
            continue  # a code fence, a table's rule, a horizontal rule
        if bare.startswith("|"):
            line = line.replace("\\|", "\0").replace("|", " ").replace("\0", "|")
        lines.append(MARKDOWN_LINE_START.sub("", line))
    text = MARKDOWN_LINK.sub(r"\1", MARKDOWN_BREAK.sub(" ", "\n".join(lines)))
    return MARKDOWN_ESCAPE.sub(r"\1", MARKDOWN_MARKS.sub("", text))


def compose_unicode(text: str) -> str:
    """Unicode NFC."""
    return unicodedata.normalize("NFC", text)


def fold_compatible(text: str) -> str:
    """Unicode NFKC."""
    return unicodedata.normalize("NFKC", text)


def straighten_quotes(text: str) -> str:
    """Every quotation mark is ' or "."""
    return text.translate(QUOTES)


def straighten_dashes(text: str) -> str:
    """Every dash is a hyphen-minus."""
    return text.translate(DASHES)


def collapse_whitespace(text: str) -> str:
    """One space where there is white space, none at the ends."""
    return " ".join(text.split())


# In the order in which they are applied, whatever order they are asked for in.
NORMALISATIONS: Mapping[str, tuple[Normaliser, str]] = {
    "nfc": (compose_unicode, "composed characters (Unicode NFC)"),
    "nfkc": (fold_compatible, "compatible characters too: ligatures, full width, superscripts (Unicode NFKC)"),
    "markdown": (strip_markdown, "Markdown marks dropped: headings, lists, emphasis, tables, links, fences, escapes"),
    "quotes": (straighten_quotes, "curly, low and angle quotes and primes become ' and \""),
    "dashes": (straighten_dashes, "hyphens, dashes and the minus sign become -"),
    "case": (str.casefold, "upper and lower case are one"),
    "whitespace": (collapse_whitespace, "runs of white space, line breaks too, become one space; ends stripped"),
}


def normaliser(names: Sequence[str]) -> Normaliser:
    """The named normalisations as one function."""
    steps = [step for name, (step, _) in NORMALISATIONS.items() if name in names]

    def apply(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return apply
