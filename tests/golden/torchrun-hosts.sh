#!/bin/bash
# tiny: 4 ranks on 2 nodes under torchrun
# written by isles VERSION; it does not need the command isles to run
# on every node, within a few minutes of each other: bash THIS_FILE NODE

cd /home/me/train || exit 1
source venv/bin/activate || exit 1
# The interface with the address of node 0, or on the route to it; gloo would use the interface of
# the host's own name, which may be its loopback.
master=$(getent ahostsv4 192.168.1.100 | awk '{ print $1; exit }')
ip4() { PATH=$PATH:/usr/sbin:/sbin ip -4 -o "$@"; }
interface=$(ip4 addr show | awk -v a="$master/" 'index($4, a) == 1 { print $2; exit }')
[ -n "$interface" ] || interface=$(ip4 route get "$master" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
[ -z "$interface" ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
case "${1-}" in
0) # me@192.168.1.100
  exec torchrun \
    --nnodes=2 --nproc_per_node=3 --node_rank=0 \
    --rdzv_backend=static --master_addr=192.168.1.100 --master_port="${MASTER_PORT:-29500}" \
    --rdzv_conf=timeout=900 --max_restarts=0 \
    -m isles.train ./run.yaml training.max_steps=9
  ;;
1) # me@laptop
  exec torchrun \
    --nnodes=2 --nproc_per_node=1 --node_rank=1 \
    --rdzv_backend=static --master_addr=192.168.1.100 --master_port="${MASTER_PORT:-29500}" \
    --rdzv_conf=timeout=900 --max_restarts=0 \
    -m isles.train ./run.yaml training.max_steps=9
  ;;
*)
  echo "usage: bash $0 NODE, with NODE from 0 to 1" >&2
  exit 1
  ;;
esac
