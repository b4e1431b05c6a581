#!/bin/bash
# One run on one GPU of a SLURM cluster, requeued when its time is over: `sbatch deploy/slurm.sh`.
#SBATCH --job-name=lora
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# The processes that srun started get SIGTERM two minutes before the end: the run saves and exits with 143.
#SBATCH --signal=TERM@120

srun lora-trainer train --preset 24gb --data ./images --model ./my-sd15 --output runs --name cat \
    --resume --set train.grace_seconds=90
code=$?
# 143 SIGTERM, 138 SIGUSR1: a signal stopped the run before its end.
if [ "$code" -eq 143 ] || [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
