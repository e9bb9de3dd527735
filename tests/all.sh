#!/usr/bin/env bash
# Every test: tests/all.sh PYTHON [arguments of pytest].
#
# The harness tests mostly wait (for programs that back off, for streams that were cut), so they run beside the unit tests, and their output
# comes after these. Each part is a process of its own: the Ray cluster of one must be gone before the next starts another.
set -um # jobs in process groups of their own: Ctrl-C reaches the one in front, and we pass it on to the other
python=$1
shift

worst=0
part() { # pytest's exit code 5: nothing was selected; 2: interrupted
  case $1 in
    0 | 5) ;;
    2) exit 2 ;;
    *) worst=$1 ;;
  esac
}

output=$(mktemp)
"$python" -m pytest tests/harness "$@" >"$output" 2>&1 &
harness=$!
trap 'kill -INT -- "-$harness" 2>/dev/null && wait "$harness"; rm -f "$output"' EXIT

"$python" -m pytest tests/unit "$@"
part $?
wait "$harness"
code=$?
cat "$output"
part $code
"$python" -m pytest tests/integration "$@"
part $?
"$python" -m pytest tests/fault "$@"
part $?
exit "$worst"
