//! Begins in a *bare* program, which has no glibc: statically linked, or linked with musl.
//!
//! The launcher has started the program stopped, has mapped this library into it as a dynamic
//! linker would, and calls [`hecaton_enter`] in the place of the program's first instruction
//! ([`hecaton_uffd::bare`]). Nothing of glibc's may be called from here on, neither by the helper
//! nor in a fork: no such function is there.
//!
//! The program's system calls are its own. Those that make children the launcher replaces by jumps
//! to [`crate::fork`], where it finds them. New mappings the pager finds from outside.

use crate::failure::Failure;
use crate::{attach, fork};
use hecaton_uffd::Errno;
use hecaton_uffd::bare::Place;

/// Attaches the program; 0, or 1 after a failure that it has told of.
///
/// # Safety
/// `place` is the launcher's, and the program has not begun.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hecaton_enter(place: *mut Place) -> i32 {
    // SAFETY: the caller's promise.
    let place = unsafe { &mut *place };
    (place.follow_clone, place.follow_fork) = fork::entries();
    match attach::bare(place) {
        Ok(()) => 0,
        Err(failure) => {
            failure.report();
            1
        }
    }
}

/// Is called in the place of what glibc has and a bare program has not.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn hecaton_missing() -> ! {
    Failure("libhecaton.so has called glibc, which is not there", Errno(libc::ENOSYS))
        .report_and_exit()
}
