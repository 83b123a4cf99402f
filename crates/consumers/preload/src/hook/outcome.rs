//! Turns what a system call returned into what libc's function returns.

use hecaton_uffd::Errno;
use libc::{c_int, c_void};

pub(super) fn fail(errno: Errno) {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = errno.0 };
}

/// Converts a system call's outcome to the result of libc's `mmap`.
pub(super) fn as_address(mapped: Result<usize, Errno>) -> *mut c_void {
    match mapped {
        Ok(start) => start as *mut c_void,
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// The same of functions that return no address.
pub(super) fn as_status(done: Result<(), Errno>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}
