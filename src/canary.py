"""The canary: a page of known text that an engine must read before it is trusted with the first real one.

An engine with the wrong version, image or weights answers quickly, keeps the GPU busy and writes nonsense. No gauge
shows that; only a page whose text is known does.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError
from .grounding import parse_grounding, plain_text
from .pages import Page, PageLimits, Refusal, make_page
from .result import PageResult

if TYPE_CHECKING:
    from PIL import Image

CANARY_LINES = (
    "Harbour Office, 14 March 1897",
    "Received of the ship Aurora forty sacks",
    "of grain and nine barrels of salted fish,",
    "all in good order and well counted.",
    "The balance of 362 crowns is to be paid",
    "before the end of the month.",
)
CANARY_SIZE_PX = (980, 560)
CANARY_FONT_PX = 36
MOST_ERRORS = 0.25  # characters wrong; a working engine has under 0.02, a degenerate one over 0.8
LONGEST_ANSWER = 3  # times the text: what is longer was made up
CANARY_ROWS = (-1, -2)  # the rows whose seeds the two tries are asked with: no page has them


@dataclass(frozen=True)
class Canary:
    """A page and the text that stands on it."""

    page: Page
    text: str

    @property
    def max_tokens(self) -> int:
        """How long an answer may be: no tokenizer needs more than one a character."""
        return max(64, LONGEST_ANSWER * len(self.text))


def make_canary(page_file: str | None, text_file: str | None, limits: PageLimits) -> Canary:
    """Draw the canary page, or take the picture and the text of the user's own."""
    if (page_file is None) != (text_file is None):
        raise UsageError("--canary-page and --canary-text go together: a picture, and a file with the text on it")
    if page_file is None or text_file is None:
        return Canary(Page(draw_canary(), None), "\n".join(CANARY_LINES))
    try:
        cell, text = Path(page_file).read_bytes(), Path(text_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the canary page can't be read: {error}; check --canary-page and --canary-text") from error
    page = make_page(cell, limits)
    if isinstance(page, Refusal):
        raise UsageError(f"--canary-page {page_file}: {page.reason}")
    if not plain(text):
        raise UsageError(f"--canary-text {text_file} holds no letters")
    return Canary(page, text)


def draw_canary() -> Image.Image:
    """Draw `CANARY_LINES` as a scanned letter has them: dark on light, in the font that Pillow brings."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("L", CANARY_SIZE_PX, 250)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(CANARY_FONT_PX)
    for number, line in enumerate(CANARY_LINES):
        draw.text((64, 56 + number * 76), line, font=font, fill=20)
    return page


def what_is_wrong(canary: Canary, result: PageResult) -> str | None:
    """Return why the answer to the canary page shows that the engine can't be trusted; None where it is readable."""
    answer = plain_text(parse_grounding(result.text or ""))  # a text without markers is as it was
    seen = f"{answer[:120]!r}{'…' if len(answer) > 120 else ''}"
    if result.status == "error" and result.text is None:
        return result.error or "no answer"
    if re.search(r"</?think(ing)?>", answer):
        return f"it thinks aloud, which must be off: {seen}"
    if result.status == "repetition" or ends_in_a_loop(answer):
        return f"it repeats itself: {seen}"
    if not plain(answer):
        return f"it read no letter: {seen}"
    rate = error_rate(canary.text, answer)
    if result.status == "truncated" or len(plain(answer)) > LONGEST_ANSWER * len(plain(canary.text)):
        return f"it does not stop ({result.tokens} tokens for {len(canary.text)} characters): {seen}"
    if rate > MOST_ERRORS:
        return f"{rate:.0%} of the characters are wrong ({MOST_ERRORS:.0%} is the most): {seen}"
    return None


def plain(text: str) -> str:
    """Return the letters and digits of a text, in one case: markup, spaces and line ends are matters of taste."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def error_rate(truth: str, answer: str) -> float:
    """Return the edits from the answer to the truth, a character of the truth, by letters and digits alone."""
    wanted, got = plain(truth), plain(answer)[: 4 * len(plain(truth)) + 64]
    row = list(range(len(got) + 1))
    for number, letter in enumerate(wanted, 1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(got, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (letter != other))
    return row[-1] / max(1, len(wanted))


def ends_in_a_loop(text: str) -> bool:
    """Whether a text ends in one piece over and over: six times or more, and more than 40 characters in all."""
    found = re.search(r"(.{1,80}?)\1{5,}\s*\Z", text[-2000:], re.DOTALL)
    return found is not None and len(found[0]) > 40
