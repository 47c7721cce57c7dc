#!/bin/sh
# Install what is missing and run every check and every test.
#
#   sh tests/run.sh                 lint, format, types, floors, all tests
#   sh tests/run.sh -k rename       arguments go to pytest; the checks before the tests are left out
#   sh tests/run.sh -n 0            the tests one after the other; else several at a time
#
# Needs Debian 12 or Ubuntu 24.04, Python 3.11 or newer, and root or sudo. The exit status is non-zero if any
# check or test failed; the last line on standard output is pytest's.
set -eu
cd "$(dirname "$0")/.."

if [ "$(id -u)" = 0 ]; then as_root=; else as_root="sudo -E"; fi

# Each command that a test calls, with the Debian package that has it.
missing=
for pair in fio:fio setfattr:attr setfacl:acl rsync:rsync sqlite3:sqlite3 mkfs.ext4:e2fsprogs losetup:mount \
    git:git tar:tar cpio:cpio findmnt:util-linux; do
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null 2>&1; then
        missing="$missing ${pair#*:}"
    fi
done
if [ -n "$missing" ]; then
    echo "installing$missing"
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing </dev/null
fi

# The report is opened in a browser. Ubuntu has none as a package: there that test is skipped.
if ! command -v chromium >/dev/null 2>&1 && ! command -v google-chrome >/dev/null 2>&1; then
    [ -n "$missing" ] || $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    echo "installing chromium"
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium \
        </dev/null >/dev/null || echo "no chromium: the report is not opened in a browser"
fi

# The native parts are tested always: what cannot be built fails here, and not as a skipped test later.
TIERFS_INSTALL_EXTRAS=test TIERFS_NATIVE=1 sh deploy/install.sh

python=.venv/bin/python
failed=
if [ $# -eq 0 ]; then
    $python -m ruff check . || failed="$failed ruff"
    $python -m mypy || failed="$failed mypy"
    .venv/bin/lint-imports || failed="$failed lint-imports"
    find tierfs_native -name '*.[ch]' -exec .venv/bin/clang-format --dry-run --Werror {} + ||
        failed="$failed clang-format"
fi

# As root, since half of the tests mount, or act as several users. Nothing is written into the work tree.
scratch=$(mktemp -d "${TMPDIR:-/tmp}/tXXXXXX")
trap 'rm -rf --one-file-system "$scratch"' EXIT
# More at a time than there are processors: a test waits, for a mount or for a time to pass, more than it computes.
workers=$(($(nproc) + 2))
[ "$workers" -le 8 ] || workers=8
status=0
# Temporary directories of its own: pytest clears those of earlier runs away, and another run may be using them.
$as_root env PYTHONDONTWRITEBYTECODE=1 PYTEST_DEBUG_TEMPROOT="$scratch" TIERFS_NEED_NATIVE=1 HYPOTHESIS_STORAGE_DIRECTORY="$scratch/hypothesis" \
    PATH="$PATH:/usr/sbin:/sbin" $python -m pytest -p no:cacheprovider -n "$workers" --dist worksteal "$@" </dev/null || status=$?

if [ -n "$failed" ]; then
    echo "failed before the tests:$failed" >&2
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
