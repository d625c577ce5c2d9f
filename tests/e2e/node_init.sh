#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# node_init.sh NAME FOLDER PAUSE   the first process of a node, in network, mount, UTS and PID namespaces.
# Mounts of this namespace are seen only here, and disappear with it.
set -eu
name=$1 folder=$2 pause=$3
hostname "$name"
mount --make-rprivate /
mount -t proc proc /proc
# Other programs' temporary mounts, such as network namespaces, would last as long as this node.
awk '$5 ~ "^/(run|tmp)/" {print $5}' /proc/self/mountinfo | sort -r | while read -r path; do
    umount -l "$path" || true
done

# Folders of a node that the machine may lack: in an overlay, so that none is created on the machine.
for parent in /var/lib /var/log /etc /opt; do
    layer=$folder/overlay$parent
    mkdir -p "$layer/upper" "$layer/work"
    mount -t overlay -o "lowerdir=$parent,upperdir=$layer/upper,workdir=$layer/work" overlay "$parent"
done
# containerd cannot put its own overlays on an overlay.
for path in /var/lib/kubelet /var/lib/containerd /var/lib/cni /etc/cni /opt/cni /var/log/pods /var/log/containers; do
    mkdir -p "$path" "$folder/root$path"
    mount --bind "$folder/root$path" "$path"
done
# The whole of /run: if a process removed a mount point below the machine's /run, the mount here would go too.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock
# Each node has its own pins.
mount -t bpf bpf /sys/fs/bpf

# The kubelet or Cilium's agent writes these; the machine's own must not change.
mkdir -p "$folder/sys"
for entry in kernel/panic=10 kernel/panic_on_oops=1 vm/overcommit_memory=1 vm/panic_on_oom=0 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000 \
    kernel/unprivileged_bpf_disabled=1 kernel/timer_migration=0; do
    file=$folder/sys/$(basename "${entry%=*}")
    echo "${entry#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${entry%=*}"
done
mount --make-rshared /
touch "$folder/ready"
exec "$pause"
