#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# launch.sh [ARGUMENT...] - the default launcher of the chart: 'epkit launch' on every pod. The first one waits for all,
# sorts them by location and starts the job on them; the others run their part and exit with its exit code. The job
# "testbed" is hostname by MPI, then NCCL's all_reduce. With RUN_DEEPEP_TEST=true the job is DeepEP's internode test.
set -euo pipefail

job=${EPKIT_JOB:-testbed}
if [ "${RUN_DEEPEP_TEST:-false}" = true ]; then
    job=deepep-internode
fi
if ! command -v epkit >/dev/null; then
    echo "launch.sh: there is no epkit in the image: build it with deploy/docker, or bring a launcher of your own" \
        "(--set-file workload_launcher=FILE)" >&2
    exit 127
fi

# in_folder JOB: the options that put the folder of the run into the bucket, if one is mounted
in_folder() {
    options=()
    [ -z "${EPKIT_LOGS:-}" ] || options=(--out "$EPKIT_LOGS/${JOB_IDENTIFIER:-run}-${JOB_TIMESTAMP:-}-$1")
}

if [ "$job" = testbed ]; then
    in_folder hostname
    epkit launch "${options[@]}" --with mpirun --per-node "${GPUS_PER_NODE:-8}" hostname &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null || true' TERM INT
    code=0
    wait "$child" || code=$?
    # A signal ends the first wait; the next one returns the exit code of the child.
    while kill -0 "$child" 2>/dev/null; do
        code=0
        wait "$child" || code=$?
    done
    [ "$code" = 0 ] || exit "$code"
    job=nccl
    set -- all_reduce "$@"
fi
in_folder "$job"
exec epkit launch "${options[@]}" "$job" "$@"
