#!/bin/bash -l
# llama-1b: 2 nodes with 4 GPUs each, written by isles VERSION
# One task a node runs torchrun, which starts the ranks of that node; `isles train` has
# submitted this file as it is.
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
#SBATCH --output=/home/me/train/runs/llama-1b-1/attempts/001/slurm-%j.out
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
export ISLES_RUN_DIR=/home/me/train/runs/llama-1b-1
export ISLES_ATTEMPT=1
attempt_dir="$ISLES_RUN_DIR"/attempts/001

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
  [ -d "$ISLES_RUN_DIR" ] || {
    echo "isles: $(hostname) does not see the run directory $ISLES_RUN_DIR: set output_dir to a" \
      "folder that all nodes share" >&2
    exit 1
  }
  [ "$ISLES_RESTART" -eq 0 ] || echo "---- restart $ISLES_RESTART ----"
  echo "$(date '+%F %T') $(hostname) joins the others at $MASTER_ADDR:$MASTER_PORT"
  exec torchrun \
    --nnodes=2 --nproc_per_node=4 --node_rank="$SLURM_NODEID" \
    --rdzv_backend=static --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --rdzv_conf=timeout=120 --max_restarts=0 \
    -m isles.train "$ISLES_RUN_DIR" --attempt 1
}
export -f start_node

gang='' signalled='' terminated=''
start_gang() {
  MASTER_PORT=$(free_port) || exit 1
  export MASTER_PORT
  echo "$(date '+%F %T') Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: 2 x 4" \
    "ranks meet at $MASTER_ADDR:$MASTER_PORT"
  printf '%s\n' "${hosts[@]}" >"$attempt_dir"/hosts
  # One task a node: torchrun starts the ranks. They may use all cores that the job has there.
  srun --export=ALL --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=28 \
    --cpu-bind=none --kill-on-bad-exit=1 \
    --output="$attempt_dir/node-%n.log" --open-mode=append \
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

# ---- The time limit, preemption, scancel -----------------------------------------------------
# Before the time limit: rank 0 looks for this file, and all ranks save at the end of a step.
before_the_limit() {
  signalled=1
  local request=$attempt_dir/stop-request.json
  [ ! -e "$request" ] || return 0
  echo "$(date '+%F %T') the time limit is near: asking the ranks to save"
  printf '{"kind": "save", "by": "Slurm job %s, before its time limit", "at": %s, "requeue": %s}\n' \
    "$SLURM_JOB_ID" "$(date +%s)" true >"$request.new" &&
    mv "$request.new" "$request"
}
trap before_the_limit USR1
# scancel, or preemption without grace: Slurm tells the ranks itself, and queues the job again if that
# is its way.
trap 'signalled=1 terminated=--terminated' TERM

decide() {
  python -m isles.agent.conclude "$ISLES_RUN_DIR" --attempt 1 \
    --job "Slurm job $SLURM_JOB_ID" --output "$attempt_dir/slurm-$SLURM_JOB_ID.out" "$@"
}

queue_again() {
  # Slurm ends a job to queue it again: this script, and also the command that has asked for it.
  (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID") && exit 0
  [ -z "$terminated" ] || exit 0
  echo "Slurm does not queue this job again: submitting it once more"
  sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" "$attempt_dir"/job.sh \
    >"$attempt_dir"/job-id.new && mv "$attempt_dir"/job-id.new "$attempt_dir"/job-id && exit 0
  decide --stranded
  exit 85
}

# ---- The run ---------------------------------------------------------------------------------
next=$(decide --begin)
while [ "$next" = start ]; do
  ISLES_RESTART=$(find "$attempt_dir" -maxdepth 1 -name 'restart-*.json' | wc -l)
  export ISLES_RESTART
  start_gang
  wait_for_gang
  next=$(decide --status "$status" $terminated $(preempted))
done
[ "$next" != requeue ] || queue_again
exit "${next:-3}"
