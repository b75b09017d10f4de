# What the run_*.sh scripts share; they source it. Each of them:
#   scripts/run_x.sh [more options of the trainer; the last of two counts]
#   GPUS=4 scripts/run_x.sh       on so many GPUs (default: all); the tokens of a step stay the same, accumulation follows
#   DRY_RUN=1 scripts/run_x.sh    prints the command and what it will take
#   PROGRAM=./x scripts/run_x.sh  another build of the trainer (default: ./train_gpt2cu, which is made where it is missing)
# Stopped, killed or crashed, start the same script again: it goes on from the newest checkpoint, on another number of GPUs too.
# Ctrl-C, SIGTERM or a closed terminal saves a checkpoint first; a second Ctrl-C does not wait for it.
# A crash is tried again at once, until two in a row have brought no new checkpoint. An error before the run has begun would come again: it ends the script.
# Exit status: 0 when all steps are done; 128 + the signal that stopped this script, or 75 if it stopped the trainer
# alone: start it again; else 1.
set -euo pipefail
first_comment() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"; }
for word in "$@"; do
    [ "$word" = --help ] || continue
    first_comment "$0"
    if [[ ${0##*/} == pyrun* ]]; then echo "options: python train_gpt2.py --help"
    else first_comment "${BASH_SOURCE[0]}"; echo "options of the trainer: ./train_gpt2 --help"; fi
    exit 0
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3

# Sums by NVLink multicast (NVLS) were off in everything that dev/bench measured, and can fail at the start inside of a container. 1 tries them.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# What mpirun needs. It asks hwloc for the machine's devices, and OpenCL drivers that contain LLVM then take SIGUSR1 away from it: ranks would
# not be told to save. And Open MPI 4 starts nothing, not even ranks on this host, where there is no ssh.
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS:--opencl}
command -v ssh > /dev/null || command -v rsh > /dev/null || export OMPI_MCA_plm_rsh_agent=${OMPI_MCA_plm_rsh_agent:-false}

fail() { printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2; exit 1; }
quoted() { printf '%q' "$1"; }  # a path as a command has it
make_folder() { mkdir -p "$1" 2> /dev/null || fail "cannot make the folder '$1'" "name one that you may write to: -o FOLDER"; }

# need_data OPTIONS...: the training data is there, or $make_data makes it: now if $small is set, else after a word from the user
need_data() {
    local pattern
    pattern=$(last_value '' i train-data "$@")
    compgen -G "$pattern" > /dev/null && return
    [[ $pattern != *:* ]] || return 0  # a mixture: the trainer says which of its sets is missing
    [ -n "${small:-}" ] || fail "no file matches '$pattern'" "make it with: $make_data"
    "$python" ${make_data#python }
}

# last_value DEFAULT LETTER LONG OPTIONS...: the value of the last -LETTER or --LONG among the options
last_value() {
    local value=$1 letter=$2 long=$3; shift 3
    while [ $# -gt 0 ]; do
        case $1 in
            -"$letter"|--"$long") value=${2:-}; shift;;
            --"$long"=*) value=${1#*=};;
            -*=*) ;;
            -*) [[ $# -eq 1 || $2 == -[!0-9]* ]] || shift;;  # one that is 0 or 1 may stand alone
        esac
        shift
    done
    printf '%s\n' "$value"
}

# Sets GPUS: as given, or all that are there.
choose_gpus() {
    GPUS=${GPUS:-$(count_gpus)}
    [ "$GPUS" != 0 ] || [ -z "${DRY_RUN:-}" ] || GPUS=1
    [[ $GPUS =~ ^[1-9][0-9]*$ ]] || fail "no GPU was found, or GPUS='$GPUS' is not a number" "nvidia-smi must list GPUs; GPUS=N says how many to use"
}
count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then awk -F, '{ print NF }' <<< "$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi > /dev/null; then nvidia-smi -L 2> /dev/null | grep -c '^GPU ' || true
    else echo 0; fi
}

# print_plan TOKENS: what a run takes at the speeds in $measured, "GPUs:tokens/s ..."; $where says what they were measured on
print_plan() {
    local pair speed=0
    for pair in ${measured:-}; do [ "${pair%:*}" != "$GPUS" ] || speed=${pair#*:}; done
    awk -v tokens="$1" -v speed="$speed" -v gpus="$GPUS" -v where="${where:-}" 'BEGIN {
        printf tokens < 1e8 ? "tokens    %.1fM\n" : "tokens    %.2fB\n", tokens / (tokens < 1e8 ? 1e6 : 1e9)
        hours = speed ? tokens / speed / 3600 : 0
        if (speed) printf "time      %.1f hours%s at %.1fk tokens/s (%s)\n", hours, (hours > 48 ? sprintf(" = %.1f days", hours / 24) : ""), speed / 1e3, where
        else printf "time      not measured on %s GPU%s\n", gpus, (gpus > 1 ? "s" : "")
    }'
}

newest_checkpoint() { ls "$out" 2> /dev/null | grep -E '^step_[0-9]+$' | sort | tail -1 || true; }

child= stopped=
# stop STATUS: the trainer saves and ends on SIGUSR1, which mpirun passes on. The second time it ends at once: mpirun ends its ranks on SIGINT,
# and the trainer, as a background process of this script, ignores that.
stop() {
    local signal=USR1
    [ -z "$stopped" ] || { signal=INT; [[ $launched == *mpirun ]] || signal=KILL; }
    stopped=$1
    [ -z "$child" ] || kill -"$signal" "$child" 2> /dev/null || true
}
say_stopped() {
    local newest
    newest=$(newest_checkpoint)
    if [ -n "$newest" ]; then echo "stopped after step $((10#${newest#step_})); run the same command again"
    else echo "stopped before there was a checkpoint; the same command begins again"; fi
}
wait_for_child() {
    local status
    while true; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2> /dev/null || return "$status"  # still there: a signal for us ended the wait
    done
}

# Two trainers must not write to one folder. The trainer inherits the lock: it holds even when this script is killed and it is not.
lock() {
    command -v flock > /dev/null || return 0
    make_folder "$out"
    exec 9> "$out/.lock"
    flock -n 9 || fail "another run writes to '$out'" "end it first (fuser $(quoted "$out/.lock") names its processes), or give another -o FOLDER"
}

# keep_going COMMAND...: runs it until it ends well, or fails twice without a new checkpoint in $out
keep_going() {
    local before begun status=0 failures=0
    launched=$1
    lock
    begun=$(wc -c 2> /dev/null < "$out/main.jsonl" || true)
    trap 'stop 129' HUP
    trap 'stop 130' INT
    trap 'stop 143' TERM USR1
    before=$(newest_checkpoint)
    while true; do
        $(command -v setsid || true) "$@" & child=$!  # Ctrl-C and timeout(1) signal our whole process group, and mpirun would end its ranks at once, saved or not
        status=0
        wait_for_child || status=$?
        child=
        [ -z "$stopped" ] || { say_stopped; exit "$stopped"; }
        [ "$status" -ne 0 ] || break
        [ "$status" -ne 75 ] || { say_stopped; exit 75; }  # a signal to the trainer stopped it; it has saved
        # no signal has killed it, and nothing came into its log: an error of the options, the data or the machine
        [ "$status" -ge 128 ] || [ "$(wc -c 2> /dev/null < "$out/main.jsonl" || true)" != "$begun" ] || exit 1
        failures=$((failures + 1))
        [ "$(newest_checkpoint)" = "$before" ] || failures=0
        before=$(newest_checkpoint)
        [ "$failures" -lt 2 ] || fail "the trainer failed twice without a new checkpoint (status $status)" "its last message is above; start this script again to go on from ${before:-the beginning}"
        echo "the trainer ended with status $status; going on from ${before:-the beginning}" >&2
        sleep "${RETRY_SECONDS:-5}" & wait $! || true
        [ -z "$stopped" ] || { say_stopped; exit "$stopped"; }
    done
    trap - HUP INT TERM USR1
}

# may_start_ranks MPIRUN: it is there, and as root, which a container's user often is, it is told that this is meant
may_start_ranks() {
    command -v "$1" > /dev/null || fail "there is no $1 to start $GPUS ranks with" "make mpi, then make train_gpt2cu again; or GPUS=1"
    [ "$(id -u)" = 0 ] && [ "${OMPI_ALLOW_RUN_AS_ROOT:-}${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-}" != 11 ] || return 0
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    echo "note: mpirun may run as root here: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" >&2
}

# train gpu|cpu OPTIONS...: the whole of it, with PROGRAM; gpu: on GPUS GPUs, by mpirun if these are several
train() {
    local kind=$1 mpirun= steps batch; shift
    local program=${PROGRAM:-./train_gpt2$([ "$kind" = cpu ] || echo cu)}
    local -a command=("$program" -y 1 "$@")
    if [ "$kind" = gpu ]; then
        choose_gpus
        [ "$GPUS" = 1 ] || { mpirun=$(sed -n 's/^MPIRUN := //p' build/config.mk 2> /dev/null || true); command=("${mpirun:=mpirun}" -np "$GPUS" "${command[@]}"); }
        steps=$(last_value '' x max-steps "$@") batch=$(last_value '' d total-batch "$@")
        [[ ! $steps:$batch =~ ^[0-9]+:[0-9]+$ ]] || print_plan $((steps * batch))
    fi
    out=$(last_value '' o output "$@")
    printf '%q ' "${command[@]}"; echo
    [ -z "${DRY_RUN:-}" ] || return 0
    [ -z "$mpirun" ] || may_start_ranks "$mpirun"
    need_data "$@"
    [ -x "$program" ] || make "${program#./}"
    keep_going "${command[@]}"
    "$python" dev/plot.py "$out" -o "$out/loss.png" ${references:+--reference "$references"} || true
}
