#!/bin/bash
# Plain PyTorch DDP on the nodes of a Slurm job:  sbatch train_distributed_example.sh [OPTION…]
# The options are those of train_distributed_example.py. LAUNCHER=torchrun before it takes torchrun,
# one task a node, in place of srun with one task a rank.
#SBATCH --job-name=train_distributed
#SBATCH --nodes=2
#SBATCH --gres=gpu:1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=28
#SBATCH --mem=200G
#SBATCH --output=train_distributed_%j.out
#SBATCH --error=train_distributed_%j.err

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?this is a job script: sbatch $0}" || exit 1
nodes=$SLURM_JOB_NUM_NODES
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# An address, for not every node knows the names of the others; and never that of its own loopback.
MASTER_ADDR=$(getent ahostsv4 "$first" | awk '$1 !~ /^127\./ { print $1; exit }')
export MASTER_ADDR="${MASTER_ADDR:-$first}"
# Two jobs that share a node begin at different ports.
export MASTER_PORT="${MASTER_PORT:-$((29500 + SLURM_JOB_ID % 100))}"
export WORLD_SIZE="$SLURM_NTASKS"
# srun does not take it from the job by itself.
cpus=${SLURM_CPUS_PER_TASK:-1} tasks=$((SLURM_NTASKS / nodes))

echo "=========================================="
echo "Distributed Training Example"
echo "=========================================="
echo "Job ID: $SLURM_JOB_ID"
echo "Number of nodes: $nodes"
echo "Node list: $SLURM_JOB_NODELIST"
echo "Master address: $MASTER_ADDR"
echo "World size: $WORLD_SIZE"
echo "Rank: $SLURM_PROCID"
echo "Local rank: $SLURM_LOCALID"
echo
echo "Node information:"
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 hostname
echo
echo "GPU information:"
# shellcheck disable=SC2016  # these are expanded in each task
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash -c '
  command -v nvidia-smi >/dev/null || { echo "$(hostname) has no nvidia-smi"; exit 0; }
  nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader,nounits |
    awk -F ", " "{ printf \"%s, %s, %.0f MB\n\", \$1, \$2, \$NF * 1.048576 }"'
echo
echo "=========================================="
echo "Starting training..."
echo "=========================================="

# RANK, LOCAL_RANK and SLURM_NODEID differ from task to task: in this shell they would all be 0. So
# they stand between single quotes.
case "${LAUNCHER:-srun}" in
srun)
  srun --cpus-per-task="$cpus" --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    exec python -u train_distributed_example.py "$@"' - "$@"
  ;;
torchrun)
  export NPROC_PER_NODE=$tasks
  srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=$((cpus * tasks)) \
    --kill-on-bad-exit=1 bash -c '
    exec torchrun \
      --nproc_per_node="$NPROC_PER_NODE" \
      --nnodes="$SLURM_JOB_NUM_NODES" \
      --node_rank="$SLURM_NODEID" \
      --master_addr="$MASTER_ADDR" \
      --master_port="$MASTER_PORT" \
      train_distributed_example.py "$@"' - "$@"
  ;;
*)
  echo "error: LAUNCHER is '$LAUNCHER'" >&2
  echo "  fix: srun or torchrun" >&2
  exit 1
  ;;
esac
