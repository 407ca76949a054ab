"""The PyPI package `saturate` as `bench/saturate.py` measures it: its pump, with a request function as in its recipes.

    python bench/saturate_peer.py INPUT OUTPUT --server URL --model ID [--window N] [--prepare-workers N]

Runs in a virtual environment of its own, which the benchmark makes. Its recipes stream a dataset with decoded pictures,
and for each make RGB of it, scale it down to 1540 px (LANCZOS), save it as PNG at Pillow's default level and put it as
base64 into a body of JSON: so does this. The window is the package's own, begun with 8 as its recipes do it, up to its
default of 512; `--window` holds it. The request function runs on its event loop, as in the recipes, or where
`--prepare-workers` says so in as many threads, as its README advises.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import io
from typing import Any

import datasets
from PIL import Image

LONGEST_EDGE_PX = 1540


def png_url(image: Image.Image) -> str:
    """Make a page of a decoded picture."""
    page = image.convert("RGB")
    page.thumbnail((LONGEST_EDGE_PX, LONGEST_EDGE_PX), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    page.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read_answer(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Make the output's columns of an answer."""
    usage = answer.get("usage") or {}
    return {"markdown": answer["choices"][0]["message"]["content"], "tokens": usage.get("completion_tokens")}


def main() -> None:
    """Run the client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--window", type=int, help="so many in flight, instead of a window that adapts")
    parser.add_argument("--prepare-workers", type=int, default=0)
    options = parser.parse_args()
    saturate: Any = importlib.import_module("saturate")  # not where the other checks of this repository run

    def make_request(row: dict[str, Any]) -> dict[str, Any]:
        picture = {"type": "image_url", "image_url": {"url": png_url(row["image"])}}
        return {
            "model": options.model,
            "messages": [{"role": "user", "content": [picture]}],
            "temperature": 0.2,
            "top_p": 0.9,
            "max_tokens": 4096,
        }

    pages = datasets.load_dataset("parquet", data_files=f"{options.input}/*.parquet", split="train", streaming=True)
    window = saturate.Fixed(options.window) if options.window else saturate.Auto(initial=8)
    saturate.pump(
        saturate.dataset_rows(pages, columns=["image"]),
        make_request,
        read_answer,
        f"{options.server}/v1",
        options.output,
        window=window,
        prepare_workers=options.prepare_workers,
    )


if __name__ == "__main__":
    main()
