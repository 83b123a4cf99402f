//! Notes SIGTERM, which ends the programs first and then the pager.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Set by SIGTERM: the programs are ended first, then the pager, so that none of them ever runs
/// without it.
pub(crate) static TERMINATED: AtomicBool = AtomicBool::new(false);

/// From now on SIGTERM is noted.
pub(crate) fn end_by_it() {
    extern "C" fn note(_: libc::c_int) {
        TERMINATED.store(true, Relaxed);
    }
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::signal(libc::SIGTERM, note as *const () as libc::sighandler_t) };
}
