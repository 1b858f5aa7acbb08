#!/bin/bash
# Trains on one node or on several with torchrun: typed once on every node. README.md explains it.
set -uo pipefail

usage() {
  cat <<'END'
./cluster_train.sh [config_path] [num_nodes] [node_rank] [master_addr] [master_port]

  config_path   training configuration, YAML       (default: config/train_config.yaml)
  num_nodes     number of nodes                    (default: 1)
  node_rank     number of this node, from 0        (default: 0)
  master_addr   address of node 0                  (default: localhost)
  master_port   port on which the nodes meet       (default: 29500)

Environment variables:
  NPROC_PER_NODE  processes on this node           (default: one for each GPU; without GPUs one)
  BACKEND         nccl or gloo                     (default: nccl)
  LOG_LEVEL       INFO or DEBUG                    (default: INFO)
  CONDA_ENV       conda environment                (default: purrsight)
  TRAIN_SCRIPT    a script, or isles               (default: isles where the configuration is a run
                                                    file of isles, else train_phase2.py beside this)
  START_TIMEOUT   longest wait for the other nodes, seconds          (default: 300)

The log is logs/distributed_training/cluster_train_TIMESTAMP_nodeRANK.log; latest_nodeRANK.log is the
newest. Exit codes: 0 trained, 1 a wrong word or configuration, 2 a node that is not fit, 3 training
failed, 4 out of memory, 5 the nodes did not meet, 130 and 143 interrupted.
END
}

log=/dev/null
say() { echo "$(date '+%F %T') [$1] node ${node_rank:-0}: $2" | tee -a "$log"; }
fail() { # exit code, what, and lines that say how to mend it
  local line
  { echo "error: $2" && echo "  fix:" && for line in "${@:3}"; do echo "  - $line"; done; } |
    tee -a "$log" >&2
  exit "$1"
}

# ---- The environment -------------------------------------------------------------------------
activate() {
  local name=${CONDA_ENV:-purrsight} why=''
  if ! command -v conda >/dev/null; then
    if [ -z "${CONDA_ENV-}" ]; then
      say INFO "conda is not on PATH: going on in the environment that is active"
      return
    fi
    why="conda is not on PATH"
  else
    set +u # conda's own scripts use variables that are not set
    eval "$(conda shell.bash hook)" && conda activate "$name" || why="conda has said why"
    set -u
  fi
  [ -z "$why" ] || fail 2 "Failed to activate conda environment: $name ($(hostname): $why)" \
    "Ensure conda is in PATH" "Verify environment exists on all nodes" \
    "Use \`CONDA_ENV\` variable to specify correct environment"
}

find_python() {
  local missing
  python=$(command -v python || command -v python3) ||
    fail 2 "$(hostname): there is no python on PATH" "CONDA_ENV=NAME names an environment that has it"
  missing=$("$python" -c 'from importlib.util import find_spec
print(*(name for name in ("isles", "torch") if find_spec(name) is None))')
  [ -z "$missing" ] || fail 2 "$(hostname): $python has no package ${missing// / and no }" \
    "pip install 'isles[train]' in this environment" "CONDA_ENV=NAME names another"
}

# ---- The words -------------------------------------------------------------------------------
number() { # name, value, least, most
  [[ $2 =~ ^[0-9]{1,6}$ ]] && (("10#$2" >= $3 && "10#$2" <= $4)) ||
    fail 1 "$1 is '$2'" "give a whole number from $3 to $4" "see $0 --help"
}
one_of() { # name, value, and those that there are
  local word
  for word in "${@:3}"; do [ "$2" != "$word" ] || return 0; done
  fail 1 "$1 is '$2'" "there are: ${*:3}"
}

export BACKEND=${BACKEND:-nccl} LOG_LEVEL=${LOG_LEVEL:-INFO} START_TIMEOUT=${START_TIMEOUT:-300}
case "${1-}" in
-h | --help)
  usage
  [ "$LOG_LEVEL" != DEBUG ] || (activate && find_python && say DEBUG "the environment has $python") || :
  exit 0
  ;;
-*) fail 1 "there is no option $1" "see $0 --help" ;;
esac
[ $# -le 5 ] || fail 1 "there are $# words, and at most five are known: $*" "see $0 --help"

config_path=${1:-config/train_config.yaml} num_nodes=${2:-1} node_rank=${3:-0}
master_addr=${4:-localhost} master_port=${5:-29500}
number num_nodes "$num_nodes" 1 1024
number node_rank "$node_rank" 0 $((10#$num_nodes - 1))
number master_port "$master_port" 1 65535
number START_TIMEOUT "$START_TIMEOUT" 1 86400
[ -z "${NPROC_PER_NODE-}" ] || number NPROC_PER_NODE "$NPROC_PER_NODE" 1 1024
one_of BACKEND "$BACKEND" nccl gloo
one_of LOG_LEVEL "$LOG_LEVEL" INFO DEBUG

# ---- The log, and the rest -------------------------------------------------------------------
logs=logs/distributed_training
log=$logs/cluster_train_$(date +%Y%m%d_%H%M%S)_node$node_rank.log
mkdir -p "$logs" && : >>"$log" || {
  log=/dev/null
  fail 1 "$(pwd)/$logs cannot be written" "call it in a folder that you may write to"
}
ln -sfn "${log##*/}" "$logs/latest_node$node_rank.log"

activate
find_python
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$python" "$here/launch.py" "$config_path" "$num_nodes" "$node_rank" "$master_addr" \
  "$master_port" --log "$log"
