//! Takes all rights from the helper that its work does not need.
//!
//! The program can write to the memory that the helper runs on, and may have given up rights since
//! the helper was started (`setuid`). So the kernel must refuse everything else that the helper
//! could be made to do: a seccomp filter allows the system calls below, and no capability is left
//! but those that let the helper see and end its own program. The filter is the helper's alone:
//! filters are not shared with the processes that share memory.
//!
//! The user id stays: a change of it would mark the memory, and thereby the program, as one that
//! must not be traced or dumped.

use hecaton_uffd::Errno;
use hecaton_uffd::abi::UFFDIO_MOVE;
use hecaton_uffd::sys::syscall;
use libc::sock_filter;
use std::os::fd::RawFd;

const KCMP_VM: u32 = 1;
/// To end a program that has changed its user, and to compare with one that has.
const KEPT_CAPABILITIES: u32 = 1 << CAP_KILL | 1 << CAP_SYS_PTRACE;
const CAP_KILL: u32 = 5;
const CAP_SYS_PTRACE: u32 = 19;

/// Never undone. An error where the kernel has no filters; a thread that has inherited a filter
/// that forbids more of them has the rights of its program, and goes on.
pub(super) fn confine(program: RawFd) -> Result<(), Errno> {
    drop_capabilities();
    let filter = filter(program);
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    let set = (libc::PR_SET_NO_NEW_PRIVS as usize, libc::SECCOMP_SET_MODE_FILTER as usize);
    // SAFETY: numbers, and a filter that lives across the call.
    unsafe {
        let confined = syscall(libc::SYS_prctl, [set.0, 1, 0, 0, 0, 0]).and_then(|_| {
            syscall(libc::SYS_seccomp, [set.1, 0, &raw const program as usize, 0, 0, 0])
        });
        let Err(errno) = confined else { return Ok(()) };
        let mode = syscall(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]);
        if mode == Ok(2) { Ok(()) } else { Err(errno) }
    }
}

fn drop_capabilities() {
    #[repr(C)]
    struct Header(u32, i32);
    const VERSION_3: u32 = 0x2008_0522;
    let header = Header(VERSION_3, 0);
    // Effective, permitted and inheritable ones, 32 at a time.
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: structures of the third version. A program that has none can lose none.
    let _ = unsafe {
        let (header, to) = (&raw const header as usize, sets.as_mut_ptr() as usize);
        syscall(libc::SYS_capget, [header, to, 0, 0, 0, 0]).and_then(|_| {
            let [effective, permitted, _] = sets[0];
            let kept = [effective & KEPT_CAPABILITIES, permitted & KEPT_CAPABILITIES, 0];
            sets = [kept, [0; 3]];
            syscall(libc::SYS_capset, [header, to, 0, 0, 0, 0])
        })
    };
}

const ALLOWED: [libc::c_long; 9] = [
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_sendto,
    libc::SYS_poll,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_exit,
    libc::SYS_getpid,
];

/// Statements of the filter: 4 at its head, one for each of [`ALLOWED`], those of the three calls
/// with conditions, and 2 at its end.
const STATEMENTS: usize = 4 + ALLOWED.len() + 3 + 5 + 3 + 2;

/// Where the kernel shows the filter a call's number, its architecture, and its arguments.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// A program of the classic packet filter, as seccomp takes it.
struct Filter {
    statements: [sock_filter; STATEMENTS],
    len: usize,
}

impl Filter {
    fn add(&mut self, code: u16, k: u32, jt: usize, jf: usize) {
        self.statements[self.len] = sock_filter { code, jt: jt as u8, jf: jf as u8, k };
        self.len += 1;
    }

    /// Statements from the next one to the one before the last, which refuses; the last one allows.
    fn to_refusal(&self) -> usize {
        STATEMENTS - 2 - (self.len + 1)
    }

    /// Allows the call whose number is loaded if its arguments have these values.
    fn allow_with<const N: usize>(&mut self, call: libc::c_long, arguments: [(u32, u32); N]) {
        self.add(IF_EQUAL, call as u32, 0, 2 * N);
        for (i, (index, value)) in arguments.into_iter().enumerate() {
            self.add(LOAD, argument(index), 0, 0);
            let refusal = self.to_refusal();
            let matched = if i + 1 == N { refusal + 1 } else { 0 };
            self.add(IF_EQUAL, value, matched, refusal);
        }
    }
}

fn filter(program: RawFd) -> [sock_filter; STATEMENTS] {
    const X86_64: u32 = 0xc000_003e;
    const FIRST_OF_X32: u32 = 0x4000_0000;
    let nothing = sock_filter { code: 0, jt: 0, jf: 0, k: 0 };
    let mut filter = Filter { statements: [nothing; STATEMENTS], len: 0 };
    filter.add(LOAD, ARCHITECTURE, 0, 0);
    let refusal = filter.to_refusal();
    filter.add(IF_EQUAL, X86_64, 0, refusal);
    filter.add(LOAD, NUMBER, 0, 0);
    let refusal = filter.to_refusal();
    filter.add(IF_AT_LEAST, FIRST_OF_X32, refusal, 0);
    for call in ALLOWED {
        let allowed = filter.to_refusal() + 1;
        filter.add(IF_EQUAL, call as u32, allowed, 0);
    }
    filter.allow_with(libc::SYS_ioctl, [(1, UFFDIO_MOVE as u32)]);
    let kill = [(0, program as u32), (1, libc::SIGKILL as u32)];
    filter.allow_with(libc::SYS_pidfd_send_signal, kill);
    filter.allow_with(libc::SYS_kcmp, [(2, KCMP_VM)]);
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    while filter.len < STATEMENTS - 1 {
        filter.add(RETURN, refuse, 0, 0);
    }
    filter.add(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
    filter.statements
}

/// Whether processes `one` and `other` share their memory; the error of `kcmp`.
pub(super) fn share_memory(one: i32, other: i32) -> Result<bool, Errno> {
    let [one, other] = [one as usize, other as usize];
    // SAFETY: numbers only.
    let order = unsafe { syscall(libc::SYS_kcmp, [one, other, KCMP_VM as usize, 0, 0, 0]) };
    order.map(|order| order == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own, which the filter stays with.
    #[test]
    fn confined_process_can_make_the_calls_of_the_helper_and_no_others() {
        let call = |number: libc::c_long, args: [usize; 6]| {
            // SAFETY: the calls below take numbers, or fail with EFAULT or EBADF.
            unsafe { syscall(number, args) }.map_err(|errno| errno.0)
        };
        let of_itself = call(libc::SYS_getpid, [0; 6]).unwrap();
        let check = move || {
            let pidfd =
                call(libc::SYS_pidfd_open, [call(libc::SYS_getpid, [0; 6])?, 0, 0, 0, 0, 0])?;
            confine(pidfd as RawFd).map_err(|errno| errno.0)?;
            let none = usize::MAX;
            let badly = |result: Result<usize, i32>, wanted: i32| {
                if result == Err(wanted) { Ok(()) } else { Err(result.err().unwrap_or(-1)) }
            };
            badly(call(libc::SYS_read, [none, 0, 0, 0, 0, 0]), libc::EBADF)?;
            badly(call(libc::SYS_ioctl, [none, UFFDIO_MOVE as usize, 0, 0, 0, 0]), libc::EBADF)?;
            badly(call(libc::SYS_ioctl, [none, 0x5401, 0, 0, 0, 0]), libc::EPERM)?;
            let kill = |fd: usize, signal: i32| {
                call(libc::SYS_pidfd_send_signal, [fd, signal as usize, 0, 0, 0, 0])
            };
            badly(kill(pidfd, libc::SIGTERM), libc::EPERM)?;
            badly(kill(pidfd + 1, libc::SIGKILL), libc::EPERM)?;
            badly(call(libc::SYS_kill, [0, 0, 0, 0, 0, 0]), libc::EPERM)?;
            badly(call(libc::SYS_socket, [1, 1, 0, 0, 0, 0]), libc::EPERM)?;
            badly(call(libc::SYS_openat, [0; 6]), libc::EPERM)?;
            badly(call(libc::SYS_kcmp, [of_itself, of_itself, 0, 0, 0, 0]), libc::EPERM)?;
            // The last one: the parent sees SIGKILL.
            kill(pidfd, libc::SIGKILL)
        };
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let failed = check().err().unwrap_or(250);
            let _ = call(libc::SYS_exit, [failed as usize, 0, 0, 0, 0, 0]);
        }
        let mut status = 0;
        // SAFETY: the child is this test's, and the kernel writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        let ended = (libc::WIFSIGNALED(status), libc::WTERMSIG(status));
        assert_eq!(ended, (true, libc::SIGKILL), "exit status {}", libc::WEXITSTATUS(status));
    }

    #[test]
    fn who_shares_memory_is_told() {
        let this = std::process::id() as i32;
        assert_eq!(share_memory(this, this), Ok(true));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        assert_eq!(share_memory(this, child.id() as i32), Ok(false));
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
