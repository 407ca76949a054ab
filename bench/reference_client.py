"""The plain client that `bench/driver.py` measures ours against: what a careful afternoon's script does.

    python bench/reference_client.py INPUT OUTPUT.parquet --server URL --model ID --concurrency N

All rows are handed to a thread pool; a thread decodes its page, makes it RGB, scales it down (LANCZOS), saves it as PNG
at Pillow's default level, and sends it with one blocking `requests.post`. The results are one list, written at the end.
"""

from __future__ import annotations

import argparse
import base64
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import requests
from PIL import Image

LONGEST_EDGE_PX = 1540


def ask(url: str, model: str, image: Image.Image) -> str:
    """Have one page read."""
    page = image.convert("RGB")
    page.thumbnail((LONGEST_EDGE_PX, LONGEST_EDGE_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    page.save(buffer, format="PNG")
    data_url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": data_url}}]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.2,
        "top_p": 0.9,
        "max_tokens": 4096,
    }
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=3600)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def main() -> None:
    """Run the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()

    rows: Any = datasets.load_dataset(options.input, split="train")

    def read(index: int) -> str:
        return ask(options.server, options.model, rows[index]["image"])

    with ThreadPoolExecutor(options.concurrency) as pool:
        texts = [future.result() for future in [pool.submit(read, index) for index in range(len(rows))]]
    rows.add_column("markdown", texts).to_parquet(options.output)


if __name__ == "__main__":
    main()
