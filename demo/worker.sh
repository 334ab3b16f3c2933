#!/bin/bash
# A reader in shell: the same work as worker.py, with nothing but psql to talk to the queue.
#
#     worker.sh NAME
#
# One psql stays open for the whole run. SIGTERM ends the worker after the task in hand.
set -uo pipefail

name=${1:?usage: worker.sh NAME}
here=$(cd "$(dirname "$0")" && pwd)
[[ $name =~ ^[a-z0-9-]+$ ]] || { echo "worker.sh: '$name' is not a plain name" >&2; exit 2; }

stopping=
trap 'stopping=yes' TERM

# It must not be stopped before we are: only the end of its input ends it.
coproc DB { trap '' TERM; PGAPPNAME=$name exec psql -X -q -A -t -F $'\t'; }

# ask STATEMENT: its rows come back in $answer. False when the statement failed (psql has said why) or psql is gone.
ask() {
    local line
    answer=
    printf '%s;\n\\echo <end> :ERROR\n' "$1" >&"${DB[1]}" || return 1
    while IFS= read -r line <&"${DB[0]}"; do
        case $line in
            '<end> false') return 0 ;;
            '<end> true') return 1 ;;
            *) answer+=${answer:+$'\n'}$line ;;
        esac
    done
    return 1
}

give_up() { echo "worker.sh $name: $1" >&2; exit 1; }

# read_on TOKENS: the time a model would take; after each full window the lease is renewed. False when it was lost.
read_on() {
    local left=$1
    while ((left > READ_WINDOW)); do
        sleep "$(seconds "$READ_WINDOW")"
        ((left -= READ_WINDOW))
        ask "select status from stint.extend('extract', '$id', '$lease',
                 progress => jsonb_build_object('read', $1 - $left, 'of', $1))" || give_up 'cannot extend'
        [[ $answer == held ]] || return 1
    done
    sleep "$(seconds "$left")"
}

# seconds TOKENS, in milliseconds' precision without starting a program
seconds() {
    local ms=$(($1 * 1000 / READ_PACE))
    printf '%d.%03d' $((ms / 1000)) $((ms % 1000))
}

while [[ -z $stopping ]]; do
    ask "select id, attempt, lease, payload->>'path' from stint.claim('extract', worker => '$name', wait => '1 s')" ||
        give_up 'cannot claim'
    [[ $answer ]] || continue
    IFS=$'\t' read -r id attempt lease path <<<"$answer"

    row=$(/usr/bin/python3 -S -E "$here/licences.py" --row "$path") || give_up "cannot read $path"
    IFS=$'\t' read -r confidence tokens_in tokens_out result <<<"$row"
    read_on "$tokens_in" || continue

    # The parser leaves no $ in the JSON, so nothing in it can end the dollar quotes.
    ask "insert into callbacks (worker, id, attempt, call, outcome, first)
         select '$name', '$id', $attempt, 'on time', c.outcome, c.first
         from stint.complete('extract', '$id', '$lease',
             result => \$json\$$result\$json\$, run_id => '$name/$$', trace_id => '$id.$attempt', model => 'parser-1',
             input_tokens => $tokens_in, output_tokens => $tokens_out,
             model_cost => ($tokens_in * $PRICE_IN + $tokens_out * $PRICE_OUT) / 1000000,
             confidence => $confidence) as c" || give_up 'cannot complete'
done
