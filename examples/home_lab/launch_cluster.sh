#!/bin/bash
# Check all machines, then start train_distributed.py's training on them, from this one.
#   ./launch_cluster.sh                                   the three of the guide, as this user
#   ./launch_cluster.sh user@192.168.1.100 user@HOST …    these; the first one leads
#   ./launch_cluster.sh … -- training.num_train_epochs=1  and values, and options of isles train
# Ctrl+C saves and stops; closing the terminal leaves the training going.
set -euo pipefail
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do hosts+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#hosts[@]} -gt 0 ] || hosts=(192.168.1.100 192.168.1.101 192.168.1.102)
train=$(dirname "$0")/train_distributed.py

settings=()
for word in "$@"; do
  [[ $word == -* || $word != *=* ]] || settings+=("$word")
done

python "$train" --check "${settings[@]}" --hosts "${hosts[@]}" || {
  code=$?
  echo "not started: mend what is named above, then again" >&2
  exit $code
}
exec python "$train" "$@" --hosts "${hosts[@]}"
