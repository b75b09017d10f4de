#!/usr/bin/env bash
# make demo, make test and make test-all on a bare Debian or Ubuntu: one that has what README.md installs with apt, and
# nothing else.
#
#   dev/test/bare_machine.sh [RELEASE [FOLDER [COMMAND ...]]]
#
# RELEASE (trixie) is installed into FOLDER (build/bare-RELEASE, 10 GB after make test) by debootstrap. A user without
# rights then clones this checkout's last commit and runs each COMMAND ('make demo' 'make test' 'make test-all') there. A
# second call goes on with what is in FOLDER. Needs root, debootstrap, a mirror and a package index.
#
#   dev/test/bare_machine.sh RELEASE FOLDER image
#
# runs what dev/containers/Dockerfile and llm.def run, as root, in a system that has nothing else. make toolkit stands in
# for the image that they begin with. ARCHS (80): what to compile for; the images are for more.
#
#   dev/test/bare_machine.sh RELEASE FOLDER install
#
# installs the package by pip into an environment of its own, from a clone that is then removed, and uses the command
# and the package elsewhere, beside files that have the names of its modules.
#
# From the caller's environment: MIRROR and COMPONENTS for debootstrap; proxies; PIP_* and certificates' files, which are
# copied. Not taken: pip's configuration and folders of packages.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
release=${1:-trixie}
folder=$(realpath -m "${2:-$checkout/build/bare-$release}")
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- 'make demo' 'make test' 'make test-all'

die() {
    printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || die 'a system can only be installed by root' 'sudo -E dev/test/bare_machine.sh'
command -v debootstrap >/dev/null || die 'no debootstrap' 'Debian, Ubuntu: apt install debootstrap'
# What is mounted or left running ends with this script.
[ -n "${BARE_MACHINE:-}" ] || BARE_MACHINE=1 exec unshare --mount --pid --fork --kill-child "$0" "$release" "$folder" "$@"

packages=$(sed -n 's/^sudo apt install \([^#]*\).*/\1/p' "$checkout/README.md")
[ -n "$packages" ] || die 'README.md has no line "sudo apt install ..."' 'it names what a bare machine lacks'
if [ ! -e "$folder/etc/debian_version" ] || [ -e "$folder/debootstrap" ]; then
    debootstrap --variant=minbase --components="${COMPONENTS:-main}" "$release" "$folder" ${MIRROR:+"$MIRROR"}
fi
mount -t proc proc "$folder/proc"
mount --rbind /sys "$folder/sys"
mount --rbind /dev "$folder/dev"
cp -L /etc/resolv.conf /etc/hosts "$folder/etc/"

environment=(LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null)
for name in $(compgen -e | grep -E '^PIP_|^(SSL_CERT_FILE|REQUESTS_CA_BUNDLE)$|^(https?|no|all)_proxy$' -i); do
    case $name in PIP_CONFIG_FILE | PIP_FIND_LINKS | PIP_EXTRA_INDEX_URL | PIP_NO_INDEX) continue ;; esac
    value=${!name}
    if [ -f "$value" ]; then  # under a name that no package writes
        install -D -m 644 "$value" "$folder/opt/caller/$name"
        value=/opt/caller/$name
    fi
    environment+=("$name=$value")
done
as_root() { chroot "$folder" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "${environment[@]}" "$@"; }
as_user() {
    chroot --userspec=someone:someone "$folder" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/home/someone \
        "${environment[@]}" bash -c "cd ~/llm.cu && $1"
}
install='set -e
    rm -rf ~/installed ~/from && python3 -m venv ~/installed && git clone --quiet . ~/from
    ~/installed/bin/pip install --quiet ~/from && rm -rf ~/from
    cd "$(mktemp -d)" && mkdir dev && echo "raise SystemExit(1)" | tee program.py > places.py
    PATH=$HOME/installed/bin:$PATH
    llmc --help && llmc doctor
    llmc prepare --python-stdlib --tokenizer bytes --output data/python
    llmc train -e d2,channels=64,vocab=256,seq=64 -i "data/python/*_train_*.bin" -b 8 -t 64 -x 50 -v 50 -s 0 -o log/a
    llmc generate log/a --prompt import -g 40
    llmc watch log/a --once
    pip install --quiet matplotlib && llmc plot log/a -o loss.png && ls -l loss.png
    python -c "import llmc; t = llmc.Trainer(\"d2\"); print(llmc.__file__, t); t.close()"'

# A checkout is cloned without its files, which `git reset` brings.
make_image() {
    local clone=$folder/llm.cu line library
    [ -e "$clone/.git" ] || git -c safe.directory='*' clone --quiet --no-checkout --no-hardlinks "$checkout" "$clone"
    git -c safe.directory='*' -C "$clone" fetch --quiet "$checkout" HEAD
    git -c safe.directory='*' -C "$clone" update-ref --no-deref HEAD FETCH_HEAD
    environment+=(HOME=/root)
    while IFS= read -r line; do
        [[ $line != *train_gpt2cu* ]] || as_root bash -c 'cd /llm.cu && make toolkit' </dev/null
        line=${line/ARCHS=\"*\"/ARCHS=\"${ARCHS:-80}\"}
        printf '\n== %s: %s\n' "$release" "$line"
        as_root bash -c "cd /llm.cu && $line" </dev/null
    done < <(sed -n 's/^RUN //p' "$checkout/dev/containers/Dockerfile")
    as_root /llm.cu/train_gpt2cu --help >/dev/null
    as_root /llm.cu/.venv/bin/llmc --help >/dev/null
    for library in libmpi libcublasLt libnccl; do
        as_root ldd /llm.cu/train_gpt2cu | grep "$library" || die "train_gpt2cu was built without $library" 'see above'
    done
}
if [ "$1" = image ]; then
    make_image
    exit
fi

as_root apt-get update -q
as_root apt-get install -q -y $packages
as_root id someone >/dev/null 2>&1 || as_root useradd --create-home someone
clone=$folder/home/someone/llm.cu
[ -e "$clone/.git" ] || git -c safe.directory='*' clone --no-hardlinks "$checkout" "$clone"
git -c safe.directory='*' -C "$clone" fetch --quiet "$checkout" HEAD
git -c safe.directory='*' -C "$clone" checkout --quiet --force --detach FETCH_HEAD
as_root chown -R someone:someone /home/someone/llm.cu

status=0
for command; do
    [ "$command" != install ] || command=$install
    printf '\n== %s: %s\n' "$release" "$command"
    begin=$SECONDS
    as_user "$command" || status=1
    printf '== %d s; %s\n' $((SECONDS - begin)) "$(du -sh --apparent-size "$clone" | cut -f 1)"
done
exit $status
