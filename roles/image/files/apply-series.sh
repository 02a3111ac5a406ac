#!/bin/sh
# apply-series.sh PATCHES TARGET: apply the patches that PATCHES/series names to TARGET, in that order. One that does not apply
# exactly ends it, so that no image is built of half of them.
set -eu
patches=$1
target=$2
grep -v -e '^#' -e '^[[:space:]]*$' "$patches/series" | while read -r name; do
    echo "applying $name"
    patch --directory="$target" --strip=1 --fuzz=0 --forward --batch --reject-file=- <"$patches/$name" || {
        echo "E_CONFIG: $name of $patches/series does not apply to $target" >&2
        exit 1
    }
done
