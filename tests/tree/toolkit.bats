#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/cuda_toolkit.sh, with a pip that only pretends: two runs in one checkout do not disturb each other.

bats_require_minimum_version 1.5.0

setup() {
    [ ! -e /usr/local/cuda/bin/nvcc ] || skip "this machine has a CUDA toolkit"
    command -v flock >/dev/null || skip "flock is not installed"
    mkdir -p "$BATS_TEST_TMPDIR/scripts" "$BATS_TEST_TMPDIR/bin"
    cp "$EPKIT_SOURCE/scripts/cuda_toolkit.sh" "$BATS_TEST_TMPDIR/scripts"
    cd "$BATS_TEST_TMPDIR" || return 1
    # Slow, as the real one is; what it writes is whole only at its end.
    cat >bin/python3 <<'END'
#!/bin/sh
[ "$3" != --version ] || exit 0
echo "$$" >>"$CALLS"
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/nvidia/cu13/bin" && sleep 2 || exit 1
[ ! -e "$FAIL" ] || { echo "pip: no network"; exit 1; }
printf '#!/bin/sh\n' >"$2/nvidia/cu13/bin/nvcc" && chmod +x "$2/nvidia/cu13/bin/nvcc"
END
    chmod +x bin/python3
}

toolkit() {
    env -i PATH="$PWD/bin:/usr/bin:/bin" CALLS="$PWD/calls" FAIL="$PWD/fail" \
        timeout --kill-after=5 600 scripts/cuda_toolkit.sh
}

@test "two at once: one fetches, both get a compiler" {
    PATH=/usr/bin:/bin command -v nvcc >/dev/null && skip "there is an nvcc on PATH"
    toolkit >first 2>first.err &
    sleep 0.5
    toolkit >second 2>second.err
    wait $!
    cat first.err second.err
    [ "$(cat first)" = "$PWD/build-cuda-toolkit/site/nvidia/cu13/bin/nvcc" ]
    [ "$(cat second)" = "$(cat first)" ]
    [ -x "$(cat first)" ]
    [ "$(wc -l <calls)" -eq 1 ]
}

@test "one that fails leaves nothing that the next one would take for a compiler" {
    PATH=/usr/bin:/bin command -v nvcc >/dev/null && skip "there is an nvcc on PATH"
    touch fail
    run -1 --separate-stderr toolkit
    # shellcheck disable=SC2154 # set by run
    [[ "$stderr" == *"pip could not fetch one: pip: no network"* ]]
    rm fail
    [ -x "$(toolkit 2>/dev/null)" ]
    [ "$(wc -l <calls)" -eq 2 ]
}

@test "a wheel needs a Python with pip, and says so" {
    cp "$EPKIT_SOURCE/scripts/wheel.sh" scripts
    printf '#!/bin/sh\nexit 1\n' >bin/python3
    EPKIT_PYTHON="$PWD/bin/python3" run -1 --separate-stderr scripts/wheel.sh dist
    [[ "$stderr" == "wheel.sh: $PWD/bin/python3 cannot run pip: install it (Debian: python3-pip"* ]]
    [ ! -e dist ]
}
