#!/bin/bash
# enter HOST CMD...: exec CMD as root on HOST of the cluster whose state directory holds this script.
#
# Everything is exec'd in place, so the caller's child pid, signals, terminal, exit status and working directory are CMD's own.
# It enters the network namespace with nsenter, not with `ip netns exec`: that mounts a new /sys, and without /sys/fs/cgroup slurmd fails.
state=$(cd "${0%/*}" && pwd) || exit 1
case $1 in
--inside)
    host=$2
    shift 2
    echo "$host" >/proc/sys/kernel/hostname || exit 1
    mount --bind "$state/hosts" /etc/hosts || exit 1
    # A site has its slurm.conf in /etc/slurm and no SLURM_CONF: programs that scrub SLURM_* must work here too.
    [ ! -d /etc/slurm ] || mount --bind "$state/etc" /etc/slurm || exit 1
    # A fresh sysfs shows this namespace's interfaces in /sys/class/net; the cgroup tree is carried over from the old one.
    if mount --rbind /sys/fs/cgroup "$state/sys" 2>/dev/null; then
        mount -t sysfs sysfs /sys 2>/dev/null && mount --rbind "$state/sys" /sys/fs/cgroup
        umount -l "$state/sys"
    fi
    if [ -d "$state/private/$host" ]; then
        mount --bind "$state/private/$host/tmp" /tmp && mount --bind "$state/private/$host/shm" /dev/shm || exit 1
    fi
    exec "$@"
    ;;
*)
    if [ -n "$MINICLUSTER_PIDFILE" ]; then
        # The daemon records itself, before it is anything: a launcher killed at this very instant leaves nothing unknown behind.
        read -r stat </proc/$$/stat && echo "$stat" >"$MINICLUSTER_PIDFILE" || exit 1
        unset MINICLUSTER_PIDFILE
    fi
    host=$1
    shift
    export SLURM_CONF="$state/etc/slurm.conf"
    exec nsenter --net="/run/netns/minicluster.${state##*/}.$host" \
        unshare --uts --mount --propagation slave /bin/bash "$state/enter" --inside "$host" "$@"
    ;;
esac
