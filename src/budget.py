"""Whether the largest page and its text fit the context: a sum that costs nothing and saves a night of refusals."""

from __future__ import annotations

from .errors import UsageError
from .models import ModelProfile
from .question import Question

# The chat template, the marks around the image and the trained word: measured 19 on a LightOnOCR-2 page.
TEMPLATE_TOKENS = 64


def image_tokens(width: int, height: int, pixels_per_token_side: int) -> int:
    """Return what a picture costs: a token for each started square; these models put none between the rows."""
    return -(-width // pixels_per_token_side) * -(-height // pixels_per_token_side)


def check_budget(profile: ModelProfile, question: Question, max_model_len: int | None) -> None:
    """Raise `UsageError`, with the sum, where a square page at the longest edge and its text would not fit.

    `max_model_len` is what the engine says it has; None, where it does not say, passes.
    """
    if max_model_len is None:
        return
    edge, side = profile.longest_edge_px, profile.pixels_per_token_side
    page = image_tokens(edge, edge, side)
    answer = question.max_tokens or 1
    needed = page + TEMPLATE_TOKENS + answer
    if needed <= max_model_len:
        return
    text = f"{question.max_tokens} of text (--max-tokens)" if question.max_tokens else "at least 1 of text"
    most = max_model_len - page - TEMPLATE_TOKENS
    lower = f"at most --max-tokens {most}, or " if question.max_tokens and most > 0 else ""
    raise UsageError(
        f"the largest page does not fit the engine's context: {edge}x{edge} px are {page} tokens "
        f"(one a {side}x{side} px), + {TEMPLATE_TOKENS} of the prompt + {text} = {needed}, "
        f"and --max-model-len is {max_model_len}; give {lower}--max-model-len {needed} or more"
    )
