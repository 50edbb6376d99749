#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Check, and with "bench" also time, the CUDA backend on the GPUs of this machine.
#   gpu_check.sh BUILD [check|bench|sanitize|all] [RANKS...]
# BUILD is a build folder, or a folder with its libraries and the programs of tests/cuda. Figures go to $OUT, if set.
set -u
build=${1:?usage: gpu_check.sh BUILD [check|bench|sanitize|all] [RANKS...]}
what=${2:-check}
shift $(($# < 2 ? $# : 2))
gpus=$(nvidia-smi --list-gpus | wc -l)
[ $# -gt 0 ] || set -- 1 2 3 "$gpus"
programs=$build/tests/cuda
[ -d "$programs" ] || programs=$build
export LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
code=0

step()
{
    echo "== $*"
    timeout "${STEP_SECONDS:-120}" "$@" || { code=1; echo "== exit $?: $*"; }
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sort | uniq -c
case $what in check | all)
    for ranks in "$@"; do
        step "$programs/test_cuda" --ranks "$ranks" --rounds "${ROUNDS:-60}" --seed "$ranks"
        step "$programs/test_cuda" --ranks "$ranks" --rounds "${ROUNDS:-60}" --seed 1"$ranks" --threads
        step "$programs/graph_cuda" --ranks "$ranks"
    done
    ;;
esac
case $what in check | all)
    step "$programs/fault_cuda" --ranks 3
    step "$programs/ll_fault_cuda" --ranks 3
    ;;
esac
case $what in sanitize | all)
    step compute-sanitizer --error-exitcode 9 "$programs/test_cuda" --threads --ranks 2 --rounds 4 --small
    step compute-sanitizer --tool racecheck --error-exitcode 9 "$programs/test_cuda" --threads --ranks 2 --rounds 2 --small
    ;;
esac
case $what in bench | all)
    for ranks in "$@"; do
        step "$programs/bench_cuda" --ranks "$ranks" --sms "${SMS:-8,16,24}" | tee "${OUT:-/tmp}/cuda_$ranks.jsonl"
    done
    ;;
esac
exit $code
