"""Colour profiles, honoured where they change what can be read.

Nearly every profile is sRGB or a shade of it, which no reader minds; the models were trained on pages whose profiles
nobody looked at, and a JPEG with such a one still travels as it is. But gray that is stored linearly, inverted, or
with its channels exchanged is another page: where a profile moves the lightness of any colour by more than
`MOST_SHIFT`, it is applied. One that is broken, or of another kind of colour than the pixels, is none.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

MOST_SHIFT = 40  # gray levels; gamma 1.8 taken for 2.2 is 20, Adobe RGB taken for sRGB less, linear light over 70
KINDS = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK"}  # mode → what an ICC profile calls it
STEPS = {"L": 52, "RGB": 6, "CMYK": 4}  # how many values of each channel are tried


def profiled(image: Image.Image, profile: object) -> Image.Image:
    """Return the picture ("L", "RGB" or "CMYK") as its profile means it: the same object where that is no matter."""
    if not isinstance(profile, bytes) or image.mode not in KINDS:
        return image
    meaning = _meaning(profile, image.mode)
    return meaning(image) if meaning else image


@functools.lru_cache(maxsize=16)
def _meaning(profile: bytes, mode: str) -> Callable[[Image.Image], Image.Image] | None:
    """Return what turns pixels of this profile into "L" or "RGB", or None where it would be no matter."""
    from PIL import Image, ImageCms

    def apply(image: Image.Image) -> Image.Image:
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None  # only inPlace gives None
        return converted.convert("L") if mode == "L" else converted

    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if opened.profile.xcolor_space != KINDS[mode]:
            return None
        transform = ImageCms.buildTransform(
            opened, ImageCms.createProfile("sRGB"), mode, "RGB", flags=ImageCms.Flags.NOCACHE
        )
        # All colours of a lattice, a pixel each.
        values = [round(step * 255 / (STEPS[mode] - 1)) for step in range(STEPS[mode])]
        colours = list(itertools.product(values, repeat=len(mode)))
        probe = Image.frombytes(mode, (len(colours), 1), bytes(itertools.chain.from_iterable(colours)))
        before, after = probe.convert("RGB").convert("L"), apply(probe).convert("L")
    except Exception:  # noqa: BLE001  a broken profile must not cost the page
        return None
    shift = max(abs(a - b) for a, b in zip(before.tobytes(), after.tobytes(), strict=True))
    return apply if shift > MOST_SHIFT else None
