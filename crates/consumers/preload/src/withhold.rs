//! Keeps memory that may be in the pool out of copies that nobody follows.
//!
//! A child that is made by a `syscall` instruction of the program's own, past
//! [`crate::hook::sites`], has the program's mappings without their userfaultfd: what of them is in
//! the pool would read as zeros in it. So memory is marked as not to be copied (MADV_DONTFORK)
//! before it is registered, and such a child gets SIGSEGV where it would have got zeros. It may
//! still call `exec`.
//!
//! For a fork that is followed the marks are taken off, except what the program itself keeps from
//! its children, and put back in both processes afterwards. Until then a child that another thread
//! makes past [`crate::hook::sites`] is not protected.
//!
//! Rejected: userfaultfd's event for forks, which takes CAP_SYS_PTRACE; and a seccomp filter, which
//! would forbid set-user-ID programs for good.

use crate::failure::Failure;
use crate::own::{KEPT_BY_PROGRAM, LEFT_ALONE};
use crate::{maps, own, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;
use std::os::fd::RawFd;

/// No child that is not followed has this memory from now on.
pub(crate) fn withhold(range: Range) {
    advise(range, libc::MADV_DONTFORK);
}

/// A child is about to be made that will be followed: it has all that the program lets it have.
pub(crate) fn suspend() -> Result<(), Failure> {
    let failure = |errno| Failure("a fork takes /proc/self/maps, which cannot be read", errno);
    let maps = maps::open().map_err(failure)?;
    let suspended = each_run(maps, give);
    sys::close(maps);
    suspended.map_err(failure)
}

/// Children have this memory from now on, but for what the program itself keeps from them.
pub(crate) fn give(run: Range) {
    let (mut at, end) = (run.start, run.start + run.len);
    while at < end {
        let rest = Range { start: at, len: end - at };
        let kept = KEPT_BY_PROGRAM.first_in(rest).unwrap_or(Range { start: end, len: 0 });
        let given = kept.start.saturating_sub(at);
        if given > 0 {
            advise(Range { start: at, len: given }, libc::MADV_DOFORK);
        }
        at = at.max(kept.start + kept.len);
    }
}

/// In either process, once the child is there, or cannot be made.
pub(crate) fn resume() {
    // What was read a moment ago can be read again; and if not, this is no worse than without.
    if let Ok(maps) = maps::open() {
        resume_from(maps);
        sys::close(maps);
    }
}

/// The same for who has an open file of the mappings.
pub(crate) fn resume_from(maps: RawFd) {
    let _ = each_run(maps, withhold);
}

fn advise(range: Range, advice: i32) {
    // SAFETY: this process's memory stays as it is. What is not mapped any more is passed over.
    let _ = unsafe { sys::advise(range.start as usize, range.len as usize, advice as usize) };
}

/// Calls `each` for all memory that may be paged, neighbours together.
fn each_run(maps: RawFd, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    let mut run = Range::default();
    let listed = maps::for_each_anonymous(maps, own::range(), |mapping| {
        if LEFT_ALONE.first_in(mapping).is_some() {
            return;
        }
        if run.start + run.len == mapping.start {
            run.len += mapping.len;
        } else {
            let done = std::mem::replace(&mut run, mapping);
            if done.len > 0 {
                each(done);
            }
        }
    });
    if run.len > 0 {
        each(run);
    }
    listed
}
