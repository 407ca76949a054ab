"""Text from anywhere, made harmless: on one line, and unable to steer a terminal."""

from __future__ import annotations

from collections.abc import Mapping

CONTROL_PICTURES: Mapping[int, int | str] = {
    **{code: 0x2400 + code for code in range(32)},
    **dict.fromkeys((*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    0x09: "⇥",
    0x0A: "⏎",
}


def visible(text: str) -> str:
    """Text on one line that can't steer a terminal: control and direction characters become pictures."""
    return text.translate(CONTROL_PICTURES)
