#!/bin/bash -l
# llama-1b: 2 nodes with 4 GPUs each
# written by isles VERSION for attempt 1 of /home/me/train/runs/llama-1b-1
#SBATCH --job-name=llama-1b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=28
#SBATCH --mem=200G
#SBATCH --time=24:00:00
#SBATCH --account=physics
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --constraint=a100|h100
#SBATCH --output=/home/me/train/runs/llama-1b-1/attempts/001/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --mail-type=END

# `isles stop` signals this shell too; the coordinator reads the stop request when it starts.
# Slurm's signal before the time limit would be lost here, so the lines below must be fast.
trap '' USR1

# ---- Environment of the agents and their ranks ----------------------------------------------
cd /home/me/train || exit 1
module load cuda/12.8 || exit 1
eval "$(conda shell.bash hook)" && conda activate train || { echo 'Failed to activate conda environment (conda must be on PATH, and the environment on this node)' >&2; exit 1; }
export HF_HOME=/scratch/hf
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"

# ---- The run ---------------------------------------------------------------------------------
# The coordinator: it finds the nodes of this job and starts an agent on each, starts lost ranks
# again, saves before the time limit, and queues the job again to resume.
exec python -m isles.agent /home/me/train/runs/llama-1b-1 --attempt 1 "$@"
