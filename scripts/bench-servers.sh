# Sourced by the scripts that measure servers beside each other: starts servers on one core, and ends them with the script.
# The server's core is SERVER_CORE (1), the client's CLIENT_CORE (0).
me=$(basename "$0" .sh)
server_core=${SERVER_CORE:-1}
client_core=${CLIENT_CORE:-0}
[ "$(uname)" = Linux ] || { echo "$me: needs Linux's taskset and /proc" >&2; exit 1; }
[ "$(nproc)" -ge 2 ] || { echo "$me: needs two cores" >&2; exit 1; }

work=$(mktemp -d)
started=()
stop() {
  local status=$?
  [ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  if [ $status -ne 0 ]; then tail -n 5 "$work"/*.log >&2 || true; fi
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

# Refuses to go on without a binary: needs_binary PATH.
needs_binary() {
  [ -x "$1" ] || { echo "$me: there is no $1: run \`make bench-program-dist\`" >&2; exit 1; }
}
free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
# Starts a server on its core, with its output in NAME.log: start NAME COMMAND…. Sets `pid`.
start() {
  local name=$1; shift
  taskset -c "$server_core" "$@" >"$work/$name.log" 2>&1 &
  pid=$!
  started+=("$pid")
}
# Waits up to a minute until the server started last answers: answers NAME URL [CURL'S OPTIONS].
answers() {
  local name=$1 url=$2; shift 2
  for _ in $(seq 300); do
    if curl -fsS -o "$work/answer" --max-time 5 "$@" "$url" 2>/dev/null; then return 0; fi
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.2
  done
  echo "$me: $name does not answer" >&2
  exit 1
}
# Runs `baton-bench serve` on the client's core, with its table in NAME.txt and its figures in NAME.json: load NAME OPTIONS…
load() {
  local name=$1; shift
  echo "$me: $name" >&2
  taskset -c "$client_core" "$client" serve --json "$work/$name.json" "$@" >"$work/$name.txt" &
  # A signal ends `wait` at once, but not a command in the foreground.
  started+=($!)
  wait $! || { cat "$work/$name.txt"; exit 1; }
  [ -z "${VERBOSE:-}" ] || cat "$work/$name.txt" >&2
}
