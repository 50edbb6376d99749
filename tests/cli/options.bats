#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Usage errors of epkit test are reported before a rank starts: exit code 2, and an error text.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

# refused TEXT ARGUMENT...: of `epkit test`
refused() {
    local text="$1"
    shift
    run -2 --separate-stderr epkit test "$@"
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
    [[ "$stderr" == *"'epkit test --help' explains it"* ]]
}

@test "arguments" {
    refused "missing argument: intranode|internode|lowlatency"
    refused "did you mean 'intranode'?" intranod
    refused "unexpected argument 'internode'" intranode internode
}

@test "numbers: invalid, out of range, too large" {
    refused "--ranks: '3x' is not a whole number (1..1024)" intranode --ranks 3x
    refused "--ranks: '' is not a whole number" intranode --ranks ''
    refused "--ranks: 0 is out of range 1..1024" intranode --ranks 0
    refused "--ranks: -4 is out of range 1..1024" intranode --ranks=-4
    refused "--tokens: 99999999999999999999 is out of range 1..1048576" intranode --tokens 99999999999999999999
    refused "--net-ring: '12Q' is not a size in bytes" internode --net-ring 12Q
    refused "--net-ring: 2G is out of range 0..1073741824" internode --net-ring 2G
}

@test "choices" {
    refused "--boot: 'frok' is none of fork, threads, tcp; did you mean 'fork'?" intranode --boot frok
    refused "--backend: 'gpu' is none of auto, host, cuda" intranode --backend gpu
}

@test "missing and unwanted values" {
    refused "--ranks needs an argument (N)" intranode --ranks
    refused "--json takes no argument" intranode --json=yes
    refused "option '--net' is ambiguous" intranode --net 3
    refused "unknown option '-Q'" intranode -Q
    [[ "$stderr" != *"put --"* ]]
    for arguments in "launch --hosts a ls -la" "nics ls -la" "env ls --all"; do
        # shellcheck disable=SC2086 # words
        run -2 --separate-stderr epkit $arguments
        [[ "${stderr_lines[0]}" == *"unknown option '-"*"'; if it is for the program, put -- in front of the program" ]]
    done
}

@test "numbers that contradict each other" {
    refused "--ranks 9 cannot be spread evenly over --nodes 2" internode --ranks 9
    refused "--nodes 4: there are only 2 ranks" internode --ranks 2 --nodes 4
    refused "internode needs --nodes 2 or more" internode --nodes 1
    refused "--experts 9 cannot be spread evenly over 8 ranks" intranode --experts 9
    refused "--topk 5: there are only 4 experts" intranode --ranks 2 --experts 4 --topk 5
    refused "--hidden 1002: hidden must be a multiple of 8" intranode --hidden 1002
    refused "--hidden 1000: hidden must be a multiple of 128 for fp8 rows" intranode --hidden 1000
    refused "--hidden 640: hidden must be a multiple of 512" lowlatency --hidden 640
    refused "--only 5 is not a case of --dtype bf16" intranode --only 5 --dtype bf16
    refused "of memory, but only" intranode --ranks 1024 --tokens 1048576 --hidden 65536
    refused "--only 25: intranode has 24 cases" intranode --only 25
    refused "--only 33: lowlatency has 32 cases" lowlatency --only 33
}

@test "routings" {
    refused "'zipff' is neither a routing nor a file; did you mean 'zipf'?" intranode --routing zipff
    refused "no-such.txt: No such file or directory" intranode --routing no-such.txt
    echo nonsense >"$BATS_TEST_TMPDIR/broken.txt"
    refused "$BATS_TEST_TMPDIR/broken.txt: " intranode --routing "$BATS_TEST_TMPDIR/broken.txt"
    mkfifo "$BATS_TEST_TMPDIR/pipe.fifo"
    refused "$BATS_TEST_TMPDIR/pipe.fifo: not a regular file" intranode --routing "$BATS_TEST_TMPDIR/pipe.fifo"
}

@test "a routing file whose experts do not exist is rejected with their position" {
    printf '0 1\n2 99\n' >"$BATS_TEST_TMPDIR/far.txt"
    refused "rank 0 token 1 selection 1: expert 99" intranode --ranks 2 --experts 16 --routing "$BATS_TEST_TMPDIR/far.txt"
}
