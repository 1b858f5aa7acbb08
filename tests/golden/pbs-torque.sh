#!/bin/bash
# llama-1b: 2 x 4 ranks under torchrun
# written by isles VERSION for start 1 of /home/me/train/runs/llama-1b-1
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

set -uo pipefail
export ISLES_RUN_DIR=/home/me/train/runs/llama-1b-1
attempt_dir=$ISLES_RUN_DIR/attempts/001
logs=$attempt_dir
# PBS shows what a job prints when it is over; this file grows while it runs.
exec >>"$attempt_dir/pbs.log" 2>&1

say() { echo "$(date '+%F %T') PBS job $PBS_JOBID: $*"; }

# ---- What the ranks run in: on every node the same -------------------------------------------
setting() {
  cd /home/me/train || exit 1
  module load cuda/12.8 || exit 1
  source /home/me/venv/bin/activate || exit 1
  export HF_HOME=/scratch/hf
  export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
}

# ---- The nodes: each once, in order (a node file repeats a host for each of its processes) ----
mapfile -t nodes < <(awk 'NF && !seen[$1]++ { print $1 }' "$PBS_NODEFILE")
[ "${#nodes[@]}" -eq 2 ] || {
  say "error: it has ${#nodes[@]} hosts (${nodes[*]}), and this script is for 2"
  say "  fix: ask for 2 different hosts in the lines with #PBS -l"
  exit 1
}

# ---- Where the ranks meet: an address of this host, the first, and a port of it ---------------
master_addr=$(getent ahostsv4 "${nodes[0]}" | awk '$1 !~ /^127\./ { print $1; exit }')
# Where the host's name is that of its loopback address only: its first address.
master_addr=${master_addr:-$(hostname -I | awk '{ print $1 }')}
[ -n "$master_addr" ] || {
  say "error: $(hostname) has no IPv4 address"
  exit 1
}

# A port that nobody listens on; two jobs that share a node begin at different ones.
free_port() {
  local port i job=${PBS_JOBID%%[!0-9]*}
  for ((i = 0; i < 100; i++)); do
    port=$((29500 + (job + i) % 100))
    (exec 3<>"/dev/tcp/$master_addr/$port") 2>/dev/null || { echo "$port" && return; }
  done
  say "error: all ports from 29500 to 29599 are taken on $(hostname)" >&2
  return 1
}

# ---- What every node runs, once. pbsdsh starts it in $HOME, with a bare environment -----------
on_node() {
  local rank='' i agent code ended_at=''
  for i in "${!nodes[@]}"; do
    [ "${nodes[i]%%.*}" != "${HOSTNAME%%.*}" ] || rank=$i
  done
  [ -n "$rank" ] || {
    echo "$HOSTNAME is not one of: ${nodes[*]}" >>"$start/stranger"
    exit 1
  }
  mkdir "$start/node-$rank" 2>/dev/null || exit 0 # a second task on this host has nothing to do
  exec >>"$logs/node-$rank.log" 2>&1
  trap : TERM # qdel: PBS tells torchrun as well, and this waits for its end
  (start_ranks "$rank") &
  agent=$!
  while kill -0 "$agent" 2>/dev/null; do
    if [ -z "$ended_at" ] && [ -e "$start/end" ]; then
      ended_at=$SECONDS
      kill -TERM "$agent" # torchrun gives its ranks 30 s
    elif [ -n "$ended_at" ] && [ $((SECONDS - ended_at)) -ge 45 ]; then
      pkill -KILL -P "$agent"
      kill -KILL "$agent"
    fi
    sleep 0.5
  done
  wait "$agent"
  code=$?
  # pbsdsh itself ends with 0 whatever its tasks do: the end of each node is a file.
  echo "$code" >"$start/node-$rank/code.new" && mv "$start/node-$rank/code.new" "$start/node-$rank/code"
}

start_ranks() {
  setting
  command -v torchrun >/dev/null || {
    echo "isles: torchrun is not on PATH on $HOSTNAME: install torch in the environment that the" \
      "run file names (clusters: environment)" >&2
    exit 1
  }
  [ -d "$ISLES_RUN_DIR" ] || {
    echo "isles: $HOSTNAME does not see the run directory $ISLES_RUN_DIR: set output_dir to a" \
      "folder that all nodes share" >&2
    exit 1
  }
  [ "$ISLES_RESTART" -eq 0 ] || echo "---- restart $ISLES_RESTART ----"
  # The interface that leads to the others. Without it gloo takes the one of the host's own name.
  local interface peer=$master_addr
  [ "$1" -ne 0 ] || peer=$(getent ahostsv4 "${nodes[1]}" | awk '{ print $1; exit }')
  interface=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o route get "$peer" 2>/dev/null |
    sed -n 's/.* dev \([^ ]*\).*/\1/p')
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  export OMP_NUM_THREADS=8 # of one rank; PBS has set it to the cores of the node
  exec torchrun \
    --nnodes=2 --nproc_per_node=4 --node_rank="$1" \
    --rdzv_backend=static --master_addr="$master_addr" --master_port="$master_port" \
    --rdzv_conf=timeout=120 --max_restarts=0 \
    -m isles.train /home/me/train/runs/llama-1b-1 --attempt 1
}

# ---- One start of all nodes -------------------------------------------------------------------
start_nodes() {
  rm -rf "$start" && mkdir -p "$start"
  # A task of pbsdsh gets no variable of this script: it reads them, and its part, from a file.
  {
    declare -p nodes logs start master_addr master_port ISLES_RUN_DIR ISLES_RESTART
    declare -f setting on_node start_ranks
    echo on_node
  } >"$start/node.sh"
  if command -v pbsdsh >/dev/null; then
    pbsdsh -u -- /bin/bash -l "$start/node.sh" &
  else
    say "there is no pbsdsh here: starting the nodes over ssh"
    local node
    for node in "${nodes[@]}"; do
      ssh -n -o BatchMode=yes "$node" /bin/bash -l "$start/node.sh" &
    done
  fi
}

# Waits until every node has ended. One that fails ends all; one that is missing is named.
wait_for_nodes() {
  local i began=$SECONDS failed_at='' code missing open
  status=0
  while :; do
    missing='' open=''
    for i in "${!nodes[@]}"; do
      if [ ! -d "$start/node-$i" ]; then
        missing+=" node $i (${nodes[i]})"
        [ -z "$failed_at" ] || continue # it is not waited for: should it come, it ends at once
      fi
      if ! read -r code 2>/dev/null <"$start/node-$i/code"; then
        open+=" node $i (${nodes[i]})"
      elif [ "$code" -ne 0 ] && [ -z "$failed_at" ]; then
        say "node $i (${nodes[i]}) has ended with $code: see $logs/node-$i.log"
        failed_at=$SECONDS status=$code
      fi
    done
    [ -n "$open" ] || return 0
    if [ -n "$missing" ] && [ -z "$failed_at" ] && [ $((SECONDS - began)) -ge 120 ]; then
      say "error: not started within 120 s:$missing"
      [ ! -e "$start/stranger" ] || cat "$start/stranger"
      failed_at=$SECONDS status=5
    fi
    # The others may still write down why they have ended, before they are told to.
    if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge 5 ]; then
      touch "$start/end"
    fi
    if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge 60 ]; then
      say "error: no end is heard of:$open"
      return 0
    fi
    look_at_the_clock
    sleep 0.5 & wait $!
  done
}

# ---- The time limit (PBS sends no signal before it), and qdel or preemption --------------------
look_at_the_clock() {
  [ "$SECONDS" -ge 85800 ] || return 0
  # Rank 0 looks for this file, and all ranks save at the end of a step.
  local request=$attempt_dir/stop-request.json
  [ ! -e "$request" ] || return 0
  say "the time limit is near: asking the ranks to save"
  printf '{"kind": "save", "by": "PBS job %s, before its time limit", "at": %s, "requeue": true}\n' \
    "$PBS_JOBID" "$(date +%s)" >"$request.new" && mv "$request.new" "$request"
}
terminated=''
trap 'terminated=--terminated' TERM

decide() {
  (setting >/dev/null && exec python -m isles.agent.conclude "$ISLES_RUN_DIR" --attempt 1 \
    --job "PBS job $PBS_JOBID" --output "$attempt_dir/pbs.log" "$@")
}

# The same script once more: from here or, where compute nodes may not submit, from its origin.
queue_again() {
  local id submit code
  submit="cd $(printf %q "$PBS_O_WORKDIR") && qsub $(printf %q "$attempt_dir/job.sh")"
  id=$(timeout 60 bash -c "$submit")
  code=$?
  if [ "$code" -ne 0 ] && [ "$code" -ne 124 ]; then
    id=$(timeout 60 ssh -n -o BatchMode=yes "$PBS_O_HOST" "$submit")
    code=$?
  fi
  if [ "$code" -eq 0 ]; then
    echo "$id" >"$attempt_dir/job-id.new" && mv "$attempt_dir/job-id.new" "$attempt_dir/job-id"
    say "it goes on as job $id"
    exit 0
  fi
  # A job that was taken without an answer finds this end on record, and ends as it begins.
  say "error: it cannot be submitted again (exit status $code; 124: no answer in 60 s)"
  decide --stranded
  exit 85
}

# ---- The run ------------------------------------------------------------------------------------
next=$(decide --begin)
while [ "$next" = start ]; do
  ISLES_RESTART=$(find "$attempt_dir" -maxdepth 1 -name 'restart-*.json' | wc -l)
  export ISLES_RESTART
  start=$attempt_dir/start-$PBS_JOBID-$ISLES_RESTART
  master_port=$(free_port) || exit 1
  say "2 x 4 ranks on ${nodes[*]} meet at $master_addr:$master_port"
  start_nodes
  wait_for_nodes
  # shellcheck disable=SC2086  # nothing, where it is empty
  next=$(decide --status "$status" $terminated)
done
[ "$next" != requeue ] || queue_again
exit "${next:-3}"
