#!/bin/bash -l
# llama-1b: 2 nodes with 4 GPUs each, written by isles VERSION
# One task a node runs torchrun, which starts the ranks of that node.
#SBATCH --job-name=llama-1b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=28
#SBATCH --mem=200G
#SBATCH --time=1-00:00:00
#SBATCH --account=physics
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --constraint=a100|h100
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --mail-type=END

# ---- What the ranks run in -------------------------------------------------------------------
cd /home/me/train || exit 1
module load cuda/12.8 || exit 1
eval "$(conda shell.bash hook)" && conda activate train || { echo 'Failed to activate conda environment: is conda on PATH, and the environment on this node?' >&2; exit 1; }
export HF_HOME=/scratch/hf
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
set -uo pipefail

command -v torchrun >/dev/null || {
  echo "isles: torchrun is not on PATH on $(hostname): install torch in the environment that" \
    "the run file names (clusters: environment)" >&2
  exit 1
}

# ---- Where the ranks meet: addresses, since not every node knows the names of the others -----
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# The IPv4 address at which the others reach a node: never one that its own loopback has.
address_of() {
  local name address
  for name in "$1" "$(scontrol show node -o "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')"; do
    for address in $(getent ahostsv4 "$name" | awk '{ print $1 }'); do
      [[ $address == 127.* ]] || { echo "$address" && return; }
    done
  done
  echo "isles: no address is known for the node $1: getent ahostsv4 $1" >&2
  return 1
}
MASTER_ADDR=$(address_of "${hosts[0]}") || exit 1
SECOND_ADDR=$(address_of "${hosts[1]}") || exit 1
export MASTER_ADDR SECOND_ADDR

# A port of this node that nobody listens on; two jobs that share a node begin at different ones.
free_port() {
  local port i
  for ((i = 0; i < 100; i++)); do
    port=$((29500 + (SLURM_JOB_ID + i) % 100))
    (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null || { echo "$port" && return; }
  done
  echo "isles: all ports from 29500 to 29599 are taken on $(hostname)" >&2
  return 1
}

# ---- What every node runs, once --------------------------------------------------------------
start_node() {
  # The interface that leads to the others. Without it gloo takes the one of the node's own name.
  local peer=$MASTER_ADDR interface
  [ "$SLURM_NODEID" -ne 0 ] || peer=$SECOND_ADDR
  interface=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o route get "$peer" 2>/dev/null |
    sed -n 's/.* dev \([^ ]*\).*/\1/p')
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  local cores=${SLURM_CPUS_ON_NODE:-1}
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 4 ? cores / 4 : 1))}"
  exec torchrun \
    --nnodes=2 --nproc_per_node=4 --node_rank="$SLURM_NODEID" \
    --rdzv_backend=static --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --rdzv_conf=timeout=120 --max_restarts=0 \
    -m isles.train run.yaml
}
export -f start_node

gang='' signalled=''
start_gang() {
  MASTER_PORT=$(free_port) || exit 1
  export MASTER_PORT
  echo "$(date '+%F %T') Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: 2 x 4" \
    "ranks meet at $MASTER_ADDR:$MASTER_PORT"
  # One task a node: torchrun starts the ranks. They may use all cores that the job has there.
  srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=28 \
    --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c start_node &
  gang=$!
}

# A signal ends bash's wait, not the ranks: wait again, until there is a status of their own.
wait_for_gang() {
  local later
  wait "$gang"
  status=$?
  while [ "$status" -gt 128 ] && [ -n "$signalled" ]; do
    signalled=''
    wait "$gang" 2>/dev/null
    later=$?
    [ "$later" -ne 127 ] || break # that was their own
    status=$later
  done
  gang=''
}

# Preemption with a time of grace is a SIGTERM to the ranks alone, and queues nothing again.
preempted() {
  scontrol show job -o "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]' && echo --preempted
}

# ---- The time limit: the ranks save, and the job is queued again to go on ------------------------
before_the_limit() {
  signalled=1
  [ -z "$gang" ] || scancel --signal=TERM "$SLURM_JOB_ID".0 # torchrun gives its ranks 30 s
  again=yes
}
again=''
trap before_the_limit USR1
checkpoints() { ls -1d /home/me/train/runs/llama-1b-[0-9]*/checkpoints/step-* 2>/dev/null; }
before=$(checkpoints)

start_gang
wait_for_gang
[ "$status" -eq 0 ] || again=$again$(preempted)
if [ -n "$again" ] && [ "$status" -ne 0 ]; then
  # A run that came no further would be queued for ever.
  [ "$(checkpoints)" != "$before" ] || {
    echo "isles: its time is over, and nothing was saved: it is not queued again" >&2
    exit "$status"
  }
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
