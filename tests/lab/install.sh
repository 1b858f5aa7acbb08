#!/bin/bash
# What the tests need of Debian or Ubuntu: for the test clusters sshd, network namespaces, nftables, rsync,
# shells, Slurm and rootless podman; for what people look at Chromium, a font, and tmux.
# Does nothing where all of it is there. Needs root to install.
set -euo pipefail
need=()
for pair in sshd:openssh-server ssh:openssh-client ip:iproute2 nft:nftables rsync:rsync \
  csh:csh fish:fish slurmctld:slurmctld slurmd:slurmd sinfo:slurm-client munged:munge faketime:faketime \
  chromium:chromium tmux:tmux podman:podman crun:crun newuidmap:uidmap; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || need+=("${pair##*:}")
done
[ -d /usr/share/fonts/opentype/inter ] || need+=(fonts-inter)
[ ${#need[@]} = 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "the tests need: ${need[*]}" >&2
  echo "  fix: sudo apt-get install ${need[*]}; or leave them out: pytest -m 'not gpu and not lab'" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends "${need[@]}" >/dev/null || {
  apt-get update >/dev/null
  apt-get install -y --no-install-recommends "${need[@]}" >/dev/null
}
