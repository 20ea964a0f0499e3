#!/bin/sh
# Installs Baton from this unpacked folder into a home folder, or removes it.
#   ./install.sh [--prefix DIR]              default: ~/.local
#   ./install.sh [--prefix DIR] --remove
# It writes below the prefix alone, needs no root, and may be repeated: files of an older version go. A running Baton goes on
# with its old program until it is started again. Models of a `baton bundle` go to the folder of `baton pull`.
set -eu

[ -n "${HOME:-}" ] || { echo "install: HOME is not set" >&2; exit 2; }
prefix=$HOME/.local
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
# The folder of `baton pull`.
if [ "$(uname)" = Darwin ]; then caches=$HOME/Library/Caches; else caches=$HOME/.cache; fi
case ${XDG_CACHE_HOME:-} in /*) caches=$XDG_CACHE_HOME ;; esac
models=${BATON_CACHE:-$caches/baton/models}

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
  echo "Baton is removed from $prefix. Models stay in $models, a pairing in $HOME/.config/baton."
  exit
fi

[ -x "$from/bin/baton" ] || { echo "install: $from has no bin/baton: unpack the whole archive" >&2; exit 1; }
files=$(mktemp)
trap 'rm -f "$files"' EXIT
(cd "$from" && for folder in bin lib share; do [ ! -d "$folder" ] || find "$folder" -type f; done) > "$files"
# Files that cargo, uv or pipx put there stay theirs.
while IFS= read -r file; do
  if [ ! -e "$prefix/$file" ] && [ ! -L "$prefix/$file" ]; then continue; fi
  if [ -e "$prefix/$list" ] && grep -Fxq -- "$file" "$prefix/$list"; then continue; fi
  echo "install: $prefix/$file is not by this script: remove it first, or choose another --prefix" >&2
  exit 1
done < "$files"
# Before the files: an interrupted installation can be repeated or removed.
mkdir -p "$prefix/share/baton"
[ -e "$prefix/$list" ] || : > "$prefix/$list"
cat "$files" >> "$prefix/$list"
while IFS= read -r file; do
  mkdir -p "$prefix/$(dirname "$file")"
  # By a rename: a running program's file must not be written to.
  rm -f "$prefix/$file.new"
  cp -p "$from/$file" "$prefix/$file.new"
  mv -f "$prefix/$file.new" "$prefix/$file"
done < "$files"
forget "$prefix/$list" "$files"
cp "$files" "$prefix/$list"
"$prefix/bin/baton" --version > /dev/null || { echo "install: $prefix/bin/baton does not start on this machine" >&2; exit 1; }
echo "Installed $("$prefix/bin/baton" --version) in $prefix."
if [ -d "$from/models" ]; then
  mkdir -p "$models"
  for model in "$from"/models/*; do
    name=${model##*/}
    if [ ! -e "$models/$name" ]; then
      # A model gets its name when it is complete.
      rm -f "$models/$name.part"
      cp "$model" "$models/$name.part"
      mv "$models/$name.part" "$models/$name"
    elif ! cmp -s "$model" "$models/$name"; then
      echo "install: $models/$name is another file of this name, and stays" >&2
      exit 1
    fi
    echo "Model: $models/$name"
  done
fi
case ":$PATH:" in
  *":$prefix/bin:"*) echo "Next: baton" ;;
  *) echo "Next: $prefix/bin/baton   (add $prefix/bin to PATH to type less)" ;;
esac
