//! Attaches *bare* programs: statically linked, or linked with musl.
//!
//! The launcher has started the program stopped, has mapped this library into it as a dynamic
//! linker would, and calls [`hecaton_enter`] in the place of the program's first instruction
//! ([`hecaton_uffd::bare`]). The program has no glibc, so neither this code, nor the helper, nor a
//! fork calls a function of glibc.
//!
//! The launcher replaces the system calls that make children, where it finds them, by jumps to
//! [`crate::fork`]. The program makes all other system calls itself, so the pager finds new
//! mappings from outside.

use crate::failure::Failure;
use crate::{attach, fork};
use hecaton_uffd::Errno;
use hecaton_uffd::bare::Place;

/// Attaches the program. Returns 0, or 1 after it has reported a failure on standard error.
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

/// Ends the program. Every call of a function of glibc comes here.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn hecaton_missing() -> ! {
    Failure("libhecaton.so has called glibc, which is not there", Errno(libc::ENOSYS))
        .report_and_exit()
}
