#!/usr/bin/env bash
# Run the exactness tests with other instruction sets and numbers of threads: one line each; fails if any fails.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
for setting in \
    "OMP_NUM_THREADS=1" "OMP_NUM_THREADS=2" "OMP_NUM_THREADS=4" \
    "ATEN_CPU_CAPABILITY=default" "ATEN_CPU_CAPABILITY=avx2" \
    "ONEDNN_MAX_CPU_ISA=SSE41" "ONEDNN_MAX_CPU_ISA=AVX2" \
    "MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41"; do
    log=$(mktemp)
    workers=logical
    case $setting in OMP_NUM_THREADS=[2-9]*) workers=0 ;; esac  # its threads need all cores
    # shellcheck disable=SC2086  # one entry may hold several variables
    if env $setting .venv/bin/python -m pytest -q -m "exact and not slow" -n "$workers" --dist worksteal >"$log" 2>&1; then
        printf '%-75s %s\n' "$setting" "$(tail -n 1 "$log")"
    else
        failed=1
        printf '%-75s FAILED\n' "$setting"
        cat "$log"
    fi
    rm -f "$log"
done
exit $failed
