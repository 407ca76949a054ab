"""Draws scans of A4 pages into parquet files: the same pages, byte for byte, for every contestant of a benchmark.

Half of them at 200 dpi, a quarter of them at 300 dpi, one in four in colour; paper with grain and a shadow, lines of
text in Pillow's own font, saved as JPEG as a scanner does.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ("the", "ledger", "was", "written", "by", "hand", "signed", "before", "council", "of", "river", "towns", "in")
SIZES_PX = {200: (1654, 2339), 300: (2480, 3508)}
ROW_GROUP_ROWS = 100  # what `datasets` writes for pictures


def scan(number: int) -> bytes:
    """Draw page `number` as a JPEG file."""
    dpi = 300 if number % 4 == 2 else 200
    colour = number % 4 == 3
    image = _with_grain(_typeset(number, dpi), number, colour)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80, dpi=(dpi, dpi))
    return file.getvalue()


def _typeset(number: int, dpi: int) -> Image.Image:
    """Black text on white: 46 lines of about 11 points."""
    words = random.Random(number)
    width, height = SIZES_PX[dpi]
    page = Image.new("L", (width, height), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(dpi * 11 / 72)
    margin, line_height = dpi, height // 54
    for line in range(46):
        text = f"{number}.{line} " + " ".join(words.choices(WORDS, k=11))
        draw.text((margin, margin + line * line_height), text, fill=words.randint(20, 60), font=font)
    return page


def _with_grain(page: Image.Image, number: int, colour: bool) -> Image.Image:
    """The page on paper: off-white, darker towards one side, with grain; warm where it is in colour."""
    dice = np.random.default_rng(number)
    ink = np.asarray(page, dtype=np.float32) / 255
    shadow = np.linspace(0.9, 1.0, ink.shape[1], dtype=np.float32)
    gray = ink * shadow * 238 + dice.normal(0, 3, ink.shape).astype(np.float32)
    if not colour:
        return Image.fromarray(gray.clip(0, 255).astype(np.uint8))
    return Image.fromarray(np.stack([gray, gray * 0.97, gray * 0.88], axis=2).clip(0, 255).astype(np.uint8))


def write_dataset(folder: Path, pages: Iterator[bytes] | list[bytes], rows_per_file: int = 1000) -> Path:
    """Write pages as a dataset of parquet files, `train` split, with the columns `id` and `image`."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = datasets.Features({"id": datasets.Value("int64"), "image": datasets.Image()})
    folder.mkdir(parents=True, exist_ok=True)
    pages = iter(pages)
    written = 0
    while chunk := [page for page, _ in zip(pages, range(rows_per_file), strict=False)]:
        columns = {
            "id": list(range(written, written + len(chunk))),
            "image": [{"bytes": page, "path": f"{written + index:06d}"} for index, page in enumerate(chunk)],
        }
        table = pa.table(columns, schema=features.arrow_schema)
        file = folder / f"train-{written:09d}.parquet"
        pq.write_table(table, file, row_group_size=ROW_GROUP_ROWS, compression="none")
        written += len(chunk)
    return folder
