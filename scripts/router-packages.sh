# Sourced by the scripts that measure other inference routers: `install_routers` puts them into target/peers once.
vllm_version=0.1.17
sglang_version=0.3.2
router_venv=$PWD/target/peers/venv

install_routers() {
  local versions="vllm-router==$vllm_version sglang-router==$sglang_version"
  [ "$(cat "$router_venv/installed.txt" 2>/dev/null)" != "$versions" ] || return 0
  echo "$(basename "$0" .sh): $versions go to target/peers" >&2
  python3 -m venv "$router_venv"
  # shellcheck disable=SC2086  # a list
  "$router_venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: $versions
  echo "$versions" >"$router_venv/installed.txt"
}
