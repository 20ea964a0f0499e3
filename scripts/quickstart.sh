#!/usr/bin/env bash
# Does what an owner of a Spark and a Mac does, on three network namespaces of this machine, and says how long each step takes.
# docs/quickstart.md shows it. With --picture FILE.webp it also takes a picture of the page, which needs Node and Chromium.
#   scripts/quickstart.sh [--picture FILE.webp]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${QUICKSTART_INSIDE:-}" ]; then
  model=$(target/release/baton pull smollm2)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  if ! unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc true 2>/dev/null; then
    echo "SKIPPED: no network namespaces can be made here, so the quickstart was not tried"
    exit
  fi
  QUICKSTART_INSIDE=1 MODEL=$model WORK=$work unshare --user --map-root-user --net --mount --pid --fork --kill-child \
    --mount-proc "$0" "$@"
  exit
fi

picture=
[ "${1:-}" != --picture ] || picture=$(realpath "$2")
baton=$PWD/target/release/baton

# Three hosts on one switch. `ip netns` keeps its names in /run.
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add switch type bridge
ip link set switch up
i=0
for host in spark mac laptop; do
  i=$((i + 1))
  ip netns add $host
  ip link add port-$host type veth peer name eth0 netns $host
  ip link set port-$host master switch up
  ip netns exec $host sh -ec "ip link set lo up; ip link set eth0 up; ip address add 192.168.77.$i/24 dev eth0
    ip route add 224.0.0.0/4 dev eth0"
  mkdir -p "$WORK/$host"
done
# Each host has a home folder, and so a configuration, of its own. It stays in this process, which ends with the script.
on() { # HOST COMMAND...
  local host=$1
  shift
  ip netns exec "$host" env -u BATON_CLUSTER_KEY HOME="$WORK/$host" XDG_CONFIG_HOME="$WORK/$host/.config" \
    XDG_STATE_HOME="$WORK/$host/.state" "$@"
}
now() { date +%s%N; }
step() { # TEXT BEGAN
  local ms=$((($(now) - $2) / 1000000))
  printf 'step: %-62s %4d.%d s\n' "$1" $((ms / 1000)) $((ms % 1000 / 100))
}
until_says() { # FILE PATTERN SECONDS
  local end=$((SECONDS + $3))
  until grep -qs "$2" "$1"; do
    [ $SECONDS -lt $end ] || { echo "quickstart: no \"$2\" in:" >&2; cat "$1" >&2; exit 1; }
    sleep 0.05
  done
}

start=$(now)
began=$start
echo "mac$ baton serve --pair --model model.gguf --listen 0.0.0.0:8080"
# Both hosts are the same processor, so no handoff would save time.
on mac "$baton" serve --pair --model "$MODEL" --threads 1 --listen 0.0.0.0:8080 \
  --policy always_handoff > "$WORK/serve.log" 2>&1 &
until_says "$WORK/serve.log" 'baton node --pair [0-9]' 20
code=$(grep -o 'baton node --pair [0-9-]*' "$WORK/serve.log" | head -n 1 | cut -d' ' -f4)
echo "spark$ baton node --pair $code --role prefill --model model.gguf --listen 0.0.0.0:9000"
on spark "$baton" node --pair "$code" --role prefill --model "$MODEL" --threads 1 --listen 0.0.0.0:9000 \
  > "$WORK/node.log" 2>&1 &
until_says "$WORK/serve.log" ' joined, from ' 30
step "pair both machines" "$began"

began=$(now)
url=http://192.168.77.2:8080
end=$((SECONDS + 60))
# Both engines have loaded the model, and the link between them was measured.
until on mac curl -sf http://127.0.0.1:8080/baton/state | grep -q '"same_weights":true'; do
  [ $SECONDS -lt $end ] || { echo "quickstart: the Spark was not found" >&2; cat "$WORK"/{node,serve}.log >&2; exit 1; }
  sleep 0.1
done
step "both load the model; the Mac finds the Spark, measures the link" "$began"

began=$(now)
python3 - "$(basename "$MODEL" .gguf)" > "$WORK/request.json" <<'PYTHON'
import json, sys
text = " ".join(f"Fact {i}: the box number {i} holds {i * 7 % 93} marbles." for i in range(120))
print(json.dumps({"model": sys.argv[1], "max_tokens": 16, "messages": [{"role": "user", "content": text + " Summarize."}]}))
PYTHON
echo "laptop$ curl $url/v1/chat/completions -d @request.json"
on laptop curl -sS -D "$WORK/head" "$url/v1/chat/completions" -d @"$WORK/request.json" > "$WORK/reply.json"
grep -i '^x-baton-route' "$WORK/head"
grep -qi '^x-baton-route: handoff' "$WORK/head" || { echo "quickstart: it was not handed over" >&2; cat "$WORK/reply.json" >&2; exit 1; }
step "a long prompt, computed on the Spark and continued on the Mac" "$began"

if [ -n "$picture" ]; then
  began=$(now)
  on laptop node scripts/quickstart/picture.mjs "$url" "$picture"
  step "open the page on the laptop" "$began"
fi
step "everything" "$start"
