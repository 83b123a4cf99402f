//! In a hypervisor: hands guest RAM to the pager, and nothing else.
//!
//! Guest RAM is recognised as it is mapped: shared, large, and of a memory file whose name says
//! what it is for ([`FILE_NAMES`]), wherever its descriptor came from. The hypervisor's own memory
//! stays as it is. A userfaultfd and a connection are made when the first is mapped, not at the
//! start: a hypervisor may fork into the background before, and the helpers that it runs have no
//! guest RAM.
//!
//! There is no helper: the pager takes pages of a shared file away without one.

use super::launch;

use crate::sys;
use hecaton_uffd::abi::*;
use hecaton_uffd::guest_ram::{Answer, FILE_NAMES, Handover, MAGIC, MIN_BYTES};
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use hecaton_uffd::{Errno, Uffd};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// How long one attempt waits for the pager's answer, and how many there are: a pager that was
/// killed comes back within moments.
const PATIENCE_SECONDS: i64 = 5;
const ATTEMPTS: u32 = 6;
const PAUSE_MS: u64 = 100;

/// The pager's socket; empty in a process that is no hypervisor, or has not asked for it yet.
static mut SOCKET_PATH: [u8; 108] = [0; 108];

/// The machine has left the pool.
static IS_DETACHED: AtomicBool = AtomicBool::new(false);

/// One hand-over at a time.
static BUSY: AtomicBool = AtomicBool::new(false);
/// Userfaultfd and connection of the first region, and the process that made them.
static UFFD: AtomicI32 = AtomicI32::new(-1);
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Why a region is not paged.
pub(crate) enum Refused {
    /// The reason was printed.
    Said,
    /// The machine has left the pool: its memory is as any other.
    Detached,
}

/// Guest RAM will be handed to the pager at `path`. False if that is no socket's path.
pub(crate) fn prepare(path: &[u8]) -> bool {
    if path.is_empty() || path.len() >= 108 {
        return false;
    }
    // SAFETY: the constructor calls this, before the program has a second thread.
    unsafe { (&raw mut SOCKET_PATH).cast::<u8>().copy_from(path.as_ptr(), path.len()) };
    true
}

/// A shared mapping of `fd` from `offset` on was made. If it is guest RAM, it is paged when this
/// returns.
pub(crate) fn mapped(region: Range, fd: RawFd, offset: u64) -> Result<(), Refused> {
    if region.len < MIN_BYTES || IS_DETACHED.load(Ordering::Relaxed) || !is_guest_ram(fd) {
        return Ok(());
    }
    while BUSY.swap(true, Ordering::Acquire) {
        // SAFETY: no arguments.
        let _ = unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
    }
    let done = hand_over(region, fd, offset);
    BUSY.store(false, Ordering::Release);
    done
}

fn is_guest_ram(fd: RawFd) -> bool {
    let mut path = *b"/proc/self/fd/..........\0";
    let mut digits = [0u8; 10];
    let digits = decimal(fd as u32, &mut digits);
    path[14..14 + digits.len()].copy_from_slice(digits);
    path[14 + digits.len()] = 0;
    let mut name = [0u8; 128];
    // SAFETY: the path is a C string, and the kernel writes at most the buffer's length.
    let read = unsafe {
        let (at, to) = (path.as_ptr() as usize, name.as_mut_ptr() as usize);
        let here = libc::AT_FDCWD as usize;
        syscall(libc::SYS_readlinkat, [here, at, to, name.len(), 0, 0])
    };
    let Ok(length) = read else { return false };
    let Some(name) = name[..length].strip_prefix(b"/memfd:") else { return false };
    FILE_NAMES.iter().any(|known| name.starts_with(known.as_bytes()))
}

fn decimal(mut number: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    while at == digits.len() || number > 0 {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
    }
    &digits[at..]
}

fn hand_over(region: Range, file: RawFd, offset: u64) -> Result<(), Refused> {
    if PROCESS.swap(process_id(), Ordering::Relaxed) != process_id() {
        // A fork's child has its parent's, which are not for its memory.
        sys::close(UFFD.swap(-1, Ordering::Relaxed));
        sys::close(SOCKET.swap(-1, Ordering::Relaxed));
    }
    let uffd = match UFFD.load(Ordering::Relaxed) {
        -1 => open()?,
        fd => Uffd(fd),
    };
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    if uffd.register(region.start, region.len, mode).is_err() {
        return refuse(
            b"the kernel does not let userfaultfd handle it (shared memory needs Linux 5.19)",
        );
    }
    let accepted = deliver(uffd, region, file, offset);
    if accepted.is_err() {
        // Else unmapping it would wait until somebody reads of it.
        let _ = uffd.unregister(region.start, region.len);
    }
    match accepted {
        Err(Refused::Detached) => Ok(()),
        other => other,
    }
}

fn open() -> Result<Uffd, Refused> {
    let mut path = [0; 108];
    launch::ask(&mut path, refuse)?;
    if path[0] != 0 {
        // SAFETY: read by `connect` only, which like this runs in the one thread that hands over.
        unsafe { (&raw mut SOCKET_PATH).write(path) };
    }
    let Ok(uffd) = Uffd::open() else {
        return refuse(b"userfaultfd is not permitted to this process");
    };
    let uffd = Uffd(sys::out_of_the_way(uffd.0));
    if uffd.api(GUEST_RAM_FEATURES).is_err() {
        sys::close(uffd.0);
        return refuse(
            b"this kernel's userfaultfd cannot write-protect shared memory (Linux 5.19 can)",
        );
    }
    // Paging is by pages of 4 KiB. A huge page in a memory file cannot be taken away in parts: the
    // kernel would merge pages that are there behind the pager's back.
    // SAFETY: numbers only.
    let _ = unsafe { syscall(libc::SYS_prctl, [libc::PR_SET_THP_DISABLE as usize, 1, 0, 0, 0, 0]) };
    UFFD.store(uffd.0, Ordering::Relaxed);
    Ok(uffd)
}

fn deliver(uffd: Uffd, region: Range, file: RawFd, offset: u64) -> Result<(), Refused> {
    for _ in 0..ATTEMPTS {
        let known = SOCKET.load(Ordering::Relaxed);
        let first = known == -1;
        let Ok(socket) = (if first { connect() } else { Ok(known) }) else {
            sys::sleep_ms(PAUSE_MS);
            continue;
        };
        let message = Handover { magic: MAGIC, first: first.into(), region, offset };
        let descriptors = [uffd.0, file];
        let descriptors = if first { &descriptors[..] } else { &descriptors[1..] };
        let mut bytes = [0u8; size_of::<Answer>()];
        // A pager that has let go of this machine does not listen, but has left its last word.
        let _ = sys::send_with_descriptors(socket, message.as_bytes(), descriptors);
        let read = sys::read(socket, &mut bytes);
        let answer = read.ok().and_then(|read| Answer::parse(&bytes[..read]));
        match answer {
            Some(answer) if answer.refused == 0 => {
                SOCKET.store(socket, Ordering::Relaxed);
                return Ok(());
            }
            Some(answer) if answer.refused == Answer::DETACHED.refused => {
                // From here on this process maps memory like any other.
                IS_DETACHED.store(true, Ordering::Relaxed);
                return Err(Refused::Detached);
            }
            Some(answer) => {
                if first {
                    sys::close(socket);
                }
                return refuse(answer.reason());
            }
            // It was killed, and its successor does not know this connection; or, if it does, the
            // same is said once more on it.
            None if first => sys::close(socket),
            None => {}
        }
        sys::sleep_ms(PAUSE_MS);
    }
    refuse(b"the pager does not answer")
}

fn connect() -> Result<RawFd, Errno> {
    let path = (&raw const SOCKET_PATH).cast::<[u8; 108]>();
    // SAFETY: written by `prepare` and `open` only, which do not run at the same time as this.
    let path: [u8; 108] = unsafe { path.read() };
    let length = path.iter().position(|&b| b == 0).unwrap_or(path.len());
    let socket = sys::out_of_the_way(sys::connect(&path[..length])?);
    let patience = libc::timeval { tv_sec: PATIENCE_SECONDS, tv_usec: 0 };
    // SAFETY: the kernel reads the structure.
    let _ = unsafe {
        let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_RCVTIMEO as usize);
        let at = &raw const patience as usize;
        let len = size_of::<libc::timeval>();
        syscall(libc::SYS_setsockopt, [socket as usize, level, name, at, len, 0])
    };
    Ok(socket)
}

fn process_id() -> i32 {
    // SAFETY: no arguments, no memory.
    unsafe { syscall(libc::SYS_getpid, [0; 6]).map_or(0, |pid| pid as i32) }
}

fn refuse<T>(reason: &[u8]) -> Result<T, Refused> {
    for part in [b"hecaton: guest memory is not paged: ", reason, b"\n"] {
        // SAFETY: the kernel reads within the slice.
        let _ =
            unsafe { syscall(libc::SYS_write, [2, part.as_ptr() as usize, part.len(), 0, 0, 0]) };
    }
    Err(Refused::Said)
}
