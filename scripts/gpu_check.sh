#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# gpu_check.sh BUILD [WHAT] [RANKS...] - test and time the CUDA backend on the GPUs of this machine. WHAT is one of
#   check        the tests that each change must pass: results, for each number of ranks
#   faults       ranks that die, stop, are late or leave, for each number of ranks from 2 on; for 2 and 3 also at each
#                point of tests/cuda/points.h, which needs a module of its own: ninja -C BUILD epkit-cuda-points
#   long         1000 random shapes for each number of ranks, and every odd number of ranks up to 7
#   sanitize     memcheck, racecheck and synccheck (compute-sanitizer), on small shapes
#   sanitize-ll  racecheck on single cases of `epkit test lowlatency`, two of each format
#   bench        timing, a JSON document for each number of ranks and multiprocessors
#   wide         what other numbers of GPUs could change, in ten minutes: a rank on each GPU, as one node and as several,
#                odd numbers of ranks, faults, the drop-in, figures; with torch, in the folder of the sources
#   all          check, faults, long, sanitize, bench
# BUILD is a build folder, or a folder with its libraries and the programs of tests/cuda (and epkit: sanitize-ll and
# bench need it, and check then also runs its low-latency cases).
# RANKS default to 1, 2, 3 and the number of GPUs; more ranks than GPUs share them. Each step has a time limit; the
# last lines are a table of all steps. The exit code is 1 if one failed, took too long or was skipped.
# Environment: OUT, a folder for the figures and the output of each step (default: a new one in /tmp); STEPS, a bash
# pattern: only steps whose text it matches ('*ll_fault*'); ROUNDS, of check (60); SMS, of bench (8 16 24).
set -u
build=${1:?usage: gpu_check.sh BUILD [check|faults|long|sanitize|sanitize-ll|bench|wide|all] [RANKS...]}
what=${2:-check}
shift $(($# < 2 ? $# : 2))
case $what in
check | faults | long | sanitize | sanitize-ll | bench | wide | all) ;;
*)
    echo "gpu_check.sh: $what is not one of check, faults, long, sanitize, sanitize-ll, bench, wide, all" >&2
    exit 2
    ;;
esac
gpus=$(nvidia-smi --list-gpus | wc -l)
if [ "$gpus" -lt 1 ]; then
    echo "gpu_check.sh: nvidia-smi lists no GPU on this machine" >&2
    exit 2
fi
if [ $# -eq 0 ]; then
    set -- 1 2 3
    [ "$gpus" -le 3 ] || set -- "$@" "$gpus"
fi
programs=$build/tests/cuda
[ -d "$programs" ] || programs=$build
epkit=$build/epkit
export LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
out=${OUT:-$(mktemp -d /tmp/gpu_check.XXXXXX)}
mkdir -p "$out"
code=0
number=0
log= # of the last step
child=
table=()
# A step has its own process group, and would go on using the GPUs.
trap '[ -z "$child" ] || kill "$child"; exit 143' TERM INT

# step LIMIT COMMAND...: runs it for at most LIMIT seconds, and shows the end of its output, more if it fails.
step() {
    local limit=$1 begin=$SECONDS text result
    shift
    text=${*//"$programs/"/}
    text=${text//"$build/"/}
    log=
    # shellcheck disable=SC2053 # a pattern it is
    [[ $text == ${STEPS:-*} ]] || return
    number=$((number + 1))
    log=$(printf '%s/step-%02d.log' "$out" "$number")
    echo "== $text"
    # In the background: bash runs a trap only when its foreground command has ended.
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 &
    child=$!
    wait "$child"
    result=$?
    child=
    case $result in
    0)
        result=ok
        tail -n 1 "$log"
        ;;
    *)
        tail -n 40 "$log"
        case $result in
        124 | 137) result="timeout ($limit s)" ;;
        77) result=skipped ;;
        *) result="failed ($result)" ;;
        esac
        echo "== $result: $text (all of it: $log)"
        code=1
        ;;
    esac
    table+=("$(printf '%-14s %5d s  %s' "$result" $((SECONDS - begin)) "$text")")
}

wants() {
    case $what in "$1" | all) return 0 ;; *) return 1 ;; esac
}

check() {
    local ranks
    for ranks in "$@"; do
        step 200 "$programs/test_cuda" --ranks "$ranks" --rounds "${ROUNDS:-60}" --seed "$ranks"
        step 200 "$programs/test_cuda" --ranks "$ranks" --rounds "${ROUNDS:-60}" --seed "1$ranks" --threads
        step 200 "$programs/test_cuda" --ll --ranks "$ranks" --rounds "${ROUNDS:-60}" --seed "$ranks"
        step 200 "$programs/test_cuda" --ll --ranks "$ranks" --rounds "${ROUNDS:-60}" --seed "1$ranks" --threads
        step 200 "$programs/test_cuda" --hide --ranks "$ranks" --rounds 20 --seed "$ranks"
        step 200 "$programs/test_cuda" --hide --ll --ranks "$ranks" --rounds 20 --seed "$ranks"
        step 200 "$programs/stage_cuda" --ranks "$ranks"
        step 200 env EPKIT_STRICT_SMS=1 "$programs/stage_cuda" --ranks "$ranks"
        step 200 "$programs/stream_cuda" --ranks "$ranks"
        step 200 "$programs/plan_cuda" --ranks "$ranks"
        step 200 "$programs/metadata_cuda" --ranks "$ranks"
        step 200 "$programs/memory_cuda" --ranks "$ranks"
        step 120 "$programs/graph_cuda" --ranks "$ranks"
        step 200 "$programs/sequence_cuda" --ranks "$ranks" --seed "$ranks"
        step 200 "$programs/ll_async_cuda" --ranks "$ranks"
        step 200 "$programs/ll_mix_cuda" --ranks "$ranks"
        step 200 "$programs/ll_weights_cuda" --ranks "$ranks"
        [ "$ranks" -eq 1 ] || step 200 "$programs/ll_mask_cuda" --ranks "$ranks"
        [ "$ranks" -eq 1 ] || nodes "$ranks"
        [ -x "$epkit" ] || continue
        step 300 "$epkit" test intranode --backend cuda --ranks "$ranks"
        step 300 "$epkit" test lowlatency --backend cuda --ranks "$ranks"
        step 300 "$epkit" test lowlatency --backend cuda --ranks "$ranks" --no-partial-reduce
    done
}

# One rank per node, and, with an even number of ranks, two nodes.
nodes() {
    local ranks=$1 nodes shapes=("$1")
    [ "$ranks" -le 2 ] || [ $((ranks % 2)) -ne 0 ] || shapes+=(2)
    for nodes in "${shapes[@]}"; do
        step 200 "$programs/test_cuda" --ranks "$ranks" --nodes "$nodes" --rounds "${ROUNDS:-60}" --seed "2$ranks"
        step 200 "$programs/test_cuda" --ranks "$ranks" --nodes "$nodes" --threads --network tcp --rounds 20 --bf16
        step 200 "$programs/test_cuda" --ranks "$ranks" --nodes "$nodes" --bad-network --rounds 10
        step 200 "$programs/nodes_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/nodes_cuda" --ranks "$ranks" --nodes "$nodes" --network tcp
        step 300 "$programs/nodes_graph_cuda" --ranks "$ranks" --nodes "$nodes"
        step 300 "$programs/plan_cuda" --ranks "$ranks" --nodes "$nodes"
        step 300 "$programs/metadata_cuda" --ranks "$ranks" --nodes "$nodes"
        step 300 "$programs/plan_cuda" --ranks "$ranks" --nodes "$nodes" --network tcp --rounds 10
        step 300 "$programs/nodes_graph_cuda" --ranks "$ranks" --nodes "$nodes" --network tcp --rounds 200
        step 200 "$programs/stream_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/sequence_cuda" --ranks "$ranks" --nodes "$nodes" --seed "2$ranks"
        step 300 "$programs/sequence_cuda" --ranks "$ranks" --nodes "$nodes" --network tcp --rounds 5
        step 200 "$programs/stage_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/memory_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/test_cuda" --ll --ranks "$ranks" --nodes "$nodes" --rounds "${ROUNDS:-60}" --seed "2$ranks"
        step 200 "$programs/test_cuda" --ll --ranks "$ranks" --nodes "$nodes" --threads --network tcp --rounds 20
        step 200 "$programs/test_cuda" --ll --ranks "$ranks" --nodes "$nodes" --bad-network --small --rounds 10
        step 200 "$programs/ll_async_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/ll_mix_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/ll_weights_cuda" --ranks "$ranks" --nodes "$nodes"
        step 200 "$programs/ll_mask_cuda" --ranks "$ranks" --nodes "$nodes"
        # Ranks that share a GPU use no links, and some GPUs have none.
        if [ "$ranks" -le "$gpus" ] && nvidia-smi nvlink --status 2>/dev/null | grep -q 'GB/s'; then
            step 150 "$programs/traffic_cuda" --ranks "$ranks" --nodes "$nodes"
        fi
        [ -x "$epkit" ] || continue
        step 300 "$epkit" test internode --backend cuda --ranks "$ranks" --nodes "$nodes"
        step 300 "$epkit" test internode --backend cuda --ranks "$ranks" --nodes "$nodes" --network tcp
        step 300 "$epkit" test lowlatency --backend cuda --ranks "$ranks" --nodes "$nodes"
        step 300 "$epkit" test lowlatency --backend cuda --ranks "$ranks" --nodes "$nodes" --network tcp --no-partial-reduce
    done
}

faults() {
    local ranks
    for ranks in "$@"; do
        [ "$ranks" -gt 1 ] || continue
        step 300 "$programs/fault_cuda" --ranks "$ranks"
        step 400 "$programs/ll_fault_cuda" --ranks "$ranks"
        step 200 "$programs/ll_edge_cuda" --ranks "$ranks" --seed "$ranks"
        step 200 "$programs/ll_free_cuda" --ranks "$ranks"
        step 400 "$programs/regroup_cuda" --ranks "$ranks"
        [ "$ranks" -gt 3 ] || step 1000 env LD_LIBRARY_PATH="$programs/points:$LD_LIBRARY_PATH" \
            "$programs/regroup_cuda" --ranks "$ranks" --only points
        # Two nodes of two ranks: not every rank has a connection to every rank of the other node. Four ranks may share
        # GPUs, and are too slow for the deadlines then.
        [ "$ranks" -ne 4 ] || step 300 "$programs/fault_cuda" --ranks 4 --nodes 2 --network tcp --slow 3
        [ "$ranks" -ne 4 ] || step 600 "$programs/ll_fault_cuda" --ranks 4 --nodes 2 --network tcp --slow 3
        [ "$ranks" -ne 4 ] || step 600 "$programs/regroup_cuda" --ranks 4 --nodes 2 --network tcp --slow 3
        [ "$ranks" -ne 3 ] || step 600 "$programs/regroup_cuda" --ranks 3 --nodes 3 --network tcp
        [ "$ranks" -eq 2 ] || continue
        step 300 "$programs/fault_cuda" --ranks 2 --nodes 2
        step 300 "$programs/fault_cuda" --ranks 2 --nodes 2 --network tcp
        step 400 "$programs/regroup_cuda" --ranks 2 --nodes 2
        step 400 "$programs/regroup_cuda" --ranks 2 --nodes 2 --network tcp
        step 200 "$programs/regroup_cuda" --ranks 2 --nodes 2 --network direct --only lowest
        step 400 "$programs/ll_fault_cuda" --ranks 2 --nodes 2
        step 400 "$programs/ll_fault_cuda" --ranks 2 --nodes 2 --network tcp
        step 200 "$programs/ll_edge_cuda" --ranks 2 --nodes 2
        step 200 "$programs/ll_free_cuda" --ranks 2 --nodes 2
        step 200 "$programs/ll_copy_cuda" --ranks 2 --nodes 2
    done
}

long() {
    local ranks
    for ranks in "$@"; do
        step 900 "$programs/test_cuda" --ranks "$ranks" --rounds 1000 --seed "$((1000 + ranks))"
        step 900 "$programs/test_cuda" --ll --ranks "$ranks" --rounds 1000 --seed "$((2000 + ranks))"
    done
    for ranks in 3 5 6 7; do
        step 300 "$programs/test_cuda" --ranks "$ranks" --rounds 60 --seed "$((3000 + ranks))"
        step 300 "$programs/test_cuda" --ll --ranks "$ranks" --rounds 60 --seed "$((4000 + ranks))"
        step 200 "$programs/graph_cuda" --ranks "$ranks"
        step 300 "$programs/ll_async_cuda" --ranks "$ranks"
        step 300 "$programs/ll_mix_cuda" --ranks "$ranks"
        step 300 "$programs/ll_weights_cuda" --ranks "$ranks"
    done
    for ranks in 2 3 4; do
        step 500 "$programs/ll_edge_cuda" --ranks "$ranks" --rounds 60 --seed "$((5000 + ranks))"
    done
}

# Deadlines are long here: kernels take a hundred times as long. Ranks are threads, because the tool observes one
# process.
sanitize() {
    local tool small=(--threads --ranks 2 --small --timeout 300)
    for tool in memcheck racecheck synccheck; do
        step 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$programs/test_cuda" "${small[@]}" --rounds 4
        step 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$programs/test_cuda" --ll "${small[@]}" --rounds 8
    done
}

sanitize_ll() {
    local case
    for case in 1 2 3 5 7 8 14; do
        step 120 compute-sanitizer --tool racecheck --error-exitcode 9 "$epkit" test lowlatency --backend cuda \
            --boot threads --ranks 2 --tokens 16 --hidden 1024 --experts 16 --only "$case" --timeout 300
    done
}

# record NAME OPTION...: a record of the command in the folder of the figures.
record() {
    local name=$1
    shift
    # shellcheck disable=SC2016 # the inner shell expands them
    step 300 bash -c 'exec "$@" >"$0"' "$out/$name.json" "$epkit" bench --backend cuda --tokens 512,4096 --json "$@"
}

bench() {
    local ranks sms
    for ranks in "$@"; do
        for sms in ${SMS:-8 16 24}; do
            record "cuda_${ranks}_$sms" --ranks "$ranks" --sms "$sms"
            record "engine_${ranks}_$sms" --ranks "$ranks" --sms "$sms" --engine-calls
        done
    done
}

wide() {
    local ranks=$gpus n nodes
    step 60 "$programs/test_cuda" --ranks "$ranks" --rounds 30
    step 60 "$programs/test_cuda" --ll --ranks "$ranks" --rounds 30
    for n in stage plan metadata graph sequence ll_mix ll_weights; do
        step 60 "$programs/${n}_cuda" --ranks "$ranks"
    done
    for nodes in $(printf '%s\n' 2 $((ranks / 2)) | sort -nu); do
        if [ "$nodes" -le 1 ] || [ $((ranks % nodes)) -ne 0 ]; then continue; fi
        step 60 "$programs/test_cuda" --ranks "$ranks" --nodes "$nodes" --rounds 20
        step 60 "$programs/test_cuda" --ranks "$ranks" --nodes "$nodes" --rounds 10 --threads --network tcp
        step 60 "$programs/test_cuda" --ll --ranks "$ranks" --nodes "$nodes" --rounds 10 --threads --network tcp
        step 60 "$programs/nodes_graph_cuda" --ranks "$ranks" --nodes "$nodes" --rounds 100
        step 60 "$programs/traffic_cuda" --ranks "$ranks" --nodes "$nodes"
    done
    for n in 3 5 6 7; do
        [ "$n" -gt "$ranks" ] || step 30 "$programs/test_cuda" --ranks "$n" --rounds 10
    done
    step 100 "$programs/fault_cuda" --ranks "$ranks"
    step 150 "$programs/ll_fault_cuda" --ranks "$ranks"
    step 200 env EPKIT_PACKAGES="$build/python" tests/python/gpu.sh engines nodes random training
    step 120 env PYTHONPATH="$build/python" torchrun --nproc-per-node "$ranks" bench/engine_calls.py --sms 8,12,16,24 \
        --ll-tokens 8,32,128,512 --json "$out/engine_calls.json"
    record "cuda_$ranks" --ranks "$ranks" --sms 24
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sort | uniq -c
if wants check; then check "$@"; fi
if wants faults; then faults "$@"; fi
if wants long; then long "$@"; fi
if wants sanitize; then sanitize; fi
if [ "$what" = sanitize-ll ]; then sanitize_ll; fi
if wants bench; then bench "$@"; fi
if [ "$what" = wide ]; then wide; fi
echo "== the output of each step is in $out"
printf '%s\n' "${table[@]}"
if [ ${#table[@]} -eq 0 ]; then
    echo "gpu_check.sh: no step matches ${STEPS:-*}" >&2
    code=2
fi
exit $code
