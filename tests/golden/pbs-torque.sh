#!/bin/bash
# llama-1b: 2 nodes with 4 GPUs each
# written by isles VERSION for attempt 1 of /home/me/train/runs/llama-1b-1
#PBS -N llama-1b
#PBS -l nodes=2:ppn=32:gpus=4
#PBS -l mem=400gb
#PBS -l walltime=24:00:00
#PBS -q gpu
#PBS -A physics
#PBS -r y
#PBS -j oe
#PBS -o /home/me/train/runs/llama-1b-1/attempts/001/pbs.out
#PBS -m ae

# ---- Environment of the agents and their ranks ----------------------------------------------
cd /home/me/train || exit 1
module load cuda/12.8 || exit 1
source /home/me/venv/bin/activate || exit 1
export HF_HOME=/scratch/hf
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export OMP_NUM_THREADS=8 # per rank; PBS sets it to all cores
# PBS shows a job's output only at its end; this file grows while the job runs.
[ $# -gt 0 ] || exec >>/home/me/train/runs/llama-1b-1/attempts/001/pbs.log 2>&1

# ---- The run ---------------------------------------------------------------------------------
# The coordinator: it finds the nodes of this job and starts an agent on each, starts lost ranks
# again, saves before the time limit, and queues the job again to resume.
exec python -m isles.agent /home/me/train/runs/llama-1b-1 --attempt 1 "$@"
