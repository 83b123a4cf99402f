//! Starts the helper: a process that shares the program's memory and nothing else of it.
//!
//! A thread of the program was rejected, because it would have the program's identity:
//!
//! - `unshare` and `setns` refuse a program with two threads.
//! - `setuid` by a bare system call would leave the thread with its old rights.
//! - A tracer or SIGSTOP would stop it, and other programs would wait for its pages.
//!
//! The helper is a child of a process that ends at once, so that the program's `wait` never meets
//! it. Orphans become children of the first process of their namespace, or of a subreaper. If that
//! is the program itself, the helper is its child from the start. `wait` passes over such a child
//! (no signal at its end), because the program may wait until it has no children.
//!
//! The helper has a session of its own, which no signal to the program's group reaches, and a
//! working directory of its own. Its descriptor table has only what it needs: the program may close
//! every descriptor it has, and none of its pipes stays open because of us. A tracer that follows
//! what the program starts does not get hold of the helper (CLONE_UNTRACED): the tracer may be
//! waiting for a page itself. All signals are blocked in the helper.

use super::confine;
use super::program::Program;
use super::serve::{Links, serve};
use crate::{maps, own, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::HELPER_NAME;
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_void};
use std::os::fd::RawFd;
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

/// Stack for the process between the program and its helper, at the top of the helper's.
const FIRST_STACK: usize = 16 << 10;

/// Flags of both clones. The program's handlers are no business of the helper's.
const FLAGS: c_int = libc::CLONE_VM | libc::CLONE_UNTRACED;

/// The program's end of the lifeline.
#[unsafe(link_section = ".data")]
static LIFELINE: AtomicI32 = AtomicI32::new(-1);

/// A `Start` before the helper has said anything.
const STARTING: u32 = u32::MAX;
/// How often it is made sure that the helper lives.
const LOOK_AGAIN_MS: u64 = 100;
/// How long the helper may take: it makes some ten system calls.
const PATIENCE_MS: u64 = 30_000;

/// Arguments of the helper, at the top of its stack.
#[repr(C, align(16))]
struct Start {
    links: Links,
    program: Program,
    /// Where the helper's own stack ends.
    stack_top: usize,
    /// [`STARTING`]; 0 once the helper is on its own; or the error that it met.
    outcome: AtomicU32,
}

impl Start {
    fn say(&self, outcome: u32) {
        self.outcome.store(outcome, Release);
        sys::wake_all(&self.outcome);
    }
}

/// The child of a fork has its parent's end of a lifeline, too, and must let go of it.
pub(crate) fn let_go_of_parents_lifeline() {
    let lifeline = LIFELINE.swap(-1, Relaxed);
    if lifeline >= 0 {
        sys::close(lifeline);
    }
}

/// Starts the helper and waits until it has closed its copies of the program's descriptors.
pub(crate) fn start(links: Links) -> Result<(), Errno> {
    let before = sys::set_signal_mask(u64::MAX);
    let started = start_with_signals_blocked(links);
    sys::set_signal_mask(before);
    started
}

fn start_with_signals_blocked(links: Links) -> Result<(), Errno> {
    // The first process in a namespace is its init, and must not end at once; nor does it see the
    // program's number.
    let is_first = has_unborn_namespace();
    let pid = sys::process_id();
    let is_direct = is_first || pid == 1 || sys::is_subreaper();
    let pidfd = if is_first { open_pidfd(pid)? } else { -1 };
    let pipe = sys::pipe()?;
    LIFELINE.store(sys::out_of_the_way(pipe[1]), Relaxed);
    let top = own::helper_stack_top();
    let at = (top - size_of::<Start>()) & !63;
    let start = at as *mut Start;
    let program = Program { helper_pid: 0, pid, pidfd, lifeline: pipe[0], stat: -1 };
    let outcome = AtomicU32::new(STARTING);
    // SAFETY: the top of the helper's stack, which nothing uses yet.
    let start = unsafe {
        start.write(Start { links, program, stack_top: top - FIRST_STACK, outcome });
        &*start
    };
    let cloned = match is_direct {
        true => clone(entry, at, FLAGS, start),
        false => clone(between, at, FLAGS | libc::CLONE_VFORK, start).map(reap),
    };
    sys::close(pipe[0]);
    if pidfd >= 0 {
        sys::close(pidfd);
    }
    if let Err(errno) = cloned {
        let_go_of_parents_lifeline();
        return Err(errno);
    }
    let (lifeline, until) = (LIFELINE.load(Relaxed), sys::now_ms() + PATIENCE_MS);
    loop {
        match start.outcome.load(Acquire) {
            STARTING if has_no_reader(lifeline) => return Err(Errno(libc::ESRCH)),
            STARTING if sys::now_ms() >= until => return Err(Errno(libc::ETIMEDOUT)),
            STARTING => sys::wait_while(&start.outcome, STARTING, LOOK_AGAIN_MS),
            0 => return Ok(()),
            errno => return Err(Errno(errno as i32)),
        }
    }
}

fn clone(
    function: extern "C" fn(*mut c_void) -> c_int,
    stack: usize,
    flags: c_int,
    start: &Start,
) -> Result<c_int, Errno> {
    let cloned: isize;
    // SAFETY: the stack is the library's, aligned, and only the new process uses it. That never
    // returns from here and never unwinds, and neither it nor the calling thread, which shares its
    // thread-local storage, uses any meanwhile. Not libc's, because a bare program has none.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "mov edi, eax",
            "mov eax, {exit}",
            "syscall",
            "2:",
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone as isize => cloned,
            in("rdi") flags as usize, in("rsi") stack, in("rdx") 0, in("r10") 0, in("r8") 0,
            in("r12") std::ptr::from_ref(start), in("r13") function as *const (),
            out("rcx") _, out("r11") _,
        );
    }
    if cloned < 0 { Err(Errno(-cloned as i32)) } else { Ok(cloned as c_int) }
}

/// The process between: ends once it has started the helper. The program stands still meanwhile.
extern "C" fn between(start: *mut c_void) -> c_int {
    // SAFETY: `start` wrote it, and it stays.
    let start = unsafe { &*start.cast::<Start>() };
    if let Err(errno) = clone(entry, start.stack_top, FLAGS, start) {
        start.say(errno.0 as u32);
    }
    0
}

/// Takes note of the end of the process between, which sent no signal.
fn reap(pid: c_int) -> c_int {
    let options = libc::__WALL as usize;
    // SAFETY: the status is not asked for.
    while unsafe { syscall(libc::SYS_wait4, [pid as usize, 0, options, 0, 0, 0]) }
        == Err(Errno(libc::EINTR))
    {}
    pid
}

extern "C" fn entry(start: *mut c_void) -> c_int {
    // SAFETY: `start` wrote it, and it stays, above the helper's stack.
    let start = unsafe { &*start.cast::<Start>() };
    let Links { socket, uffd, mover, .. } = start.links;
    let mover = mover.map_or(-1, |mover| mover.0);
    keep_only([socket, uffd.0, mover, start.program.lifeline, start.program.pidfd]);
    // Opened here, because the program may be allowed few descriptors. It waits, so its number is
    // its own.
    let links = Links { maps: maps::open().unwrap_or(-1), ..start.links };
    let mut program = Program { helper_pid: sys::process_id(), ..start.program };
    become_nobodys_child();
    let ready = match program.pidfd {
        -1 => open_pidfd(program.pid).map(|pidfd| program.pidfd = pidfd),
        _ => Ok(()),
    };
    program.stat = open_stat(program.pid);
    if let Err(errno) = ready.and_then(|()| confine::confine(program.pidfd)) {
        start.say(errno.0 as u32);
        return 1;
    }
    start.say(0);
    serve(&links, &mut program);
    0
}

fn open_pidfd(pid: i32) -> Result<RawFd, Errno> {
    // SAFETY: numbers only.
    let opened = unsafe { syscall(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) };
    opened.map(|fd| fd as RawFd)
}

/// `/proc/PID/stat`, or -1.
fn open_stat(pid: i32) -> RawFd {
    let mut path = [0u8; 32];
    path[..6].copy_from_slice(b"/proc/");
    let end = sys::write_decimal(&mut path, 6, pid);
    path[end..end + 5].copy_from_slice(b"/stat");
    let path = std::ffi::CStr::from_bytes_until_nul(&path);
    path.ok().and_then(|path| sys::open(path).ok()).unwrap_or(-1)
}

fn become_nobodys_child() {
    let (name, root) = (HELPER_NAME.as_ptr() as usize, c"/".as_ptr() as usize);
    // The kernel's sigaction: the handler, then flags, restorer and mask.
    let ignored = [libc::SIG_IGN, 0, 0, 0];
    let ignored = ignored.as_ptr() as usize;
    // SAFETY: C strings, and a structure as the kernel has it. An error of these changes nothing
    // that counts. SIGCHLD is for one that is the init of a namespace.
    let _ = unsafe {
        let _ = syscall(libc::SYS_setsid, [0; 6]);
        let _ = syscall(libc::SYS_chdir, [root, 0, 0, 0, 0, 0]);
        let _ = syscall(libc::SYS_rt_sigaction, [libc::SIGCHLD as usize, ignored, 0, 8, 0, 0]);
        syscall(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name, 0, 0, 0, 0])
    };
}

/// Closes all but these; those below 0 count for nothing.
fn keep_only<const N: usize>(mut kept: [RawFd; N]) {
    kept.sort_unstable();
    let close = |from: usize, to: usize| {
        if from <= to {
            // SAFETY: this process's own table; the program's is another.
            let _ = unsafe { syscall(libc::SYS_close_range, [from, to, 0, 0, 0, 0]) };
        }
    };
    let mut next = 0;
    for fd in kept.into_iter().filter_map(|fd| usize::try_from(fd).ok()) {
        if next < fd {
            close(next, fd - 1);
        }
        next = fd + 1;
    }
    close(next, u32::MAX as usize);
}

/// Whether the next process that this one makes is the first of its namespace.
fn has_unborn_namespace() -> bool {
    let (mut own, mut of_children) = ([0u8; 64], [0u8; 64]);
    let read = |path: &std::ffi::CStr, name: &mut [u8; 64]| sys::read_link(path, name).is_ok();
    read(c"/proc/self/ns/pid", &mut own)
        && !(read(c"/proc/self/ns/pid_for_children", &mut of_children) && own == of_children)
}

/// Whether the helper has ended: it has the only other end.
fn has_no_reader(lifeline: RawFd) -> bool {
    let mut polled = libc::pollfd { fd: lifeline, events: 0, revents: 0 };
    // SAFETY: one structure.
    let _ = unsafe { syscall(libc::SYS_poll, [&raw mut polled as usize, 1, 0, 0, 0, 0]) };
    polled.revents & libc::POLLERR != 0
}
