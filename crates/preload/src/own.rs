//! The library's own memory: never paged, so that it can be used while nobody serves faults.
//!
//! One mapping, with inaccessible pages at its ends and above the stacks so that the kernel merges
//! it with no neighbour and an overflow is noticed. The library's few static variables are in
//! `.data`, which is a mapping of the file and thereby never paged either; `.bss` may share a
//! mapping with memory that is.

use crate::helper;
use crate::sys;
use hecaton_uffd::Errno;
use hecaton_uffd::handover::{MAX_RUNS, Range};
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

pub(crate) const PAGE: usize = 4096;
/// Bytes of the area that evicted pages are moved to.
pub(crate) const AREA: usize = MAX_RUNS * PAGE;
/// Ranges that the pager leaves alone; as many threads may have their stacks left alone.
pub(crate) const LEFT_ALONE: usize = 1024;
const FORK_STACK: usize = 64 << 10;

const HELPER_STACK_AT: usize = PAGE;
const FORK_STACK_AT: usize = HELPER_STACK_AT + helper::STACK + PAGE;
const AREA_AT: usize = FORK_STACK_AT + FORK_STACK + PAGE;
const LEFT_ALONE_AT: usize = AREA_AT + AREA;
const ATTACHED_AT: usize = LEFT_ALONE_AT + (LEFT_ALONE * size_of::<Range>()).next_multiple_of(PAGE);
const LEN: usize = ATTACHED_AT + PAGE + PAGE;

#[unsafe(link_section = ".data")]
static START: AtomicU64 = AtomicU64::new(0);

fn start() -> usize {
    START.load(Relaxed) as usize
}

/// Makes the mapping.
pub(crate) fn map() -> Result<(), Errno> {
    let own = sys::map_anonymous(LEN, libc::PROT_NONE, libc::MAP_NORESERVE)?;
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    let wipe = libc::MADV_WIPEONFORK as usize;
    // SAFETY: parts of the mapping just made.
    unsafe {
        sys::protect(own + HELPER_STACK_AT, helper::STACK, writable)?;
        sys::protect(own + FORK_STACK_AT, FORK_STACK, writable)?;
        sys::protect(own + AREA_AT, ATTACHED_AT + PAGE - AREA_AT, writable)?;
        sys::advise(own + ATTACHED_AT, PAGE, wipe)?;
    }
    START.store(own as u64, Relaxed);
    Ok(())
}

/// All of it.
pub(crate) fn range() -> Range {
    Range { start: start() as u64, len: LEN as u64 }
}

pub(crate) fn area() -> usize {
    start() + AREA_AT
}

pub(crate) fn helper_stack_top() -> usize {
    start() + HELPER_STACK_AT + helper::STACK
}

/// The end of the stack on which a fork runs; one thread of a process uses it at a time.
pub(crate) fn fork_stack_top() -> usize {
    start() + FORK_STACK_AT + FORK_STACK
}

/// Nonzero where the address space is attached. The kernel empties this page in every copy of an
/// address space, so that a copy that nobody told of is noticed; a `vfork` child, which has no copy,
/// finds what its parent has.
pub(crate) fn attached() -> &'static AtomicU32 {
    // SAFETY: mapped and writable for the life of the process, once there is a mapping at all.
    unsafe { &*((start() + ATTACHED_AT) as *const AtomicU32) }
}

/// A table of pairs of words: start and length of what the pager is to leave alone, or zeros. It
/// reads the table from outside, so an entry's length is stored last and cleared first.
pub(crate) fn left_alone() -> &'static [[AtomicU64; 2]] {
    // SAFETY: as above; zero is a valid value, and all access is atomic.
    unsafe { std::slice::from_raw_parts((start() + LEFT_ALONE_AT) as *const _, LEFT_ALONE) }
}

/// Notes a mapping that the pager must not register. When the table is full, it may.
pub(crate) fn leave_alone(start: u64, len: u64) {
    forget_left_alone(start, len);
    for (i, [at, length]) in left_alone().iter().enumerate() {
        // The start is what claims an entry.
        if at.compare_exchange(0, start, Relaxed, Relaxed).is_ok() {
            length.store(len, Release);
            EVER_USED.fetch_max(i as u32 + 1, Release);
            return;
        }
    }
}

/// Entries of the table that were ever in use.
#[unsafe(link_section = ".data")]
static EVER_USED: AtomicU32 = AtomicU32::new(0);

/// The addresses are used for something else now.
pub(crate) fn forget_left_alone(start: u64, len: u64) {
    for [at, length] in &left_alone()[..EVER_USED.load(Acquire) as usize] {
        let first = at.load(Relaxed);
        let overlaps = first < start + len && start < first + length.load(Acquire);
        if first != 0 && overlaps {
            length.store(0, Release);
            at.store(0, Release);
        }
    }
}
