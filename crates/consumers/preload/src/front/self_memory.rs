//! Serves programs that read and write their own memory as a file, `/proc/self/mem`.
//!
//! The kernel does not wait for a page there: EIO, or less than was asked for. So the pages are
//! brought in before, few at a time, and once more if they have been evicted meanwhile.

use super::next::Next;
use crate::{own, sys};
use hecaton_uffd::sys::syscall;
use libc::{c_char, c_int, c_void, mode_t, off_t, size_t, ssize_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Pages that are brought in at a time.
const AT_A_TIME: usize = 16;

/// How often pages are brought in again that were evicted at once.
const TRIES: usize = 64;

pub(super) static NEXT: [Next; 8] = [
    Next::new(c"open"),
    Next::new(c"open64"),
    Next::new(c"openat"),
    Next::new(c"openat64"),
    Next::new(c"read"),
    Next::new(c"write"),
    Next::new(c"pread64"),
    Next::new(c"pwrite64"),
];
const OPEN: usize = 0;
const OPEN64: usize = 1;
const OPENAT: usize = 2;
const OPENAT64: usize = 3;
const READ: usize = 4;
const WRITE: usize = 5;
const PREAD: usize = 6;
const PWRITE: usize = 7;

/// Whether the program has ever opened the memory of a process. Until then nothing is looked at.
static IS_OPENED: AtomicBool = AtomicBool::new(false);

/// # Safety
/// `path` must be a C string, or null.
unsafe fn note(path: *const c_char) {
    // SAFETY: the caller's promise.
    let is_memory = !path.is_null() && is_memory(unsafe { CStr::from_ptr(path) }.to_bytes());
    if is_memory && own::is_paged() {
        IS_OPENED.store(true, Relaxed);
    }
}

fn is_memory(path: &[u8]) -> bool {
    path.starts_with(b"/proc/") && path.ends_with(b"/mem")
}

type Open = unsafe extern "C-unwind" fn(*const c_char, c_int, mode_t) -> c_int;
type OpenAt = unsafe extern "C-unwind" fn(c_int, *const c_char, c_int, mode_t) -> c_int;
type Transfer = unsafe extern "C-unwind" fn(c_int, *mut c_void, size_t) -> ssize_t;
type TransferAt = unsafe extern "C-unwind" fn(c_int, *mut c_void, size_t, off_t) -> ssize_t;

/// libc's function of a type.
macro_rules! next {
    ($index:expr, $kind:ty) => {
        std::mem::transmute::<*mut c_void, $kind>(NEXT[$index].get())
    };
}

/// # Safety
/// As for libc's. The mode counts only where libc's looks at it.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn open(
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the function has this type; the rest is the caller's promise. So below.
    unsafe {
        note(path);
        next!(OPEN, Open)(path, flags, mode)
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn open64(
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: see `open`.
    unsafe {
        note(path);
        next!(OPEN64, Open)(path, flags, mode)
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: see `open`.
    unsafe {
        note(path);
        next!(OPENAT, OpenAt)(directory, path, flags, mode)
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn openat64(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: see `open`.
    unsafe {
        note(path);
        next!(OPENAT64, OpenAt)(directory, path, flags, mode)
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn read(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: see `open`.
    unsafe {
        match place_in_memory(fd) {
            None => next!(READ, Transfer)(fd, buffer, len),
            Some(at) => in_parts(libc::MADV_POPULATE_READ, at, len, |done, part, _| {
                next!(READ, Transfer)(fd, buffer.add(done), part)
            }),
        }
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn write(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: see `open`.
    unsafe {
        match place_in_memory(fd) {
            None => next!(WRITE, Transfer)(fd, buffer, len),
            Some(at) => in_parts(libc::MADV_POPULATE_WRITE, at, len, |done, part, _| {
                next!(WRITE, Transfer)(fd, buffer.add(done), part)
            }),
        }
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn pread(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    at: off_t,
) -> ssize_t {
    // SAFETY: see `open`. The two names are one function on this machine.
    unsafe { pread64(fd, buffer, len, at) }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn pread64(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    at: off_t,
) -> ssize_t {
    // SAFETY: see `open`.
    unsafe {
        match place_in_memory(fd) {
            None => next!(PREAD, TransferAt)(fd, buffer, len, at),
            Some(_) => in_parts(libc::MADV_POPULATE_READ, at, len, |done, part, at| {
                next!(PREAD, TransferAt)(fd, buffer.add(done), part, at)
            }),
        }
    }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn pwrite(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    at: off_t,
) -> ssize_t {
    // SAFETY: see `pread`.
    unsafe { pwrite64(fd, buffer, len, at) }
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn pwrite64(
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    at: off_t,
) -> ssize_t {
    // SAFETY: see `open`.
    unsafe {
        match place_in_memory(fd) {
            None => next!(PWRITE, TransferAt)(fd, buffer, len, at),
            Some(_) => in_parts(libc::MADV_POPULATE_WRITE, at, len, |done, part, at| {
                next!(PWRITE, TransferAt)(fd, buffer.add(done), part, at)
            }),
        }
    }
}

/// Where an open file of this process's memory stands; `None` for any other file.
fn place_in_memory(fd: c_int) -> Option<off_t> {
    if !IS_OPENED.load(Relaxed) || !own::is_paged() || !is_own_memory(fd) {
        return None;
    }
    // SAFETY: numbers only.
    let at =
        unsafe { syscall(libc::SYS_lseek, [fd as usize, 0, libc::SEEK_CUR as usize, 0, 0, 0]) };
    at.ok().map(|at| at as off_t)
}

/// Another process's memory is read as it is: what is in the pool of that is not this library's.
fn is_own_memory(fd: c_int) -> bool {
    let mut path = [0u8; 64];
    const OPEN_FILES: &[u8] = b"/proc/self/fd/";
    path[..OPEN_FILES.len()].copy_from_slice(OPEN_FILES);
    let end = sys::write_decimal(&mut path, OPEN_FILES.len(), fd);
    let mut target = [0u8; 64];
    let Ok(path) = CStr::from_bytes_until_nul(&path[..=end]) else { return false };
    let Ok(len) = sys::read_link(path, &mut target) else { return false };
    let mut own = [0u8; 64];
    own[..6].copy_from_slice(b"/proc/");
    let end = sys::write_decimal(&mut own, 6, sys::process_id());
    let named = &target[..len];
    named.strip_prefix(&own[..end]).is_some_and(|rest| rest.starts_with(b"/") && is_memory(named))
}

/// Brings memory in and transfers it, a few pages at a time: `step` gets what was done, how much to
/// do, and the address. Returns what libc's function would.
///
/// # Safety
/// As `step`, for all parts of `len` bytes.
unsafe fn in_parts(
    advice: c_int,
    at: off_t,
    len: size_t,
    step: impl Fn(size_t, size_t, off_t) -> ssize_t,
) -> ssize_t {
    let mut done = 0;
    let mut tries = 0;
    while done < len {
        let from = at as usize + done;
        let part = (AT_A_TIME * own::PAGE - from % own::PAGE).min(len - done);
        let first = from & !(own::PAGE - 1);
        let pages = (from + part).next_multiple_of(own::PAGE) - first;
        // SAFETY: contents stay as they are. What is not mapped, or not writable, is the kernel's
        // to refuse.
        let _ = unsafe { sys::advise(first, pages, advice as usize) };
        let transferred = step(done, part, from as off_t);
        // SAFETY: the calling thread's errno.
        let errno = unsafe { *libc::__errno_location() };
        match transferred {
            -1 if errno == libc::EIO && tries < TRIES => tries += 1,
            -1 if done == 0 => return -1,
            -1 | 0 => break,
            transferred => done += transferred as size_t,
        }
    }
    done as ssize_t
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn memory_of_this_process_is_told_from_other_files() {
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        assert!(is_own_memory(memory.as_raw_fd()));
        let parent = std::os::unix::process::parent_id();
        if let Ok(memory) = std::fs::File::open(format!("/proc/{parent}/mem")) {
            assert!(!is_own_memory(memory.as_raw_fd()));
        }
        assert!(!is_own_memory(std::fs::File::open("/proc/self/maps").unwrap().as_raw_fd()));
        assert!(!is_own_memory(-1));
    }
}
