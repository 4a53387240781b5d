#!/usr/bin/env bash
# Makes a Debian or Ubuntu machine ready for dblp-netem: packages, a kernel with sch_netem, the environment in .venv.
#
#   sudo vagrant/provision.sh [CHECKOUT]     default: the checkout that this script is in
#
# It can be called again: what is there stays. It ends with `dblp-netem doctor`, and with its exit status.
set -euo pipefail

checkout=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")/..}")
if [ ! -f "$checkout/pyproject.toml" ]; then
    echo "provision: $checkout is not a checkout of dblp-netem (no pyproject.toml)" >&2
    exit 2
fi
if [ "$(id -u)" != 0 ]; then
    echo "provision: needs root, to install packages and to load a kernel module: sudo $0 $*" >&2
    exit 4
fi

# What the owner of the checkout would do is done as them, so that nothing in it belongs to root.
owner=$(stat -c %U "$checkout")
as_owner() {
    if [ "$owner" = root ]; then "$@"; else runuser -u "$owner" -- "$@"; fi
}

python_works() {
    python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

install_packages() {
    local missing=()
    command -v make >/dev/null || missing+=(make)
    command -v git >/dev/null || missing+=(git)
    python_works || missing+=(python3 python3-venv)
    command -v tcpdump >/dev/null || missing+=(tcpdump)
    command -v iperf3 >/dev/null || missing+=(iperf3)
    if [ ${#missing[@]} -eq 0 ]; then return 0; fi
    if ! command -v apt-get >/dev/null; then
        echo "provision: no apt-get here; install ${missing[*]} by hand" >&2
        exit 4
    fi
    echo "provision: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet >/dev/null
    apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >/dev/null
    if ! python_works; then
        echo "provision: $(python3 --version) is too old or has no venv; Python 3.11 or newer is needed" >&2
        exit 4
    fi
}

# The running kernel's own module where the distribution keeps it in a package of its own (Ubuntu, cloud images).
load_netem() {
    if modprobe --quiet sch_netem; then return 0; fi
    local version extra
    version=$(uname -r)
    extra="linux-modules-extra-$version"
    if command -v apt-get >/dev/null && apt-cache show "$extra" >/dev/null 2>&1; then
        echo "provision: installing $extra"
        DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet "$extra" >/dev/null
    fi
    if ! modprobe --quiet sch_netem; then
        echo "provision: kernel $version has no sch_netem; scenarios with delay need it, others use eBPF" >&2
    fi
}

install_packages
load_netem
for module in sch_prio sch_tbf sch_htb sch_ingress cls_u32 cls_bpf ifb; do
    modprobe --quiet "$module" || true # built in, or doctor will say that it is missing
done
as_owner make --no-print-directory -C "$checkout" install
exec "$checkout/.venv/bin/dblp-netem" doctor
