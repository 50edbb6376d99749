#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# An optional dependency that is half installed does not stop a build: the configuration says what is missing, and goes
# on without it.

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    unset CUDACXX MPI_HOME
    mkdir bin
    PATH="$PWD/bin:$PATH"
}

# plant PROGRAM LINE...: a program that comes first in PATH
plant() {
    printf '#!/bin/sh\n' >"bin/$1"
    printf '%s\n' "${@:2}" >>"bin/$1"
    chmod +x "bin/$1"
}

# configures TEXT [OPTION...]: by default without the parts that most cases do not need
configures() {
    cmake -G Ninja -S "$EPKIT_SOURCE" -B build -DBUILD_TESTING=OFF -DEPKIT_EXAMPLES=OFF -DEPKIT_COMMAND=OFF \
        -DEPKIT_PYTHON=OFF "${@:2}" >log 2>&1 || { cat log; return 1; }
    cat log
    grep -qF -- "-- $1" log
    ninja -C build -t targets all >made
}

# builds NAME: whether a library of that name is built
builds() {
    grep -q "$1[^/]*\.so: phony\|$1[^/]*\.so:" made
}

@test "MPI: the compiler mpicc without headers and libraries, as in openmpi-bin" {
    plant mpicc 'case "$*" in
        *-showme:compile*) echo "-I/nowhere/openmpi/include -pthread" ;;
        *-showme:link*) echo "-L/nowhere/openmpi/lib -lmpi" ;;
        *-showme*) echo "cc -I/nowhere/openmpi/include -L/nowhere/openmpi/lib -lmpi" ;;
        *) echo "mpi.h: No such file or directory" >&2; exit 1 ;;
        esac'
    plant mpiexec 'exit 0'
    configures "MPI: not used, $PWD/bin/mpicc cannot compile a program with mpi.h" -DEPKIT_COMMAND=ON -DEPKIT_EXAMPLES=ON
    builds libepkit
    run ! builds libepkit-bench-mpi
    run ! grep mpi_bootstrap: made
}

@test "MPI: switched off" {
    configures "MPI: not used (CMAKE_DISABLE_FIND_PACKAGE_MPI)" -DEPKIT_COMMAND=ON -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON
    run ! builds libepkit-bench-mpi
}

@test "CUDA: an nvcc without its headers" {
    plant nvcc 'echo "cuda_runtime.h: No such file or directory" >&2; exit 1'
    configures "libepkit-cuda: not built, no CUDA compiler that works was found" -DEPKIT_CUDA=AUTO
    builds libepkit
    run ! builds libepkit-cuda
}

@test "CUDA: the runtime library without a compiler" {
    mkdir -p lib include
    touch lib/libcudart.so lib/libcudart_static.a include/cuda_runtime_api.h
    plant nvcc 'exit 127'
    configures "libepkit-cuda: not built, no CUDA compiler that works was found" -DEPKIT_CUDA=AUTO \
        -DCMAKE_PREFIX_PATH="$PWD"
    run ! builds libepkit-cuda
}

@test "CUDA: a compiler without the runtime library" {
    local nvcc prefix places
    for nvcc in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc \
        "$EPKIT_SOURCE/build-cuda-toolkit/site/nvidia/cu13/bin/nvcc" ""; do
        [ ! -x "$nvcc" ] || break
    done
    [ -n "$nvcc" ] || skip "there is no nvcc"
    prefix="${nvcc%/bin/nvcc}"
    places=$(find -L "$prefix/" "$(realpath "$prefix")" -name libcudart_static.a -printf '%h;')
    configures "libepkit-cuda: not built, $nvcc has no libcudart_static.a" -DEPKIT_CUDA=AUTO -DCMAKE_CUDA_COMPILER="$nvcc" \
        -DCMAKE_IGNORE_PATH="${places//\/\///}"
    run ! builds libepkit-cuda
    run cmake build -DEPKIT_CUDA=ON
    [ "$status" -ne 0 ]
    [[ "$output" == *"EPKIT_CUDA=ON, but"* ]]
}

@test "rdma-core: the library without headers, as in libibverbs1" {
    configures 'Network "verbs": not built, there is no infiniband/verbs.h' \
        -DCMAKE_IGNORE_PATH="/usr/include;/usr/local/include"
    grep -q verbs_none made
}

@test "rdma-core: headers that are not complete" {
    mkdir -p include/infiniband
    echo '#include <infiniband/a_header_that_is_not_there.h>' >include/infiniband/verbs.h
    configures "Network \"verbs\": not built, $PWD/include/infiniband/verbs.h does not compile" -DCMAKE_PREFIX_PATH="$PWD"
    grep -q verbs_none made
}

@test "rdma-core: headers without the library, which is loaded at run time" {
    mkdir -p include/infiniband
    echo 'enum { IBV_WR_RDMA_WRITE };' >include/infiniband/verbs.h
    configures "Configuring done" -DCMAKE_PREFIX_PATH="$PWD"
    grep -q verbs_open made
}

@test "Python: no headers, and headers that are not complete" {
    configures "Python packages: not built, a program with Python.h" -DEPKIT_PYTHON=AUTO -DPython3_INCLUDE_DIR=/nowhere
    rm -r build
    mkdir include
    touch include/pyconfig.h
    echo '#define PY_VERSION "3.11.2"' >include/patchlevel.h
    echo '#include "a_header_that_is_not_there.h"' >include/Python.h
    configures "Python packages: not built, a program with Python.h" -DEPKIT_PYTHON=AUTO -DPython3_INCLUDE_DIR="$PWD/include"
    run ! builds _C
    run cmake build -DEPKIT_PYTHON=ON
    [ "$status" -ne 0 ]
    [[ "$output" == *"EPKIT_PYTHON=ON needs the headers of Python"* ]]
}
