#!/bin/sh
# What the images run to install, in the folder with the sources; each step also by itself, with any Python:
#
#   docker/install.sh wheels WHEELS          compile llama.cpp's bindings into the folder WHEELS
#   docker/install.sh cpu VENV WHEELS        the CPU image's environment
#   docker/install.sh gpu VENV [OPTION…]     the GPU image's environment; with pip's `--dry-run` only what would be in it
#
# EXTRAS: those of the CPU image. `demo` is the 94 MB model that overlays/kind-cpu serves.
set -eu

PYTHON=${PYTHON:-python3}
EXTRAS=${EXTRAS:-llamacpp,redis,demo}

venv() {
    "$PYTHON" -m venv "$1"
    "$1/bin/python" -m pip --version
}

case ${1:-} in
wheels)
    # By itself, so that a change of anything but the pin leaves the compiled layer as it is. Without GGML_NATIVE: the
    # machine that builds an image is not the one that runs it. What is left is AVX2, which every cloud has.
    CMAKE_ARGS=${CMAKE_ARGS:--DGGML_NATIVE=OFF}
    export CMAKE_ARGS
    "$PYTHON" -m pip wheel --no-deps --wheel-dir "$2" "$(grep '^llama_cpp_python==' constraints.txt)"
    ;;
cpu)
    venv "$2"
    "$2/bin/python" -m pip install --find-links "$3" --constraint constraints.txt \
        --requirement docker/requirements.txt ".[$EXTRAS]"
    ;;
gpu)
    venv=$2
    shift 2
    venv "$venv"
    "$venv/bin/python" -m pip install "$@" --constraint docker/constraints-gpu.txt \
        --requirement docker/requirements-gpu.txt ".[vllm,redis]"
    ;;
*)
    sed -n '2,8p' "$0"
    exit 2
    ;;
esac
