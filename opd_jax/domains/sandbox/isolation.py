"""Shuts the calling process in, for good: what a model wrote runs only behind this.

Three independent walls, each where the host has it, and limits always:

- **namespaces** (user, mount, pid, net, ipc, uts, cgroup): an empty network; a file system of
  Python's library and the shared libraries, read-only, and one small folder in memory; no /proc;
  no other process can even be named. Everything in it ends with it.
- **landlock**: the same rule for files, kept by the kernel without any mount: reading only below
  the library folders, writing only below the own folder; no TCP.
- **seccomp**: system calls that a pure program does not need fail with EPERM: sockets, processes
  (fork, exec), signals to anyone, tracing, mounts, kernel interfaces.
- **limits** (setrlimit): CPU seconds, address space, size of a file, open files, processes.

What each does not protect from:

- Namespaces alone: bugs of the kernel calls that stay reachable; memory and CPU of the machine.
- Landlock + seccomp without namespaces: the program can read the library folders' other content,
  see its own process id and the clock, and fill the disk of its own folder file by file (each file
  is limited, their number is not) until the folder is removed.
- Limits alone (`allow_unsandboxed`): files, network, other processes of the same user, and anything
  that outlives the call on systems other than Linux. No protection from malice.
- All of them: side channels through caches and time, a kernel exploit, and heat.

Only the standard library, and nothing of it that starts threads: this runs in a fresh interpreter.
"""

import ctypes
import os
import resource
import select
import signal
import struct
import sys

WALLS = ("namespaces", "landlock", "seccomp")
OPEN_FILES = 64
FOLDER = "/box"  # The own folder behind the namespaces.

_CLONE_FLAGS = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MNT_DETACH = 2
# Flags of a mount that a user namespace may not take off again; statvfs's bits are mount's.
_LOCKED = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_SHARED = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22

# System calls by architecture, only the ones that the filter names.
_X86_64 = {
    "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200,
    "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "setpgid": 109, "setsid": 112,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248,
    "request_key": 249, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305,
    "sethostname": 170, "setdomainname": 171, "acct": 163, "quotactl": 179, "syslog": 103,
    "personality": 135, "name_to_handle_at": 303, "open_by_handle_at": 304, "iopl": 172,
    "ioperm": 173, "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240,
    "memfd_create": 319, "setrlimit": 160, "sched_setaffinity": 203, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251,
    "migrate_pages": 256, "move_pages": 279, "fanotify_init": 300, "seccomp": 317,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242,
    "execve": 221, "execveat": 281, "kill": 129, "tkill": 130, "tgkill": 131,
    "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "ptrace": 117, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "setpgid": 154, "setsid": 157, "mount": 40,
    "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "bpf": 280,
    "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217,
    "request_key": 218, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225,
    "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266,
    "sethostname": 161, "setdomainname": 162, "acct": 89, "quotactl": 60, "syslog": 116,
    "personality": 92, "name_to_handle_at": 264, "open_by_handle_at": 265, "shmget": 194,
    "shmat": 196, "semget": 190, "msgget": 186, "mq_open": 180, "memfd_create": 279,
    "setrlimit": 164, "sched_setaffinity": 122, "setpriority": 140, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238,
    "move_pages": 239, "fanotify_init": 262, "seccomp": 277,
}  # fmt: skip
_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
_NEWEST = 463  # Calls that are newer than this list "do not exist".
# By architecture: audit number, denied calls, and those whose arguments decide.
_MACHINES = {
    "x86_64": (0xC000003E, _X86_64 | _COMMON, {"clone": 56, "socketpair": 53, "prctl": 157,
               "prlimit64": 302, "pivot_root": 155, "capset": 126, "seccomp": 317}),
    "aarch64": (0xC00000B7, _AARCH64 | _COMMON, {"clone": 220, "socketpair": 199, "prctl": 167,
                "prlimit64": 261, "pivot_root": 41, "capset": 91, "seccomp": 277}),
}  # fmt: skip
_CLONE3 = 435
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446


class IsolationError(Exception):
    """A wall could not be put up; nothing may run."""


def enter(walls: list[str], limits: dict[str, int], folder: str, supervisor: int) -> None:
    """Puts up the walls and sets the limits; returns in the process that is shut in.

    With namespaces that is a child of the caller: the caller itself never returns from here but
    ends when the child does. The current folder is then the program's own.

    Args:
      walls: of WALLS; each must succeed.
      limits: cpu_seconds, memory_bytes, file_bytes, folder_bytes.
      folder: the own folder on the host; not used behind namespaces.
      supervisor: the process that started this one, with whose death it ends.

    Raises:
      IsolationError: a wall could not be put up.
    """
    prctl = _prctl()
    libraries = _library_folders()
    if prctl:
        prctl(_PR_SET_PDEATHSIG, 9)
    if os.getppid() != supervisor:  # Gone before its death could be signalled.
        os._exit(1)
    if "namespaces" in walls:
        _enter_namespaces(libraries, limits["folder_bytes"])
        _become_first_process(prctl)
        folder = FOLDER
    os.chdir(folder)
    _limit(limits)
    if "landlock" in walls or "seccomp" in walls:
        _check(prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if "landlock" in walls:
        _enter_landlock(libraries, folder)
    if "namespaces" in walls:
        _drop_capabilities()
    if "seccomp" in walls:
        _enter_seccomp(prctl)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl():
    """prctl on Linux, None elsewhere."""
    return _libc().prctl if sys.platform == "linux" else None


def _check(result: int, what: str) -> int:
    if result < 0:
        raise IsolationError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _machine() -> tuple[int, dict[str, int], dict[str, int]]:
    if os.uname().machine not in _MACHINES:
        raise IsolationError(f"no table of system calls for {os.uname().machine}")
    return _MACHINES[os.uname().machine]


def _library_folders() -> list[str]:
    """What an interpreter that already runs still reads: its library and shared libraries."""
    base = os.path.realpath(sys.base_prefix)
    stdlib = os.path.realpath(os.path.dirname(os.__file__))
    wanted = [stdlib, *_SHARED]
    wanted += [path for path in sys.path if path and os.path.isdir(path)]
    if base != "/usr":
        wanted.append(os.path.join(base, "lib"))
    found: list[str] = []
    for path in sorted({p for p in wanted if os.path.exists(p)}, key=len):
        if not any(path.startswith(outer.rstrip("/") + "/") for outer in found):
            found.append(path)
    return found


def _limit(limits: dict[str, int]) -> None:
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


# Namespaces.


def _enter_namespaces(libraries: list[str], folder_bytes: int) -> None:
    libc, uid, gid = _libc(), os.geteuid(), os.getegid()
    _check(libc.unshare(_CLONE_FLAGS), "unshare")
    # Nobody, inside and in what the maps allow; the true user is out of reach.
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"),
                       ("gid_map", f"65534 {gid} 1")):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount(libc, "none", "/", None, _MS_REC | _MS_PRIVATE)
    # Over /proc, where nothing lies that is still needed.
    root = "/proc"
    _mount(libc, "tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in [*libraries, "/dev/null"]:
        _show(libc, path, root + path)
    box = root + FOLDER
    os.mkdir(box)
    _mount(libc, "tmpfs", box, "tmpfs", _MS_NOSUID | _MS_NODEV,
           f"size={folder_bytes},nr_inodes=4096,mode=700")  # fmt: skip
    os.chdir(root)
    _, _, calls = _machine()
    _check(libc.syscall(calls["pivot_root"], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", _MNT_DETACH), "umount")
    _mount(libc, "none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/")


def _show(libc: ctypes.CDLL, path: str, place: str) -> None:
    """Makes a path of the host visible in the new root, read-only."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(libc, path, place, None, _MS_BIND)
    device = path.startswith("/dev/")
    kept = os.statvfs(place).f_flag & _LOCKED
    flags = kept | _MS_REMOUNT | _MS_BIND | _MS_NOSUID | (0 if device else _MS_RDONLY | _MS_NODEV)
    _mount(libc, "none", place, None, flags)


def _mount(libc, source, target, kind, flags, options=None) -> None:
    raw = [None if x is None else x.encode() for x in (source, target, kind, options)]
    result = libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3])
    _check(result, f"mount of {source} on {target}")


def _become_first_process(prctl) -> None:
    """A child is the first process of the new namespace; the caller waits and ends as it did.

    SIGTERM makes the caller end the child and wait for it: once the caller is gone, all is gone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_PDEATHSIG, 9)
        os.close(held)
        if select.select([alive], [], [], 0)[0]:  # Its end: the caller is gone already.
            os._exit(1)
        os.close(alive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for fd in (0, 1, 2, alive):
        os.close(fd)  # Or the other side would never see the end.
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _drop_capabilities() -> None:
    _, _, calls = _machine()
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc().syscall(calls["capset"], header, bytes(24)), "capset")


# Landlock.


def landlock_version() -> int:
    """The kernel's version of landlock; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def _enter_landlock(libraries: list[str], folder: str) -> None:
    libc, version = _libc(), landlock_version()
    if version < 1:
        raise IsolationError("landlock: not in this kernel")
    # Rights by version: 13 at first, then refer, truncate, (net), ioctl on devices.
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (1 << bit) if version >= since else 0
    fields = [rights]
    fields += [3] if version >= 4 else []  # TCP: bind, connect.
    fields += [3] if version >= 6 else []  # Abstract sockets, signals to processes outside.
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    size = ctypes.c_size_t(len(attributes))
    ruleset = _check(libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock")
    read = 1 << 2 | 1 << 3  # Files, folders.
    for path, allowed in [*((p, read) for p in libraries), ("/dev/null", 2 | 4), (folder, rights)]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            allowed &= 1 | 2 | 4 | (1 << 14 if version >= 3 else 0)
        rule = struct.pack("=Qi", allowed, fd)
        _check(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock rule for {path}")
        os.close(fd)
    _check(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


# Seccomp: a classic BPF program over (call, architecture, arguments).

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def _argument(n: int) -> int:
    return 16 + 8 * n  # Its low half; both machines are little-endian.


def seccomp_program() -> bytes:
    """The filter as an array of `struct sock_filter`."""
    audit, denied, calls = _machine()
    threads_only = [(_LD, 0, 0, _argument(0)), (_JSET, 0, 1, 0x10000), (_RET, 0, 0, _ALLOW)]
    streams_only = [
        (_LD, 0, 0, _argument(1)), (_AND, 0, 0, 0xF), (_JEQ, 0, 1, 1), (_RET, 0, 0, _ALLOW),
    ]  # fmt: skip
    names_only = [(_LD, 0, 0, _argument(0)), (_JEQ, 0, 1, 15), (_RET, 0, 0, _ALLOW)]
    own_only = [(_LD, 0, 0, _argument(0)), (_JEQ, 0, 1, 0), (_RET, 0, 0, _ALLOW)]
    program = [
        (_LD, 0, 0, 4), (_JEQ, 1, 0, audit), (_RET, 0, 0, _KILL),
        (_LD, 0, 0, 0), (_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _EPERM),
        (_JGE, 0, 1, _NEWEST + 1), (_RET, 0, 0, _ENOSYS),
        # glibc tries clone3 first, whose flags no filter can see, and then clone.
        (_JEQ, 0, 1, _CLONE3), (_RET, 0, 0, _ENOSYS),
    ]  # fmt: skip
    for name, body in (("clone", threads_only), ("socketpair", streams_only),
                       ("prctl", names_only), ("prlimit64", own_only)):  # fmt: skip
        program += [(_JEQ, 0, len(body) + 1, calls[name]), *body, (_RET, 0, 0, _EPERM)]
    numbers = sorted(denied.values())
    for i, number in enumerate(numbers):
        program.append((_JEQ, len(numbers) - i, 0, number))
    program += [(_RET, 0, 0, _ALLOW), (_RET, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def _enter_seccomp(prctl) -> None:
    code = seccomp_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _check(prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")
