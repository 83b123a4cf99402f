//! Asks the keeper for files that replace shared memory.
//!
//! If the keeper gives none, the memory stays local. The first failure is reported on stderr. Named
//! memory that the keeper may have fails with the keeper's error.

use crate::failure::Failure;
use crate::sys::{self, Received};
use crate::{own, reach};
use hecaton_uffd::Errno;
use hecaton_uffd::bare::MAX_PATH;
use hecaton_uffd::files::{Answer, Ask, AskKind, SOCKET_SUFFIX};
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_uint};
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// In bytes. Smaller mappings stay local, as small private mappings do.
const SMALLEST: usize = 64 << 10;

/// Pause between attempts while the keeper closes connections: the pager may be starting another.
const PAUSE_MS: u64 = 10;

/// Time for an answer: keeper or pager may be stopped.
const PATIENCE_MS: u64 = 60_000;

/// 1 once a failure was reported.
#[unsafe(link_section = ".data")]
static IS_TOLD: AtomicU32 = AtomicU32::new(0);

/// 1 once an answer has timed out: further memory without a name stays local.
#[unsafe(link_section = ".data")]
static IS_SILENT: AtomicU32 = AtomicU32::new(0);

/// A file for a shared anonymous mapping. `None` if the mapping stays local.
pub(crate) fn anonymous(len: usize, flags: c_int) -> Option<RawFd> {
    let is_shared = flags & libc::MAP_TYPE == libc::MAP_SHARED && flags & libc::MAP_ANONYMOUS != 0;
    let never = libc::MAP_HUGETLB | libc::MAP_LOCKED | libc::MAP_GROWSDOWN;
    if !is_shared || flags & never != 0 || len < SMALLEST || !may_ask() || is_silent() {
        return None;
    }
    let mut ask = Ask::new(AskKind::Anonymous, b"")?;
    ask.bytes = len.next_multiple_of(own::PAGE) as u64;
    // Natively, the call uses no descriptor.
    opened(&ask, true).ok().map(sys::out_of_the_way)
}

/// A paged file in place of `memfd_create`. `None` if the kernel must make the file, as it must if
/// the file can be sealed.
fn memory_file(name: &[u8], flags: c_uint) -> Option<RawFd> {
    let known = libc::MFD_CLOEXEC | libc::MFD_EXEC;
    // The kernel rejects longer names.
    if flags & !known != 0 || name.len() > 249 || !may_ask() || is_silent() {
        return None;
    }
    let name = &name[..name.len().min(200)];
    let is_name = !name.contains(&b'/');
    let ask = Ask::new(AskKind::MemoryFile, if is_name { name } else { b"" })?;
    opened(&ask, flags & libc::MFD_CLOEXEC != 0).ok()
}

/// Does what `memfd_create` does, with a paged file if the keeper gives one.
pub(crate) fn make_memory_file(
    name: *const libc::c_char,
    flags: libc::c_uint,
) -> Result<c_int, Errno> {
    if !name.is_null() {
        // SAFETY: the caller of `memfd_create` gives a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        if let Some(file) = memory_file(name, flags) {
            return Ok(file);
        }
    }
    // SAFETY: the kernel reads the name, or says EFAULT.
    let made =
        unsafe { syscall(libc::SYS_memfd_create, [name as usize, flags as usize, 0, 0, 0, 0]) };
    made.map(|file| file as c_int)
}

/// Opens a file by its name, given without its slash.
pub(crate) fn named(name: &[u8], flags: c_int, mode: c_uint) -> Result<RawFd, Errno> {
    let mut ask = Ask::new(AskKind::Open, name).ok_or(Errno(libc::ENOSYS))?;
    (ask.flags, ask.mode) = (flags as u32, mode);
    opened(&ask, true)
}

/// Removes a file's name, given without its slash.
pub(crate) fn unlink(name: &[u8]) -> Result<(), Errno> {
    let ask = Ask::new(AskKind::Unlink, name).ok_or(Errno(libc::ENOSYS))?;
    ask_for(&ask, true).map(|opened| opened.into_iter().for_each(sys::close))
}

/// Whether this process is paged, and no seccomp filter may forbid it to ask. The pages of bare
/// programs could not be evicted, since these change their mappings at any time.
pub(crate) fn may_ask() -> bool {
    own::is_paged() && !own::is_bare() && !own::is_filtered()
}

fn is_silent() -> bool {
    IS_SILENT.load(Relaxed) != 0
}

fn opened(ask: &Ask, closes_on_exec: bool) -> Result<RawFd, Errno> {
    ask_for(ask, closes_on_exec)?.ok_or(Errno(libc::ENOSYS))
}

/// ENOSYS if the keeper cannot be reached from this process, or serves no shared memory.
fn ask_for(ask: &Ask, closes_on_exec: bool) -> Result<Option<RawFd>, Errno> {
    let mut path = [0u8; MAX_PATH + SOCKET_SUFFIX.len()];
    let of_pager = reach::path();
    let len = of_pager.to_bytes().len();
    let end = len + SOCKET_SUFFIX.len();
    path[..len].copy_from_slice(of_pager.to_bytes());
    path[len..end].copy_from_slice(SOCKET_SUFFIX.as_bytes());
    let deadline = sys::now_ms() + PATIENCE_MS;
    let failed = loop {
        match ask_once(&path[..end], ask, closes_on_exec, deadline) {
            // The keeper has ended. The pager starts another.
            Err(Errno(libc::EPROTO | libc::ECONNRESET | libc::EPIPE)) => {}
            Err(Errno(libc::EAGAIN)) => break Errno(libc::ETIMEDOUT),
            Err(errno) => break errno,
            Ok(opened) => return Ok(opened),
        }
        if sys::now_ms() > deadline {
            break Errno(libc::ETIMEDOUT);
        }
        sys::sleep_ms(PAUSE_MS);
    };
    if failed.0 == libc::ETIMEDOUT {
        IS_SILENT.store(1, Relaxed);
    }
    if matches!(failed.0, libc::ETIMEDOUT | libc::ENOSYS) {
        tell_once(failed);
    }
    Err(failed)
}

/// EPROTO if the keeper closes the connection, EAGAIN at the deadline.
fn ask_once(
    path: &[u8],
    ask: &Ask,
    closes_on_exec: bool,
    deadline: u64,
) -> Result<Option<RawFd>, Errno> {
    let left_s = || (deadline.saturating_sub(sys::now_ms()) / 1000).max(1) as i64;
    let connected = sys::connect_within(path, left_s());
    let socket = connected.map_err(|errno| match errno.0 {
        libc::ENOENT | libc::ECONNREFUSED | libc::EACCES => Errno(libc::ENOSYS),
        libc::EINTR => Errno(libc::EPROTO),
        _ => errno,
    })?;
    // The file is to have the lowest free number, as natively.
    let socket = sys::out_of_the_way(socket);
    let mut bytes = [0u8; size_of::<Answer>()];
    let received = sys::send(socket, ask.as_bytes()).and_then(|_| {
        loop {
            match sys::receive(socket, &mut bytes, closes_on_exec) {
                // Each signal begins the wait anew.
                Err(Errno(libc::EINTR)) if sys::now_ms() < deadline => {
                    sys::limit_waiting(socket, left_s());
                }
                Err(Errno(libc::EINTR)) => return Err(Errno(libc::EAGAIN)),
                other => return other,
            }
        }
    });
    sys::close(socket);
    let Received { read, fd, is_cut } = received?;
    match Answer::parse(&bytes[..read]) {
        Some(Answer { errno: 0, .. }) if is_cut => Err(Errno(libc::EMFILE)),
        Some(Answer { errno: 0, .. }) => Ok(fd),
        Some(Answer { errno, .. }) => Err(Errno(errno)),
        None => Err(Errno(libc::EPROTO)),
    }
}

fn tell_once(errno: Errno) {
    if IS_TOLD.swap(1, Relaxed) == 0 {
        let why = Failure("the pager does not provide it", errno);
        why.report_with("shared memory of this program stays on local memory");
    }
}
