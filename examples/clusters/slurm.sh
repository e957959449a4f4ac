#!/bin/bash
#SBATCH --job-name=mlax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120     # to every process, 120 s before the time is up: all save the same step and end with 143
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# One process on each node, with all of its GPUs. `place.start()` finds the others by the variables of Slurm.
# A process that dies ends the others; then the job is queued again and goes on from the last checkpoint.

MOST=20
srun --kill-on-bad-exit=1 --wait=60 python examples/clusters/train.py --run "$SLURM_SUBMIT_DIR/runs/cluster" "$@"
status=$?

if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MOST" ]; then
    echo "ended with status $status after restart ${SLURM_RESTART_COUNT:-0}; queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
