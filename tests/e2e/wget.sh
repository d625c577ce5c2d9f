#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# /usr/bin/wget of the agnhost image. The e2e image has BusyBox's; Debian's BusyBox crashes on -T. This one does
# what the specs need, with curl.
limit=30
while [ $# -gt 0 ]; do
    case $1 in
    -T) limit=$2; shift ;;
    -O) shift ;;
    -q | -qO-) ;;
    *) url=$1 ;;
    esac
    shift
done
exec curl -sf -m "$limit" -o - "$url"
