#!/usr/bin/env bash
# Make .venv in the checkout or bring it up to date; silent when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/installed
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! constraints.txt -nt "$stamp" ]; then
    exit 0
fi

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ ! -x .venv/bin/python ]; then
    for python in python3 python3.13 python3.12 python3.11 ""; do
        if [ -n "$python" ] && usable "$python"; then
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "error: no Python 3.11 or newer with the venv module was found." >&2
        echo "       On Debian or Ubuntu: apt install python3 python3-venv" >&2
        exit 2
    fi
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

# Python compiles what it imports, which is a small part of all files.
install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

echo "Installing what the package needs; the first time this takes some minutes"
# The exact version, by itself: with a range pip would try every build of torch.
install "$(grep '^torch==' constraints.txt)"
install --constraint constraints.txt --editable '.[dev]'
touch "$stamp"
