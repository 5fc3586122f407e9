# Sourced by the other scripts: find a Python, create the virtual environment if it is missing, and activate it.
# PYTHON selects another Python, and VENV another folder than .venv in the clone. Errors exit with status 2.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$root/.venv}
unset PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONPATH  # settings of other environments; the tests' processes share bytecode

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

quit() { echo "$*" >&2; exit 2; }

if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version > /dev/null 2>&1; then
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        is_new_enough "$python" && break
        python=
    done
    if [ -z "$python" ]; then
        first=${PYTHON:-python3}
        version=$("$first" --version 2>&1) || version="not there"
        quit "Python 3.11 or later is needed, and $first is $version: install one, or name it, as in" \
            "PYTHON=/usr/bin/python3.12 $0"
    fi
    "$python" -c 'import ensurepip, venv' 2> /dev/null || quit "$python has no module venv to make an environment with:" \
        "install it, on Debian and Ubuntu by \`sudo apt-get install $(basename "$python")-venv\`"
    "$python" -m venv "$VENV" || quit "no environment could be made in $VENV: name another folder, as in VENV=/tmp/wanjax $0"
fi
is_new_enough "$VENV/bin/python" || quit "$VENV is of $("$VENV/bin/python" --version), and 3.11 or later is needed:" \
    "remove the folder, or name another, as in VENV=/tmp/wanjax $0"
. "$VENV/bin/activate"

installed() { [ "$VENV/$1" -nt "$root/pyproject.toml" ]; }  # true if the requirements have not changed since
