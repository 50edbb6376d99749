# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2034,SC2154
# rank.sh - a part of the scripts of 'epkit env': from the rank on the node, and the list of ranks on the nodes as Slurm
# writes it ("8(x2),1"), to the GPU of the rank. When all counts are 1, no rank is left.

# A launcher that starts one process on a node starts a program that starts its ranks itself. They would
# inherit one NIC, so nothing is set then.
while [ -n "$_epkit_size" ]; do
    _epkit_part=${_epkit_size%%,*}
    [ "${_epkit_part%%"("*}" = 1 ] || break
    case $_epkit_size in
    *,*) _epkit_size=${_epkit_size#*,} ;;
    *) _epkit_size='' _epkit_rank='' ;;
    esac
done
_epkit_gpu=$_epkit_rank
case $_epkit_rank:${CUDA_VISIBLE_DEVICES-} in
: | :* | *[!0-9]*:*) _epkit_gpu='' ;;
*:) ;;
# By UUID, which 'epkit env -- PROGRAM' can translate.
*:*[!0-9,]*) _epkit_gpu='' ;;
*:*,*)
    _epkit_gpu=$CUDA_VISIBLE_DEVICES,
    while [ "$_epkit_rank" -gt 0 ] && [ -n "$_epkit_gpu" ]; do
        _epkit_gpu=${_epkit_gpu#*,}
        _epkit_rank=$((_epkit_rank - 1))
    done
    _epkit_gpu=${_epkit_gpu%%,*}
    ;;
*) _epkit_gpu=$CUDA_VISIBLE_DEVICES ;;
esac
