#!/bin/sh
# A mount with a sample data set: two epochs of a training reader and a checkpoint, checked and measured.
#
#   sh deploy/demo.sh                         on a plain directory as the store
#   SOURCE=s3://BUCKET/PREFIX sh deploy/demo.sh   on a bucket (AWS_* variables or ~/.aws/credentials;
#                                             another server than AWS: TIERFS_ENDPOINT_URL=https://...)
#
# Needs Debian 12 or Ubuntu 24.04, Python 3.11 or newer, and root or sudo; what else is missing is installed.
# Works in a new directory below $TMPDIR (/var/tmp), and in a bucket below a new prefix tierfs-demo-XXXXXX/.
# Whatever happens, it is unmounted and removed at the end. The exit status is 0 only if all of it worked.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
bin=$(dirname "$here")/.venv/bin
need_mib=2048

say() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'demo: %s\n' "$*" >&2
    exit 1
}

# Runs a command so that a signal to this script is acted upon at once, and not when the command is done.
child=
run() {
    "$@" &
    child=$!
    result=0
    wait "$child" || result=$?
    child=
    return "$result"
}

# A child that a hung mount keeps from ending is killed, so that the mount can be taken away at all.
stop_child() {
    kill -s TERM "$child" 2>/dev/null
    tries=0
    while grep -q -s '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$child/status"; do
        tries=$((tries + 1))
        [ "$tries" -ne 100 ] || kill -s KILL "$child" 2>/dev/null
        [ "$tries" -lt 150 ] || return
        sleep 0.1
    done
    wait "$child" 2>/dev/null
}

# Asked of the kernel's table, since a question to a mount that is in trouble may never return.
is_mounted() { grep -q -F "/$name/mnt " /proc/self/mountinfo; }

# Processes whose command line names this run's own directory, which no other run has. The pattern comes from
# standard input, so that grep does not find itself.
own_processes() {
    printf '%s/' "$work" | grep -l -a -s -F -f - /proc/[0-9]*/cmdline | cut -d / -f 3
}

stop_processes() {
    for signal in TERM KILL; do
        for pid in $(own_processes); do kill -s "$signal" "$pid" 2>/dev/null || :; done
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            [ -n "$(own_processes)" ] || return 0
            sleep 0.5
        done
    done
    return 1
}

detach() {
    is_mounted || return 0
    timeout 60 "$bin/tierfs" umount --force "$mnt" >/dev/null 2>&1 || :
    is_mounted || return 0
    if [ "$(id -u)" = 0 ]; then umount -l "$mnt"; else fusermount3 -u -z "$mnt" || sudo -n umount -l "$mnt"; fi
}

work=
in_bucket=
made=
clean_up() {
    status=$?
    trap - EXIT
    trap '' HUP INT TERM
    set +e
    case $status in
        0) ;;
        129 | 130 | 143) printf '\ndemo: stopped; removing what was made\n' >&2 ;;
        *) printf '\ndemo: failed; removing what was made\n' >&2 ;;
    esac
    [ -z "$child" ] || stop_child
    [ -n "$work" ] || exit "$status"
    if [ "$status" -ne 0 ] && [ "$status" -lt 128 ] && [ -s "$work/state/tierfs.log" ]; then
        printf '\nThe end of the log of the mount:\n' >&2
        tail -n 20 "$work/state/tierfs.log" >&2
    fi
    # Twice: a mount that was still being made when the signal came appears before its process ends.
    detach
    stop_processes || { printf 'demo: processes are left: %s\n' "$(own_processes | tr '\n' ' ')" >&2; status=1; }
    detach
    case $made in
        objects) timeout 300 "$bin/python" "$here/demo/remove_objects.py" "$source" || status=1 ;;
        directory) rm -rf --one-file-system "$source" || status=1 ;;
    esac
    if is_mounted; then
        printf 'demo: %s is still mounted\n' "$mnt" >&2
        exit 1
    fi
    rm -rf --one-file-system "$work" || status=1
    exit "$status"
}

if [ "${1:-}" != --installed ]; then
    say "Installing what is missing"
    sh "$here/install.sh"
fi

# A user may mount too, where the device is open to users. In a container it often is not.
if [ "$(id -u)" != 0 ] && ! { [ -r /dev/fuse ] && [ -w /dev/fuse ] && command -v fusermount3 >/dev/null; }; then
    exec sudo -E env HOME="$HOME" PYTHONDONTWRITEBYTECODE=1 TMPDIR="${TMPDIR:-/var/tmp}" \
        SOURCE="${SOURCE:-}" sh "$here/demo.sh" --installed
fi
[ -e /dev/fuse ] || fail "/dev/fuse is missing: load the module fuse, or start the container with
    --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined"

# Settings of another mount do not belong here; how to reach the store does.
for variable in $(env | sed -n 's/^\(TIERFS_[A-Z_]*\)=.*/\1/p'); do
    case $variable in
        TIERFS_ENDPOINT_URL | TIERFS_REGION | TIERFS_PROFILE | TIERFS_FRONT | TIERFS_LOG_LEVEL | TIERFS_RUN_DIR) ;;
        *) unset "$variable" ;;
    esac
done

trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

base=$(cd "${TMPDIR:-/var/tmp}" && pwd -P)
free_mib=$(df -Pm "$base" | awk 'NR == 2 { print $4 }')
[ "$free_mib" -ge "$need_mib" ] || fail "$base has $free_mib MiB free, and $need_mib are needed; set TMPDIR"
work=$(mktemp -d "$base/tierfs-demo.XXXXXX")
name=${work##*/}
mnt=$work/mnt
mkdir "$mnt"
case ${SOURCE:-} in
    "")
        source=$work/store
        mkdir "$source"
        ;;
    s3://*)
        source=${SOURCE%/}/tierfs-demo-${name##*.}
        in_bucket=yes
        ;;
    *)
        source=${SOURCE#file://}
        source=${source%/}/tierfs-demo-${name##*.}
        mkdir "$source"
        made=directory
        ;;
esac

# A container has 64 MiB of /dev/shm unless told otherwise; half of what is free is left to others.
ram_mib=$(df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 { print int($4 / 2) }')
ram_mib=${ram_mib:-0}
[ "$ram_mib" -le 256 ] || ram_mib=256
set -- --tier "$work/tier:2G" --state-dir "$work/state"
[ "$ram_mib" -lt 16 ] || set -- --tier "ram:${ram_mib}M" "$@"

if [ -z "$in_bucket" ]; then
    say "Making a sample data set in $source"
    run "$bin/python" "$here/demo/data.py" "$source" "$work/manifest.json"
fi

say "tierfs mount $source $mnt"
run "$bin/tierfs" mount "$source" "$mnt" "$@"
is_mounted || fail "mount said that all is well, and nothing is mounted"

if [ -n "$in_bucket" ]; then
    say "Making a sample data set through the mount, and dropping its local copies"
    made=objects
    run "$bin/python" "$here/demo/data.py" "$mnt" "$work/manifest.json"
    run "$bin/tierfs" flush "$mnt"
    run "$bin/tierfs" evict "$mnt"
fi

say "Two epochs, then a checkpoint of 8 ranks"
run "$bin/python" "$here/demo/run.py" "$mnt" "$work/manifest.json" --tierfs "$bin/tierfs"

say "tierfs umount"
run "$bin/tierfs" umount "$mnt"
! is_mounted || fail "umount said that all is well, and $mnt is still mounted"

cat <<END

With a bucket of your own:
    SOURCE=s3://BUCKET/PREFIX sh deploy/demo.sh
    $bin/tierfs mount s3://BUCKET/PREFIX /mnt/data
Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from ~/.aws, or from the machine's role.
For MinIO, Ceph, SeaweedFS... add --endpoint-url https://HOST:PORT (TIERFS_ENDPOINT_URL for the demo).
END
