# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2034,SC2154,SC2043
# shared_gpus.sh - a part of the scripts of 'epkit env'. @PAIRS@: GPU:MINOR of each GPU.

# A task that may use some of the GPUs counts these alone, each task from 0: the device files tell which of the
# node they are. Numbers below are those of the node, with that of the device file behind.
case $_epkit_gpu in
'') ;;
*)
    _epkit_left=$_epkit_gpu _epkit_found='' _epkit_shut='' _epkit_open=0 _epkit_last='' _epkit_some=''
    for _epkit_pair in @PAIRS@; do
        if [ -r "/dev/nvidia${_epkit_pair#*:}" ] && [ -w "/dev/nvidia${_epkit_pair#*:}" ]; then
            _epkit_last=${_epkit_pair%%:*}
            if [ "$_epkit_left" -eq 0 ]; then _epkit_found=$_epkit_last; fi
            _epkit_left=$((_epkit_left - 1)) _epkit_open=$((_epkit_open + 1))
        else
            _epkit_shut=1
        fi
    done
    if [ "$_epkit_open" -eq 1 ]; then _epkit_found=$_epkit_last; fi
    if [ -n "$_epkit_shut" ] && [ "$_epkit_open" -gt 0 ]; then
        _epkit_gpu=$_epkit_found _epkit_some=1
    fi
    unset _epkit_left _epkit_found _epkit_shut _epkit_open _epkit_pair _epkit_last
    ;;
esac
