#!/bin/bash
#SBATCH --job-name=mlax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120     # to every process, 120 s before the time limit: all save the same step and exit with 143
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# One process per node, with all of its GPUs. `place.initialize_distributed()` finds the others through Slurm's environment variables.
# If one process dies, the others are terminated, and the job is requeued and resumes from the last checkpoint.

MAX_RESTARTS=20
srun --kill-on-bad-exit=1 --wait=60 python examples/clusters/train.py --run "$SLURM_SUBMIT_DIR/runs/cluster" "$@"
status=$?

if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
    echo "exited with status $status after restart ${SLURM_RESTART_COUNT:-0}; requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
