r"""Escaped math delimiters repaired: `\$x\$` becomes `$x$`, while prices keep their `\$`.

A known quirk of the models (FACTS §1). Two escaped dollars are a pair of delimiters if all of this holds:

1. They stand on one line, no other dollar is between them, and none stands right beside them.
2. The first follows no Latin letter and no digit (`US\$`, `5\$`), the second precedes no digit (`\$5-\$10`), nor
   white space and a digit if a digit follows the first (`\$5 = US\$ 7`).
3. What is between has no white space at its ends, or else at both ends and a math sign in it; then it loses that.
4. It does not end like half a sentence about prices: in an operator, an opening bracket, `:` or `;`, nor in `.` or
   `,` after a number. Its braces are balanced. It holds no HTML tag, and in a row of a table no bar.
5. It reads as math: it has a LaTeX command, `^`, `_`, `=`, `<`, `>`, `+`, `|`, or is one number, numbers in brackets,
   or names of at most three letters with brackets, numbers, commas and operators; from a number on, without white
   space. Two plain words in a row are prose, whatever else is there, but for those inside of `\text{…}` and its like.

`\$\$…\$\$` is a displayed formula under the same rules, but may span lines, no empty one, and needs a math sign:
`\$\$` is also how restaurants are rated. An escaped dollar that belongs to no pair stays, and so does all that stands
in code (fences, backticks, `<pre>`, `<code>`) or between dollars that are delimiters already.
"""

from __future__ import annotations

import re

# What is looked for from left to right. Code and formulas are stepped over; what is not closed is code up to the end.
CODE = (
    r"(?m:^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*\n(?:[^\n]*\n)*?(?:[ \t]*(?P=fence)[`~]*[ \t]*$|[^\n]*\Z))"
    r"|<(?P<tag>pre|code)\b[^>]*>(?s:.*?)(?:</(?P=tag)>|\Z)"
    r"|(?<![`\\])(?P<ticks>`{1,9})(?!`)(?:(?!\n[ \t]*\n)(?s:.))*?(?<!`)(?P=ticks)(?!`)"
)
MATH_ALREADY = (
    r"(?<![\\$])\$\$(?!\$)(?:(?!\n[ \t]*\n)(?s:.)){1,4000}?(?<!\\)\$\$(?!\$)"
    r"|(?<![\\$])\$(?![\s$])(?:\\.|[^\\$\n]){0,500}?(?<=[^\s\\])\$(?![\d$])"
)
ESCAPED = r"(?<![\\$])(?P<display>\\\$\\\$)(?!\\?\$)|(?<![\\$])(?P<inline>\\\$)(?!\\?\$)"
TOKEN = re.compile(f"{CODE}|{MATH_ALREADY}|{ESCAPED}")

INLINE_CLOSE = re.compile(r"(?:\\[^$\n]|[^\\$\n]){1,500}?(?=(?<!\\)\\\$(?!\\?\$))")
DISPLAY_CLOSE = re.compile(r"(?:(?!\n[ \t]*\n)(?:\\[^$]|[^\\$])){1,4000}?(?=(?<!\\)\\\$\\\$(?!\\?\$))")

MATH_SIGN = re.compile(r"\\[a-zA-Z]|[\^_=<>+|]|\\[{}|,;!]|[−×÷≤≥≠≈∈∞∑∫√±·→\u0391-\u03c9]")
HALF_A_SENTENCE = re.compile(r"(?:(?<![\^_{])[-+*/=<>–—−(\[:;&]|(?<=\d)[.,])\Z")
HTML_IN_MATH = re.compile(
    r"</?(?:td|tr|th|table|thead|tbody|br|p|div|span|b|i|u|em|strong|sup|sub|li|ul|ol|a)\b[^<>]*>"
)
WORDS_INSIDE = re.compile(
    r"\\(?:text|mathrm|operatorname|mbox|textbf|textit|mathbf|mathit|mathsf|begin|end)\*?\s*\{[^{}]*\}"
)
TWO_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}[,.]?\s+(?![a-zA-Z]\b)[a-zA-Z]{2,}")
SHORT_EXPRESSION = re.compile(r"(?:[\s\d.,%°'’!()\[\]/*:–-]|(?<![a-zA-Z])[a-zA-Z]{1,3}(?![a-zA-Z]))+")
NUMBERS_ALONE = re.compile(r"-?\d+(?:[.,]\d+)*%?|[(\[]-?[\d.]+(?:,\s*-?[\d.]+)*[)\]]")


def fix_dollars(text: str) -> str:
    """Return the text with its escaped math delimiters repaired, all else as it is."""
    if "\\$" not in text:
        return text
    parts: list[str] = []
    at = 0
    while match := TOKEN.search(text, at):
        opened = match["display"] or match["inline"]
        parts.append(text[at : match.start()])
        formula = _formula_at(text, match) if opened else None
        if formula is None:
            parts.append(match[0])
            at = match.end()
        else:
            inside, at = formula
            parts.append(inside)
    return "".join([*parts, text[at:]])


def _formula_at(text: str, opening: re.Match[str]) -> tuple[str, int] | None:
    """Return the formula that an escaped delimiter opens, repaired, and where it ends; None if it opens none."""
    is_display = opening["display"] is not None
    body = (DISPLAY_CLOSE if is_display else INLINE_CLOSE).match(text, opening.end())
    if not body:
        return None
    inside = body[0]
    end = body.end() + len(opening[0])
    if not _fits_around(text, opening.start(), end, inside, is_display=is_display):
        return None
    is_math = _is_display_math(inside) if is_display else _is_inline_math(inside)
    if not is_math or ("|" in inside and _is_table_row(text, opening.start())):
        return None
    dollars = "$$" if is_display else "$"
    return f"{dollars}{inside if is_display else inside.strip()}{dollars}", end


def _fits_around(text: str, start: int, end: int, inside: str, *, is_display: bool) -> bool:
    """Rules 2 and 3: what stands before, after and at the ends."""
    if re.match(r"[A-Za-z0-9]", text[start - 1 : start]):
        return False
    is_padded = inside[:1].isspace() and inside[-1:].isspace()
    if is_display:
        return not text[end : end + 1].isdigit()
    begins_like_a_price = is_padded or inside[0].isdigit()
    if re.match(r"\s?\d" if begins_like_a_price else r"\d", text[end : end + 2]):
        return False
    if is_padded:
        return MATH_SIGN.search(inside) is not None
    return not inside[:1].isspace() and not inside[-1:].isspace()


def _is_display_math(inside: str) -> bool:
    return MATH_SIGN.search(inside) is not None and _is_whole(inside) and not _is_prose(inside)


def _is_inline_math(inside: str) -> bool:
    """Rules 4 and 5."""
    bare = inside.strip()
    if not bare or not _is_whole(inside) or _is_prose(bare):
        return False
    if MATH_SIGN.search(bare) or NUMBERS_ALONE.fullmatch(bare):
        return True
    if bare[0].isdigit() and re.search(r"\s", bare):
        return False
    return any(map(str.isalpha, bare)) and SHORT_EXPRESSION.fullmatch(bare) is not None


def _is_whole(inside: str) -> bool:
    """Rule 4: no half of a sentence, of a group or of a table."""
    braces = re.sub(r"\\[{}]", "", inside)
    is_balanced = braces.count("{") == braces.count("}")
    return is_balanced and not HALF_A_SENTENCE.search(inside.strip()) and not HTML_IN_MATH.search(inside)


def _is_prose(inside: str) -> bool:
    return TWO_WORDS.search(WORDS_INSIDE.sub(" ", inside)) is not None


def _is_table_row(text: str, at: int) -> bool:
    """Whether the line there is a row of a Markdown table: it begins with a bar, or has one between spaces."""
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[start : end if end >= 0 else len(text)]
    return line.lstrip().startswith("|") or " | " in line
