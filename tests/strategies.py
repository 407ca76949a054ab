"""Hypothesis strategies for the things this project handles."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, cast

from hypothesis import strategies as st

from src.models import catalogue

if TYPE_CHECKING:
    from PIL import Image

IMAGE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F")
SAVED_FORMATS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "GIF": ("L", "P"),
}

model_ids = st.sampled_from([profile.model_id for profile in catalogue()])
separators = st.sampled_from(["-", "_", "/", ".", "--", "\\"])
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", max_size=12)


@st.composite
def recased(draw: st.DrawFn, text: st.SearchStrategy[str]) -> str:
    """The text with each letter in either case."""
    word = draw(text)
    upper = draw(st.lists(st.booleans(), min_size=len(word), max_size=len(word)))
    return "".join(letter.upper() if up else letter.lower() for letter, up in zip(word, upper, strict=True))


@st.composite
def images(draw: st.DrawFn, modes: tuple[str, ...] = IMAGE_MODES, max_side: int = 90) -> Image.Image:
    """A small image with random pixels in one of the modes."""
    from PIL import Image

    mode = draw(st.sampled_from(modes))
    size = (draw(st.integers(1, max_side)), draw(st.integers(1, max_side)))
    noise = Image.frombytes("L", size, draw(st.randoms(use_true_random=False)).randbytes(size[0] * size[1]))
    if mode in ("I;16", "I", "F"):
        return noise.convert("I").point(lambda value: value * 257).convert(mode)
    bands = Image.getmodebands(mode)
    if mode in ("1", "L", "P"):
        return noise.convert(mode)
    turned = [noise.transpose(Image.Transpose(turn)).resize(size) for turn in range(bands)]
    return Image.merge(mode, turned)


@st.composite
def image_files(draw: st.DrawFn, max_side: int = 90) -> bytes:
    """A whole image file in one of the formats."""
    file_format = draw(st.sampled_from(sorted(SAVED_FORMATS)))
    buffer = io.BytesIO()
    draw(images(SAVED_FORMATS[file_format], max_side)).save(buffer, file_format)
    return buffer.getvalue()


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    """An image file with bytes changed, cut off or put in."""
    data = bytearray(draw(image_files(60)))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case _:
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(data)


cells = cast(
    "st.SearchStrategy[object]",
    st.one_of(
        st.none(),
        st.binary(max_size=200),
        st.integers(),
        st.text(max_size=20),
        st.fixed_dictionaries({"bytes": st.none() | st.binary(max_size=200), "path": st.none() | st.text(max_size=20)}),
    ),
)
