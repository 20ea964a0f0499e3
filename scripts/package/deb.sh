#!/usr/bin/env bash
# Packs OUT/tree as a Debian package: OUT/baton-serve_VERSION_ARCHITECTURE.deb. Needs dpkg-deb alone.
#   scripts/package/deb.sh OUT VERSION
set -euo pipefail
out=$(cd "$1" && pwd) version=$2
cd "$(dirname "$0")/../.."
root=$out/deb
rm -rf "$root"
mkdir -p "$root/DEBIAN" "$root/etc/baton" "$root/usr/lib/systemd/system"
cp -R "$out/tree/." "$root/usr/"
# Debian's own, which the package depends on.
rm -f "$root/usr/lib/baton/libgomp.so.1" "$root/usr/share/doc/baton/LICENSE-libgomp"
mkdir -p "$root/usr/share/zsh"
mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions"
mv "$root/usr/share/doc/baton" "$root/usr/share/doc/baton-serve"
mv "$root/usr/share/doc/baton-serve/LICENSE" "$root/usr/share/doc/baton-serve/copyright"
gzip -9n "$root/usr/share/doc/baton-serve/CHANGELOG.md" "$root/usr/share/doc/baton-serve/THIRD-PARTY-NOTICES"
for unit in baton baton-node; do
  sed -e 's,/usr/local/bin/baton,/usr/bin/baton,' -e 's,/usr/local/share/doc/baton/,/usr/share/doc/baton-serve/,' \
    "packaging/systemd/$unit.service" > "$root/usr/lib/systemd/system/$unit.service"
done
rm -r "$root/usr/share/baton/launchd"
rm "$root/usr/share/baton/systemd/"*.service
install -m 644 configs/single-machine.toml "$root/etc/baton/baton.toml"
echo /etc/baton/baton.toml > "$root/DEBIAN/conffiles"
install -m 755 packaging/debian/postinst packaging/debian/prerm packaging/debian/postrm "$root/DEBIAN/"

find "$root" -type d -exec chmod 755 {} +
mapfile -t files < <(find "$root/usr/bin" "$root/usr/lib/baton" -type f 2>/dev/null)
arch=$(scripts/package/elf.py arch "${files[@]}")
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum > DEBIAN/md5sums)
# With a tilde, Debian sorts 1.0.0-rc.1 before 1.0.0.
cat > "$root/DEBIAN/control" <<CONTROL
Package: baton-serve
Version: $(echo "$version" | sed 's/-/~/')
Architecture: $arch
Maintainer: The Baton authors <baton@example.invalid>
Installed-Size: $(du -k -s --apparent-size "$root/usr" | cut -f1)
Depends: $(scripts/package/elf.py deb "${files[@]}")
Recommends: ca-certificates
Suggests: python3-pip
Section: net
Priority: optional
Description: one endpoint for language models on your own machines
 An OpenAI- and Ollama-compatible inference endpoint: prompts are computed on
 one machine, replies on another. The command is baton. The services baton and
 baton-node start when they are enabled.
CONTROL
deb=$out/baton-serve_${version}_$arch.deb
# xz, which every Debian since 2012 can unpack.
dpkg-deb --root-owner-group -Zxz --build "$root" "$deb" > /dev/null
rm -rf "$root"
echo "$deb"
