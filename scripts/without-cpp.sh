# To be sourced: hides c++ and cmake behind commands that fail, in the folder $hide, which is removed at the end. A server whose
# process id is $server is ended then, too.
hide=$(mktemp -d)
trap 'rm -rf "$hide"; [ -z "${server:-}" ] || kill "$server" 2>/dev/null || true' EXIT
for tool in c++ g++ aarch64-linux-gnu-g++ clang++ cmake ninja; do
  printf '#!/bin/sh\necho "this build must not call %s" >&2\nexit 1\n' "$tool" > "$hide/$tool"
  chmod +x "$hide/$tool"
done

# Runs a command of cargo on the program without its default features.
without_cpp() { # COMMAND OPTIONS...
  PATH="$hide:$PATH" CXX="$hide/c++" ${CARGO:-cargo} "$1" --release --locked --no-default-features "${@:2}"
}

# Builds the binary for $hide/NAME with these options of cargo build, and with `--package baton-bench` among them the benchmarks
# beside it.
build_without_cpp() { # NAME OPTIONS...
  local name=$1
  shift
  without_cpp build "$@"
  # Move them away, so that nothing mistakes them for the full programs.
  local built=${CARGO_TARGET_DIR:-target}/${CARGO_BUILD_TARGET:-}/release
  mv "$built/baton" "$hide/$name"
  case " $* " in *" --package baton-bench "*) mv "$built/baton-bench" "$hide/baton-bench" ;; esac
}

# Waits until the server has written its address to $hide/out, and sets $base to it.
wait_for_address() { # SECONDS
  for _ in $(seq $(($1 * 10))); do
    grep -q 'Baton serves' "$hide/out" && break
    kill -0 "$server" || { cat "$hide/out" >&2; exit 1; }
    sleep 0.1
  done
  base=$(grep -o 'http://[0-9.:]*' "$hide/out" | head -n 1)
}
