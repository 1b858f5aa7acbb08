#!/bin/bash -l
# llama-1b: 2 nodes with 4 GPUs each under torchrun
# written by isles VERSION; it does not need the command isles to run
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
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --mail-type=END

# ---- Environment of the ranks ----------------------------------------------------------------
cd /home/me/train || exit 1
module load apptainer || exit 1
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
set -uo pipefail

# ---- Rendezvous of the ranks: an address and a port of this node, the first ------------------
# Nodes may not know each other's names, and a name may resolve to the node's own loopback.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
slurms=$(scontrol show node -o "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
MASTER_ADDR=$({ getent ahostsv4 "$first"; getent ahostsv4 "$slurms"; } | awk '$1 !~ /^127[.]/ { print $1; exit }')
[ -n "$MASTER_ADDR" ] || {
  echo "isles: $(hostname) has no IPv4 address that other nodes can reach" >&2
  exit 1
}

# A free port; two jobs that share a node start at different ports.
free_port() {
  local port i
  for ((i = 0; i < 100; i++)); do
    port=$((29500 + (SLURM_JOB_ID + i) % 100))
    (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null || { echo "$port" && return; }
  done
  echo "isles: all ports from 29500 to 29599 are in use on $(hostname)" >&2
  return 1
}

MASTER_PORT=$(free_port) || exit 1
export MASTER_ADDR MASTER_PORT

# ---- Code that every node runs once ----------------------------------------------------------
start_node() {
  # The interface with the address of node 0, or on the route to it; gloo would use the interface of
  # the host's own name, which may be its loopback.
  master=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }')
  ip4() { PATH=$PATH:/usr/sbin:/sbin ip -4 -o "$@"; }
  interface=$(ip4 addr show | awk -v a="$master/" 'index($4, a) == 1 { print $2; exit }')
  [ -n "$interface" ] || interface=$(ip4 route get "$master" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  local cores=${SLURM_CPUS_ON_NODE:-1}
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 4 ? cores / 4 : 1))}"
  exec apptainer exec --pwd /home/me/train --nv --bind /home/me/train:/home/me/train --bind "${HF_HOME:-$HOME/.cache/huggingface}":"${HF_HOME:-$HOME/.cache/huggingface}" /home/me/train/images/train.sif python3 -m torch.distributed.run \
    --nnodes=2 --nproc_per_node=4 --node_rank="$SLURM_NODEID" \
    --rdzv_backend=static --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --rdzv_conf=timeout=120 --max_restarts=0 \
    -m isles.train ./run.yaml
}
export -f start_node

# ---- The run: one task per node, which may use all cores of the job there --------------------
echo "$(date '+%F %T') Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: 2 x 4 ranks, rendezvous at $MASTER_ADDR:$MASTER_PORT"
checkpoints() { ls -1d /home/me/train/runs/llama-1b-[0-9]*/checkpoints/step-* 2>/dev/null; }
before=$(checkpoints)
# Slurm signals this script before the time limit: the ranks save, and torchrun gives them 30 s.
# Without the trap, the signal would end this script, so the trap comes before the ranks.
again='' signaled=''
trap 'again=yes signaled=yes; scancel --signal=TERM "$SLURM_JOB_ID".0' USR1
srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=28 \
  --cpu-bind=none --kill-on-bad-exit=1 \
  bash -c start_node &
ranks=$!
wait "$ranks"
status=$?
while [ -n "$signaled" ]; do # a signal ends bash's wait, not the ranks
  signaled=''
  wait "$ranks" 2>/dev/null
  later=$?
  [ "$later" -eq 127 ] || status=$later # 127: that was their own
done
if [ -n "$again" ] && [ "$status" -ne 0 ]; then
  # A run that came no further would be queued for ever.
  [ "$(checkpoints)" != "$before" ] || {
    echo "isles: the time limit is over and nothing was saved, so the job is not queued again" >&2
    exit "$status"
  }
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
