#!/bin/sh
# Fuzz each parser of the native front for so many seconds, from inputs that a real mount has made.
#
#   sh tierfs_native/fuzz/run.sh SECONDS [FUZZER...]      all of them: tierfs_native/fuzz/fuzz_*.c
#
# With clang (installed where it is missing and can be) this is libFuzzer, led by the branches that are reached; with
# CC=gcc it is replay_main.c, which only mutates. Address and undefined behaviour sanitizers either way. Set in the
# environment: SEED (else the time; printed), PYTHON, FUZZ_DIR (build/fuzz). What is found is kept and named:
# FUZZ_DIR/crashes/FUZZER/; what was learnt, in FUZZ_DIR/found/FUZZER/, is where the next run goes on. The exit status
# is 0 if nothing was found.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:?usage: run.sh SECONDS [FUZZER...]}
shift
root=$(pwd)
python=${PYTHON:-$root/.venv/bin/python}
build=${FUZZ_DIR:-$root/build/fuzz}
seed=${SEED:-$(date +%s)}

say() { echo "fuzz: $*"; }

# libclang-rt has the runtime of libFuzzer and of the sanitizers; clang alone does not bring it.
install_clang() {
    if [ "$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi
    command -v apt-get >/dev/null || return 0
    say "installing clang"
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get update -qq || return 0
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang \
        </dev/null >/dev/null || return 0
    version=$(clang -dumpversion | cut -d . -f 1)
    [ -e "$(clang -print-runtime-dir)/libclang_rt.fuzzer-x86_64.a" ] ||
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            "libclang-rt-$version-dev" </dev/null >/dev/null || :
}

if [ -z "${CC:-}" ]; then
    command -v clang >/dev/null || install_clang
    CC=$(command -v clang || command -v cc)
fi

PATH=$(dirname "$python"):$PATH
mkdir -p "$(dirname "$build")"
cmake -S tierfs_native -B "$build" -DTIERFS_FUZZ=ON -DTIERFS_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DTIERFS_SANITIZE="address;undefined" -DCMAKE_C_COMPILER="$CC" >"$build.log" 2>&1 ||
    { cat "$build.log" >&2; exit 1; }
cmake --build "$build" --parallel 2 >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
rm -f "$build.log"

# A mount of this checkout. Where none can be made, fuzzing begins from nothing.
if [ ! -d "$build/corpus" ]; then
    if PYTHONPATH="$root" PYTHONDONTWRITEBYTECODE=1 "$python" tierfs_native/fuzz/corpus.py "$build/corpus.new"; then
        mv "$build/corpus.new" "$build/corpus"
    else
        rm -rf "$build/corpus.new"
        say "no mount could be made here: without inputs to begin with"
    fi
fi

[ $# -gt 0 ] || set -- $(cd tierfs_native/fuzz && ls fuzz_*.c | sed 's/\.c$//')
say "$seconds s each, seed $seed, $CC"
scratch=$(mktemp -d "${TMPDIR:-/tmp}/fuzzXXXXXX")
trap 'rm -rf "$scratch"' EXIT
failed=
for fuzzer in "$@"; do
    found=$build/found/$fuzzer
    crashes=$build/crashes/$fuzzer
    mkdir -p "$found" "$crashes"
    ls "$crashes" >"$scratch/before"
    seeds=
    [ ! -d "$build/corpus/$fuzzer" ] || seeds=$build/corpus/$fuzzer
    status=0
    (cd "$crashes" && TMPDIR=$scratch ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
        timeout -k 10 $((seconds * 2 + 120)) setarch --addr-no-randomize "$build/$fuzzer" -max_total_time="$seconds" -seed="$seed" \
        -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 "$found" $seeds) >"$scratch/log" 2>&1 || status=$?
    edges=$(sed -n 's/.*inline 8-bit counters\{0,1\}.*(\([0-9]*\) inline.*/\1/p; s/.*(\([0-9]*\) inline 8-bit counters).*/\1/p' \
        "$scratch/log" | head -n 1)
    reached=$(sed -n 's/^#.* cov: \([0-9]*\) .*/\1/p' "$scratch/log" | tail -n 1)
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p; s/^\([0-9]*\) runs, seed.*/\1/p' "$scratch/log" | tail -n 1)
    inputs=$(ls "$found" | wc -l)
    if [ "$status" -eq 0 ]; then
        say "$fuzzer: nothing found in ${runs:-?} runs; ${reached:-an unknown number} of ${edges:-?} edges, $inputs inputs kept"
    else
        failed="$failed $fuzzer"
        tail -n 60 "$scratch/log" >&2
        say "$fuzzer: FAILED (exit status $status) after ${runs:-?} runs, seed $seed"
        ls "$crashes" | grep -v -x -F -f "$scratch/before" | while read -r input; do
            say "  $build/$fuzzer $crashes/$input"
        done
    fi
done
[ -z "$failed" ] || { say "found something:$failed"; exit 1; }
