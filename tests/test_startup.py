"""What a log of vLLM tells: lines as real servers wrote them, vLLM 0.9 to 0.32."""

from __future__ import annotations

import pytest

from src.startup import CAUSES, explanation, find_cause, is_progress, phase_of

PHASES = [
    ("Fetching 4 files:  25%|##5       | 1/4 [00:03<00:10,  3.41s/it]", "download"),
    ("model.safetensors:  37%|###7      | 754M/2.04G [00:05<00:08, 151MB/s]", "download"),
    (
        "(Worker pid=7) INFO 11-30 11:15:02 [weight_utils.py:533] Time spent downloading weights for x: 12.5 s",
        "download",
    ),
    ("(Worker pid=11891) INFO 11-30 11:15:02 [cpu_model_runner.py:68] Starting to load model /models/x...", "weights"),
    ("Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 219.02it/s]", "weights"),
    ("(Worker pid=11891) INFO 11-30 11:15:02 [default_loader.py:501] Loading weights took 0.01 seconds", "weights"),
    ("INFO 05-10 16:00:15 [backends.py:1167] Dynamo bytecode transform time: 7.20 s", "compile"),
    ("INFO [backends.py:1105] Using cache directory: /home/me/.cache/vllm/x for vLLM's torch.compile", "compile"),
    ("Capturing CUDA graphs (decode, FULL):  50%|#####     | 1/2 [00:00<00:00,  2.98it/s]", "graphs"),
    ("(VllmWorker rank=0 pid=2445155) INFO [gpu_model_runner.py:1686] Graph capturing finished in 112 secs", "graphs"),
    ("(APIServer pid=11727) INFO:     Application startup complete.", "ready"),
    ("(APIServer pid=11727) INFO 11-30 11:14:41 [model.py:2152] Using max model len 2048", None),
    ("", None),
]


@pytest.mark.parametrize(("line", "phase"), PHASES)
def test_a_line_of_the_log_tells_the_phase(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase


NO_PROGRESS = [
    "",
    "   ",
    "DEBUG 11-30 11:15:02 [utils.py:785] Waiting for 1 local, 0 remote core engine proc(s) to start.",
    "INFO [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds.",
    '(APIServer pid=9) INFO:     127.0.0.1:51234 - "GET /v1/models HTTP/1.1" 503 Service Unavailable',
    '(APIServer pid=9) INFO:     127.0.0.1:51234 - "GET /health HTTP/1.1" 503 Service Unavailable',
]


@pytest.mark.parametrize("line", NO_PROGRESS)
def test_what_a_server_repeats_and_what_we_make_it_say_is_no_progress(line: str) -> None:
    assert not is_progress(line)


@pytest.mark.parametrize("line", [line for line, phase in PHASES if phase])
def test_every_line_of_a_phase_is_progress(line: str) -> None:
    assert is_progress(line)


HEAD = "(EngineCore_DP0 pid=6880) ERROR 09-03 11:03:37 [core.py:712] "
TAIL = (
    "(APIServer pid=223598) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}"
)
# What the log says → the cause, and a word of the remedy.
FAILURES = [
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update it",
        "driver",
        "update the driver",
    ),
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on "
        "non supported HW",
        "driver",
        "nvidia-smi",
    ),
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / "
        "cuda driver combination",
        "driver",
        "update the driver",
    ),
    ("RuntimeError: Found no NVIDIA driver on your system.", "no GPU", "--server"),
    ("RuntimeError: Failed to infer device type, please set the environment variable", "no GPU", "nvidia-smi"),
    ("RuntimeError: No CUDA GPUs are available", "no GPU", "nvidia-smi"),
    (
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
        "nvcc",
        "VLLM_USE_FLASHINFER_SAMPLER=0",
    ),
    ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", "nvcc", "VLLM_USE_FLASHINFER_SAMPLER=0"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'", "nvcc", "VLLM_USE_FLASHINFER_SAMPLER=0"),
    ("nvcc fatal   : Unknown option '-static-global-template-stub=false'", "nvcc", "the image IMAGE"),
    ("ninja: build stopped: subcommand failed.", "nvcc", "the image IMAGE"),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 350.00 MiB. GPU 0 has a total capacity of 23.68 "
        "GiB of which 212.81 MiB is free.",
        "CUDA memory",
        "--gpu-memory-utilization",
    ),
    (
        "ValueError: Free memory on device (7.34/139.72 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 125.75 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "memory taken",
        "nvidia-smi",
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (4.25 GiB).",
        "KV cache",
        "--max-model-len",
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (1048576), 22.5 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (17.39 GiB).",
        "KV cache",
        "--max-model-len",
    ),
    (
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (7344).",
        "KV cache",
        "--max-model-len",
    ),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
        "KV cache",
        "--gpu-memory-utilization",
    ),
    (
        "Value error, Model architectures ['LightOnOCRForConditionalGeneration'] are not supported for now. Supported "
        "architectures: dict_keys(['ApertusForCausalLM'",
        "architecture",
        "the image IMAGE",
    ),
    (
        "ValueError: The checkpoint you are trying to load has model type `mistral3` but Transformers does not "
        "recognize this architecture.",
        "architecture",
        "the image IMAGE",
    ),
    (
        "ImportError: cannot import name 'PixtralRotaryEmbedding' from 'transformers.models.pixtral.modeling_pixtral' "
        "(/usr/local/lib/python3.12/dist-packages/transformers/models/pixtral/modeling_pixtral.py)",
        "bad pair",
        "5.16.1",
    ),
    (
        "ImportError: huggingface-hub>=1.5,<2 is required for a normal functioning of this module, but found "
        "huggingface-hub==2.4.0.",
        "bad pair",
        "the image IMAGE",
    ),
    (
        "ImportError: /usr/lib/python3/dist-packages/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
        "bad pair",
        "the image IMAGE",
    ),
    ("OSError: [Errno 98] Address already in use", "port", "--port"),
    (
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use",
        "port",
        "--server",
    ),
    (
        "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/x.\n"
        "401 Client Error. (Request ID: Root=1-6951)",
        "gated",
        "HF_TOKEN",
    ),
    (
        "huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-6604c5e0)",
        "gated",
        "HF_TOKEN",
    ),
    (
        "OSError: no/model is not a local folder and is not a valid model identifier listed on 'https://huggingface.co'",
        "weights",
        "--model",
    ),
    (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
        "specified revision on the local disk and outgoing traffic has been disabled.",
        "weights",
        "HF_HUB_OFFLINE",
    ),
    ("RuntimeError: Cannot find any model weights with `/models/empty`", "weights", "--model"),
    ("OSError: [Errno 28] No space left on device", "disk", "HF_HOME"),
    ("OSError: I/O error: IO Error: No space left on device (os error 28)", "disk", "HF_HOME"),
    ("vllm: error: unrecognized arguments: --no-such-flag", "argument", "vllm serve --help"),
    ("vllm serve: error: argument --dtype: invalid choice: 'int3' (choose from auto, half)", "argument", "after --"),
    (
        "Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
        "(max_position_embeddings=16384)",
        "argument",
        "--max-model-len",
    ),
    ("RuntimeError: unable to write to file </torch_8_1>: out of shared memory", "shared memory", "--ipc=host"),
    ("MemoryError", "host memory", "more of it"),
]


@pytest.mark.parametrize(("line", "name", "remedy"), FAILURES)
def test_the_cause_of_a_failed_start_is_found_in_its_log(line: str, name: str, remedy: str) -> None:
    log = "\n".join(
        [
            "(APIServer pid=1) INFO 11-30 11:14:41 [model.py:2152] Using max model len 2048",
            *(HEAD + part for part in line.splitlines()),
            '  File "/usr/local/lib/python3.12/dist-packages/vllm/v1/engine/core.py", line 1299, in run_engine_core',
            TAIL,
        ]
    )
    cause = find_cause(log)
    assert cause is not None
    assert cause.name == name
    said = explanation(log, "IMAGE")
    assert remedy in said
    assert "pid=" not in said
    assert "[core.py" not in said


def test_every_cause_has_a_line_that_shows_it() -> None:
    assert {cause.name for cause in CAUSES} == {name for _, name, _ in FAILURES}
    hit = [find_cause(line) for line, _, _ in FAILURES]
    assert [cause for cause in CAUSES if cause not in hit] == []


def test_the_line_that_names_the_cause_is_in_the_explanation() -> None:
    log = f"{HEAD}OSError: [Errno 28] No space left on device\n{TAIL}"
    assert explanation(log, "") == (
        "the disk is full (OSError: [Errno 28] No space left on device): free some space, or point HF_HOME to a larger "
        "disk"
    )


def test_the_cause_that_explains_the_others_comes_first() -> None:
    log = (
        "ImportError: cannot import name 'PixtralRotaryEmbedding' from 'x'\nModel architectures failed to be inspected"
    )
    assert "can't be imported" in explanation(log, "")


def test_a_log_without_a_known_cause_is_left_to_speak_for_itself() -> None:
    assert find_cause("INFO all is well\nValueError: something new") is None
    assert explanation("ValueError: something new", "IMAGE") == ""


def test_a_server_that_was_killed_is_taken_for_one_without_memory() -> None:
    assert "memory is full" in explanation("INFO all is well", "IMAGE", killed=True)
