"""The process that runs a model's code: `python -I -B sandbox_child.py` with a job on stdin, its results on stdout.

It imports nothing of tfglm. Before the code runs it gives up everything that a pure function does not need: limits on
processor time, memory and files, then a seccomp filter that lets through a short list of system calls. Files may be
opened for reading only; there are no sockets, no processes, no signals and no programs. Linux on x86-64 and AArch64.

Job: {"source", "function", "calls": [arguments...], "cpu_s", "memory"}. Result: {"values": [...]}, or {"error",
"at"}, or {"unsafe"} where the filter cannot be set. Values have to be JSON; tuples become lists.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

LD, JEQ, JSET, RET = 0x20, 0x15, 0x45, 0x06  # classic BPF: load a word, jump if equal, jump if any bit is set, return
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each, low word first
EPERM, ENOSYS = 1, 38
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x10000

# Audit architecture, numbers of clone, clone3 and openat, and the calls that pass. Source: the kernel's tables.
SYSCALLS = {
    "x86_64": (0xC000003E, 56, 435, 257, {
        "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
        "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
        "madvise": 28, "dup": 32, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89,
        "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104,
        "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "arch_prctl": 158, "gettid": 186,
        "time": 201,
        "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218, "clock_gettime": 228,
        "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262, "readlinkat": 267,
        "faccessat": 269, "ppoll": 271, "set_robust_list": 273, "getrandom": 318, "statx": 332, "rseq": 334,
        "faccessat2": 439,
    }),
    "aarch64": (0xC00000B7, 220, 435, 56, {
        "getcwd": 17, "dup": 23, "faccessat": 48, "close": 57, "getdents64": 61, "lseek": 62, "read": 63, "write": 64,
        "readv": 65, "writev": 66, "pread64": 67, "pselect6": 72, "ppoll": 73, "readlinkat": 78, "newfstatat": 79,
        "fstat": 80, "exit": 93, "exit_group": 94, "set_tid_address": 96, "futex": 98, "set_robust_list": 99,
        "nanosleep": 101, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123,
        "sched_yield": 124, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "times": 153, "uname": 160, "getrlimit": 163, "getrusage": 165, "gettimeofday": 169, "getpid": 172,
        "getppid": 173,
        "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "sysinfo": 179, "brk": 214,
        "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "getrandom": 278, "statx": 291,
        "rseq": 293, "faccessat2": 439,
    }),
}  # fmt: skip


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, operand)."""
    arch, clone, clone3, openat, passing = SYSCALLS[machine]

    def unless(bits_wanted: bool, argument: int, bits: int) -> list[tuple[int, int, int, int]]:
        """Refuse the call by whether its argument has any of the bits; four instructions long."""
        refuse, allow = (1, 0) if bits_wanted else (0, 1)
        return [
            (LD, 0, 0, ARGUMENTS + 8 * argument),
            (JSET, refuse, allow, bits),
            (RET, 0, 0, ERRNO | EPERM),
            (RET, 0, 0, ALLOW),
        ]

    code = [(LD, 0, 0, ARCH), (JEQ, 1, 0, arch), (RET, 0, 0, KILL), (LD, 0, 0, NUMBER)]
    for number in passing.values():
        code += [(JEQ, 0, 1, number), (RET, 0, 0, ALLOW)]
    code += [(JEQ, 0, 4, openat), *unless(False, 2, WRITES)]
    code += [(JEQ, 0, 4, clone), *unless(True, 0, CLONE_THREAD)]
    # ENOSYS lets the C library fall back to clone, whose flags a filter can read.
    return [*code, (JEQ, 0, 1, clone3), (RET, 0, 0, ERRNO | ENOSYS), (RET, 0, 0, ERRNO | EPERM)]


def lock() -> None:
    """From here on only the listed calls pass. Raises OSError where that cannot be had."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in SYSCALLS or struct.calcsize("P") != 8:
        raise OSError(f"no system call filter for {sys.platform} on {machine}")
    code = b"".join(struct.pack("HBBI", *step) for step in program(machine))
    steps = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    filter_ = Program(len(code) // 8, ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, by_filter, ctypes.byref(filter_), 0, 0):
        raise OSError(os.strerror(ctypes.get_errno()))


def limit(cpu_s: int, memory: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
    ):
        resource.setrlimit(what, (most, most))


def run(source: str, function: str, calls: list[list[object]]) -> dict[str, object]:
    at = "definition"
    try:
        scope: dict[str, object] = {"__name__": "answer"}
        exec(compile(source, "answer", "exec"), scope)
        values = []
        for number, arguments in enumerate(calls):
            at = f"call {number}"
            values.append(json.loads(json.dumps(scope[function](*arguments), allow_nan=False)))  # type: ignore[operator]
        return {"values": values}
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers of the code too
        return {"error": f"{type(error).__name__}: {str(error)[:200]}", "at": at}


def main() -> None:
    job = json.load(sys.stdin)
    results = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        limit(job["cpu_s"], job["memory"])
        lock()
    except (OSError, ValueError) as error:
        found: dict[str, object] = {"unsafe": str(error)}
    else:
        found = run(job["source"], job["function"], job["calls"])
    left = json.dumps(found).encode()
    while left:
        left = left[os.write(results, left) :]
    # Threads and exit handlers of the code have no say in how this ends.
    os._exit(0)


if __name__ == "__main__":
    main()
