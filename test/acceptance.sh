#!/usr/bin/env bash
# Black-box acceptance: a server from nothing, the cases, a restart, the cases, a
# kill -9, the cases; the cases while its Redis is killed over and over, and while it
# is filled with garbage; then the sample deliveries with 1 and with 64 workers.
#   test/acceptance.sh SHARED
set -euo pipefail
shared=${1:?usage: test/acceptance.sh SHARED, the directory that holds cases/ and data/}
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/dist/dualcheck
work=$(mktemp -d)
pid=
stop() { # SIGNAL
	[ -n "$pid" ] || return 0
	kill "-$1" "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
	pid=
}
trap 'stop TERM; rm -rf "$work"' EXIT

start() { # STATE-DIR
	rm -f "$1/dev.json"
	"$bin" dev --state-dir "$1" --grpc-addr 127.0.0.1:0 --http-addr 127.0.0.1:0 >"$work/dev.log" 2>&1 &
	pid=$!
	for _ in $(seq 600); do
		[ -f "$1/dev.json" ] && break
		kill -0 "$pid" 2>/dev/null || { cat "$work/dev.log"; echo 'the server ended'; exit 1; }
		read -rt 0.1 <> <(:) || true
	done
	[ -f "$1/dev.json" ] || { cat "$work/dev.log"; echo 'not ready after a minute'; exit 1; }
	http=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["http"])' "$1/dev.json")
	redis=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["redis"])' "$1/dev.json")
	grpc=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["grpc"])' "$1/dev.json")
}
cases() { python3 "$shared/cases/run.py" --url "http://$http" "$shared/cases/dedup.json" | tail -n "${1:-1}"; }
troubled() { # KIND COMMAND...
	python3 "$root/test/trouble.py" "$redis" "$1" &
	trouble=$!
	shift
	"$@" || { kill "$trouble"; return 1; }
	kill "$trouble"
	wait "$trouble"
}
ingest() { # WORKERS FIRST REPLAY CONFLICT
	"$bin" ingest --addr "$grpc" --workers "$1" -o json "$shared/data/webhooks.jsonl" >"$work/summary.json" 2>"$work/ingest.log" || true
	python3 - "$work/summary.json" "$2" "$3" "$4" <<'PY'
import json, sys
got = json.load(open(sys.argv[1]))
want = dict(zip(("first", "replay", "conflict"), map(int, sys.argv[2:])), failed=0)
wrong = {k: (got.get(k), v) for k, v in want.items() if got.get(k) != v}
print("ingest:", got)
sys.exit("wanted otherwise (got, want): %s" % wrong if wrong else 0)
PY
}

echo '== cases, from nothing'
start "$work/state"; cases
echo '== cases, after a restart'
stop TERM; start "$work/state"; cases
echo '== cases, after kill -9'
stop KILL; start "$work/state"; cases
[ -n "$redis" ] || { echo 'dev runs without Redis: install redis-server'; exit 1; }
echo '== cases, Redis killed in the middle'
troubled kill cases
echo '== cases, Redis filled with garbage'
troubled garbage cases
echo '== sample deliveries, 1 worker'
ingest 1 329 291 14
echo '== again'
ingest 64 0 620 14
stop TERM
echo '== sample deliveries, 64 workers, from nothing'
start "$work/state2"
ingest 64 329 291 14
echo '== again, while Redis is filled with garbage'
troubled garbage ingest 64 0 620 14
echo '== sample deliveries, 64 workers, from nothing, Redis killed in the middle'
stop TERM
start "$work/state3"
troubled kill ingest 64 329 291 14
ingest 64 0 620 14
stop TERM
echo 'acceptance: all as it should be'
