#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kernel_names.sh LIBRARY: how kernels are named. DeepEP's own tests find the kernels of a call in a profile by these
# names: one that contains "dispatch", one with "combine", and behind "::", so not in a namespace without a name.
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
