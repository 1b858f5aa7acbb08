#!/bin/bash
# llama-1b: 2 nodes with 4 GPUs each under torchrun
# written by isles VERSION; it does not need the command isles to run
# the run file's launcher is slurm: its account, time, cores and memory are used; check the PBS options
# for OpenPBS (for Torque, add clusters.0.launcher.dialect=torque)
# submit it again to resume it after its time limit; a script written with
# --output resumes by itself
#PBS -N llama-1b
#PBS -l select=2:ncpus=28:ngpus=4:mem=200G:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=24:00:00
#PBS -A physics
#PBS -r y
#PBS -j oe

set -uo pipefail
logs=$PBS_O_WORKDIR/llama-1b.$PBS_JOBID
mkdir -p "$logs" && rm -rf "$logs"/node-*

say() { echo "$(date '+%F %T') PBS job $PBS_JOBID: $*"; }

# ---- Environment of the ranks: equal on every node -------------------------------------------
setting() {
  cd /home/me/train || exit 1
  module load apptainer || exit 1
  export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
}

# ---- The nodes: each once, in order (a node file repeats a host for each of its processes) ----
mapfile -t nodes < <(awk 'NF && !seen[$1]++ { print $1 }' "$PBS_NODEFILE")
[ "${#nodes[@]}" -eq 2 ] || {
  say "error: the job has ${#nodes[@]} hosts (${nodes[*]}), but this script is for 2"
  say "  fix: request 2 different hosts in the lines with #PBS -l"
  exit 1
}

# ---- Rendezvous of the ranks: an address and a port of this host, the first -------------------
MASTER_ADDR=$(getent ahostsv4 "${nodes[0]}" | awk '$1 !~ /^127[.]/ { print $1; exit }')
MASTER_ADDR=${MASTER_ADDR:-$(hostname -I | awk '{ print $1 }')}
[ -n "$MASTER_ADDR" ] || {
  say "error: $(hostname) has no IPv4 address"
  exit 1
}

# A free port; two jobs that share a node start at different ports.
free_port() {
  local port i
  for ((i = 0; i < 100; i++)); do
    port=$((29500 + (${PBS_JOBID%%[!0-9]*} + i) % 100))
    (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null || { echo "$port" && return; }
  done
  echo "isles: all ports from 29500 to 29599 are in use on $(hostname)" >&2
  return 1
}

MASTER_PORT=$(free_port) || exit 1

# A signal ends bash's wait, but not the process that it waits for.
wait_for() {
  wait "$1"
  code=$?
  while kill -0 "$1" 2>/dev/null; do
    wait "$1"
    code=$?
  done
}

# ---- Code that every node runs once. pbsdsh starts it in $HOME, with a bare environment -------
on_node() {
  local rank='' i
  for i in "${!nodes[@]}"; do
    [ "${nodes[i]%%.*}" != "${HOSTNAME%%.*}" ] || rank=$i
  done
  [ -n "$rank" ] || exit 1
  mkdir "$logs/node-$rank" 2>/dev/null || exit 0 # a second task on this host has nothing to do
  exec >>"$logs/node-$rank.log" 2>&1
  trap : TERM # qdel: PBS tells torchrun as well, and this waits for its end
  (start_ranks "$rank") &
  wait_for $!
  echo "$code" >"$logs/node-$rank/code" # pbsdsh itself exits with 0 even if its tasks fail
}

start_ranks() {
  setting
  # The interface with the address of node 0, or on the route to it; gloo would use the interface of
  # the host's own name, which may be its loopback.
  master=$(getent ahostsv4 "$MASTER_ADDR" | awk '{ print $1; exit }')
  ip4() { PATH=$PATH:/usr/sbin:/sbin ip -4 -o "$@"; }
  interface=$(ip4 addr show | awk -v a="$master/" 'index($4, a) == 1 { print $2; exit }')
  [ -n "$interface" ] || interface=$(ip4 route get "$master" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  export OMP_NUM_THREADS=7 # of one rank; PBS has set it to the cores of the node
  exec apptainer exec --pwd /home/me/train --nv --bind /home/me/train:/home/me/train --bind "${HF_HOME:-$HOME/.cache/huggingface}":"${HF_HOME:-$HOME/.cache/huggingface}" docker://ghcr.io/me/train:1.2 python3 -m torch.distributed.run \
    --nnodes=2 --nproc_per_node=4 --node_rank="$1" \
    --rdzv_backend=static --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    --rdzv_conf=timeout=120 --max_restarts=0 \
    -m isles.train ./run.yaml
}

# ---- The run: a task of pbsdsh gets no variables of this script, so it reads them from a file ------
{
  declare -p nodes logs MASTER_ADDR MASTER_PORT
  declare -f setting wait_for on_node start_ranks
  echo on_node
} >"$logs/node.sh"
say "2 x 4 ranks on ${nodes[*]}, rendezvous at $MASTER_ADDR:$MASTER_PORT"
if command -v pbsdsh >/dev/null; then
  pbsdsh -- /bin/bash -l "$logs/node.sh" &
  tasks=($!)
else
  say "pbsdsh not found, so the nodes are started over ssh"
  tasks=()
  for node in "${nodes[@]}"; do
    ssh -n -o BatchMode=yes "$node" /bin/bash -l "$logs/node.sh" &
    tasks+=($!)
  done
fi
terminated=''
trap 'terminated=yes' TERM # qdel, or preemption

# PBS sends no signal before the time limit. Rank 0 checks for a file in the newest run directory.
ask_to_save() {
  local newest
  newest=$(ls -1td /home/me/train/runs/llama-1b-[0-9]*/attempts/[0-9]* 2>/dev/null | head -n 1)
  [ -n "$newest" ] || return 0
  say "the time limit is near; asking the ranks to save"
  printf '{"kind": "save", "by": "PBS job %s, before its time limit", "at": %s}\n' \
    "$PBS_JOBID" "$(date +%s)" >"$newest/stop-request.json"
}
sleep 85800 && ask_to_save &
clock=$!

status=0
for task in "${tasks[@]}"; do
  wait_for "$task"
done
for i in "${!nodes[@]}"; do
  code=$(cat "$logs/node-$i/code" 2>/dev/null) || code=5
  [ "$code" -eq 0 ] || {
    say "node $i (${nodes[i]}) exited with $code, or never started; see $logs/node-$i.log"
    status=$code
  }
done
pkill -P "$clock"
[ -z "$terminated" ] || say "the job was told to end"
exit "$status"
