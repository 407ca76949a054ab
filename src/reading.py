"""What becomes of the engine's words once the best answer is chosen: markers read, dollars repaired, frames joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .attempts import BEST_FIRST
from .confidence import Confidence
from .dollars import fix_dollars
from .grounding import Block, parse_grounding, plain_text
from .result import PageResult

FRAME_SEPARATOR = "\n\f\n"  # a form feed: where the next page begins, as in plain text from PDFs
PAGE_BREAK = "page_break"  # label of the block that stands between the blocks of two frames


@dataclass(frozen=True)
class TextRules:
    """What is wanted of a text. `drop_labels`: blocks of these labels are left out of it, in grounding mode."""

    grounding: bool = False
    drop_labels: frozenset[str] = frozenset()
    fix_dollars: bool = True
    keep_raw: bool = False


def as_wanted(result: PageResult, rules: TextRules) -> PageResult:
    """Return the result with its text as the rules want it; the status stays, even if no text is left."""
    if result.text is None:
        return result
    raw = result.text if rules.keep_raw else None
    repaired = fix_dollars if rules.fix_dollars else str
    if not rules.grounding:
        return replace(result, text=repaired(result.text), raw=raw)
    page = parse_grounding(result.text)
    blocks = tuple(
        block if block.label == "code" else replace(block, text=repaired(block.text)) for block in page.blocks
    )
    text = plain_text(replace(page, blocks=blocks, before=repaired(page.before)), rules.drop_labels)
    return replace(result, text=text, raw=raw, blocks=blocks, malformed=page.malformed)


def joined(frames: Sequence[PageResult]) -> PageResult:
    """Return one result for a picture of several frames: texts and blocks in order, the worst status, all tokens.

    Frames without ink spoil nothing: a picture is `blank` only if all of them are. Where a frame has no text there is
    none for the picture, as everywhere; `raw` has what was read all the same.
    """
    if len(frames) == 1:
        return frames[0]
    asked = [frame for frame in frames if frame.status != "blank"]
    status = max((frame.status for frame in asked), key=BEST_FIRST.index, default="blank")
    failed = [f"frame {at} of {len(frames)}: {one.error}" for at, one in enumerate(frames, 1) if one.status == "error"]
    has_raw = any(frame.raw is not None for frame in frames)
    return PageResult(
        text=None if failed else FRAME_SEPARATOR.join(frame.text or "" for frame in frames),
        status=status,
        error="; ".join(failed) or None,
        tokens=_sum([frame.tokens for frame in frames]),
        prompt_tokens=_sum([frame.prompt_tokens for frame in frames]),
        finish_reason=asked[-1].finish_reason if asked else None,
        attempts=sum(frame.attempts for frame in frames),
        latency_s=sum(frame.latency_s for frame in frames),
        raw=FRAME_SEPARATOR.join(frame.raw or "" for frame in frames) if has_raw else None,
        blocks=_joined_blocks(frames),
        malformed=sum(frame.malformed for frame in frames),
        confidence=_joined_confidence(frames),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _joined_blocks(frames: Sequence[PageResult]) -> tuple[Block, ...] | None:
    if all(frame.blocks is None for frame in frames):
        return None
    blocks: list[Block] = []
    for number, frame in enumerate(frames):
        blocks += [Block(PAGE_BREAK, (0, 0, 0, 0), "")] if number else []
        blocks += frame.blocks or ()
    return tuple(blocks)


def _joined_confidence(frames: Sequence[PageResult]) -> Confidence | None:
    """Return the mean over all tokens, and the least sure window of any frame."""
    known = [(frame.confidence, frame.tokens or 1) for frame in frames if frame.confidence]
    if not known:
        return None
    mean = sum(one.mean * tokens for one, tokens in known) / sum(tokens for _, tokens in known)
    least = min((one for one, _ in known), key=lambda one: one.lowest)
    return Confidence(mean, least.lowest, least.lowest_at)
