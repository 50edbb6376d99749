#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kernel_names.sh LIBRARY SOURCES: how kernels are named, and how they begin. DeepEP's own tests find the kernels of a
# call in a profile by these names: one that contains "dispatch", one with "combine", and behind "::", so not in a
# namespace without a name.
set -eu

expected='ep10combine_ll
ep11dispatch_ll
ep12combine_rows
ep13combine_nodes
ep13dispatch_rows
ep14dispatch_nodes
ep16combine_ll_nodes
ep17dispatch_ll_nodes'
# What nvcc makes of each kernel to launch it has the kernel's mangled name in its own.
names=$(nm "$1" | grep -o '__device_stub__Z[A-Za-z0-9_]*' | sed 's/^__device_stub__Z//' | sort -u)
moving=$(printf '%s\n' "$names" | grep -E 'dispatch|combine' | sed -E 's/^N2(ep[0-9]+[a-z_]*)E.*/\1/' | sort -u)
if [ "$moving" != "$expected" ]; then
    printf 'kernels with "dispatch" or "combine" in their names:\n%s\nbut expected:\n%s\n' "$moving" "$expected"
    exit 1
fi
# launch() lets kernels start before the previous one has ended, so each must wait before it reads anything.
hasty=$(awk '/^__global__/ { kernel = $0 } kernel && last == "{" && !/^    await_stream\(\);$/ { print FILENAME ": " kernel }
    kernel && last == "{" { kernel = "" } { last = $0 }' "$2"/*.cu)
begun=$(cat "$2"/*.cu | grep -c '^__global__')
if [ -n "$hasty" ] || [ "$begun" -lt 20 ]; then
    printf 'of %s kernels these do not begin with await_stream():\n%s\n' "$begun" "$hasty"
    exit 1
fi
if grep -n '<<<' "$2"/*.cu "$2"/*.cuh; then
    echo 'these kernels are not launched by launch()'
    exit 1
fi
