# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# unified-env.sh - to be sourced: the variables of NVSHMEM, NCCL and DeepEP that fit this machine, as 'epkit env' knows
# them. The library that must come before PyTorch's own is preloaded into the program alone (epkit_preload PROGRAM...),
# not into mpirun and ssh.
export NVSHMEM_HOME="${NVSHMEM_HOME:-/opt/deepep/nvshmem}"
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
export LD_LIBRARY_PATH="$NVSHMEM_HOME/lib:$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONPATH="/opt/deepep/python${PYTHONPATH:+:$PYTHONPATH}"
eval "$(epkit env --format sh)"
