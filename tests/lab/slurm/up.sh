#!/bin/bash
# Real Slurm (Debian slurm-wlm 22.05 + munge) with no systemd.
#   up.sh [N=3]            one machine, N slurmd (nodes n1..nN) on 127.0.0.1 ports 17001.. (no netns needed)
#   up.sh netlab           slurmctld in host "ctl" and one slurmd in every other netlab host (run netlab/up.sh first)
# Everything lives in $ST (conf, keys, spool, logs, pids). Idempotent; ends only pids it recorded.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); ST=${SLURM_STATE:-${TMPDIR:-/tmp}/isles-lab/slurm}; MODE=${1:-3}
ON=$HERE/../net/on.sh
for c in slurmctld slurmd sinfo munged; do command -v $c >/dev/null || { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null; break; }; done
"$HERE/down.sh" >/dev/null 2>&1 || true
mkdir -p "$ST"/{ctld,log,munge,jobs}; chmod 755 "$ST"; : > "$ST/pids"; chmod 700 "$ST/munge"
[ -f "$ST/munge/key" ] || { dd if=/dev/urandom of="$ST/munge/key" bs=1024 count=1 status=none; chmod 400 "$ST/munge/key"; }
NODES=(); EXTRA=""; RUN=${TMPDIR:-/tmp}/isles-lab/run; 
if [ "$MODE" = netlab ]; then
  for d in "${LAB_STATE:-${TMPDIR:-/tmp}/isles-lab/netlab}"/hosts/*/; do h=$(basename $d); [ $h = ctl ] || NODES+=($h); done
  CTL=ctl CADDR=10.77.1.100; addr(){ awk -v h=$1 '$2==h{print $1}' "${LAB_STATE:-${TMPDIR:-/tmp}/isles-lab/netlab}/hosts_file"; }; port(){ echo 6818; }
else
  for i in $(seq 1 $MODE); do NODES+=(n$i); done; CTL=$(hostname -s) CADDR=127.0.0.1; addr(){ echo 127.0.0.1; }; port(){ echo $((${PORT0:-17000}+${1#n})); }
fi
CPUS=${CPUS:-4} MEM=${MEM:-4000} GPUS=${GPUS:-4}
{ cat <<X
ClusterName=lab
SlurmctldHost=$CTL($CADDR)
SlurmctldPort=${CTLPORT:-16817}
AuthType=auth/munge
AuthInfo=socket=$ST/run/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$ST/ctld
SlurmdSpoolDir=$ST/spool.%n
SlurmctldPidFile=$ST/slurmctld.pid
SlurmdPidFile=$ST/slurmd.%n.pid
SlurmctldLogFile=$ST/log/slurmctld.log
SlurmdLogFile=$ST/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=200
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmctldTimeout=10
SlurmdTimeout=20
InactiveLimit=0
KillWait=20
MinJobAge=600
MaxJobCount=1000
JobRequeue=1
PropagateResourceLimits=NONE
OverTimeLimit=0
${SLURM_ACCT:-AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$ST/jobcomp.txt}
X
 for n in "${NODES[@]}"; do echo "NodeName=$n NodeHostname=$([ "$MODE" = netlab ] && echo $n || hostname -s) NodeAddr=$(addr $n) Port=$(port $n) CPUs=$CPUS RealMemory=$MEM Gres=gpu:fake:$GPUS State=UNKNOWN"; done
 L=$(IFS=,; echo "${NODES[*]}")
 echo "PartitionName=main Nodes=$L Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=300"
 echo "PartitionName=high Nodes=$L MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF"
 echo "PreemptType=preempt/partition_prio"; echo "PreemptMode=REQUEUE"
} > "$ST/slurm.conf"
for n in "${NODES[@]}"; do echo "NodeName=$n Name=gpu Type=fake Flags=nvidia_gpu_env File=$ST/dev/nvidia[0-$((GPUS-1))]"; done > "$ST/gres.conf"
mkdir -p "$ST/dev"; for i in $(seq 0 $((GPUS-1))); do [ -e "$ST/dev/nvidia$i" ] || mknod "$ST/dev/nvidia$i" c 1 3; done   # /dev/null clones: Count= without File= ends in state "inval"; plain files give GRES but no CUDA_VISIBLE_DEVICES
echo "CgroupPlugin=cgroup/v1" > "$ST/cgroup.conf"; : > "$ST/jobcomp.txt"
export SLURM_CONF=$ST/slurm.conf
if [ "${ACCT:-}" = dbd ]; then     # real sacct: slurmdbd + a private MariaDB (single-machine mode only)
  command -v mariadbd >/dev/null && [ -e /usr/lib/*/slurm-wlm/accounting_storage_mysql.so ] || DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurmdbd mariadb-server slurm-wlm-mysql-plugin >/dev/null
  sed -i -e 's/^AccountingStorageType=.*/AccountingStorageType=accounting_storage\/slurmdbd\nAccountingStorageHost=127.0.0.1\nAccountingStoragePort='${DBDPORT:-16819}'\nAccountingStorageUser=root\nAccountingStoragePass='"${ST//\//\\/}"'\/run\/munge.socket/' -e 's/jobacct_gather\/none/jobacct_gather\/linux/' "$ST/slurm.conf"
  mariadb-install-db --no-defaults --user=root --datadir="$ST/mysql" --auth-root-authentication-method=normal --skip-test-db >/dev/null 2>&1
  setsid mariadbd --no-defaults --user=root --datadir="$ST/mysql" --socket="$ST/mysql.sock" --bind-address=127.0.0.1 --port=${MYPORT:-13306} --pid-file="$ST/mysqld.pid" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 >"$ST/log/mariadb.log" 2>&1 </dev/null &
  for _ in $(seq 3000); do mariadb --no-defaults -S "$ST/mysql.sock" -e 'select 1' >/dev/null 2>&1 && break; sleep .1; done
  echo "mariadbd $(cat "$ST/mysqld.pid")" >> "$ST/pids"
  mariadb --no-defaults -S "$ST/mysql.sock" -e "create database slurm_acct; create user slurm@'127.0.0.1' identified by 'lab'; grant all on slurm_acct.* to slurm@'127.0.0.1';"
  printf 'DbdHost=localhost\nDbdAddr=127.0.0.1\nDbdPort=%s\nAuthType=auth/munge\nAuthInfo=socket=%s\nSlurmUser=root\nPidFile=%s\nLogFile=%s\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort=%s\nStorageUser=slurm\nStoragePass=lab\nStorageLoc=slurm_acct\n' ${DBDPORT:-16819} $ST/run/munge.socket $ST/slurmdbd.pid $ST/log/slurmdbd.log ${MYPORT:-13306} > "$ST/slurmdbd.conf"; chmod 600 "$ST/slurmdbd.conf"
fi
munge_up(){ # $1 = prefix command
  $1 mkdir -p "$ST/run"; $1 chmod 755 "$ST/run"
  $1 munged --force --key-file="$ST/munge/key" --socket="$ST/run/munge.socket" --pid-file="$ST/run/munged.pid" --log-file="$ST/munge/log.${2:-}" --seed-file="$ST/munge/seed.${2:-}"; }
if [ "$MODE" = netlab ]; then
  # hosts have a private copy-on-write root: bind the state dir in (ctl, config and job dir = the shared file system), but keep run/ private
  for h in ctl "${NODES[@]}"; do
    p=$(cat ${LAB_STATE:-${TMPDIR:-/tmp}/isles-lab/netlab}/hosts/$h/pid1)
    nsenter -t $p -m -r mkdir -p "$ST"
    R=${LAB_STATE:-${TMPDIR:-/tmp}/isles-lab/netlab}/hosts/$h/mnt/root
    nsenter -t $p -m mount --bind "$ST" "$R$ST"; nsenter -t $p -m sh -c "mkdir -p $ST/run && mount -t tmpfs tmpfs $R$ST/run"
    munge_up "$ON $h" $h
  done
  LAB_ENV="SLURM_CONF=$SLURM_CONF" $ON ctl slurmctld
  for n in "${NODES[@]}"; do LAB_ENV="SLURM_CONF=$SLURM_CONF" $ON $n slurmd -N $n; done
  S="env LAB_ENV=SLURM_CONF=$SLURM_CONF $ON ctl"
else
  munge_up "" single; sleep .3; echo "munged $(cat "$ST/run/munged.pid")" >> "$ST/pids"
  if [ "${ACCT:-}" = dbd ]; then
    slurmdbd; for _ in $(seq 3000); do (exec 3<>/dev/tcp/127.0.0.1/${DBDPORT:-16819}) 2>/dev/null && break; sleep .1; done; echo "slurmdbd $(cat "$ST/slurmdbd.pid")" >> "$ST/pids"
    sacctmgr -i add cluster lab >/dev/null 2>&1 || true
  fi
  slurmctld; for n in "${NODES[@]}"; do slurmd -N $n; done
  for _ in $(seq 3000); do [ -f "$ST/slurmctld.pid" ] && break; sleep .1; done; echo "slurmctld $(cat "$ST/slurmctld.pid")" >> "$ST/pids"
  for n in "${NODES[@]}"; do for _ in $(seq 3000); do [ -f "$ST/slurmd.$n.pid" ] && break; sleep .1; done; echo "slurmd $(cat "$ST/slurmd.$n.pid")" >> "$ST/pids"; done
  S=""
fi
ok=0; for _ in $(seq 3000); do [ "$($S sinfo -h -N -o '%T' -p main 2>/dev/null | grep -c '^idle$')" = "${#NODES[@]}" ] && { ok=1; break; }; sleep .2; done
$S sinfo -N -l -p main || true
echo "export SLURM_CONF=$ST/slurm.conf"; [ $ok = 1 ] || { echo "nodes not idle; logs in $ST/log" >&2; for f in "$ST"/log/*.log; do echo "== $f"; tail -n 5 "$f"; done >&2; exit 1; }
