//! Keeps robust mutexes in memory.
//!
//! When a thread ends, the kernel walks the list of the robust mutexes that the thread holds. It
//! cannot wait for a page then, and leaves the rest of the list as it is: whoever waits for such a
//! mutex would wait for ever. So the pages of robust mutexes are locked. The head of the list is in
//! the thread's own block, which is not paged.
//!
//! `pthread_mutex_init` is the only way to make one. libc does not call it by itself, so a symbol
//! in front of libc's is enough.

use super::next::Next;
use crate::own::{self, PAGE};
use hecaton_uffd::sys::syscall;
use libc::{c_int, c_void, pthread_mutex_t, pthread_mutexattr_t};

type Init = unsafe extern "C" fn(*mut pthread_mutex_t, *const pthread_mutexattr_t) -> c_int;

pub(super) static NEXT: Next = Next::new(c"pthread_mutex_init");

/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn pthread_mutex_init(
    mutex: *mut pthread_mutex_t,
    attributes: *const pthread_mutexattr_t,
) -> c_int {
    let next = NEXT.get();
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the symbol has this type; the rest is the caller's promise.
    unsafe {
        let made = std::mem::transmute::<*mut c_void, Init>(next)(mutex, attributes);
        let mut robust = 0;
        if made == 0
            && own::is_paged()
            && !attributes.is_null()
            && libc::pthread_mutexattr_getrobust(attributes, &raw mut robust) == 0
            && robust == libc::PTHREAD_MUTEX_ROBUST
        {
            keep(mutex as usize, size_of::<pthread_mutex_t>());
        }
        made
    }
}

/// Locks the pages of an object. Past RLIMIT_MEMLOCK they stay as they are.
fn keep(start: usize, len: usize) {
    let first = start & !(PAGE - 1);
    let len = (start + len).next_multiple_of(PAGE) - first;
    // SAFETY: contents stay as they are.
    let _ = unsafe { syscall(libc::SYS_mlock, [first, len, 0, 0, 0, 0]) };
}
