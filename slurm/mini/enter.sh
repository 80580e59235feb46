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
    local kind controllers point
    while read -r kind controllers point; do
        umount "$point" || return
        if [ "$kind" = cgroup2 ]; then
            mount -t cgroup2 cgroup "$point" || return
            # v2 gives controllers only to groups whose parent holds no process, and Slurm wants this very parent.
            mkdir -p "$point/system.slice/slurmd.service" || return
            echo $$ >"$point/system.slice/slurmd.service/cgroup.procs" || return
        else
            mount -t cgroup -o "$controllers" cgroup "$point" || return
        fi
    done <<<"$1"
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
    options=(--uts --mount --propagation slave)
    if [ "$host" != login ]; then
        options+=(--cgroup)
        while read -r kind controllers point; do
            echo $$ >"$point/minicluster.$name/$host/cgroup.procs" || exit 1
        done <"$state/cgroups"
    fi
    exec nsenter --net="/run/netns/minicluster.$name.$host" \
        unshare "${options[@]}" /bin/bash "$state/enter" --inside "$host" "$@"
fi

host=$2
shift 2
echo "$host" >/proc/sys/kernel/hostname || exit 1
mount --bind "$state/hosts" /etc/hosts || exit 1
# A site has its slurm.conf in /etc/slurm and no SLURM_CONF: programs that scrub SLURM_* must work here too.
[ ! -d /etc/slurm ] || mount --bind "$state/etc" /etc/slurm || exit 1
own_sys || exit 1
[ "$host" = login ] || own_cgroups "$(<"$state/cgroups")" || exit 1
if [ -d "$state/private/$host" ]; then
    mount --bind "$state/private/$host/tmp" /tmp && mount --bind "$state/private/$host/shm" /dev/shm || exit 1
fi
exec "$@"
