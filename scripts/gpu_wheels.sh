#!/usr/bin/env bash
# Collect the wheels that a GPU machine without a network lacks into wheels/, which git ignores, and install them there.
# The machine has Python, torch and what usually is beside it. docs/setup.md has the versions that were rehearsed.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/gpu_wheels.sh [OPTION]... [FOLDER]
       scripts/gpu_wheels.sh --install ENVIRONMENT [FOLDER]

Downloads packages at the versions of constraints.txt, into wheels/ if no FOLDER is named. Wheels of earlier calls stay where
they are still right; others in the folder are removed. Where all are larger than the limit, the least important are left out.

  --python 3.12     the machine's Python
  --cuda 130        the CUDA of its torch (torch.version.cuda without the dot): only that library of bitsandbytes is kept
  --has FILE        NAME==VERSION lines, as `python3 -m pip freeze` prints there: the same versions are not downloaded
  --without NAME    a package to leave out (repeatable)
  --limit 34        MiB of all wheels together
  --list            print what would be downloaded, with no network
  --install DIR     on the machine: make a virtual environment of the wheels, this checkout and what its python3 has
END
}

# The most important first. The program starts and trains with the first part; the rest is optional, or may be older.
required="
tomli-w annotated-types typing-extensions typing-inspection pydantic-core pydantic
httpx2 httpcore2 truststore huggingface-hub peft diffusers
"
# Not xformers: its kernels are built for one version of torch and CUDA, and 0.0.35 does not load beside 2.11 with CUDA 13.
optional="bitsandbytes pytorch-optimizer transformers gguf tokenizers"

# Those that the version of bitsandbytes in constraints.txt has a library for.
cudas="118 121 124 126 128 130 132"

# glibc of the builds that are accepted: pip compares it exactly.
platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for glibc in 17 24 27 28 31 34; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done

refuse() {
    echo "error: $1" >&2
    exit 2
}

# NAME==VERSION lines with names as pip compares them.
pins_of() {
    grep '==' "$1" | tr '[:upper:]_' '[:lower:]-' || true
}

python=3.12 cuda=130 has="" without="" limit=34 only_list=false environment="" folder=""
while [ $# -gt 0 ]; do
    case $1 in
        --help) usage && exit 0 ;;
        --list) only_list=true ;;
        --python | --cuda | --has | --without | --limit | --install)
            [ $# -gt 1 ] || refuse "$1 needs a value. See scripts/gpu_wheels.sh --help."
            case $1 in
                --python) python=$2 ;;
                --cuda) cuda=$2 ;;
                --has) has=$2 ;;
                --without) without+=" $2" ;;
                --limit) limit=$2 ;;
                --install) environment=$2 ;;
            esac
            shift
            ;;
        -*) refuse "$1 is not an option. See scripts/gpu_wheels.sh --help." ;;
        *) folder=$1 ;;
    esac
    shift
done
[[ $python =~ ^3\.(1[1-9]|[2-9][0-9])$ ]] || refuse "--python is $python, must be 3.11 or newer, such as 3.12."
[[ " $cudas " == *" $cuda "* ]] || refuse "--cuda is $cuda. The version of bitsandbytes has a library for: $cudas."
[[ $limit =~ ^[0-9]+$ ]] || refuse "--limit is $limit, must be a number of MiB."
[ -z "$has" ] || [ -f "$has" ] || refuse "--has names $has, which is not a file."

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${folder:-$checkout/wheels}

# A virtual environment finds its own packages before the machine's, in child processes too, and changes nothing there.
if [ -n "$environment" ]; then
    python3 -m venv --without-pip "$environment"
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$packages" "$folder"/*.whl
    python3 -c 'import site, sys; print(*site.getsitepackages(), sys.argv[1], sep="\n")' "$checkout" >"$packages/machine.pth"
    exit 0
fi

pins=$(pins_of "$checkout/constraints.txt")
present=""
[ -z "$has" ] || present=$(pins_of "$has")

wanted=()
for name in $required $optional; do
    if tr '[:upper:]_' '[:lower:]-' <<<"$without " | grep -qF " $name "; then
        echo "left out: $name, by --without" >&2
        continue
    fi
    pin=$(grep "^$name==" <<<"$pins") || refuse "constraints.txt has no version of $name."
    if grep -qxF "$pin" <<<"$present"; then
        echo "left out: $pin, which the machine has" >&2
        continue
    fi
    wanted+=("$pin")
done
if $only_list; then
    printf '%s\n' "${wanted[@]}"
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
# Wheels for another machine are of no use.
machine="python $python, cuda $cuda"
if [ "$(cat "$folder/made_for" 2>/dev/null || true)" != "$machine" ]; then
    rm -f "$folder"/*.whl
    echo "$machine" >"$folder/made_for"
fi

# bitsandbytes has a library for each CUDA, ROCm and XPU, 43 MB in all; the machine uses one.
keep_one_cuda() {
    python3 - "$1" "$2" "libbitsandbytes_cuda$cuda.so" <<'END'
import sys
import zipfile

whole, cut, library = sys.argv[1:]
with zipfile.ZipFile(whole) as source, zipfile.ZipFile(cut, "w", zipfile.ZIP_DEFLATED) as target:
    names = source.namelist()
    if not any(name.endswith("/" + library) for name in names):
        sys.exit(f"error: {whole} has no {library}. Name another --cuda.")
    others = {name for name in names if name.endswith(".so") and not name.endswith(("/" + library, "_cpu.so"))}
    for name in names:
        content = source.read(name)
        if name.endswith(".dist-info/RECORD"):
            rows = content.decode().splitlines(keepends=True)
            content = "".join(row for row in rows if row.split(",")[0] not in others).encode()
        if name not in others:
            target.writestr(name, content)
END
}

# The wheel of NAME==VERSION in a folder; empty where there is none.
wheel_in() {
    local stem=${2%%==*}
    find "$1" -maxdepth 1 -iname "${stem//-/_}-${2##*==}-*.whl"
}

failed=()
for pin in "${wanted[@]}"; do
    [ -z "$(wheel_in "$folder" "$pin")" ] || continue
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$python" \
        --implementation cp "${platforms[@]}" -d "$scratch" "$pin"; then
        failed+=("$pin")
        continue
    fi
    wheel=$(wheel_in "$scratch" "$pin")
    if [ "${pin%%==*}" = bitsandbytes ]; then
        keep_one_cuda "$wheel" "$scratch/cut" || { failed+=("$pin"); continue; }
        mv "$scratch/cut" "$wheel"
    fi
    mv "$wheel" "$folder/"
done

# In the order of importance, as long as there is room.
kept=() left=() total=0
for pin in "${wanted[@]}"; do
    wheel=$(wheel_in "$folder" "$pin")
    [ -n "$wheel" ] || continue
    size=$(stat -c %s "$wheel")
    if [ $((total + size)) -gt $((limit * 1024 * 1024)) ]; then
        left+=("$pin ($((size / 1024)) KiB)")
        continue
    fi
    total=$((total + size))
    kept+=("$wheel")
    printf '%6d KiB  %s\n' $((size / 1024)) "$(basename "$wheel")"
done
for wheel in "$folder"/*.whl; do
    printf '%s\n' "${kept[@]}" | grep -qxF "$wheel" || rm -f "$wheel"
done

for pin in "${left[@]}"; do
    echo "left out: $pin, over the limit of $limit MiB"
done
for pin in "${failed[@]}"; do
    echo "failed: $pin" >&2
done
echo "$((total / 1024)) KiB in $folder. On the machine, in the checkout:"
echo "    scripts/gpu_wheels.sh --install ~/lora-env && ~/lora-env/bin/python -m lora_trainer doctor"
[ ${#failed[@]} -eq 0 ] || exit 1
