# For scripts that try Baton in front of a server from the package index. Sourced: `install` and `isolate`.

# install FOLDER: makes a virtual environment with the folder's packages: requirements.txt with what they need, then packages.txt
# alone, since what those ask for is partly not in the index.
install() {
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  if ! cat "$1"/{requirements,packages}.txt | cmp -s - "$venv/installed.txt"; then
    local pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
    "${pip[@]}" install -r "$1/requirements.txt"
    "${pip[@]}" install --no-deps -r "$1/packages.txt"
    cat "$1"/{requirements,packages}.txt > "$venv/installed.txt"
  fi
}

# isolate COMMAND…: runs it in a network of its own, since these servers listen on random ports beyond loopback.
isolate() {
  exec unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc "$@"
}

# bound_ports: the system chooses ports from a thousand, below which the servers have theirs.
bound_ports() {
  ip link set lo up
  echo 20000 20999 > /proc/sys/net/ipv4/ip_local_port_range
}

run_tests() {
  "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider -p no:warnings -c tests/clients/pytest.ini "$@"
}
