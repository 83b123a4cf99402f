//! Functions of libc's that programs find here first.
//!
//! Each calls libc's own, and does something more for few programs. Unlike those in [`crate::hook`]
//! they need not see what libc does by itself.

mod memory_files;
mod next;
mod robust;

/// Looks all functions up: later, a signal handler may be the first that calls one.
pub(crate) fn prepare() {
    for next in memory_files::NEXT.iter().chain([&robust::NEXT]) {
        next.get();
    }
}
