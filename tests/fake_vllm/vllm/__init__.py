"""What lighton-ocr.py uses of vLLM, as a package for PYTHONPATH: an `LLM` that has the stub server answer.

So the offline script runs as a process without an engine, and the stub counts its pages like those of the others. The
server's address is in FAKE_VLLM_SERVER.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import threading
import urllib.error
import urllib.request
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace
from typing import Any

__version__ = "0.32.0"
STEP_S = 0.05


@dataclasses.dataclass
class SamplingParams:
    """The sampling of a request."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    repetition_detection: Any = None
    logprobs: int | None = None


class LLM:
    """An engine that asks a server. `model` is what the server serves."""

    def __init__(self, model: str, max_model_len: int = 16384, **_: Any) -> None:
        self.model = model
        self._running: dict[Future[Any], str] = {}
        self._added = 0
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len)),
            engine_core=SimpleNamespace(shutdown=lambda: None, resources=SimpleNamespace(engine_dead=False)),
            step=self._step,
            abort_request=self._abort,
        )

    def enqueue_chat(self, conversations: list[Any], sampling: list[SamplingParams], **_: Any) -> list[str]:
        """Begin to read one page; return its id."""
        self._added += 1
        request_id = str(self._added)
        self._running[self._begin(conversations[0], sampling[0])] = request_id
        return [f"{request_id}-abcdefgh"]

    def chat(self, conversations: list[Any], sampling: list[SamplingParams], **_: Any) -> list[Any]:
        """Read pages; raise if one of them can't be."""
        begun = [self._begin(*asked) for asked in zip(conversations, sampling, strict=True)]
        return [_output("", answer.result()) for answer in begun]

    def _begin(self, messages: list[Any], sampling: SamplingParams) -> Future[Any]:
        """Ask in a thread that does not keep the process from ending."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._ask(messages, sampling))
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def _step(self) -> list[Any]:
        done, _ = wait(self._running, timeout=STEP_S, return_when=FIRST_COMPLETED)
        return [_output(self._running.pop(future), future.result()) for future in done]

    def _abort(self, _ids: list[str]) -> None:
        self._running.clear()

    def _ask(self, messages: list[Any], sampling: SamplingParams) -> dict[str, Any]:
        content = [_part(part) for part in messages[0]["content"]]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        asked = {key: value for key, value in vars(sampling).items() if key in {"temperature", "top_p", "seed"}}
        asked |= {"max_tokens": sampling.max_tokens} if sampling.max_tokens else {}
        request = urllib.request.Request(
            f"{os.environ['FAKE_VLLM_SERVER']}/v1/chat/completions",
            json.dumps(body | asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise ValueError(f"the engine refuses the page: {error.read().decode()[:200]}") from error
        return answer


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_pil":
        return part
    out = io.BytesIO()
    part["image_pil"].save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _output(request_id: str, answer: dict[str, Any]) -> Any:
    choice, usage = answer["choices"][0], answer["usage"]
    completion = SimpleNamespace(
        text=choice["message"]["content"],
        finish_reason=choice["finish_reason"],
        token_ids=[0] * usage["completion_tokens"],
        logprobs=None,
    )
    prompt = [0] * usage["prompt_tokens"]
    return SimpleNamespace(request_id=request_id, finished=True, outputs=[completion], prompt_token_ids=prompt)
