"""What a page costs the API server of the real vLLM by the way it comes: as a file, as PNG or JPEG in the request.

    python bench/transports.py [--rounds 3] [--json FILE]

One server (vLLM on CPU, the tiny LightOnOCR), one page after the other, so that nothing but the way differs; the ways
take turns, and the median of the rounds is reported. Counted are the CPU seconds of the API server's own process (user
and system), without engine and worker, less what it takes where nothing is asked of it. Two kinds of pages: the drawn
ones that the tiny model reads, to the end of their text; and A4 scans scaled to 1540 px as the scripts do it, of whose
text a few tokens are asked for. On the ways without loss the texts have to be the same; what JPEG changes is told.

    file BMP      as our scripts send pages to a server of their own: gray pages stay gray
    PNG           as they send them to any other server (src/png.py)
    PNG, Pillow   RGB at Pillow's default level, as most clients do
    JPEG          quality 90, which is another picture
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.pages import scan  # noqa: E402
from src.pages import PageLimits, Refusal, make_page  # noqa: E402
from src.png import png_file  # noqa: E402
from tests.tiny_lightonocr.drawn import drawn_pages  # noqa: E402
from tests.vllm_cpu import TinyServer, serve_tiny  # noqa: E402

LONGEST_EDGE_PX = 1540
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
IDLE_LOOK_S = 5.0
WARM_UP_PAGES = 2


def pillow_file(image: Image.Image, image_format: str, **options: Any) -> bytes:
    """Return an image as a file that Pillow writes."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


@dataclasses.dataclass(frozen=True)
class Way:
    """How pages come to the server."""

    name: str
    encode: Callable[[Image.Image], bytes]
    media_type: str
    as_file: bool = False
    lossless: bool = True

    def address(self, image: Image.Image, folder: Path) -> str:
        """Return the URL under which the server finds a page."""
        content = self.encode(image)
        if not self.as_file:
            return f"data:{self.media_type};base64,{base64.b64encode(content).decode()}"
        handle, name = tempfile.mkstemp(dir=folder, suffix=".bmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return f"file://{name}"


WAYS = (
    Way("file BMP", lambda image: pillow_file(image, "BMP"), "image/bmp", as_file=True),
    Way("PNG", png_file, "image/png"),
    Way("PNG, Pillow", lambda image: pillow_file(image.convert("RGB"), "PNG"), "image/png"),
    Way("JPEG", lambda image: pillow_file(image, "JPEG", quality=90), "image/jpeg", lossless=False),
)


@dataclasses.dataclass(frozen=True)
class Pages:
    """Pages of one kind, and how much of their text is asked for."""

    name: str
    images: list[Image.Image]
    max_tokens: int


def drawn(count: int) -> Pages:
    """Pages that the tiny model can read."""
    return Pages("drawn", [page.image.convert("L") for page in drawn_pages(count, seed=64)], 400)


def scans(count: int) -> Pages:
    """A4 scans as the scripts prepare them."""
    prepared = [make_page(scan(number), PageLimits(LONGEST_EDGE_PX)) for number in range(count)]
    return Pages("scans", [page.image for page in prepared if not isinstance(page, Refusal)], 4)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a way cost with pages of one kind."""

    pages: str
    way: str
    count: int
    kib_a_page: float
    cpu_ms: list[float]  # a page, one value a round
    seconds_a_page: float
    same_texts: int  # as by the first way

    @property
    def median_cpu_ms(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.cpu_ms)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def idle_cores(pid: int) -> float:
    """Return the share of a core that a server takes where nothing is asked of it."""
    before = cpu_seconds(pid)
    time.sleep(IDLE_LOOK_S)
    return (cpu_seconds(pid) - before) / IDLE_LOOK_S


def read(session: requests.Session, server: TinyServer, bodies: list[bytes]) -> list[str]:
    """Ask about page after page."""
    texts = []
    for body in bodies:
        headers = {"Content-Type": "application/json"}
        answer = session.post(f"{server.url}/chat/completions", data=body, headers=headers, timeout=300)
        answer.raise_for_status()
        texts.append(str(answer.json()["choices"][0]["message"]["content"]))
    return texts


def body_of(server: TinyServer, url: str, max_tokens: int) -> bytes:
    """Return the request about the page at an address."""
    content = [{"type": "image_url", "image_url": {"url": url}}]
    request = {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    return json.dumps(request).encode()


def compare(server: TinyServer, pages: Pages, folder: Path, rounds: int) -> list[Measured]:
    """Send the same pages by each way in turn."""
    bodies = {
        way.name: [body_of(server, way.address(image, folder), pages.max_tokens) for image in pages.images]
        for way in WAYS
    }
    pid = server.process.pid
    cpu_ms: dict[str, list[float]] = {way.name: [] for way in WAYS}
    passed_s = dict.fromkeys(cpu_ms, 0.0)
    texts: dict[str, list[str]] = {}
    with requests.Session() as session:
        for of_way in bodies.values():
            read(session, server, of_way[:WARM_UP_PAGES])
        idle = idle_cores(pid)
        for _ in range(rounds):
            for way in WAYS:
                began, cpu_s = time.monotonic(), cpu_seconds(pid)
                found = read(session, server, bodies[way.name])
                took_s = time.monotonic() - began
                cpu_ms[way.name].append(1000 * (cpu_seconds(pid) - cpu_s - idle * took_s) / len(found))
                passed_s[way.name] += took_s / len(found) / rounds
                if found != texts.setdefault(way.name, found):
                    raise SystemExit(f"{pages.name}, {way.name}: another round, another text")
    first = texts[WAYS[0].name]
    for way in WAYS:
        if way.lossless and texts[way.name] != first:
            raise SystemExit(f"{pages.name}: {way.name} gives other texts than {WAYS[0].name}")
    return [
        Measured(
            pages=pages.name,
            way=way.name,
            count=len(pages.images),
            kib_a_page=sum(size_of(way, image) for image in pages.images) / 1024 / len(pages.images),
            cpu_ms=cpu_ms[way.name],
            seconds_a_page=passed_s[way.name],
            same_texts=sum(one == other for one, other in zip(texts[way.name], first, strict=True)),
        )
        for way in WAYS
    ]


def size_of(way: Way, image: Image.Image) -> int:
    """Return the bytes that travel for a page: in the request, or through the file."""
    size = len(way.encode(image))
    return size if way.as_file else -(-size // 3) * 4


def show(found: list[Measured]) -> None:
    """Print the table of one kind of pages; the ratio is to the first way."""
    first = found[0].median_cpu_ms
    for it in found:
        rounds = " ".join(f"{value:.1f}" for value in it.cpu_ms)
        cells = f"{it.kib_a_page:>10.0f}{it.median_cpu_ms:>10.1f}{it.median_cpu_ms / first:>8.2f}"
        same = f"{it.same_texts}/{it.count}"
        print(f"{it.pages:<7}{it.way:<13}{cells}{it.seconds_a_page:>10.2f}{same:>8}   {rounds}", flush=True)


HEAD = f"{'':20}{'KiB/page':>10}{'CPU ms':>10}{'ratio':>8}{'s/page':>10}{'same':>8}   CPU ms of each round"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--drawn", type=int, default=64, metavar="N", help="drawn pages (default: 64)")
    parser.add_argument("--scans", type=int, default=24, metavar="N", help="scans (default: 24)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each way (default: 3)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all that was measured")
    options = parser.parse_args()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as scratch:
        log = Path(scratch) / "serve.log"
        with serve_tiny(log, f"--allowed-local-media-path={scratch}") as server:
            print(f"load {os.getloadavg()[0]:.1f}\n{HEAD}", flush=True)
            for pages in (drawn(options.drawn), scans(options.scans)):
                of_it = compare(server, pages, Path(scratch), options.rounds)
                show(of_it)
                found += of_it
            print(f"load {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(it) for it in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
