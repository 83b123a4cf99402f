//! Forks a child that stays on local memory, where no child can be followed.
//!
//! A sandbox (seccomp) may forbid the program to connect to its pager, a program that does not see
//! `/proc` finds no mappings, and a child with CLONE_FILES cannot have a userfaultfd of its own
//! under its parent's number. Such a child is a plain copy of its parent, and so all memory of the
//! parent must be there when it is made:
//!
//! 1. The helper takes no pages from now on ([`turn::keep_pages`]).
//! 2. Each page is read that may be in the pool.
//! 3. The child is made. It knows that it is not paged, and registers nothing.
//!
//! Memory that cannot be read (PROT_NONE) may hold pages that are in the pool. The child does not
//! have such memory: it gets SIGSEGV where it makes the memory accessible, never zeros.

use crate::failure::Failure;
use crate::own::{self, LEFT_ALONE, PAGE};
use crate::{maps, sys, turn, withhold};
use hecaton_uffd::Errno;
use hecaton_uffd::handover::Range;

/// Most pages that are read for one child: 1 GiB. Memory that was never used counts, too.
const MOST_PAGES: usize = 1 << 18;

/// Pages that the kernel is asked about at a time.
const AT_A_TIME: usize = 4096;

/// Brings all memory in, for a child that has it. Mappings cannot change meanwhile.
pub(super) fn bring_all_in() -> Result<(), Failure> {
    if !turn::keep_pages() {
        return Err(Failure("the helper does not come to rest for a fork", Errno(libc::EAGAIN)));
    }
    let unreadable = |errno| Failure("a fork takes /proc/self/maps, which cannot be read", errno);
    let mappings = maps::open().map_err(unreadable)?;
    let mut left = Some(MOST_PAGES);
    let listed = maps::for_each_readable_anonymous(mappings, own::range(), |mapping| {
        let range = mapping.range;
        if LEFT_ALONE.first_in(range).is_none() {
            left = left.and_then(|left| left.checked_sub(touch(range, left)));
            withhold::give(range);
        }
    });
    sys::close(mappings);
    listed.map_err(unreadable)?;
    let what = "a child that cannot be followed would bring in more than 1 GiB";
    left.map(drop).ok_or(Failure(what, Errno(libc::EAGAIN)))
}

/// Reads one byte of each page that is not there. Returns how many that were; stops behind `most`.
fn touch(range: Range, most: usize) -> usize {
    let mut there = [0u8; AT_A_TIME];
    let mut touched = 0;
    for first in (range.start..range.start + range.len).step_by(AT_A_TIME * PAGE) {
        let pages = ((range.start + range.len - first) as usize / PAGE).min(AT_A_TIME);
        let there = &mut there[..pages];
        if !sys::residency(first as usize, there) {
            // A sandbox may forbid the question.
            there.fill(0);
        }
        for (i, _) in there.iter().enumerate().filter(|(_, there)| **there & 1 == 0) {
            if touched > most {
                return touched;
            }
            touched += 1;
            // SAFETY: a page of a mapping that can be read, and stays: nobody else changes
            // mappings.
            unsafe { ((first as usize + i * PAGE) as *const u8).read_volatile() };
        }
    }
    touched
}
