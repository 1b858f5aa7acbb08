#!/usr/bin/env bash
# N workers on this machine that average over Hivemind, each a torchrun with its own GPUs:
#   run_training.sh N NUM_GPU PEER|auto [flags of train_fsdp.py]
# PEER is what hivemind-dht prints behind --initial_peers; with auto it is started here, and ended.
# Worker K writes worker-K.log. The workers end together: where one fails, the others are stopped.
set -euo pipefail

usage() {
    echo "error: $1" >&2
    echo "  fix: $0 N NUM_GPU PEER|auto [flags of train_fsdp.py], such as" \
        "$0 2 1 auto --path-model ../tests/models/llama-2m-fresh --fake-data --max-steps 5" \
        "--hv.local-steps 2" >&2
    exit 1
}

[ "$#" -ge 3 ] || usage "$# arguments, and N, NUM_GPU and PEER are needed"
num_workers=$1 num_gpus=$2 peer=$3
shift 3
for number in "$num_workers" "$num_gpus"; do
    [[ $number =~ ^[1-9][0-9]{0,3}$ ]] || usage "'$number' is not a number of workers or GPUs"
done
[[ $peer == auto || $peer == /*/p2p/* ]] || usage "'$peer' is neither auto nor an address with /p2p/"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dht="" workers=()

stop() {
    trap - EXIT INT TERM
    # Workers save on SIGTERM. Only processes that this script has started are ended.
    for process in "${workers[@]}"; do kill -TERM "$process" 2>/dev/null || true; done
    for process in "${workers[@]}"; do wait "$process" 2>/dev/null || true; done
    [ -z "$dht" ] || kill -TERM "$dht" 2>/dev/null || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start_dht() {
    : >dht.log # an address of an earlier one must not be read
    hivemind-dht --identity_path fixed_private_key.pem --host_maddrs /ip4/127.0.0.1/tcp/0 \
        >>dht.log 2>&1 &
    dht=$!
    disown "$dht" # so that `wait -n` below is for the workers alone
    local deadline=$((SECONDS + 60))
    until peer=$(grep -a -m 1 -oE '/ip4/127[^ ]*/p2p/[A-Za-z0-9]+' dht.log); do
        if ! kill -0 "$dht" 2>/dev/null || [ "$SECONDS" -ge "$deadline" ]; then
            echo "error: hivemind-dht has ended, or printed no address within 60 s" >&2
            echo "  fix: see dht.log; pip install 'isles[hivemind]' installs it" >&2
            exit 1
        fi
        sleep 0.2
    done
    echo "hivemind-dht: --initial_peers $peer"
}

# The GPUs of a worker, out of those that are visible here; where none is, none.
gpus_of() {
    local all mine
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"
    else
        mapfile -t all < <(seq 0 $((num_workers * num_gpus - 1)))
    fi
    mine=("${all[@]:$1 * num_gpus:num_gpus}")
    [ "${#mine[@]}" -eq "$num_gpus" ] || [ "${#all[@]}" -eq 0 ] ||
        usage "$num_workers x $num_gpus GPUs, and CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES"
    (IFS=,; echo "${mine[*]}")
}

gpus=()
for ((rank = 0; rank < num_workers; rank++)); do gpus+=("$(gpus_of "$rank")"); done
[ "$peer" != auto ] || start_dht
for ((rank = 0; rank < num_workers; rank++)); do
    CUDA_VISIBLE_DEVICES=${gpus[rank]} torchrun --standalone --nproc_per_node="$num_gpus" \
        "$here/train_fsdp.py" "$@" --hv.initial-peers "$peer" --hv.galaxy-size "$num_workers" \
        --hv.world-rank "$rank" >"worker-$rank.log" 2>&1 &
    workers+=($!)
    echo "worker $rank: pid $!, worker-$rank.log"
done

code=0
for _ in "${workers[@]}"; do
    wait -n || { code=$?; break; }
done
if [ "$code" -ne 0 ]; then
    echo "error: a worker has ended with $code, and the others are stopped" >&2
    echo "  fix: see the end of worker-*.log" >&2
fi
exit "$code"
