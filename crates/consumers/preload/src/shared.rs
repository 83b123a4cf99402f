//! Asks the pager's keeper for files, which the program uses as shared memory.
//!
//! What the keeper cannot give is made as ever, on local memory, and the program says so once.

use crate::failure::Failure;
use crate::{attach, own, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::files::{Answer, Ask, AskKind, SOCKET_SUFFIX};
use libc::{c_int, c_uint};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Smaller mappings stay local, like other small mappings.
const SMALLEST: usize = 64 << 10;

/// How often a keeper that hangs up is asked again, and the pause: another may be about to take its
/// place.
const TRIES: usize = 1000;
const PAUSE_MS: u64 = 10;

/// How long an answer is waited for: the keeper, or the pager that it waits for, may be stopped.
const PATIENCE_S: i64 = 60;

/// Whether the program was told that its shared memory stays local.
#[unsafe(link_section = ".data")]
static IS_TOLD: AtomicU32 = AtomicU32::new(0);

/// A file for a shared anonymous mapping, if that is to be paged.
pub(crate) fn anonymous(len: usize, flags: c_int) -> Option<RawFd> {
    let is_shared = flags & libc::MAP_TYPE == libc::MAP_SHARED && flags & libc::MAP_ANONYMOUS != 0;
    let never = libc::MAP_HUGETLB | libc::MAP_LOCKED | libc::MAP_GROWSDOWN;
    if !is_shared || flags & never != 0 || len < SMALLEST || !may_ask() {
        return None;
    }
    let mut ask = Ask::new(AskKind::Anonymous, b"")?;
    ask.bytes = len.next_multiple_of(own::PAGE) as u64;
    opened(&ask, true).ok()
}

/// What `memfd_create` would return, if the file is to be paged. One that can be sealed is the
/// kernel's own.
pub(crate) fn memory_file(name: &[u8], flags: c_uint) -> Option<RawFd> {
    let known = libc::MFD_CLOEXEC | libc::MFD_EXEC;
    // With a longer name the call fails.
    if flags & !known != 0 || name.len() > 249 || !may_ask() {
        return None;
    }
    let name = &name[..name.len().min(200)];
    let is_name = !name.contains(&b'/');
    let ask = Ask::new(AskKind::MemoryFile, if is_name { name } else { b"" })?;
    opened(&ask, flags & libc::MFD_CLOEXEC != 0).ok()
}

/// Asks for the file of a name, without its slash; an error if there is none, or it cannot be asked.
pub(crate) fn named(name: &[u8], flags: c_int, mode: c_uint) -> Result<RawFd, Errno> {
    let mut ask = Ask::new(AskKind::Open, name).ok_or(Errno(libc::ENOSYS))?;
    (ask.flags, ask.mode) = (flags as u32, mode);
    opened(&ask, true)
}

/// Takes a file's name away.
pub(crate) fn unlink(name: &[u8]) -> Result<(), Errno> {
    let ask = Ask::new(AskKind::Unlink, name).ok_or(Errno(libc::ENOSYS))?;
    ask_for(&ask, true).map(|opened| opened.into_iter().for_each(sys::close))
}

/// Whether this process can ask at all.
pub(crate) fn may_ask() -> bool {
    own::is_paged() && !own::is_filtered()
}

fn opened(ask: &Ask, closes_on_exec: bool) -> Result<RawFd, Errno> {
    ask_for(ask, closes_on_exec)?.ok_or(Errno(libc::ENOSYS))
}

fn ask_for(ask: &Ask, closes_on_exec: bool) -> Result<Option<RawFd>, Errno> {
    let mut path = [0u8; 128];
    let len = attach::socket_path(&mut path);
    let end = len + SOCKET_SUFFIX.len();
    path[len..end].copy_from_slice(SOCKET_SUFFIX.as_bytes());
    for _ in 0..TRIES {
        let answered = sys::connect(&path[..end]).and_then(|socket| {
            let answered = ask_on(socket, ask, closes_on_exec);
            sys::close(socket);
            answered
        });
        match answered {
            // Another keeper is to come.
            Err(Errno(libc::EPROTO | libc::ECONNRESET | libc::EPIPE)) => {}
            // It cannot be reached from here, or serves none.
            Err(errno) => {
                if !matches!(errno.0, libc::ENOENT | libc::EEXIST) {
                    tell_once(errno);
                }
                return Err(errno);
            }
            Ok(opened) => return Ok(opened),
        }
        sys::sleep_ms(PAUSE_MS);
    }
    Err(Errno(libc::ETIMEDOUT))
}

/// EPROTO if the keeper hung up, ETIMEDOUT if it does not answer.
fn ask_on(socket: RawFd, ask: &Ask, closes_on_exec: bool) -> Result<Option<RawFd>, Errno> {
    sys::limit_waiting(socket, PATIENCE_S);
    sys::send(socket, ask.as_bytes())?;
    let mut bytes = [0u8; size_of::<Answer>()];
    let received = sys::receive_with_descriptor(socket, &mut bytes, closes_on_exec);
    let (read, opened) = match received {
        Err(Errno(libc::EAGAIN)) => return Err(Errno(libc::ETIMEDOUT)),
        other => other?,
    };
    match Answer::parse(&bytes[..read]) {
        Some(Answer { errno: 0, .. }) => Ok(opened),
        Some(Answer { errno, .. }) => Err(Errno(errno)),
        None => Err(Errno(libc::EPROTO)),
    }
}

fn tell_once(errno: Errno) {
    if IS_TOLD.swap(1, Relaxed) == 0 {
        let why = Failure("the pager does not serve it", errno);
        why.report_with("shared memory of this program stays on local memory");
    }
}
