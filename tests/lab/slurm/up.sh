#!/bin/bash
# A real Slurm (Debian's, with munge) over the pretend hosts: slurmctld in ctl, a slurmd in every other host.
# Everything lives in SLURM_STATE: conf, keys, spool, logs. env: LAB_STATE (hosts that are up), SLURM_STATE.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd) ST=$SLURM_STATE; ON="$HERE/../net/on.sh"
CPUS=${CPUS:-4} MEM=${MEM:-4000}
mkdir -p "$ST"/{ctld,log,munge,dev}; chmod 755 "$ST"; chmod 700 "$ST/munge"
dd if=/dev/urandom of="$ST/munge/key" bs=1024 count=1 status=none; chmod 400 "$ST/munge/key"
mknod "$ST/dev/nvidia0" c 1 3   # a clone of /dev/null: Count= without File= ends in state "inval"
addr(){ awk -v h=$1 '$2==h{print $1}' "$LAB_STATE/hosts_file"; }
NODES=(); for d in "$LAB_STATE"/hosts/*/; do h=$(basename $d); [ $h = ctl ] || NODES+=($h); done
{ cat <<X
ClusterName=lab
SlurmctldHost=ctl($(addr ctl))
SlurmctldPort=16817
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
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$ST/jobcomp.txt
X
  L=$(IFS=,; echo "${NODES[*]}")
  for n in "${NODES[@]}"; do
    echo "NodeName=$n NodeHostname=$n NodeAddr=$(addr $n) Port=6818 CPUs=$CPUS RealMemory=$MEM Gres=gpu:fake:1 State=UNKNOWN"
    echo "NodeName=$n Name=gpu Type=fake Flags=nvidia_gpu_env File=$ST/dev/nvidia0" >> "$ST/gres.conf"
  done
  echo "PartitionName=main Nodes=$L Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=300"
  echo "PartitionName=high Nodes=$L MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF"
  echo "PreemptType=preempt/partition_prio"; echo "PreemptMode=REQUEUE"
} > "$ST/slurm.conf"
echo "CgroupPlugin=cgroup/v1" > "$ST/cgroup.conf"; : > "$ST/jobcomp.txt"
export LAB_ENV=SLURM_CONF=$ST/slurm.conf
# A host has a copy-on-write root of its own: the folder is bound in (the shared file system), but its run/ stays the host's.
for h in ctl "${NODES[@]}"; do
  p=$(cat "$LAB_STATE/hosts/$h/pid1") R=$LAB_STATE/hosts/$h/mnt/root
  nsenter -t $p -m -r mkdir -p "$ST"
  nsenter -t $p -m mount --bind "$ST" "$R$ST"
  nsenter -t $p -m sh -c "mkdir -p $ST/run && mount -t tmpfs tmpfs $R$ST/run"
  "$ON" $h mkdir -p "$ST/run"; "$ON" $h chmod 755 "$ST/run"
  "$ON" $h munged --force --key-file="$ST/munge/key" --socket="$ST/run/munge.socket" --pid-file="$ST/run/munged.pid" \
    --log-file="$ST/munge/log.$h" --seed-file="$ST/munge/seed.$h"
done
"$ON" ctl slurmctld
for n in "${NODES[@]}"; do "$ON" $n slurmd -N $n; done
for _ in $(seq 3000); do
  [ "$("$ON" ctl sinfo -h -N -o '%T' -p main 2>/dev/null | grep -c '^idle$')" = "${#NODES[@]}" ] && exit
  sleep .2
done
echo "nodes not idle:" >&2; for f in "$ST"/log/*.log; do echo "== $f"; tail -n 5 "$f"; done >&2; exit 1
