#!/usr/bin/env bash
# Train with one process for each GPU of this machine, or of several: `deploy/launch.sh train --preset 24gb …`.
# In the image it is the command `launch`. `accelerate launch` does the same, but exits with 1 whatever happened. This
# passes signals on and exits with the code of the run, which tells Kubernetes and SLURM whether to try again.
#
#   PROCESSES    processes on this machine (default: one for each GPU; 1 without)
#   NODES, NODE  number of machines, and which one this is, from 0 (default: 1 and 0)
#   MASTER_ADDR, MASTER_PORT  machine 0, as the others reach it, and a free port there (default: 127.0.0.1, 29500)
set -u

LEFT_SECONDS=60 # for the other processes, when one has failed: they save what they can and end on their own

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
export WORLD_SIZE=$((${NODES:-1} * processes)) LOCAL_WORLD_SIZE=$processes
if [ "$MASTER_ADDR" = 127.0.0.1 ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # without GPUs: do not listen on the network
fi

pids=()
signalled=0
# shellcheck disable=SC2317  # called by the traps
pass_on() {
    signalled=$((128 + $1))
    kill -s "$1" "${pids[@]}" 2>/dev/null
}
trap 'pass_on 1' HUP
trap 'pass_on 2' INT
trap 'pass_on 10' USR1
trap 'pass_on 15' TERM

for ((local_rank = 0; local_rank < processes; local_rank++)); do
    LOCAL_RANK=$local_rank RANK=$((${NODE:-0} * processes + local_rank)) lora-trainer "$@" &
    pids+=("$!")
done

# The code of the first process that fails is that of the run: the others only follow it.
code=0
watchdog=
while true; do
    wait -n "${pids[@]}" 2>/dev/null # which is silent about those that have ended before
    ended=$?
    if [ "$ended" -eq 127 ]; then # none is left
        break
    fi
    if [ "$ended" -eq 0 ] || [ "$ended" -eq "$signalled" ]; then # also where a signal only interrupted this wait
        continue
    fi
    if [ "$code" -eq 0 ]; then
        code=$ended
        (sleep "$LEFT_SECONDS" && kill -s TERM "${pids[@]}") >/dev/null 2>&1 & # it must not keep a pipe of ours open
        watchdog=$!
    fi
done
if [ -n "$watchdog" ]; then
    kill "$watchdog" 2>/dev/null
fi
exit $((code > 0 ? code : signalled))
