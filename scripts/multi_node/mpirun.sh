#!/usr/bin/env bash
# GPT-2 1558M on several hosts that are reached by ssh, one rank for each GPU. No batch system is needed; with Slurm take slurm.sbatch.
#   HOSTFILE=my_hosts scripts/multi_node/mpirun.sh [more options of the trainer; the last of two counts]
# Stopped, killed or crashed, start it again: it goes on from the newest checkpoint, on other numbers of hosts and GPUs too.
# Ctrl-C, SIGTERM, SIGUSR1, a closed terminal: save and stop. Ctrl-C once more: stop at once.
# The exit status is 0 only if all steps are done, and 75 if the run was stopped so: start it again.
#
# Needed: ssh from this host to all others without a password; on every host the same path to this folder, with the same program
# and MPI; data on every host under the same path; the output folder on a file system that all hosts share: every rank writes
# its own part of a checkpoint. doc/multi_node.md says more.
set -euo pipefail
for word in "$@"; do  # the first comment
    [ "$word" != --help ] || { sed -n '2,/^[^#]/{/^#SBATCH/d;s/^# \{0,1\}//p;}' "$0"; exit 0; }
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# ---- what to change; each can be given from outside: NAME=value scripts/multi_node/mpirun.sh
HOSTFILE=${HOSTFILE:-hosts.txt}           # one line for each host: NAME slots=NUMBER_OF_GPUS
PROGRAM=${PROGRAM:-./train_gpt2cu}
DATA=${DATA:-dev/data/edu_fineweb100B}    # made by: python dev/data/fineweb.py --type edu --version 100B
OUTPUT=${OUTPUT:-log/gpt2_1558M}
INTERFACE=${INTERFACE:-}                  # network interfaces between the hosts, such as eth0 or ib0,ib1; empty: MPI and NCCL choose
TIMEOUT=${TIMEOUT:-300}                   # seconds without progress after which the job reports and ends
KEEPALIVE=${KEEPALIVE:-30}                # seconds without an answer after which mpirun asks whether a host is still there; gone 15 s later
SSH=${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=3}
MPIRUN=${MPIRUN:-$(sed -n 's/^MPIRUN := //p' build/config.mk 2> /dev/null || true)}  # that of the build
previous=; for word in "$@"; do case $previous in -o|--output) OUTPUT=$word;; esac; case $word in --output=*) OUTPUT=${word#*=};; esac; previous=$word; done  # -o counts as well
options=(-e gpt2:1558M -i "$DATA/edu_fineweb_train_*.bin" -j "$DATA/edu_fineweb_val_*.bin" -o "$OUTPUT" --timeout "$TIMEOUT"
    -b 16 -t 1024 -d 1048576 -x 32000 -k cosine -l 0.0006 -u 700 -q 0.1 -c 0.1 -z 1 -v 250 -s 4000 -n 2000 -nk 3 -y 1 "$@")

# ---- surroundings of every rank
# Sums by NVLink multicast (NVLS): off in everything that dev/bench measured; where a container or a shared machine does not allow
# multicast, NCCL can fail with it at the start. 1 tries it.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
# Hosts have more interfaces than lead to other hosts (docker0, management): a wrong choice hangs at the start, until --timeout.
if [ -n "$INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE OMPI_MCA_btl_tcp_if_include=$INTERFACE PRTE_MCA_prte_if_include=$INTERFACE
fi
# mpirun asks hwloc for the machine's devices, and OpenCL drivers that contain LLVM then take SIGUSR1 away from it: ranks would not be told to save.
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS:--opencl}
export PRTE_MCA_plm_ssh_agent=$SSH OMPI_MCA_plm_rsh_agent=$SSH  # Open MPI 5 and 4
for open_mpi in PRTE OMPI; do
    export "${open_mpi}_MCA_oob_tcp_keepalive_time=$KEEPALIVE" "${open_mpi}_MCA_oob_tcp_keepalive_intvl=5" "${open_mpi}_MCA_oob_tcp_keepalive_probes=3"
done
# As root Open MPI starts nothing without both; in a container there is often no other user.
if [ "$(id -u)" = 0 ] && [ "${OMPI_ALLOW_RUN_AS_ROOT:-}${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-}" != 11 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    echo "note: mpirun may run as root here: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" >&2
fi
pass=()
for name in $(compgen -e | grep -E '^(NCCL|UCX|OMP)_' || true); do pass+=(-x "$name"); done  # ssh does not carry them

[ -f "$HOSTFILE" ] || { printf "error: there is no host file '%s'\n  hint: write one, a line for each host: NAME slots=NUMBER_OF_GPUS; or HOSTFILE=FILE %s\n" "$HOSTFILE" "$0" >&2; exit 1; }
command -v "${MPIRUN:-mpirun}" > /dev/null || { printf "error: there is no %s to start ranks with\n  hint: make mpi, then make %s again; or MPIRUN=PATH %s\n" "${MPIRUN:-mpirun}" "${PROGRAM##*/}" "$0" >&2; exit 1; }
ranks=$(awk '!/^[[:space:]]*(#|$)/ { n = 1; for (i = 2; i <= NF; i++) if (sub(/^slots=/, "", $i)) n = $i; sum += n } END { print sum + 0 }' "$HOSTFILE")

log=$OUTPUT/main.jsonl
before=$(cksum "$log" 2> /dev/null || true)
# In a session of its own: Ctrl-C and timeout(1) signal our whole process group, and mpirun would end its ranks at once, saved or not.
$(command -v setsid || true) "${MPIRUN:-mpirun}" --hostfile "$HOSTFILE" -np "$ranks" "${pass[@]}" "$PROGRAM" "${options[@]}" &
launcher=$!
trap 'kill -USR1 $launcher || true' USR1 TERM HUP  # mpirun passes it on to the ranks, which save and stop
trap 'kill -${second:-USR1} $launcher || true; second=TERM' INT
while true; do
    status=0
    wait $launcher || status=$?
    kill -0 $launcher 2> /dev/null || break  # still there: a signal for this script ended the wait
done
# Open MPI 5 ends with status 0 when it has lost a host. The log says whether the run came to its end.
last=
[ "$(cksum "$log" 2> /dev/null || true)" = "$before" ] || last=$(tail -n 1 "$log")  # else it is an earlier run's
[[ $status -ne 0 || $last == '{"event":"end"'* ]] || { echo "error: the run did not come to its end; see above" >&2; status=1; }
exit "$status"
