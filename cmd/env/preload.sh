# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# preload.sh - a part of the scripts of 'epkit env'. Launchers would load the library too, and pass it to everything
# that they start.

epkit_preload() {
    case ${1##*/} in
    mpirun | mpiexec | orterun | prterun | srun | ssh | torchrun)
        echo "epkit_preload: ${1##*/} would load it too; put 'epkit env --' in front of the program that it starts" >&2
        "$@"
        ;;
    *) env LD_PRELOAD="$EPKIT_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}" "$@" ;;
    esac
}
