"""Whether anything is written on a page.

Not the mean counts but the contrast of each spot to its near surroundings, against the noise of the page. A shadow, a
gradient, grain and a page that is dark all over are blank; one small line in a corner is not. In doubt a page isn't
blank: that costs one request, the other way a page is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

# Contrasts to the surroundings, in gray levels. Beyond SURE_INK no noise explains it.
FAINTEST_INK, SURE_INK = 11, 40
NOISE_SIGMAS = 5.5
FEWEST_INK_PIXELS = 5


def is_blank(image: Image.Image) -> bool:
    """Whether no spot of an "L" or "RGB" page stands out from its surroundings by more than the page's noise."""
    if image.mode == "L":
        return not _has_ink(image)
    # Luminance first, which is enough for nearly all pages; then each band, for ink as bright as its paper.
    return not (_has_ink(image.convert("L")) or any(_has_ink(band) for band in image.split()))


def _has_ink(gray: Image.Image) -> bool:
    from PIL import ImageChops, ImageFilter

    small = gray.reduce(2) if max(gray.size) >= 800 else gray  # half the noise, and a thin stroke still shows
    contrast = ImageChops.difference(small, small.filter(ImageFilter.BoxBlur(8))).histogram()
    threshold = min(SURE_INK, max(FAINTEST_INK, round(NOISE_SIGMAS * _noise_sigma(contrast))))
    return sum(contrast[threshold:]) >= FEWEST_INK_PIXELS


def _noise_sigma(contrast: list[int]) -> float:
    """Noise where the page is quietest, as text may fill the rest: of normal noise, a quarter is within 0.319 sigma."""
    quarter = sum(contrast) / 4
    passed = 0
    for level, count in enumerate(contrast):
        if passed + count >= quarter:
            # Contrasts are rounded: level 0 stands for 0 to 0.5, level 1 for 0.5 to 1.5, and so on.
            part = (quarter - passed) / count
            return (part / 2 if level == 0 else level - 0.5 + part) / 0.319
        passed += count
    return 0.0
