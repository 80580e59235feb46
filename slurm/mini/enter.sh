#!/bin/bash
# enter HOST CMD...: exec CMD as root on HOST of the cluster whose state directory holds this script.
#
# Everything is exec'd in place, so the caller's child pid, signals, terminal, exit status and working directory are
# CMD's own. It enters the network namespace with nsenter, not with `ip netns exec`: that mounts a new /sys, and without
# /sys/fs/cgroup slurmd does not start.
state=$(cd "${0%/*}" && pwd) || exit 1
name=${state##*/}

own_sys() { # a sysfs that shows this namespace's interfaces in /sys/class/net, and under it the old cgroup tree
    mount --rbind /sys/fs/cgroup "$state/sys" || return
    mount -t sysfs sysfs /sys && mount --rbind "$state/sys" /sys/fs/cgroup
    umount --lazy "$state/sys"
}

own_cgroups() { # the node's groups, mounted in place of the machine's, as if they were the roots
    while read -r kind controllers point group; do
        umount "$point" || return
        if [ "$kind" = cgroup2 ]; then
            mount -t cgroup2 cgroup "$point" || return
        else
            mount -t cgroup -o "$controllers" cgroup "$point" || return
        fi
    done <"$state/cgroups/$1"
}

if [ "$1" != --inside ]; then
    if [ -n "$MINICLUSTER_PIDFILE" ]; then
        # The daemon records itself before it is anything: a launcher killed at this instant leaves nothing unknown.
        read -r stat </proc/$$/stat && echo "$stat" >"$MINICLUSTER_PIDFILE" || exit 1
        unset MINICLUSTER_PIDFILE
    fi
    host=$1
    shift
    export SLURM_CONF="$state/etc/slurm.conf"
    spaces=(--net="/run/netns/minicluster.$name.$host")
    if [ "$host" != login ]; then
        while read -r kind controllers point group; do
            echo $$ >"$group/cgroup.procs" || exit 1
        done <"$state/cgroups/$host"
        spaces+=(--cgroup="$state/cgroups/$host.namespace")
    fi
    exec nsenter "${spaces[@]}" \
        unshare --uts --mount --propagation slave /bin/bash "$state/enter" --inside "$host" "$@"
fi

host=$2
shift 2
echo "$host" >/proc/sys/kernel/hostname || exit 1
mount --bind "$state/hosts" /etc/hosts || exit 1
# A site has its slurm.conf in /etc/slurm and no SLURM_CONF: programs that scrub SLURM_* must work here too.
[ ! -d /etc/slurm ] || mount --bind "$state/etc" /etc/slurm || exit 1
own_sys || exit 1
[ "$host" = login ] || own_cgroups "$host" || exit 1
if [ -d "$state/private/$host" ]; then
    mount --bind "$state/private/$host/tmp" /tmp && mount --bind "$state/private/$host/shm" /dev/shm || exit 1
fi
exec "$@"
