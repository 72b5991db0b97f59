#!/usr/bin/env bash
# Fetches the training text from Debian 12 documentation packages and strips it to plain text.
#
# Usage: data/prepare_text.sh [FOLDER]     (default: build/data-text)
# Needs: apt-get and dpkg (Debian or Ubuntu; no root: packages are downloaded and unpacked,
# not installed), python3, libreadline8 (for the reader of bible-kjv). Takes a few minutes.
# Writes FOLDER/<package>.txt (documents_to_text.py says the format) and FOLDER/copyright/<package>.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/../build/data-text}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out/copyright" "$work/debs"
rm -f "$out"/*.txt

# package  kind  names left out: generated indexes, change logs, pages that repeat other pages
sources=(
  'sqlite3-doc            html     (^|/)(session|releaselog|c3ref/(objlist|constlist|funclist))/'
  'bible-kjv-text         verses   -'
  'postgresql-doc-15      html     (bookindex|/release-)'
  'python3.11-doc         html     (/contents\.html|/whatsnew/changelog)'
  'wordnet-base           wordnet  -'
  'python-django-doc      html     /releases/'
  'nodejs-doc             html     /(all|index)\.html'
  'llvm-14-doc            html     -'
  'erlang-doc             html     (/notes\.html|/lib/wx-)'
  'rust-doc               html     /html/(src|core|alloc|proc_macro|test|implementors|std/arch)/'
  'apache2-doc            html     /(de|fr|es|ja|ko|tr|pt-br|da|ru|zh-cn)/'
  'cmake-doc              html     -'
  'nova-doc               html     -'
  'neutron-doc            html     -'
  'keystone-doc           html     -'
  'cinder-doc             html     -'
  'swift-doc              html     -'
  'ironic-doc             html     -'
  'heat-doc               html     -'
  'glance-doc             html     -'
  'python-sqlalchemy-doc  html     /changelog/'
  'libboost1.74-doc       html     -'
  'python-scipy-doc       html     -'
  'python-sympy-doc       html     -'
  'python-statsmodels-doc html     -'
  'python-astropy-doc     html     -'
  'python-pandas-doc      html     -'
  'twisted-doc            html     -'
)
generated='(genindex|modindex|/_modules/|release-?notes|/search\.html)'

# bible-kjv is only the program that prints the packed text of bible-kjv-text.
packages=(bible-kjv)
for source in "${sources[@]}"; do
  packages+=("${source%% *}")
done
(cd "$work/debs" && apt-get download "${packages[@]}")
for deb in "$work"/debs/*.deb; do
  dpkg -x "$deb" "$work/$(basename "$deb" | cut -d_ -f1)"
done

for source in "${sources[@]}"; do
  read -r package kind excluded <<<"$source"
  [[ $excluded != - ]] || excluded=$generated
  convert=(python3 "$here/documents_to_text.py" "$kind" "$out/$package.txt" --seen "$work/seen")
  case $kind in
    verses) "$work/bible-kjv/usr/bin/bible" -p "$work/$package/usr/lib" -f 'gen1:1-rev22:21' | "${convert[@]}" ;;
    html) "${convert[@]}" --folder "$work/$package/usr/share/doc" --exclude "$generated|$excluded" ;;
    *) "${convert[@]}" --folder "$work/$package/usr/share" ;;
  esac
  find "$work/$package/usr/share/doc" -name copyright -type f -exec cat {} + > "$out/copyright/$package"
done
du -sh "$out"
