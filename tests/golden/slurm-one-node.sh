#!/bin/bash
# llama-1b: 1 node with 4 GPUs, written by isles VERSION
# One task a node runs torchrun, which starts the ranks of that node; `isles train` has
# submitted this file as it is.
#SBATCH --job-name=llama-1b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH --output=/home/me/train/runs/llama-1b-1/attempts/001/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue

# ---- What the ranks run in -------------------------------------------------------------------
cd /home/me/train || exit 1
source /home/me/venv/bin/activate || exit 1
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
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
export MASTER_ADDR=127.0.0.1 # one node: no port is open to the network

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
    --nnodes=1 --nproc_per_node=4 --node_rank="$SLURM_NODEID" \
    --rdzv_backend=static --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --rdzv_conf=timeout=120 --max_restarts=0 \
    -m isles.train "$ISLES_RUN_DIR" --attempt 1
}
export -f start_node

gang='' signalled='' terminated=''
start_gang() {
  MASTER_PORT=$(free_port) || exit 1
  export MASTER_PORT
  echo "$(date '+%F %T') Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: 1 x 4" \
    "ranks meet at $MASTER_ADDR:$MASTER_PORT"
  # One task a node: torchrun starts the ranks. They may use all cores that the job has there.
  srun --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 \
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

# ---- The time limit, preemption, scancel -----------------------------------------------------
# Before the time limit: rank 0 looks for this file, and all ranks save at the end of a step.
before_the_limit() {
  signalled=1
  local request=$attempt_dir/stop-request.json
  [ ! -e "$request" ] || return 0
  echo "$(date '+%F %T') the time limit is near: asking the ranks to save"
  printf '{"kind": "save", "by": "Slurm job %s, before its time limit", "at": %s, "requeue": %s}\n' \
    "$SLURM_JOB_ID" "$(date +%s)" false >"$request.new" &&
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
  next=$(decide --status "$status" $terminated)
done
[ "$next" != requeue ] || queue_again
exit "${next:-3}"
