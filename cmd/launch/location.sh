# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# location.sh METHOD [SERVER] - run on a node: prints its physical location, a word. It prints nothing if there is no source
# of it, and fails with a reason on standard error. METHOD is auto (the first available), slurm, kubernetes or metadata;
# SERVER is HOST[:PORT] of the metadata server, "" for that of Google Compute Engine.

slurm() {
    case ${SLURM_TOPOLOGY_ADDR-} in # without a topology plugin it is the name of the node
    *.*) printf '%s\n' "$SLURM_TOPOLOGY_ADDR" ;;
    *)
        echo 'Slurm reports no switches here (SLURM_TOPOLOGY_ADDR is not set)' >&2
        return 1
        ;;
    esac
}

# The labels of the pod by the downward API, key="value"; from the widest to the narrowest: nearby nodes share a prefix.
kubernetes() {
    local file=/etc/podinfo/labels key labels location=
    if ! labels=$(cat "$file" 2>/dev/null); then
        echo "$file cannot be read" >&2
        return 1
    fi
    for key in topology.kubernetes.io/zone cloud.google.com/gce-topology-{block,subblock,host} kubernetes.io/hostname; do
        [[ $'\n'$labels =~ $'\n'"$key"=\"?([^\"$'\n']+) ]] && location+=/${BASH_REMATCH[1]}
    done
    if [ -z "$location" ]; then
        echo "$file contains no topology label" >&2
        return 1
    fi
    printf '%s\n' "$location"
}

metadata() {
    local url=http://$1/computeMetadata/v1/instance/attributes/physical_host port=80 status line
    [[ $1 != *:* ]] || port=${1##*:}
    if ! { exec 3<>"/dev/tcp/${1%:*}/$port"; } 2>/dev/null; then
        echo "$url: no connection" >&2
        return 1
    fi
    # A server that has closed the connection is one without an answer.
    trap '' PIPE
    printf 'GET %s HTTP/1.0\r\nHost: %s\r\nMetadata-Flavor: Google\r\n\r\n' "${url#"http://$1"}" "$1" 2>/dev/null >&3
    # After the status a reason phrase may be missing.
    read -r _ status _ <&3 2>/dev/null
    status=${status%$'\r'}
    if [ "$status" != 200 ]; then
        echo "$url: HTTP status ${status:-missing}" >&2
        return 1
    fi
    while read -r line <&3 && [ "$line" != $'\r' ]; do :; done
    read -r line <&3
    line=${line%$'\r'}
    if [ -z "$line" ]; then
        echo "$url: the answer is empty" >&2
        return 1
    fi
    printf '%s\n' "$line"
}

case $1 in
auto)
    slurm 2>/dev/null || kubernetes 2>/dev/null && exit
    [ -n "$2" ] || grep -qs ^Google /sys/class/dmi/id/product_name || exit 0
    metadata "${2:-169.254.169.254}"
    ;;
metadata) metadata "${2:-169.254.169.254}" ;;
slurm | kubernetes) "$1" ;;
esac
