#!/bin/bash
# One run on a SLURM cluster, with one process for each GPU, requeued when its time is over: `sbatch deploy/slurm.sh`.
# For several GPUs: --gres=gpu:8 with --ntasks-per-node=8, and --nodes=2 for two machines. Read docs/several-gpus.md first.
#SBATCH --job-name=lora
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# The processes that srun started get SIGUSR1 two minutes before the end: the run saves and exits with 138.
#SBATCH --signal=USR1@120

ARGUMENTS=(train --preset 24gb --data ./images --model ./my-sd15 --output runs --name cat
    --resume --set train.grace_seconds=90)

# NCCL finds its way by itself; WARN prints the reason of a failure. What may have to be set, and why:
export NCCL_DEBUG=WARN
# export NCCL_SOCKET_IFNAME=ib0  # several machines: the network that all of them reach, where NCCL chooses another one
# export NCCL_IB_DISABLE=1       # several machines: InfiniBand is found but does not work
# export NCCL_P2P_DISABLE=1      # GPUs without NVLink that hang when they copy to each other

if [ "${SLURM_NTASKS:-1}" -eq 1 ]; then
    srun lora-trainer "${ARGUMENTS[@]}"
else
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # A port for each job, so that two jobs of one machine do not meet.
    export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    # shellcheck disable=SC2016  # each process has numbers of its own
    srun bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
        LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE; exec lora-trainer "$@"' lora-trainer "${ARGUMENTS[@]}"
fi
code=$?
# Not after SIGTERM (143): of a preempted job SLURM itself takes care (PreemptMode=REQUEUE), and one that you cancel with
# scancel must not come back.
if [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
