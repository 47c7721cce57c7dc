#!/bin/sh
# Install what tierfs needs, and tierfs itself into .venv (leaves .venv/bin/tierfs).
#
#   sh deploy/install.sh
#
# For Debian 12, Ubuntu 24.04 or newer, with root or sudo; nothing else has to be there. Run again, it only
# does what is missing. Set in the environment:
#   TIERFS_INSTALL_EXTRAS=test    what the tests need; without it: report, the plots of tierfs bench and plan
#   TIERFS_INSTALL_EDITABLE=no    copy the package instead of pointing at this directory
#   TIERFS_INSTALL_LINKS=no       as root: no links in /usr/local/bin and /sbin
#   TIERFS_NATIVE=0               without native code; 1: fail if it cannot be built
#   PYTHON=/path/to/python3       the interpreter, 3.11 or newer
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
extras=${TIERFS_INSTALL_EXTRAS-report}
editable=${TIERFS_INSTALL_EDITABLE:-yes}

say() { echo "install: $*" >&2; }
fail() { say "$*"; exit 1; }

good_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14 /usr/bin/python3; do
        if [ -n "$candidate" ] && good_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

has_lmdb() { echo '#include <lmdb.h>' | gcc -E -x c - >/dev/null 2>&1; }

# What pip needs to build pyfuse3 (there are no wheels of it) and the native parts, and what mounts need to run.
# pip brings cmake and ninja by itself.
missing_packages() {
    python=$(find_python)
    system=no
    case $python in '' | /usr/bin/*) system=yes ;; esac
    [ -n "$python" ] || echo python3
    if [ "$system" = yes ]; then
        [ -n "$python" ] && "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
        [ -n "$python" ] && "$python" -c 'import os, sysconfig
open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || echo python3-dev
    fi
    command -v gcc >/dev/null 2>&1 || echo gcc libc6-dev
    if command -v pkg-config >/dev/null 2>&1; then
        pkg-config --exists fuse3 || echo libfuse3-dev
    else
        echo pkg-config libfuse3-dev
    fi
    [ "${TIERFS_NATIVE:-}" = 0 ] || has_lmdb || echo liblmdb-dev
    command -v fusermount3 >/dev/null 2>&1 || echo fuse3
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
}

can_install() {
    command -v apt-get >/dev/null 2>&1 && { [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null 2>&1; }
}

install_packages() {
    # shellcheck disable=SC2046 # one word per package
    set -- $(missing_packages)
    if [ "$*" = liblmdb-dev ] && [ "${TIERFS_NATIVE:-}" != 1 ] && ! can_install; then
        say "without the native front: liblmdb-dev is missing, and there is neither root nor sudo to install it"
        return 0
    fi
    [ $# -gt 0 ] || return 0
    command -v apt-get >/dev/null 2>&1 || fail "these packages are missing, install them first: $*"
    if [ "$(id -u)" -eq 0 ]; then
        sudo=
    elif command -v sudo >/dev/null 2>&1; then
        sudo=sudo
    else
        fail "not root and no sudo; run as root: apt-get install -y $*"
    fi
    say "system packages: $*"
    apt update
    apt install -y --no-install-recommends "$@"
}

# apt-get, heard only when it fails.
apt() {
    output=$($sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" </dev/null 2>&1) ||
        { echo "$output" >&2; fail "apt-get $1 failed"; }
}

# The stamp tells what .venv holds; a change of dependencies, of the interpreter, of the extras, of the C sources
# or of what is there to build them renews it.
wanted_stamp() {
    "$1" --version
    cksum <pyproject.toml
    echo "editable=$editable root=$root"
    if [ "${TIERFS_NATIVE:-}" != 0 ]; then
        echo "native lmdb=$(has_lmdb && echo yes)"
        find tierfs_native/CMakeLists.txt tierfs_native/src -type f -exec cksum {} + | sort
    fi
    [ "$editable" = yes ] || find tierfs tierfs_native -name '*.py' -exec cksum {} + | sort
}

# Extras that were installed before stay wanted, so that demo and tests do not undo each other's work.
merged_extras() {
    { echo "$extras"; cat .venv/tierfs-extras 2>/dev/null || true; } | tr ',' '\n' |
        sed '/^$/d' | sort -u | paste -s -d , -
}

make_venv() {
    if [ -e .venv ] && ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
        say "replacing a .venv that does not work"
        rm -rf .venv
    fi
    if [ ! -e .venv ]; then
        python=$(find_python)
        [ -n "$python" ] || fail "no Python 3.11 or newer; Debian 12 and Ubuntu 24.04 have one"
        say "virtual environment .venv with $python"
        "$python" -m venv .venv || { rm -rf .venv; fail "python -m venv failed"; }
    fi
}

# Why the native front is not there; nothing if it is. Asked from elsewhere, so that what is installed is meant.
native_missing() {
    (cd / && "$root/.venv/bin/python" -c 'import tierfs_native; print(tierfs_native.why_missing() or "")')
}

install_tierfs() {
    extras=$(merged_extras)
    stamp=$(wanted_stamp .venv/bin/python)
    if [ -x .venv/bin/tierfs ] && [ "$stamp" = "$(cat .venv/tierfs-stamp 2>/dev/null)" ] &&
        [ "$extras" = "$(cat .venv/tierfs-extras 2>/dev/null)" ] &&
        { [ "${TIERFS_NATIVE:-}" != 1 ] || [ -z "$(native_missing)" ]; }; then
        return 0
    fi
    what=.
    [ -z "$extras" ] || what=".[$extras]"
    say "tierfs and its libraries${extras:+ (with $extras)}"
    rm -f .venv/tierfs-stamp
    set -- --quiet --disable-pip-version-check --no-input
    if [ "$editable" = yes ]; then
        .venv/bin/python -m pip install "$@" --editable "$what" >&2
    else
        .venv/bin/python -m pip install "$@" "$what" >&2
    fi
    .venv/bin/tierfs version >/dev/null || fail ".venv/bin/tierfs does not start"
    missing=$(native_missing)
    [ -z "$missing" ] || say "without the native front: $missing"
    echo "$extras" >.venv/tierfs-extras
    echo "$stamp" >.venv/tierfs-stamp
}

# mount(8) looks for helpers in /sbin; a file that is not our link is left alone.
link_helpers() {
    [ "$(id -u)" -eq 0 ] && [ "${TIERFS_INSTALL_LINKS:-yes}" = yes ] || return 0
    for pair in tierfs:/usr/local/bin/tierfs mount.tierfs:/sbin/mount.tierfs mount.tierfs:/sbin/mount.fuse.tierfs; do
        source=$root/.venv/bin/${pair%%:*}
        link=${pair#*:}
        [ "$(readlink "$link" 2>/dev/null)" != "$source" ] || continue
        if [ -L "$link" ] || [ ! -e "$link" ]; then
            ln -sfn "$source" "$link" 2>/dev/null || say "cannot make $link; fstab and systemd will not find tierfs"
        else
            say "$link is not a link and stays as it is"
        fi
    done
}

install_packages
make_venv
install_tierfs
link_helpers
