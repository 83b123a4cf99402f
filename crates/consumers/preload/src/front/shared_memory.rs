//! Replaces `shm_open`, `shm_unlink` and `fstatfs` for files of the pager.
//!
//! A name is looked up in the pool first, then in libc's directory, which has the names of other
//! programs on this host. A new name is visible to programs of the same consumer and user.

use super::next::Next;
use crate::{shared, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::files::FILE_SYSTEM_ID;
use libc::{c_char, c_int, c_uint, c_void, mode_t};
use std::ffi::CStr;

pub(super) static NEXT: [Next; 4] = [
    Next::new(c"shm_open"),
    Next::new(c"shm_unlink"),
    Next::new(c"fstatfs"),
    Next::new(c"fstatfs64"),
];
const OPEN: usize = 0;
const UNLINK: usize = 1;
const STATFS: usize = 2;
const STATFS64: usize = 3;

type Open = unsafe extern "C-unwind" fn(*const c_char, c_int, mode_t) -> c_int;
type Unlink = unsafe extern "C-unwind" fn(*const c_char) -> c_int;
type StatFs = unsafe extern "C-unwind" fn(c_int, *mut libc::statfs) -> c_int;

/// The name without its leading slashes. `None` if it cannot be in the pool.
///
/// # Safety
/// `name` is a C string.
unsafe fn name_of<'a>(name: *const c_char) -> Option<&'a [u8]> {
    if name.is_null() || !shared::may_ask() {
        return None;
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let skipped = name.iter().take_while(|&&byte| byte == b'/').count();
    let name = &name[skipped..];
    (!name.is_empty() && !name.contains(&b'/')).then_some(name)
}

fn fail(errno: Errno) -> c_int {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = errno.0 };
    -1
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn shm_open(
    name: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: libc's own function, with the caller's promises.
    let natively = |flags| unsafe {
        std::mem::transmute::<*mut c_void, Open>(NEXT[OPEN].get())(name, flags, mode)
    };
    // SAFETY: the caller's promise.
    let Some(known) = (unsafe { name_of(name) }) else { return natively(flags) };
    const EXCLUSIVE: c_int = libc::O_CREAT | libc::O_EXCL;
    let is_exclusive = flags & EXCLUSIVE == EXCLUSIVE;
    // If the name exists, an exclusive open must not truncate the file.
    let changes = if is_exclusive { EXCLUSIVE | libc::O_TRUNC } else { EXCLUSIVE };
    match shared::named(known, flags & !changes, 0) {
        Ok(opened) if is_exclusive => {
            sys::close(opened);
            return fail(Errno(libc::EEXIST));
        }
        Ok(opened) => return opened,
        Err(Errno(libc::ENOENT)) => {}
        Err(Errno(libc::ENOSYS)) => return natively(flags),
        // The pool may have this name, so libc must not make another file for it.
        Err(errno) => return fail(errno),
    }
    let outside = natively(flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC));
    if outside >= 0 {
        sys::close(outside);
        return natively(flags);
    }
    // SAFETY: the calling thread's errno.
    let errno = unsafe { *libc::__errno_location() };
    if errno != libc::ENOENT || flags & libc::O_CREAT == 0 {
        return -1;
    }
    match shared::named(known, flags, (mode & !umask()) as c_uint) {
        Ok(opened) => opened,
        Err(Errno(libc::ENOSYS)) => natively(flags),
        Err(errno) => fail(errno),
    }
}

/// The process's mask. `umask` would change it for the other threads.
fn umask() -> mode_t {
    const USUAL: mode_t = 0o022;
    let mut text = [0u8; 4096];
    let Ok(status) = sys::open(c"/proc/self/status") else { return USUAL };
    let read = sys::read_at(status, &mut text, 0).unwrap_or(0);
    sys::close(status);
    let mut lines = text[..read].split(|&byte| byte == b'\n');
    let mask = lines.find_map(|line| line.strip_prefix(b"Umask:"));
    let digits = mask.map(|line| line.iter().filter(|byte| (b'0'..b'8').contains(byte)));
    digits.map_or(USUAL, |digits| {
        digits.fold(0, |mask, digit| mask << 3 | mode_t::from(digit - b'0'))
    })
}

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn shm_unlink(name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    if let Some(known) = unsafe { name_of(name) }
        && shared::unlink(known).is_ok()
    {
        return 0;
    }
    // SAFETY: libc's own function, with the caller's promises.
    unsafe { std::mem::transmute::<*mut c_void, Unlink>(NEXT[UNLINK].get())(name) }
}

/// Defines functions that report tmpfs for files of the pager, because some programs insist on it.
macro_rules! statfs {
    ($($name:ident = $index:ident;)*) => {$(
        /// # Safety
        /// As for libc's.
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C-unwind" fn $name(fd: c_int, to: *mut libc::statfs) -> c_int {
            // SAFETY: libc's own function, with the caller's promises. It has filled in the fields
            // that are read.
            unsafe {
                let next = std::mem::transmute::<*mut c_void, StatFs>(NEXT[$index].get());
                let done = next(fd, to);
                if done == 0 && (*to).f_type == libc::EXT4_SUPER_MAGIC && is_ours(&(*to).f_fsid) {
                    (*to).f_type = libc::TMPFS_MAGIC;
                }
                done
            }
        }
    )*};
}

/// Whether it is that of a file system of the pool.
fn is_ours(id: &libc::fsid_t) -> bool {
    const _: () = assert!(size_of::<libc::fsid_t>() == size_of::<u64>());
    // SAFETY: two words of 4 bytes, which libc keeps to itself.
    unsafe { std::ptr::from_ref(id).cast::<u64>().read_unaligned() == FILE_SYSTEM_ID }
}

// On this machine `statfs` and `statfs64` have the same layout.
statfs! {
    fstatfs = STATFS;
    fstatfs64 = STATFS64;
}
