# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# unified-env.sh - to be sourced: the variables of NVSHMEM, NCCL and DeepEP for this machine, from 'epkit env'. The
# library that must precede PyTorch's own is preloaded only into the program (epkit_preload PROGRAM...), not into mpirun
# and ssh.
export NVSHMEM_HOME="${NVSHMEM_HOME:-/opt/deepep/nvshmem}"
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$NVSHMEM_HOME/lib:$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONPATH="/opt/deepep/python${PYTHONPATH:+:$PYTHONPATH}"
eval "$(epkit env --format sh)"
