"""What a starting vLLM says of itself: from lines of its log to the phase it is in, and to why a start has failed.

A start takes minutes in which nobody answers; only the log tells a download from a hang. A start that failed leaves a
traceback of hundreds of lines, of which one tells what to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A phase of the start → what stands in the log when it begins or goes on.
PHASES = {
    "download": r"Fetching \d+ files|Downloading|\.safetensors: +\d+%|Time spent downloading weights",
    "weights": r"Starting to load model|Loading (safetensors|pt) checkpoint shards|Loading weights took",
    "compile": r"torch\.compile|Dynamo bytecode transform|Compiling a graph|autotun|JIT compil|ninja: ",
    "graphs": r"Capturing CUDA graph|Graph capturing",
    "ready": r"Application startup complete|Uvicorn running on",
}
# What a server writes over and over while nothing moves, and what our own questions make it write.
NO_PROGRESS = re.compile(
    r"Waiting for \d+ local|No available shared memory broadcast block|\"GET /(v1/models|health|metrics|version)"
)


@dataclass(frozen=True)
class Cause:
    """Why a start failed: `pattern` is how the log says it, `what` how people do, `remedy` the next step."""

    name: str
    pattern: str
    what: str
    remedy: str


# In order: what stands further up explains what stands further down, where a log has both.
CAUSES = (
    Cause(
        "bad pair",
        r"cannot import name 'PixtralRotaryEmbedding'|PixtralRotaryEmbedding",
        "this vLLM and this transformers don't fit together: the Pixtral models can't be imported",
        "use the image {image}, or install transformers 5.16.1",
    ),
    Cause(
        "bad pair",
        r"cannot import name '\w+' from '(transformers|huggingface_hub|tokenizers)[.']"
        r"|ImportError: .*(transformers|huggingface[-_]hub|tokenizers)[><=!]=",
        "this vLLM and the installed transformers (or what it needs) don't fit together",
        "use the image {image}, whose versions were made for each other",
    ),
    Cause(
        "bad pair",
        r"undefined symbol|_C\.abi3\.so|ImportError: lib\w+\.so[.\d]*: cannot open shared object file",
        "this vLLM and this torch or CUDA don't fit together",
        "use the image {image}, or install vLLM anew in an environment of its own",
    ),
    Cause(
        "driver",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"
        r"|forward compatibility was attempted|unsupported display driver / cuda driver combination",
        "the NVIDIA driver of this machine is too old for this build of vLLM (CUDA 12.6 is the least)",
        "update the driver, or use a machine with a newer one (`nvidia-smi` shows both versions)",
    ),
    Cause(
        "no GPU",
        r"Found no NVIDIA driver|No CUDA GPUs are available|Failed to infer device type|no CUDA-capable device"
        r"|libcuda\.so\.1: cannot open",
        "vLLM finds no GPU on this machine",
        "use a machine that has one (`nvidia-smi` must list it), or --server URL",
    ),
    Cause(
        "nvcc",
        r"Could not find nvcc|nvcc: not found|No such file or directory: 'nvcc'|nvcc fatal|Ninja build failed"
        r"|ninja: build stopped|No such file or directory: 'ninja'|FlashInfer requires",
        "FlashInfer compiles its kernels at the start, for which this machine lacks a fitting nvcc",
        "set VLLM_USE_FLASHINFER_SAMPLER=0 (we do where it is not set), or use the image {image}",
    ),
    Cause(
        "memory taken",
        r"Free memory on device .*is less than desired GPU memory utilization",
        "another process holds memory of the GPU",
        "end it (`nvidia-smi` lists it), or give a lower --gpu-memory-utilization",
    ),
    Cause(
        "KV cache",
        r"KV cache is needed, which is larger than|No available memory for the cache blocks"
        r"|larger than the maximum number of tokens that can be stored in KV cache",
        "the memory that is left on the GPU does not hold one page of --max-model-len",
        "give a smaller --max-model-len, a higher --gpu-memory-utilization, or a GPU with more memory",
    ),
    Cause(
        "CUDA memory",
        r"CUDA out of memory|CUDA error: out of memory|torch\.(cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is full",
        "give -- --max-num-seqs 64, a lower --gpu-memory-utilization, or a GPU with more memory",
    ),
    Cause(
        "architecture",
        r"are not supported for now|does not recognize this architecture|failed to be inspected"
        r"|has no vLLM implementation|Unrecognized (model|configuration class)",
        "this vLLM does not know the model's architecture: it is too old for it",
        "use the image {image}",
    ),
    Cause(
        "gated",
        r"gated repo|GatedRepoError|401 Client Error|403 Client Error|403 Forbidden",
        "the Hub refuses the model's weights to us: they are gated or private",
        "ask for access on the model's page, and set HF_TOKEN (`-s HF_TOKEN` on a hosted GPU)",
    ),
    Cause(
        "disk",
        r"No space left on device|os error 28|Disk quota exceeded|Not enough free disk space",
        "the disk is full",
        "free some space, or point HF_HOME to a larger disk",
    ),
    Cause(
        "weights",
        r"is not a valid model identifier|RepositoryNotFoundError|404 Client Error|RevisionNotFoundError"
        r"|Cannot find any model weights|LocalEntryNotFoundError|EntryNotFoundError|is not a local folder"
        r"|Can't load the configuration of|does not appear to have a file named config\.json|Invalid repository ID",
        "the model or its weights can't be found",
        "check --model and --model-revision, and that the Hub can be reached (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN)",
    ),
    Cause(
        "port",
        r"[Aa]ddress already in use|\[Errno 98\]|EADDRINUSE",
        "the port is taken",
        "leave --port out, then a free one is taken; or use what runs there with --server",
    ),
    Cause(
        "argument",
        r"error: (unrecognized arguments|argument |ambiguous option|the following arguments are required)"
        r"|invalid choice: |unexpected keyword argument|greater than the derived max_model_len",
        "vLLM refuses one of its arguments",
        "see what stands after -- (and --max-model-len) and `vllm serve --help=all`",
    ),
    Cause(
        "shared memory",
        r"Bus error|out of shared memory|insufficient shared memory",
        "/dev/shm is too small",  # noqa: S108 - a message
        "give the container more (`docker run --ipc=host`, or --shm-size 8g)",
    ),
    Cause(
        "host memory",
        r"MemoryError|Cannot allocate memory|std::bad_alloc|oom-kill|Killed$",
        "the machine's own memory is full",
        "use a machine with more of it",
    ),
)


def phase_of(line: str) -> str | None:
    """Return the phase of the start that this line of the log tells of."""
    return next((phase for phase, pattern in PHASES.items() if re.search(pattern, line)), None)


def is_progress(line: str) -> bool:
    """Whether the line shows that something moves."""
    return bool(line.strip()) and not NO_PROGRESS.search(line)


def find_cause(log: str) -> Cause | None:
    """Return the reason that a log gives for a start that failed; None where none of the known ones is in it."""
    return next((cause for cause in CAUSES if re.search(cause.pattern, log, re.MULTILINE)), None)


def explanation(log: str, image: str, *, killed: bool = False) -> str:
    """Say why a start failed and what to do, as the log and the image to use tell; empty where nothing is known.

    `killed`: it ended by SIGKILL, which the kernel sends where memory has run out.
    """
    cause = find_cause(log)
    if cause:
        line = next(line for line in log.splitlines() if re.search(cause.pattern, line))
        remedy = cause.remedy.format(image=image or "that the model's page names")
        return f"{cause.what} ({_without_head(line)}): {remedy}"
    return "it was killed, most likely as the machine's memory is full: use one with more of it" if killed else ""


def _without_head(line: str) -> str:
    """Return the message of a log line, without process, time and place, at most 300 characters of it."""
    return re.sub(r"^(\([^)]*pid=\d+\) )*((INFO|WARNING|ERROR) [-\d]+ [:\d]+ (\[[^\]]+\])? ?)?", "", line).strip()[:300]
