#!/bin/bash
# One run on one GPU of a SLURM cluster, put back into the queue when its time is over: `sbatch deploy/slurm.sh`.
#SBATCH --job-name=lora
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM goes to the processes that srun started, two minutes before the end: the run saves and leaves with 143.
#SBATCH --signal=TERM@120

srun lora-trainer train --preset 24gb --data ./pictures --model ./my-sd15 --output runs --name cat \
    --resume --set train.grace_seconds=90
code=$?
# 143 SIGTERM, 138 SIGUSR1: it was told to leave before it was done.
if [ "$code" -eq 143 ] || [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
