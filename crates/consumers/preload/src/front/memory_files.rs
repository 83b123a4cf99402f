//! Serves programs that use memory as a file: their own, `/proc/self/mem`, or that of a process
//! that they debug.
//!
//! The kernel does not wait for a page there: EIO, or less than was asked for. So the pages are
//! brought in before, few at a time, and once more if they have been evicted meanwhile. Pages of
//! others are brought in by a read (`process_vm_readv`), which waits, and written to by
//! `process_vm_writev`.

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

/// Defines functions that note a path and call libc's.
macro_rules! opens {
    ($($name:ident = $index:ident as $kind:ty, ($($directory:ident)?);)*) => {$(
        /// # Safety
        /// As for libc's. The mode counts only where libc's looks at it.
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C-unwind" fn $name(
            $($directory: c_int,)?
            path: *const c_char,
            flags: c_int,
            mode: mode_t,
        ) -> c_int {
            // SAFETY: the function has this type; the rest is the caller's promise.
            unsafe {
                note(path);
                next!($index, $kind)($($directory,)? path, flags, mode)
            }
        }
    )*};
}

opens! {
    open = OPEN as Open, ();
    open64 = OPEN64 as Open, ();
    openat = OPENAT as OpenAt, (directory);
    openat64 = OPENAT64 as OpenAt, (directory);
}

/// Defines functions that read or write where a file stands.
macro_rules! transfers {
    ($($name:ident = $index:ident, $advice:ident;)*) => {$(
        /// # Safety
        /// As for libc's.
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            buffer: *mut c_void,
            len: size_t,
        ) -> ssize_t {
            // SAFETY: the function has this type; the rest is the caller's promise.
            unsafe {
                match place_in_memory(fd) {
                    None => next!($index, Transfer)(fd, buffer, len),
                    Some(place) => in_parts(libc::$advice, place, len, |done, part, _| {
                        next!($index, Transfer)(fd, buffer.add(done), part)
                    }),
                }
            }
        }
    )*};
}

transfers! {
    read = READ, MADV_POPULATE_READ;
    write = WRITE, MADV_POPULATE_WRITE;
}

/// Defines functions that read or write at a place. With a third argument, it is tried where the
/// file refuses.
macro_rules! transfers_at {
    ($($name:ident = $index:ident, $advice:ident $(, $otherwise:ident)?;)*) => {$(
        /// # Safety
        /// As for libc's.
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            buffer: *mut c_void,
            len: size_t,
            at: off_t,
        ) -> ssize_t {
            // SAFETY: the function has this type; the rest is the caller's promise.
            unsafe {
                let Some(Place { pid, .. }) = place_in_memory(fd) else {
                    return next!($index, TransferAt)(fd, buffer, len, at);
                };
                in_parts(libc::$advice, Place { pid, at }, len, |done, part, at| {
                    let buffer = buffer.add(done);
                    let transferred = next!($index, TransferAt)(fd, buffer, part, at);
                    $(if let (Some(pid), true) = (pid, transferred < 0) {
                        return $otherwise(pid, buffer, part, at);
                    })?
                    transferred
                })
            }
        }
    )*};
}

// The names with and without 64 are one function on this machine.
transfers_at! {
    pread = PREAD, MADV_POPULATE_READ;
    pread64 = PREAD, MADV_POPULATE_READ;
    pwrite = PWRITE, MADV_POPULATE_WRITE, write_by_address;
    pwrite64 = PWRITE, MADV_POPULATE_WRITE, write_by_address;
}

/// Writes where a file of memory would not: to pages that are write-protected in the pool's
/// service, and not to memory that the process may not write to itself. -1 and the error of the
/// file if it does not write, either.
///
/// # Safety
/// The buffer has `len` bytes.
unsafe fn write_by_address(pid: i32, buffer: *mut c_void, len: size_t, at: off_t) -> ssize_t {
    let from = libc::iovec { iov_base: buffer, iov_len: len };
    let to = libc::iovec { iov_base: at as *mut c_void, iov_len: len };
    let (from, to) = (&raw const from as usize, &raw const to as usize);
    // SAFETY: the kernel reads the buffer.
    let written =
        unsafe { syscall(libc::SYS_process_vm_writev, [pid as usize, from, 1, to, 1, 0]) };
    written.map_or(-1, |written| written as ssize_t)
}

/// An open file of a process's memory.
#[derive(Clone, Copy)]
struct Place {
    /// `None`: this process.
    pid: Option<i32>,
    at: off_t,
}

/// Where an open file of memory stands; `None` for any other file.
fn place_in_memory(fd: c_int) -> Option<Place> {
    if !IS_OPENED.load(Relaxed) || !own::is_paged() {
        return None;
    }
    let pid = owner(fd)?;
    // SAFETY: numbers only.
    let at =
        unsafe { syscall(libc::SYS_lseek, [fd as usize, 0, libc::SEEK_CUR as usize, 0, 0, 0]) };
    let at = at.ok()? as off_t;
    Some(Place { pid: (pid != sys::process_id()).then_some(pid), at })
}

/// The process or thread whose memory an open file is.
fn owner(fd: c_int) -> Option<i32> {
    const OPEN_FILES: &[u8] = b"/proc/self/fd/";
    let (mut path, mut target) = ([0u8; 64], [0u8; 64]);
    path[..OPEN_FILES.len()].copy_from_slice(OPEN_FILES);
    let end = sys::write_decimal(&mut path, OPEN_FILES.len(), fd);
    let path = CStr::from_bytes_until_nul(&path[..=end]).ok()?;
    let len = sys::read_link(path, &mut target).ok()?;
    let rest = target[..len].strip_prefix(b"/proc/")?.strip_suffix(b"/mem")?;
    // `PID` or `PID/task/TID`.
    let number = rest.split(|&byte| byte == b'/').next()?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Brings in pages from `first` on, as far as that is possible.
fn bring_in(pid: Option<i32>, advice: c_int, first: usize, pages: usize) {
    let Some(pid) = pid else {
        // SAFETY: contents stay as they are. The kernel refuses memory that is not mapped, or not
        // writable.
        let _ = unsafe { sys::advise(first, pages * own::PAGE, advice as usize) };
        return;
    };
    let mut bytes = [0u8; AT_A_TIME];
    for (i, byte) in bytes.iter_mut().enumerate().take(pages) {
        let to = libc::iovec { iov_base: std::ptr::from_mut(byte).cast(), iov_len: 1 };
        let from = libc::iovec { iov_base: (first + i * own::PAGE) as *mut c_void, iov_len: 1 };
        let (to, from) = (&raw const to as usize, &raw const from as usize);
        // SAFETY: the kernel writes one byte.
        let _ = unsafe { syscall(libc::SYS_process_vm_readv, [pid as usize, to, 1, from, 1, 0]) };
    }
}

/// Brings memory in and transfers it, a few pages at a time: `step` gets what was done, how much to
/// do, and the address. Returns what libc's function would.
///
/// # Safety
/// As `step`, for all parts of `len` bytes.
unsafe fn in_parts(
    advice: c_int,
    Place { pid, at }: Place,
    len: size_t,
    step: impl Fn(size_t, size_t, off_t) -> ssize_t,
) -> ssize_t {
    let mut done = 0;
    let mut tries = 0;
    while done < len {
        let from = at as usize + done;
        let part = (AT_A_TIME * own::PAGE - from % own::PAGE).min(len - done);
        let first = from & !(own::PAGE - 1);
        let pages = ((from + part).next_multiple_of(own::PAGE) - first) / own::PAGE;
        bring_in(pid, advice, first, pages);
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
    fn memory_of_a_process_is_told_from_other_files() {
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        assert_eq!(owner(memory.as_raw_fd()), Some(sys::process_id()));
        let parent = std::os::unix::process::parent_id();
        if let Ok(memory) = std::fs::File::open(format!("/proc/{parent}/mem")) {
            assert_eq!(owner(memory.as_raw_fd()), Some(parent as i32));
        }
        assert_eq!(owner(std::fs::File::open("/proc/self/maps").unwrap().as_raw_fd()), None);
        assert_eq!(owner(-1), None);
    }
}
