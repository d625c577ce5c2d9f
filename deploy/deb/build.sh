#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Debian package dist/pyebpf-proxy_VERSION_ARCHITECTURE.deb for the Debian release of this machine; `make deb`
# calls it. It needs .venv, the wheel in dist/ and the manual pages in build/man.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=deploy/deb
python=.venv/bin/python
version=$("$python" -c 'import pyebpf_proxy; print(pyebpf_proxy.__version__)')
wheel=$(ls dist/pyebpf_proxy-"$version"-*.whl)
architecture=$(dpkg --print-architecture)
work=build/deb
root=$work/root
name=pyebpf-proxy
library=$root/usr/lib/$name

rm -rf "$work/root"
mkdir -p "$library" "$root/DEBIAN"
# All times are that of the last commit, so that another build of the package has the same bytes.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH

# Install the agent and its dependencies, by the hashes of the lock. The lock has more packages: pip selects those that
# the agent needs.
pip=("$python" -m pip --quiet --no-input --disable-pip-version-check)
sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' requirements.lock >"$work/constraints"
"${pip[@]}" install --dry-run --ignore-installed --report "$work/report.json" --constraint "$work/constraints" "$wheel"
"$python" deploy/image/locked.py requirements.lock --report "$work/report.json" >"$work/run.lock"
"${pip[@]}" install --target "$library" --no-deps --require-hashes -r "$work/run.lock"
"${pip[@]}" install --target "$library" --no-deps --no-index "$wheel"
rm -rf "${library:?}/bin"
# Remove pip's records of this installation, which contain the path of the build.
find "$library" -path '*.dist-info/*' \( -name RECORD -o -name direct_url.json \) -delete
find "$library" -name __pycache__ -type d -prune -exec rm -rf {} +
# Compile modules so that they stay valid whatever modification times the unpacked files have.
"$python" -m compileall -q -s "$root" --invalidation-mode unchecked-hash "$library"

install -D -m 755 "$here/launcher.py" "$root/usr/sbin/$name"
install -D -m 755 "$here/may-start.py" "$library/may-start"
install -D -m 644 "$here/$name.service" "$root/lib/systemd/system/$name.service"
install -D -m 644 "$here/$name.default" "$root/etc/default/$name"
install -D -m 644 "$here/config.yaml" "$root/etc/$name/config.yaml"
install -d -m 755 "$root/etc/$name/manifests"
install -D -m 644 "$here/copyright" "$root/usr/share/doc/$name/copyright"
install -D -m 644 NOTICE "$root/usr/share/doc/$name/NOTICE"
gzip -9n <CHANGELOG.md >"$root/usr/share/doc/$name/changelog.gz"
mkdir -p "$root/usr/share/doc/$name/examples"
cp -r examples/* "$root/usr/share/doc/$name/examples/"
mkdir -p "$root/usr/share/man/man1"
cp build/man/*.1 "$root/usr/share/man/man1/"
gzip -9n "$root/usr/share/man/man1/"*.1
complete() {
    mkdir -p "$root/$(dirname "$2")"
    .venv/bin/pyebpf-proxy completion "$1" >"$root/$2"
}
complete bash "usr/share/bash-completion/completions/$name"
complete zsh "usr/share/zsh/vendor-completions/_$name"
complete fish "usr/share/fish/vendor_completions.d/$name.fish"

# Compiled modules require the same version of Python.
now=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
next=$("$python" -c 'import sys; print("%d.%d" % (sys.version_info[0], sys.version_info[1] + 1))')
chmod -R u=rwX,go=rX "$root"
find "$root" -type d -exec chmod 755 {} +
size=$(du -k -s "$root" | cut -f 1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@SIZE@/$size/" \
    -e "s/@PYTHON@/$now/" -e "s/@NEXT_PYTHON@/$next/" "$here/control" >"$root/DEBIAN/control"
for script in postinst prerm postrm; do
    install -m 755 "$here/$script.sh" "$root/DEBIAN/$script"
done
(cd "$root" && find etc -type f -printf '/%p\n' | sort >DEBIAN/conffiles)
(cd "$root" && find usr lib -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
find "$root" -newermt "@$SOURCE_DATE_EPOCH" -print0 | xargs -0 touch --no-dereference --date="@$SOURCE_DATE_EPOCH"
mkdir -p dist
dpkg-deb --root-owner-group -Zxz --build "$root" dist/
