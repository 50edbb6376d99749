# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# prepend.sh - a part of the scripts of 'epkit env': prepends $1 to the list $2, once.

_epkit_prepend() {
    _epkit_path=":$2:"
    case $_epkit_path in
    *":$1:"*) _epkit_path=${_epkit_path%%":$1:"*}:${_epkit_path#*":$1:"} ;;
    esac
    _epkit_path=${_epkit_path#:}
    _epkit_path=${_epkit_path%:}
    _epkit_path=$1${_epkit_path:+:$_epkit_path}
}
