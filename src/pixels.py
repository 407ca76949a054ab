"""Pixels as they were stored, in whatever mode, → 8 bits a channel, gray ("L") or "RGB"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from .profiles import profiled

if TYPE_CHECKING:
    from PIL import Image


def flatten(image: Image.Image, white_is_zero: bool, ink_as_it_is: bool, colour_profile: object = None) -> Image.Image:
    """The same picture in 8 bits, "L" or "RGB", as its colour profile means it."""
    image = profiled(_in_8_bits(image, white_is_zero, ink_as_it_is), colour_profile)
    return image if image.mode in {"L", "RGB"} else image.convert("RGB")


def _in_8_bits(image: Image.Image, white_is_zero: bool, ink_as_it_is: bool) -> Image.Image:
    """The same picture in 8 bits, "L", "RGB" or "CMYK"."""
    from PIL import ImageChops

    mode = image.mode
    if mode in {"L", "RGB"} and "transparency" not in image.info:
        return image
    if mode.startswith("I") or mode == "F":
        return _scale_to_8_bits(image, white_is_zero)
    if mode in {"LA", "La", "PA", "RGBA", "RGBa"} or "transparency" in image.info:
        return _over_white(image)
    if mode == "1":
        return image.convert("L")
    if mode == "LAB":
        return _lab_to_rgb(image)
    if mode == "CMYK":
        return ImageChops.invert(image) if ink_as_it_is else image
    return image.convert("RGB")


def gray_if_it_is(image: Image.Image) -> Image.Image:
    """A gray page stored in colour, as scanners and PDF renderers do, as gray: the same pixels for half the work."""
    from PIL import Image, ImageChops

    if image.mode != "RGB":
        return image
    sample = image.resize((max(1, image.width // 16), max(1, image.height // 16)), Image.Resampling.NEAREST)
    for looked_at in (sample, image):  # most pages in colour are known by the sample
        red, green, blue = looked_at.split()
        if ImageChops.difference(red, green).getbbox() or ImageChops.difference(red, blue).getbbox():
            return image
    return image.getchannel("R")


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    gray = image.mode in {"1", "L", "LA", "La"}
    layered = image.convert("LA" if gray else "RGBA")
    page = Image.new("L" if gray else "RGB", image.size, "white")
    page.paste(layered.convert(page.mode), mask=layered.getchannel("A"))
    return page


def _scale_to_8_bits(image: Image.Image, white_is_zero: bool) -> Image.Image:
    """Scale integers of up to 32 bits and floats to 0…255 by their range, never cut off.

    The range is what as many bits hold as the largest value needs, 8 at least: 65535 for a 16-bit scan, but 4095 for
    a 12-bit scan in 16-bit words, which would come out nearly black otherwise: the largest value is always 128 or more.
    Floats up to 1 are taken as 0…1. With negative values, the range is from the smallest to the largest.
    """
    exact = image if image.mode == "F" else image.convert("I")  # Pillow has no extrema of I;16B
    low, high = cast("tuple[float, float]", exact.getextrema())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("it has values that are no numbers (NaN or infinite)")
    if low < 0:
        base, full = low, (high - low) or 1.0
    elif image.mode == "F" and high <= 1:
        base, full = 0.0, 1.0
    else:
        base, full = 0.0, float((1 << max(8, math.ceil(high).bit_length())) - 1)
    scale, offset = 255 / full, -base * 255 / full
    if white_is_zero:
        scale, offset = -scale, 255 - offset
    values = exact.convert("F")
    return values.point(lambda value: value * scale + (offset + 0.5)).convert("L")  # the conversion cuts off decimals


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, rgb, outputMode="RGB")
    assert converted is not None  # only inPlace gives None
    return converted
