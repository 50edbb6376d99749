#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A launcher as users write them: the first pod waits for the others and runs mpirun.
set -euo pipefail
[ "$JOB_COMPLETION_INDEX" = 0 ] || exec sleep infinity
: >/tmp/hostfile
for i in $(seq 0 $((NNODES - 1))); do
    host=$HOSTNAME_PREFIX$i.$DOMAIN_NAME
    for _ in $(seq 300); do
        if ssh -q "$host" true; then break; fi
        sleep 1
    done
    ssh "$host" hostname
    echo "$host slots=4" >>/tmp/hostfile
done
mpirun --allow-run-as-root --hostfile /tmp/hostfile -np $((NNODES * 4)) --oversubscribe \
    --mca orte_keep_fqdn_hostnames 1 --mca btl tcp,self --mca btl_tcp_if_include 198.18.80.0/24 \
    --mca oob_tcp_if_include 198.18.80.0/24 -x PATH -x MASTER_ADDR -x MASTER_PORT \
    /opt/epkit/bin/epkit test internode --tokens 16 --hidden 512 --timeout 240
