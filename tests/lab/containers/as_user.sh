#!/bin/bash
# Run a command as a user who has rootless podman: as_user.sh STATE PYTHON REPOSITORY COMMAND...
# In a mount namespace of its own, with what a desktop has and a machine for tests may not: cgroups of
# version 2 alone, /dev/mqueue, numbers for the user's containers, and a Python that the user may read.
# Needs root, and podman, crun and uidmap. STATE holds the user's home and images.
set -euo pipefail
if [ "${1-}" != --inside ]; then exec unshare --mount bash "$0" --inside "$@"; fi
state=$2 python=$3 repository=$4 uid=64042
shift 4
mount --make-rprivate /
umount -R /sys/fs/cgroup 2>/dev/null || umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
[ -e /dev/mqueue ] || mkdir /dev/mqueue
mountpoint -q /dev/mqueue || mount -t mqueue none /dev/mqueue
mkdir -p "$state/etc" "$state/home" "$state/run" "$state/tmp" "$state/shm"
chown $uid:$uid "$state/home" "$state/run" "$state/tmp" "$state/shm" && chmod 700 "$state/run"
mount --bind "$state/shm" /dev/shm  # podman's locks would stay
for file in passwd subuid subgid; do cat "/etc/$file" >"$state/etc/$file" 2>/dev/null || : >"$state/etc/$file"; done
echo "boxer:x:$uid:$uid::$state/home:/bin/bash" >>"$state/etc/passwd"
echo "boxer:2000000:65536" | tee -a "$state/etc/subuid" >>"$state/etc/subgid"
for file in passwd subuid subgid; do
  [ -e "/etc/$file" ] || touch "/etc/$file"
  mount --bind "$state/etc/$file" "/etc/$file"
done
# A Python, and a repository, below a home that is closed to others.
kept=()
for folder in "$(dirname "$(dirname "$(readlink -f "$python")")")" "$(dirname "$(dirname "$python")")" "$repository"; do
  if [[ $folder == /root/* ]]; then kept+=("$folder"); fi
done
for index in "${!kept[@]}"; do
  mkdir -p "$state/kept/$index"
  mount --bind "${kept[$index]}" "$state/kept/$index"
done
if ((${#kept[@]})); then mount -t tmpfs -o mode=755 none /root; fi
for index in "${!kept[@]}"; do
  mkdir -p "${kept[$index]}"
  mount --bind "$state/kept/$index" "${kept[$index]}"
done
export HOME=$state/home TMPDIR=$state/tmp USER=boxer LOGNAME=boxer XDG_RUNTIME_DIR=$state/run
unset XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME DBUS_SESSION_BUS_ADDRESS
exec setpriv --reuid=$uid --regid=$uid --clear-groups "$@"
