#!/bin/bash
# Inside a PBS job: starts cluster_train.sh once on every node, and waits for all of them.
#   pbs_nodes.sh CONFIG_PATH
set -uo pipefail
config=$1
: "${PBS_NODEFILE:?this runs inside a PBS job: qsub cluster_train.pbs}"

# A node file repeats each host, once for each of its processes: its line is not its number.
mapfile -t nodes < <(awk 'NF && !seen[$1]++ { print $1 }' "$PBS_NODEFILE")
address=$(getent ahostsv4 "${nodes[0]}" | awk '$1 !~ /^127\./ { print $1; exit }')
address=${address:-$(hostname -I | awk '{ print $1 }')} # the job's script runs on the first node
port=${MASTER_PORT:-$((29500 + ${PBS_JOBID%%[!0-9]*} % 100))}

# pbsdsh ends with 0 whatever its tasks do, and they get a bare environment: each reads this file,
# and leaves the exit code of its node in another.
work=$PWD/logs/pbs-$PBS_JOBID
rm -rf "$work" && mkdir -p "$work" || exit 1
on_node() {
  local rank='' i code
  for i in "${!nodes[@]}"; do
    [ "${nodes[i]%%.*}" != "$(hostname -s)" ] || rank=$i
  done
  [ -n "$rank" ] || {
    echo "error: $(hostname) is not one of: ${nodes[*]}" >&2
    exit 2
  }
  mkdir "$work/node-$rank" 2>/dev/null || exit 0 # a second task on this host has nothing to do
  trap : TERM # qdel tells the training as well, and this waits for its end
  cd "$folder" && ./cluster_train.sh "$config" "${#nodes[@]}" "$rank" "$address" "$port"
  code=$?
  echo "$code" >"$work/node-$rank/new" && mv "$work/node-$rank/new" "$work/node-$rank/code"
}
folder=$PWD
{
  (unset CUDA_VISIBLE_DEVICES && export -p) # each node has its own
  declare -p nodes config address port work folder
  declare -f on_node
  echo on_node
} >"$work/node.sh"

status=0 began=$SECONDS ended_at=''
trap 'status=143' TERM
if command -v pbsdsh >/dev/null; then
  pbsdsh -- /bin/bash "$work/node.sh" &
else
  echo "there is no pbsdsh here: starting the nodes over ssh"
  for node in "${nodes[@]}"; do
    ssh -n -o BatchMode=yes "$node" /bin/bash "$work/node.sh" &
  done
fi

# Until every node has left its code; one that has not even begun in time is named.
for i in "${!nodes[@]}"; do
  until [ -e "$work/node-$i/code" ]; do
    if [ ! -d "$work/node-$i" ] && [ $((SECONDS - began)) -ge "${START_TIMEOUT:-300}" ]; then
      echo "error: node $i (${nodes[i]}) has not begun within ${START_TIMEOUT:-300} s" >&2
      echo "  fix: see the output above; pbsdsh or ssh must reach it from $(hostname)" >&2
      [ "$status" != 0 ] || status=5
      continue 2
    fi
    # All tasks are over: a shared folder may still need a while to show what they have written.
    [ -n "$ended_at" ] || [ -n "$(jobs -r)" ] || ended_at=$SECONDS
    if [ -n "$ended_at" ] && [ $((SECONDS - ended_at)) -ge 30 ]; then
      echo "error: node $i (${nodes[i]}) has ended without an exit code" >&2
      [ "$status" != 0 ] || status=3
      continue 2
    fi
    sleep 0.5 &
    wait $!
  done
  code=$(<"$work/node-$i/code")
  [ "$code" = 0 ] || {
    echo "error: node $i (${nodes[i]}) has ended with $code: logs/distributed_training/latest_node$i.log" >&2
    [ "$status" != 0 ] || status=$code
  }
done
exit "$status"
