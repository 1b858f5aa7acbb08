#!/bin/bash
# llama-1b: 1 node with 4 GPUs
# written by isles VERSION for attempt 1 of /home/me/train/runs/llama-1b-1
#SBATCH --job-name=llama-1b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH --output=/home/me/train/runs/llama-1b-1/attempts/001/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue

# `isles stop` signals this shell too; the coordinator reads the stop request when it starts.
# Slurm's signal before the time limit would be lost here, so the lines below must be fast.
trap '' USR1

# ---- Environment of the agents and their ranks ----------------------------------------------
cd /home/me/train || exit 1
source /home/me/venv/bin/activate || exit 1
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"

# ---- The run ---------------------------------------------------------------------------------
# The coordinator: it finds the nodes of this job and starts an agent on each, starts lost ranks
# again, saves before the time limit, and queues the job again to resume.
exec python -m isles.agent /home/me/train/runs/llama-1b-1 --attempt 1 "$@"
