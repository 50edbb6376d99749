#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test.sh [quick|medium|long] - all checks of the tree. The last line counts them; the exit code is 1 if any failed.
#
#   quick    release build; unit and command tests
#   medium   all tests; sanitizers; clang-tidy and the other linters (the default)
#   long     medium with more repetitions and cases, all tests with AddressSanitizer, a build with clang, the
#            analyzer of clang-tidy with full depth, and a minute of fuzzing for each target
#
# The output of each step is kept in build/test-results/.
set -euo pipefail
cd "$(dirname "$0")"

tier="${1:-medium}"
groups=(build test)
case "$tier" in
quick | medium) ;;
long)
    export EPKIT_TEST_LONG=1
    groups+=(fuzz cluster nodes long)
    ;;
*)
    echo "usage: test.sh [quick|medium|long]" >&2
    exit 2
    ;;
esac

results="$PWD/build/test-results"
rm -rf "$results"
mkdir -p "$results"
counts="$results/counts"
failures="$results/failures"
: >"$counts"
: >"$failures"

# Open MPI refuses to run as root and on fewer cores than ranks unless told otherwise.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# check NAME COMMAND...: a check that counts as one. Its output is shown only if it fails.
check() {
    local name="$1" start=$SECONDS
    shift
    if "$@" >"$results/$name.log" 2>&1; then
        echo 1 0 0 >>"$counts"
        printf '  %-40s ok      %4d s\n' "$name" $((SECONDS - start))
    else
        echo 0 1 0 >>"$counts"
        printf '  %-40s FAILED  %4d s\n' "$name" $((SECONDS - start))
        sed 's/^/      | /' "$results/$name.log"
        {
            echo "  $name: FAILED"
            tail -n 40 "$results/$name.log" | sed 's/^/      | /'
        } >>"$failures"
        return 1
    fi
}

# skip NAME REASON: a check that cannot run on this machine.
skip() {
    echo 0 0 1 >>"$counts"
    printf '  %-40s skipped: %s\n' "$1" "$2"
}

# suites PRESET JOBS CTEST-OPTION...: the tests of a preset, counted by scripts/count_results.py. Many of them wait more than
# they compute, hence four JOBS for each processor in all; with more, ranks that poll take time from those they wait for.
# The time limit only ends a hang; in the long tier suites take hours.
suites() {
    local preset="$1" jobs="$2" junit="$results/$1.xml"
    shift 2
    [ "$tier" != long ] || set -- --timeout 7200 "$@"
    "${run_tests[@]}" ctest --preset "$preset" --parallel $((jobs * $(nproc))) --output-junit "$junit" \
        --test-output-size-passed 10000000 --test-output-size-failed 10000000 "$@" >"$results/$preset.log" 2>&1 || true
    if [ ! -f "$junit" ]; then
        cat "$results/$preset.log"
        echo 0 1 0 >>"$counts"
        echo "  $preset: the tests did not run" >>"$failures"
        return
    fi
    scripts/count_results.py "$preset" "$junit" "$counts" "$failures"
}
run_tests=()

format() {
    find include lib common machine cmd python tests examples bench -name '*.[ch]' -print0 | xargs -0 clang-format --dry-run --Werror
}

shell_scripts() {
    shellcheck run.sh test.sh .ci/run scripts/*.sh
    find deploy tests examples bench -name '*.sh' -print0 | xargs -0 --no-run-if-empty shellcheck
    find tests -name '*.bats' -print0 | xargs -0 --no-run-if-empty shellcheck
}

# ThreadSanitizer of older compilers does not start if the kernel randomises addresses widely; then disable that.
prepare_thread_sanitizer() {
    echo 'int main(void) { return 0; }' | cc -fsanitize=thread -x c -o "$results/probe" - || return 1
    run_tests=()
    "$results/probe" 2>/dev/null && return
    run_tests=(setarch "$(uname -m)" -R)
    "${run_tests[@]}" "$results/probe" 2>/dev/null
}

# A minute for each target, starting from its corpus; new inputs are kept there.
fuzz() {
    local target name
    for target in build-fuzz/tests/fuzz/fuzz_*; do
        if [ ! -f "$target" ] || [ ! -x "$target" ]; then continue; fi
        name="${target##*/fuzz_}"
        mkdir "$results/corpus-$name"
        check "fuzz-$name" tests/fuzz/corpus.sh "$name" "$target" -max_total_time=60 -artifact_prefix="$results/" \
            "$results/corpus-$name" || true
    done
}

# More random tests. The seeds are printed to build/test-results/.
repetitions() {
    local matrix
    for matrix in intranode internode lowlatency; do
        check "repeat-$matrix" build/epkit test "$matrix" --repeat 20 || true
    done
    check repeat-bad-network build/epkit test internode --repeat 10 --tokens 32 --hidden 512 --net-delay-us 300 \
        --net-reorder --net-ring 2K --net-split 700 || true
    check repeat-sequence build/tests/property/sequence_host --seconds 600 || true
}

linters() {
    local version
    version=$(clang-format --version | sed 's/.*version \([0-9]*\).*/\1/')
    if [ "$version" -eq 14 ]; then
        check clang-format format || true
    else
        skip clang-format "version $version lays out some lines otherwise than 14, which the tree follows"
    fi
    check shellcheck shell_scripts || true
    if [ "$tier" = long ]; then
        check clang scripts/build.sh clang || true
        check clang-tidy scripts/clang_tidy.py --deep build || true
    else
        check clang-tidy scripts/clang_tidy.py build || true
    fi
}

# Every kernel is compiled for both architectures with the tree in "dist": here the tests on GPUs. Nothing of it runs.
kernels() {
    local nvcc
    if ! nvcc=$(scripts/cuda_toolkit.sh 2>"$results/cuda-toolkit.log"); then
        skip cuda-compile "$(tail -n 1 "$results/cuda-toolkit.log")"
        return
    fi
    CUDACXX=$nvcc EPKIT_BUILD_FOLDER=build-dist check cuda-compile scripts/build.sh dist -DEPKIT_CUDA=ON \
        -DEPKIT_WERROR=ON -DEPKIT_COMMAND=OFF -DBUILD_TESTING=ON || true
}

# What only compiles runs beside tests, many of which wait, and gives way to them.
sanitizer_builds() {
    renice -n 19 "$BASHPID" >"$results/renice.log"
    local preset
    for preset in asan tsan; do
        if check "build-$preset" scripts/build.sh "$preset"; then touch "$results/built-$preset"; fi
    done
}

# compilers PID: behind the builds of this process, which tests wait for
compilers() {
    renice -n 19 "$BASHPID" >"$results/renice.log"
    tail --pid="$1" -f /dev/null
    kernels
    linters
}

# With ThreadSanitizer beside the other ones: the last tests of each mostly wait.
sanitizers() {
    if [ -e "$results/built-asan" ]; then
        suites "$([ "$tier" = long ] && echo asan || echo asan-medium)" 3 &
    fi
    if ! prepare_thread_sanitizer; then
        skip tsan "ThreadSanitizer does not start on this machine"
    elif [ -e "$results/built-tsan" ]; then
        suites tsan 1
    fi
    wait
    run_tests=()
}

scripts/packages.sh "${groups[@]}"
# Tests start Python often. If python3 is a wrapper that searches for the right one, it costs more than Python itself.
PATH="$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH"
if check build-release scripts/build.sh release -DEPKIT_WERROR=ON -DBUILD_TESTING=ON -DEPKIT_EXAMPLES=ON; then
    if [ "$tier" = quick ]; then
        suites release 4 --label-regex '^(unit|cli)$'
    else
        sanitizer_builds &
        builds=$!
        # The test tree_dist uses this one, which has the CUDA backend if there is an nvcc.
        if check dist scripts/dist.sh --to "$results/dist" -DEPKIT_WERROR=ON; then
            export EPKIT_DIST="$results/dist"
        fi
        compilers "$builds" &
        suites "$([ "$tier" = long ] && echo release || echo release-medium)" 4
        wait "$builds"
        sanitizers
    fi
fi
if [ "$tier" = long ]; then
    repetitions
    if check build-fuzz scripts/build.sh fuzz; then
        fuzz
    fi
fi

if [ -s "$failures" ]; then
    echo
    echo "What failed (all that was printed is in build/test-results/):"
    cat "$failures"
    echo
fi
awk -v seconds="$SECONDS" '
    { passed += $1; failed += $2; skipped += $3 }
    END {
        printf "%d min %02d s\n%d passed, %d failed, %d skipped\n", seconds / 60, seconds % 60, passed, failed, skipped
        exit failed > 0 || passed == 0
    }' "$counts"
