"""Mutates picture files of every format and makes pages of them: nothing may crash, hang or eat the memory.

    python bench/fuzz_pages.py                          20,000 cases
    python bench/fuzz_pages.py --cases 500 --seed 7

A case is a function of the seed and its number: a file of one format (some of several frames), with bytes changed, cut
off, put in, copied about, or set to extremes. The cases run in a process of their own: one that ends or hangs is noted,
and a new one goes on after the case that did it. Reported: what became of the cases, the slowest one in CPU seconds,
and the most memory that the process had.
"""

from __future__ import annotations

import argparse
import functools
import io
import multiprocessing
import os
import random
import resource
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageCms, ImageDraw

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from src.pages import Page, PageLimits, make_page  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HANG_S = 60.0
LIMITS = PageLimits(600, max_pixels=4_000_000)
EXTREMES = (b"\x00", b"\xff", b"\x7f\xff", b"\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff")
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {"progressive": True}),
    ("JPEG", "CMYK", {}),
    ("PNG", "1", {}),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "RGBA", {}),
    ("PNG", "I;16", {}),
    ("PNG", "RGB", {"save_all": True}),
    *(("TIFF", "RGB", {"compression": one}) for one in ("raw", "tiff_lzw", "tiff_deflate", "jpeg", "packbits", "zstd")),
    ("TIFF", "1", {"compression": "group4"}),
    ("TIFF", "1", {"compression": "group3"}),
    ("TIFF", "F", {}),
    ("TIFF", "LAB", {}),
    ("TIFF", "L", {"save_all": True}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("WEBP", "RGB", {"save_all": True}),
    ("JPEG2000", "RGB", {}),
    ("JPEG2000", "L", {"irreversible": True}),
    ("BMP", "RGB", {}),
    ("BMP", "P", {}),
    ("GIF", "P", {"save_all": True}),
    ("AVIF", "RGB", {}),
    ("PPM", "RGB", {}),
    ("PPM", "1", {}),
)


def drawing(mode: str, shift: int = 0) -> Image.Image:
    """A small page with ink, in a mode."""
    page = Image.linear_gradient("L").resize((150, 190)).point(lambda value: 160 + value // 4)
    ImageDraw.Draw(page).text((20 + shift, 40), "The mill stands\nby the river", fill=20)
    if mode in {"I;16", "F"}:
        return page.convert("I").point(lambda value: value * 257).convert(mode)
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        converted = ImageCms.profileToProfile(page.convert("RGB"), *profiles, outputMode="LAB")
        assert converted is not None
        return converted
    return page.convert(mode)


@functools.cache
def whole_file(number: int) -> bytes:
    """The file that the cases of a kind start from."""
    file_format, mode, options = KINDS[number]
    exif = Image.Exif()
    exif[0x0112] = 6
    more: dict[str, Any] = {**options}
    if options.get("save_all"):
        more["append_images"] = [drawing(mode, 5 * shift) for shift in (1, 2)]
    if file_format in {"JPEG", "PNG", "WEBP", "AVIF"} and mode != "CMYK":
        more |= {
            "exif": exif.tobytes(),
            "icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        }
    buffer = io.BytesIO()
    drawing(mode).save(buffer, file_format, **more)
    return buffer.getvalue()


def mutated(data: bytes, dice: random.Random) -> bytes:
    """The file with one to eight things done to it; most of them near its beginning, where the numbers stand."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        size = len(changed)
        at = dice.randrange(min(size, 600)) if dice.random() < 0.4 and size else dice.randrange(size + 1)
        match dice.randrange(6):
            case 0:
                changed[at : at + 1] = dice.randbytes(1)
            case 1:
                extreme = dice.choice(EXTREMES)
                changed[at : at + len(extreme)] = extreme
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + dice.randint(1, 64)]
            case 4:
                changed[at:at] = dice.randbytes(dice.randint(1, 32))
            case _:
                source = dice.randrange(size + 1)
                changed[at : at + 32] = changed[source : source + 32]
    return bytes(changed)


def fuzz_case(seed: int, number: int) -> tuple[str, str]:
    """Make a page of a case; return what became of it, and the format."""
    dice = random.Random(f"{seed}:{number}")
    kind = dice.randrange(len(KINDS))
    limits = PageLimits(LIMITS.longest_edge_px, LIMITS.max_pixels, allow_truncated=dice.random() < 0.3)
    made = make_page(mutated(whole_file(kind), dice), limits, frame=dice.choice((0, 0, 0, 1)))
    if isinstance(made, Page):
        assert max(made.image.size) <= limits.longest_edge_px
        assert made.image.mode in {"L", "RGB"}
        return "page", KINDS[kind][0]
    return made.status, KINDS[kind][0]


def work(seed: int, first: int, step: int, cases: int, pipe: Connection) -> None:
    """Go through every `step`-th case; say which is begun, and what became of each."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff writes there by itself
    for number in range(first, cases, step):
        pipe.send(("begin", number))
        started = time.process_time()
        outcome, file_format = fuzz_case(seed, number)
        rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send(("end", number, outcome, file_format, time.process_time() - started, rss_mib))
    pipe.send(("over",))


@dataclass
class Fuzzed:
    """What is found out."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, -1)
    most_mib: float = 0.0
    deaths: list[str] = field(default_factory=list)


def follow(seed: int, first: int, step: int, cases: int, found: Fuzzed) -> None:
    """Have a worker go through its cases; where it dies or hangs, note the case and go on after it."""
    while first < cases:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.Process(target=work, args=(seed, first, step, cases, theirs), daemon=True)
        worker.start()
        theirs.close()
        number = first
        try:
            while ours.poll(HANG_S):
                kind, *told = ours.recv()
                if kind == "over":
                    worker.join()
                    return
                number = told[0]
                if kind == "end":
                    _, outcome, file_format, cpu_s, rss_mib = told
                    found.outcomes[file_format, outcome] += 1
                    found.slowest = max(found.slowest, (cpu_s, number))
                    found.most_mib = max(found.most_mib, rss_mib)
            found.deaths.append(f"case {number} hangs")
        except EOFError:
            worker.join()
            found.deaths.append(f"case {number} ends its process: exit code {worker.exitcode}")
        worker.kill()
        first = number + step


def main() -> int:
    """Run the cases and print what was found; 1 where anything crashed or hung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = Fuzzed()
    follow(options.seed, 0, 1, options.cases, found)
    for file_format in sorted({name for name, _ in found.outcomes}):
        counts = {outcome: found.outcomes[file_format, outcome] for outcome in ("page", "blank", "error")}
        print(f"{file_format:9} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"{found.outcomes.total()} cases, seed {options.seed}: {len(found.deaths)} crashes or hangs")
    print(f"slowest: case {found.slowest[1]}, {found.slowest[0]:.2f} CPU s; most memory: {found.most_mib:.0f} MiB")
    print("\n".join(found.deaths))
    return 1 if found.deaths else 0


if __name__ == "__main__":
    sys.exit(main())
