#!/usr/bin/env bash
# What the vm tier needs besides virtme-ng: user-mode Linux; QEMU, a kernel with sch_netem, a static busybox; and the
# linter shellcheck, for the script that provisions a machine.
# As root on a machine with apt it installs what is missing; otherwise it says what is. It always succeeds: whether
# a missing capability is a skip or a failure is for the tests to say.
set -euo pipefail

kernel_with_netem() {
    local image version
    for image in /boot/vmlinuz-*; do
        version=${image#/boot/vmlinuz-}
        if compgen -G "/lib/modules/$version/kernel/net/sched/sch_netem.ko*" >/dev/null; then return 0; fi
    done
    return 1
}

linux_image() {
    # Debian's and Ubuntu's names for "the current kernel".
    local architecture
    architecture=$(dpkg --print-architecture)
    # shellcheck source=/dev/null
    if [ "$(. /etc/os-release && echo "${ID:-}")" = ubuntu ]; then echo linux-image-generic; else echo "linux-image-$architecture"; fi
}

missing=()
command -v linux.uml >/dev/null || missing+=(user-mode-linux)
command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
# udhcpc and insmod in virtme's initramfs come from a busybox without shared libraries.
{ [ -x /bin/busybox ] || [ -x /usr/bin/busybox ]; } && ! ldd "$(command -v busybox)" >/dev/null 2>&1 || missing+=(busybox-static)
command -v modprobe >/dev/null || [ -x /sbin/modprobe ] || missing+=(kmod)
command -v shellcheck >/dev/null || missing+=(shellcheck)
kernel_with_netem || missing+=(linux-image)

if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "vm tests: missing ${missing[*]} (no apt here: install user-mode Linux, QEMU for x86, a static busybox, and a kernel with sch_netem in /boot)" >&2
    exit 0
fi
missing=("${missing[@]/#linux-image/$(linux_image)}")
if [ "$(id -u)" != 0 ]; then
    echo "vm tests: missing ${missing[*]}. As root: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
echo "vm tests: installing ${missing[*]}"
install=(apt-get install --yes --quiet --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}")
if ! timeout 600 "${install[@]}" >/dev/null 2>&1; then
    # The lists are missing or old.
    timeout 300 apt-get update --quiet >/dev/null || echo "vm tests: apt-get update failed" >&2
    timeout 900 "${install[@]}" >/dev/null || echo "vm tests: could not install ${missing[*]}" >&2
fi
