#!/bin/sh
# Start vLLM-Ascend with the environment and the flags on record for an Atlas 800 A2.
#
#   serving/ascend.sh [--port 8000 …]            further words go to `vllm serve`
#
# On record is text generation (vLLM-Ascend 0.18.0rc1). Image input, which OCR is, was not verified there: run
# serving/smoke.sh against it before anything else, and compare a hundred pages with another engine's
# (lighton-ocr-parity.py). Each variable can be set otherwise in the environment.
set -eu

export ASCEND_RT_VISIBLE_DEVICES="${ASCEND_RT_VISIBLE_DEVICES:-0,1}"
export VLLM_USE_MODELSCOPE="${VLLM_USE_MODELSCOPE:-true}" # false: weights from the Hugging Face Hub
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-512}"
export OMP_PROC_BIND="${OMP_PROC_BIND:-false}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"

command -v vllm >/dev/null || {
  echo "ascend.sh: no vllm on PATH; install vLLM-Ascend, or run this in its image" >&2
  exit 2
}

exec vllm serve "${MODEL:-lightonai/LightOnOCR-2-1B}" \
  --limit-mm-per-prompt '{"image": 1}' \
  --mm-processor-cache-gb 0 \
  --no-enable-prefix-caching \
  --max-model-len 8192 \
  --max-num-seqs 32 \
  --max-num-batched-tokens 4096 \
  --gpu-memory-utilization 0.85 \
  --compilation-config '{"cudagraph_mode":"FULL_DECODE_ONLY"}' \
  "$@"
