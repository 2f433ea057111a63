#!/usr/bin/env bash
# Builds dist/ and tries the wheel alone in an empty environment: `scripts/check_release.sh [TAG]`, where `build` is installed.
# With a tag, checks that it is the version and that CHANGELOG.md has a section for it, which goes to build/notes.md.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
if [ $# -gt 0 ]; then
  if [ "$1" != "v$version" ]; then
    echo "error: the tag is $1, and pyproject.toml has version $version" >&2
    exit 1
  fi
  mkdir -p build
  awk -v version="$version" '/^## /{found = $2 == version; next} found' CHANGELOG.md > build/notes.md
  grep -q '[^[:space:]]' build/notes.md || { echo "error: CHANGELOG.md has no section '## $version'" >&2; exit 1; }
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "== the sdist builds the wheel of the checkout; conf/local must not be there"
rm -rf dist
python -m build --outdir dist > "$scratch/log" || { cat "$scratch/log"; exit 1; } # the wheel from the sdist
python -m build --wheel --outdir "$scratch" > "$scratch/log" || { cat "$scratch/log"; exit 1; }
cmp dist/*.whl "$scratch"/*.whl

echo "== the wheel brings its config tree, which is read without torch"
python3 -m venv "$scratch/clean"
cd "$scratch"
clean/bin/pip install --quiet --no-deps "$root"/dist/*.whl pyyaml
clean/bin/python -m runner --version | grep -Fx "runner $version"
clean/bin/python -m runner show data=digits | grep "runner/conf/data/digits.yaml"
clean/bin/python -m runner new project my_project | tail -n 3

echo "== the wheel alone trains"
clean/bin/pip install --quiet "$root"/dist/*.whl
clean/bin/python -m runner train | tail -n 3
cd my_project
../clean/bin/python -m runner train --config-dir conf experiment=my_project | tail -n 3
