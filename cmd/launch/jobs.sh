# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# jobs.sh start|ring ARGUMENT... - what named jobs of 'epkit launch' do on a node beyond running a program. Exit code 4: what
# the job needs is not installed.

fail() {
    echo "epkit: $*" >&2
    exit 4
}

# The library is for the program of the job alone.
preload() {
    if [ -n "${EPKIT_PRELOAD-}" ]; then export LD_PRELOAD="$EPKIT_PRELOAD"; fi
}

# start PRODUCT OPTION FOLDERS FILES RUNNER ARGUMENT...: executes the first of FILES in one of FOLDERS, there, by RUNNER if
# there is one. OPTION: what the product is built with for MPI, whose library a program then names; what is no ELF file may
# start one.
start() {
    product=$1 option=$2 folders=$3 files=$4 runner=$5 without=
    shift 5
    for folder in $folders; do
        for file in $files; do
            [ -r "$folder/$file" ] || continue
            if [ -n "$option" ] && head -c 4 "$folder/$file" | grep -q ELF && ! grep -q libmpi "$folder/$file"; then
                without=$folder/$file
                continue
            fi
            cd "$folder" || exit
            if [ -n "$runner" ]; then set -- "$runner" "$file" "$@"; else set -- "./$file" "$@"; fi
            preload
            # shellcheck disable=SC2093 # a file that cannot be executed ends the job
            exec "$@"
        done
    done
    if [ -n "$without" ]; then
        fail "$without was built without MPI, so each process would measure itself alone: build $product with $option"
    fi
    # The headline of a launch has the beginning of this line.
    remedy=${option:+"build it with $option"}
    fail "$product is not installed: ${remedy:-"'epkit install list' names the recipes that bring it"}." \
        "There is no $(echo "$files" | sed 's/ / or /g') below $(echo "$folders" | sed 's/ /, /g')"
}

# ring PORTS NODE...: two rounds, 0-1, 2-3, ...; then 1-2, 3-4, ..., and the last with the first. So each node is measured
# against both of its neighbours in the order by location, and a bad node is bad in both rounds.
#
# For each port ("mlx5_0:1,mlx5_1:1"): the server waits for its client; the client retries until the server is there, which
# may still be measured in the round before. RoCE v2 needs the index of a GID; a port of InfiniBand is addressed by its LID,
# and its GIDs beyond the first are empty.
ring() {
    command -v ib_write_bw >/dev/null || fail 'ib_write_bw is not installed: apt install perftest'
    ports=$(echo "$1" | tr '=,' '  ')
    shift $((1 + (RANK + NNODES - 1) % NNODES))
    peer=$1
    preload
    for round in 0 1; do
        [ $round = 0 ] || [ "$NNODES" -gt 2 ] || exit 0
        place=$(((RANK - round + NNODES) % NNODES)) port=$((18515 + 1000 * round))
        [ $((place % 2)) = 1 ] || [ $((place + 1)) -lt "$NNODES" ] || continue
        for rail in $ports; do
            port=$((port + 1)) device=${rail%:*} tries=0
            set -- -d "$device" -i "${rail##*:}" -F -p $port
            [ "$(cat "/sys/class/infiniband/$device/ports/${rail##*:}/link_layer" 2>/dev/null)" = InfiniBand ] || set -- "$@" -x 3
            if [ $((place % 2)) = 0 ]; then
                timeout 300 ib_write_bw "$@" || exit 1
                continue
            fi
            echo "device $device to $peer"
            until timeout 120 ib_write_bw "$@" "$peer"; do
                tries=$((tries + 1))
                [ $tries -lt 240 ] || exit 1
                sleep 0.5
            done
        done
    done
}

"$@"
