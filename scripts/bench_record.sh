#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_record.sh [EPKIT] - measure the configuration for which figures are quoted, and store them in bench/results/.
#
# Takes about ten minutes and 6 GiB of memory. Build from a clean checkout (preset release), and do not use the machine
# meanwhile. Refuses to overwrite a record, and to make one with a command that was not built from this commit.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
epkit="${1:-$here/build/epkit}"

command -v jq >/dev/null || { echo "bench_record.sh: jq is needed" >&2; exit 1; }
[ -x "$epkit" ] || { echo "bench_record.sh: $epkit does not exist: build it (scripts/build.sh release) or name the command" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

source=$(git -C "$here" describe --always --dirty --abbrev=10)
case "$source" in
*-dirty) echo "bench_record.sh: $here has changes that are not committed" >&2; exit 1 ;;
esac
built=$("$epkit" bench --quick --boot fork --only plan --no-baselines --json | jq -r .build.commit)
[ "$built" = "$source" ] || { echo "bench_record.sh: $epkit was built from $built, but $here is at $source: build again" >&2; exit 1; }

# Starts the next measurement: with MPI also the baseline MPI_Alltoallv.
start=()
# measure NAME OPTION...: one document, with the command line that produced it.
measure() {
    local name="$1"
    shift
    echo "bench_record.sh: $name: epkit bench $*" >&2
    "${start[@]}" "$epkit" bench "$@" --json >"$work/document"
    jq --arg name "$name" --arg command "${start[*]:+${start[*]} }epkit bench $*" '{name: $name, command: $command, document: .}' \
        "$work/document" >>"$work/runs"
}

if command -v mpirun >/dev/null; then
    start=(mpirun -n 8)
    # Open MPI refuses root and more ranks than cores; the mpirun of other MPIs does not know these options.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    [[ "$(mpirun --version)" != *"Open MPI"* ]] || start+=(--oversubscribe --bind-to none)
fi
measure throughput --ranks 8 --tokens 512,1024 --hidden 7168 --topk 8 --experts 256 --only dispatch,combine --iters 50
start=()
measure low-latency --ranks 8 --ll-tokens 128 --hidden 7168 --topk 8 --experts 256 --only ll --iters 50
measure plans --ranks 8 --tokens 512,4096 --hidden 7168 --topk 8 --experts 256 --only plan --iters 50
measure two-nodes --ranks 8 --nodes 2 --boot fork --tokens 512 --hidden 7168 --topk 8 --experts 256 --dtype bf16 \
    --only dispatch,combine --iters 20
measure ranks --ranks 2,4,8,16,32,64 --tokens 64 --hidden 7168 --topk 8 --experts 256 --dtype bf16 \
    --only dispatch,combine,plan --iters 20

cpu=$(jq -rs '.[0].document.machine.cpu // "unknown"' "$work/runs" |
    tr '[:upper:]' '[:lower:]' | sed -E 's/\((r|tm)\)//g; s/[^a-z0-9]+/-/g; s/^-|-$//g')
commit=$(jq -rs '.[0].document.build.commit' "$work/runs")
device=$(jq -rs '.[0].document.device' "$work/runs")
out="$here/bench/results/$(date -u +%Y-%m-%d)-$device-$cpu-$commit.json"
mkdir -p "${out%/*}"
[ ! -e "$out" ] || { echo "bench_record.sh: $out already exists" >&2; exit 1; }
jq -s '{schema_version: 1, runs: .}' "$work/runs" >"$out"
echo "$out"

# The quoted figures, for reading. Not by column(1), which a minimal Debian lacks.
columns=(ON RUN OP TYPE RANKS TOKENS US LOGICAL-GB/s X-MEMCPY X-ALLTOALLV X-CACHED)
jq -r 'def digits($n): if . == null then "-" else . * pow(10; $n) | round / pow(10; $n) end;
    .runs[] | .name as $name | .document | .device as $device | .rows[] |
    [$device, $name, .op, .type, .ranks, .tokens, (.time_us | round), (.logical_gbps | digits(3)),
     (.vs_memcpy | digits(2)), (.vs_alltoallv | digits(2)), (.vs_cached | digits(2))] |
    map(if . == "" then "-" else . end) | @tsv' "$out" |
    cat <(IFS=$'\t'; echo "${columns[*]}") - | expand -t 36,50,66,72,79,87,95,109,119,132
