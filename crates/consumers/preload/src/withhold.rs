//! Keeps memory that may be in the pool out of copies that nobody follows: children and core files.
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
//! The kernel resolves no fault while it writes a core file: what is in the pool would be zeros in
//! it. So the same memory is marked as not to be dumped (MADV_DONTDUMP), and is absent from core
//! files. That mark stays during forks, and the program cannot take it off (MADV_DODUMP).
//!
//! Rejected: userfaultfd's event for forks, which takes CAP_SYS_PTRACE; and a seccomp filter, which
//! would forbid set-user-ID programs for good.

use crate::failure::Failure;
use crate::own::{KEPT_BY_PROGRAM, LEFT_ALONE};
use crate::{maps, own, sys};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;
use std::os::fd::RawFd;

/// No child that is not followed has this memory from now on, and no core file.
pub(crate) fn withhold(range: Range) {
    withhold_from_children(range);
    withhold_from_cores(range);
}

fn withhold_from_children(range: Range) {
    advise(range, libc::MADV_DONTFORK);
}

/// Forks are no reason to wait with this.
pub(crate) fn withhold_from_cores(range: Range) {
    advise(range, libc::MADV_DONTDUMP);
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
    // The file was readable a moment ago; if it is not now, this is no worse than without.
    if let Ok(maps) = maps::open() {
        resume_from(maps);
        sys::close(maps);
    }
}

/// The same for who has an open file of the mappings.
pub(crate) fn resume_from(maps: RawFd) {
    let _ = each_run(maps, withhold_from_children);
}

/// The program wants the range in core files (MADV_DODUMP): marks all of it but what may be paged.
/// The caller is alone.
pub(crate) fn let_cores_have(range: Range) -> Result<(), Errno> {
    let end = range.start.saturating_add(range.len);
    let (mut at, mut outcome) = (range.start, Ok(()));
    let dump = |from: u64, to: u64| match from < to {
        // SAFETY: as the program asks.
        true => unsafe {
            sys::advise(from as usize, (to - from) as usize, libc::MADV_DODUMP as usize)
        },
        false => Ok(()),
    };
    let maps = maps::open()?;
    let listed = each_run(maps, |run| {
        let run_end = run.start + run.len;
        if run_end > at && run.start < end {
            outcome = outcome.and(dump(at, run.start));
            at = run_end.min(end);
        }
    });
    sys::close(maps);
    listed?;
    outcome.and(dump(at, end))
}

fn advise(range: Range, advice: i32) {
    // SAFETY: this process's memory stays as it is. The kernel skips memory that is not mapped.
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
