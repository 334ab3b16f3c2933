# shellcheck shell=bash
# Sourced by every script: the places, the versions, and how to act as the user a server may run as.

set -euo pipefail
umask 022 # what is staged must be readable by the server's user

# Either would replace the linker flag with which cargo-pgrx keeps its schema section in the library.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export PG_MAJOR=${PG_MAJOR:-15}
packaged=/usr/lib/postgresql/$PG_MAJOR

export PGRX_HOME=$root/pgrx-config
# config.toml names the default version only; bindings for another come from its own pg_config.
if [ "$PG_MAJOR" != 15 ]; then
    export PGRX_PG_CONFIG_PATH=$packaged/bin/pg_config
fi
# `cargo pgrx install` hands these on to cargo.
export PGRX_BUILD_FLAGS=--locked

die() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    [ -z "${2-}" ] || printf 'HINT: %s\n' "$2" >&2
    exit 1
}

# PostgreSQL refuses to run as root.
as_server() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

# A folder for everything made here. When the server's user cannot reach the repository (a clone under
# /root), the folder lies in /tmp and .scratch/elsewhere remembers which it was.
scratch() {
    local dir=${STINT_SCRATCH:-$root/.scratch} other
    mkdir -p "$dir"
    if as_server test -r "$dir" -a -x "$dir"; then
        (cd "$dir" && pwd -P)
        return
    fi
    if other=$(cat "$dir/elsewhere" 2>/dev/null) && [ -d "$other" ] && [ -O "$other" ]; then
        echo "$other"
        return
    fi
    other=$(mktemp -d /tmp/pg_stint.XXXXXX)
    chmod 755 "$other"
    echo "$other" >"$dir/elsewhere"
    echo "$other"
}

# step MESSAGE COMMAND…: runs the command quietly, tells every ten seconds how far it is, and shows its
# output only when it fails.
step() {
    local message=$1 log pid start=$SECONDS told=0 rc=0
    shift
    log=$(mktemp)
    printf '==> %s\n' "$message" >&2
    "$@" </dev/null >"$log" 2>&1 &
    pid=$!
    # Ending this script ends the step, too.
    # shellcheck disable=SC2064
    trap "kill $pid 2>/dev/null || :; rm -f '$log'" EXIT
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - start >= told + 10)); then
            told=$((SECONDS - start))
            printf '    %4d s  %s\n' "$told" "$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-90)" >&2
        fi
    done
    wait "$pid" || rc=$?
    trap - EXIT
    if ((rc)); then
        cat "$log" >&2
        printf '==> failed after %d s: %s\n' $((SECONDS - start)) "$message" >&2
    else
        printf '    done in %d s\n' $((SECONDS - start)) >&2
    fi
    rm -f "$log"
    return "$rc"
}
