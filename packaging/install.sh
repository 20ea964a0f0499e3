#!/bin/sh
# Installs Baton from this unpacked folder into a home folder, or removes it.
#   ./install.sh [--prefix DIR]              default: ~/.local
#   ./install.sh [--prefix DIR] --remove
# It writes below the prefix alone, needs no root, and may be repeated: files of an older version go. A running Baton goes on
# with its old program until it is started again. Models of a `baton bundle` go to the folder of `baton pull`.
set -eu

prefix=${HOME:-}/.local
action=install
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) [ $# -ge 2 ] || { echo "install: --prefix needs a folder" >&2; exit 2; }; prefix=$2; shift 2 ;;
    --remove) action=remove; shift ;;
    *) echo "usage: $0 [--prefix DIR] [--remove]" >&2; exit 2 ;;
  esac
done
case $prefix in /*) ;; *) echo "install: the prefix must begin with /, and is $prefix" >&2; exit 2 ;; esac
from=$(cd "$(dirname "$0")" && pwd)
list=share/baton/installed-files

# Removes the listed files that the other list does not have, and the folders that are then empty.
forget() { # LIST KEPT
  while IFS= read -r file; do
    # A list is the prefix's own, but a broken one must not reach outside.
    case $file in /*|*..*|"") continue ;; esac
    grep -Fxq -- "$file" "$2" && continue
    rm -f "$prefix/$file"
    folder=$(dirname "$file")
    while [ "$folder" != . ] && rmdir "$prefix/$folder" 2>/dev/null; do folder=$(dirname "$folder"); done
  done < "$1"
}

if [ "$action" = remove ]; then
  [ -e "$prefix/$list" ] || { echo "install: $prefix has no Baton that this script installed" >&2; exit 1; }
  files=$(mktemp)
  trap 'rm -f "$files"' EXIT
  cp "$prefix/$list" "$files"
  echo "$list" >> "$files"
  forget "$files" /dev/null
  echo "Baton is removed from $prefix. Models stay in ${BATON_CACHE:-$HOME/.cache/baton}, a pairing in $HOME/.config/baton."
  exit
fi

[ -x "$from/bin/baton" ] || { echo "install: $from has no bin/baton: unpack the whole archive" >&2; exit 1; }
files=$(mktemp)
trap 'rm -f "$files"' EXIT
(cd "$from" && for folder in bin lib share; do [ ! -d "$folder" ] || find "$folder" -type f; done) > "$files"
while IFS= read -r file; do
  mkdir -p "$prefix/$(dirname "$file")"
  # By a rename: a running program's file must not be written to.
  cp -p "$from/$file" "$prefix/$file.new"
  mv -f "$prefix/$file.new" "$prefix/$file"
done < "$files"
[ ! -e "$prefix/$list" ] || forget "$prefix/$list" "$files"
mkdir -p "$prefix/share/baton"
cp "$files" "$prefix/$list"
"$prefix/bin/baton" --version > /dev/null || { echo "install: $prefix/bin/baton does not start on this machine" >&2; exit 1; }
echo "Installed $("$prefix/bin/baton" --version) in $prefix."
if [ -d "$from/models" ]; then
  models=${BATON_CACHE:-}
  if [ -z "$models" ]; then
    if [ "$(uname)" = Darwin ]; then models=$HOME/Library/Caches; else models=$HOME/.cache; fi
    models=${XDG_CACHE_HOME:-$models}/baton/models
  fi
  mkdir -p "$models"
  for model in "$from"/models/*; do
    name=${model##*/}
    # A model gets its name when it is complete.
    cp "$model" "$models/$name.part" && mv -f "$models/$name.part" "$models/$name"
    echo "Model: $models/$name"
  done
fi
case ":$PATH:" in
  *":$prefix/bin:"*) echo "Next: baton" ;;
  *) echo "Next: $prefix/bin/baton   (add $prefix/bin to PATH to type less)" ;;
esac
