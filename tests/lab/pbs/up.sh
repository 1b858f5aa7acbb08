#!/bin/bash
# Install the PBS stand-in into the netlab hosts (run netlab/up.sh first): commands in /usr/local/bin of every host's private root.
#   up.sh [openpbs|torque] [nodes...]     then: netlab/on.sh ctl qsub ...        (nothing to stop: dies with netlab/down.sh)
HERE=$(cd "$(dirname "$0")" && pwd); ON=$HERE/../net/on.sh; L=${LAB_STATE:-${TMPDIR:-/tmp}/isles-lab/netlab}; FL=${1:-openpbs}
shift || true; N="$*"; [ -n "$N" ] || N=$(for d in "$L"/hosts/*/; do h=$(basename $d); [ $h = ctl ] || printf '%s ' $h; done)
rm -rf "${LAB_SHARED:-${TMPDIR:-/tmp}/isles-lab/shared}/.pbs"; mkdir -p "${LAB_SHARED:-${TMPDIR:-/tmp}/isles-lab/shared}/.pbs"
for h in ctl $N; do for c in qsub qstat qdel qrerun pbsnodes pbsdsh pbs_tmrsh; do
  [ $h != ctl ] && case $c in pbsdsh|pbs_tmrsh) ;; *) continue;; esac
  printf '#!/bin/sh\nexport PBS_NODES="%s" PBS_FLAVOR=%s\nexec /usr/bin/python3 %s %s "$@"\n' "$N" "$FL" "$HERE/pbs_standin.py" $c | $ON $h sh -c "cat > /usr/local/bin/$c; chmod 755 /usr/local/bin/$c"; done; done
echo "PBS stand-in ($FL) on: $N"
