# Read by tools/demo and tools/test: sets $python to a Python that PipeSD runs on and that can make environments.
# PYTHON=/path/to/python chooses one.
for python in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 ""; do
    if [ -z "$python" ]; then
        echo "$0: no Python 3.11 to 3.14 with its venv module was found; install one (on Debian and Ubuntu the" \
            "package python3-venv belongs to it) or name one with PYTHON=/path/to/python" >&2
        exit 2
    fi
    "$python" -I -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
        >/dev/null 2>&1 && break
    if [ "$python" = "${PYTHON:-}" ]; then
        echo "$0: PYTHON=$PYTHON is not a Python 3.11 to 3.14 with its venv module" >&2
        exit 2
    fi
done
