#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# launch.sh [ARGUMENT...] - the default launcher of the chart: 'epkit launch' on every pod. The first one waits for all,
# sorts them by location and starts the job on them; the others run their part and exit with its exit code. With
# RUN_DEEPEP_TEST=true the job is DeepEP's internode test.
set -euo pipefail

job=${EPKIT_JOB:-hostname}
if [ "${RUN_DEEPEP_TEST:-false}" = true ]; then
    job=deepep-internode
fi
if ! command -v epkit >/dev/null; then
    echo "launch.sh: there is no epkit in the image: build it with deploy/docker, or bring a launcher of your own" \
        "(--set-file workload_launcher=FILE)" >&2
    exit 127
fi
exec epkit launch "$job" "$@"
