"""What the options ask of pages and texts, for the rooms that see to it."""

from __future__ import annotations

from typing import Any

from .columns import Extras
from .errors import UsageError
from .grounding import GROUNDING_LABELS
from .models import ModelProfile
from .options import CommonOptions
from .pages import PageLimits
from .question import Question
from .reader import Reading
from .reading import TextRules


def text_rules(options: CommonOptions) -> TextRules:
    """Say what is wanted of the texts; raise `UsageError` where the options make no sense together."""
    is_grounding = options.mode == "grounding"
    dropped = frozenset(label.strip() for label in (options.drop_labels or "").split(",") if label.strip())
    if dropped and not is_grounding:
        raise UsageError("--drop-labels goes with --mode grounding: without it a text has no labels")
    if unknown := sorted(dropped - GROUNDING_LABELS):
        labels = ", ".join(sorted(GROUNDING_LABELS))
        raise UsageError(f"--drop-labels: {', '.join(unknown)} is no label of a block; there are {labels}")
    return TextRules(is_grounding, dropped, options.fix_dollars, options.keep_raw)


def reading_of(
    options: CommonOptions, profile: ModelProfile, question: Question, context_tokens: int | None
) -> Reading:
    """Say how the pictures of a run are read; `context_tokens` is what the engine says its --max-model-len is."""
    limits = PageLimits(
        profile.longest_edge_px,
        options.max_pixels,
        allow_truncated=options.allow_truncated,
        skip_blank=options.skip_blank,
    )
    return Reading(
        limits,
        question,
        text_rules(options),
        retries_quality=options.retries_quality,
        context_tokens=context_tokens,
        all_frames=options.frames == "all",
        page_timeout_s=options.page_timeout,
    )


def extra_columns(options: CommonOptions) -> Extras:
    """Say which columns are written beside those that always are."""
    return Extras(blocks=options.mode == "grounding", raw=options.keep_raw, confidence=options.confidence)


def quality_settings(options: CommonOptions) -> dict[str, Any]:
    """Return what decides, beside the question, which text a page gets."""
    return {
        "mode": options.mode,
        "drop_labels": sorted(text_rules(options).drop_labels),
        "fix_dollars": options.fix_dollars,
        "keep_raw": options.keep_raw,
        "confidence": options.confidence,
        "retries_quality": options.retries_quality,
        "frames": options.frames,
        "max_pixels": options.max_pixels,
        "allow_truncated": options.allow_truncated,
        "skip_blank": options.skip_blank,
    }
