//! The library's own memory: never paged, so that it can be used while nobody serves faults.
//!
//! One mapping, with inaccessible pages at its ends and above the stacks so that the kernel merges
//! it with no neighbour and an overflow is noticed. The library's few static variables are in
//! `.data`, which is a mapping of the file and thereby never paged either; `.bss` may share a
//! mapping with memory that is.

use crate::sys;
use hecaton_uffd::Errno;
use hecaton_uffd::bare::{OWN_ROOM, Place};
use hecaton_uffd::handover::{MAX_RUNS, Range};
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

pub(crate) const PAGE: usize = 4096;
/// Bytes of the area that evicted pages are moved to.
pub(crate) const AREA: usize = MAX_RUNS * PAGE;
/// Entries of a table of ranges; as many threads may have their stacks left alone.
pub(crate) const RANGES: usize = 1024;
const TABLE: usize = (RANGES * size_of::<Range>()).next_multiple_of(PAGE);
const FORK_STACK: usize = 64 << 10;
const HELPER_STACK: usize = 64 << 10;

const HELPER_STACK_AT: usize = PAGE;
const FORK_STACK_AT: usize = HELPER_STACK_AT + HELPER_STACK + PAGE;
const AREA_AT: usize = FORK_STACK_AT + FORK_STACK + PAGE;
const LEFT_ALONE_AT: usize = AREA_AT + AREA;
const KEPT_BY_PROGRAM_AT: usize = LEFT_ALONE_AT + TABLE;
const ATTACHED_AT: usize = KEPT_BY_PROGRAM_AT + TABLE;
const BIN_AT: usize = ATTACHED_AT + PAGE;
const LEN: usize = BIN_AT + AREA + PAGE;
const _: () = assert!(LEN as u64 <= OWN_ROOM);

#[unsafe(link_section = ".data")]
static START: AtomicU64 = AtomicU64::new(0);
/// Start and length that the launcher reserved in a bare program, with this library; 0 in others.
#[unsafe(link_section = ".data")]
static RESERVED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

fn start() -> usize {
    START.load(Relaxed) as usize
}

/// Makes the mapping.
pub(crate) fn map() -> Result<(), Errno> {
    lay_out(sys::map_anonymous(LEN, libc::PROT_NONE, libc::MAP_NORESERVE)?)
}

/// Uses the memory that the launcher reserved. From here on [`is_bare`] is true.
pub(crate) fn map_in(place: &Place) -> Result<(), Errno> {
    lay_out(place.room as usize)?;
    // A page that a fork has shared cannot be moved out of the area again.
    // SAFETY: a child of its own has nothing of its parent's there.
    unsafe { sys::advise(area(), AREA, libc::MADV_WIPEONFORK as usize)? };
    RESERVED[1].store(place.reserved.len, Relaxed);
    RESERVED[0].store(place.reserved.start, Relaxed);
    Ok(())
}

fn lay_out(own: usize) -> Result<(), Errno> {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    let wipe = libc::MADV_WIPEONFORK as usize;
    // SAFETY: parts of a mapping that nothing else uses.
    unsafe {
        sys::protect(own + HELPER_STACK_AT, HELPER_STACK, writable)?;
        sys::protect(own + FORK_STACK_AT, FORK_STACK, writable)?;
        sys::protect(own + AREA_AT, BIN_AT + AREA - AREA_AT, writable)?;
        sys::advise(own + ATTACHED_AT, PAGE, wipe)?;
    }
    START.store(own as u64, Relaxed);
    Ok(())
}

/// All of the library's own memory; in a bare program with the library itself.
pub(crate) fn range() -> Range {
    match RESERVED.each_ref().map(|word| word.load(Relaxed)) {
        [0, _] => Range { start: start() as u64, len: LEN as u64 },
        [start, len] => Range { start, len },
    }
}

/// Whether the program is bare ([`hecaton_uffd::bare`]). The library then sees only the system
/// calls that make children, so changes of mappings take no turns ([`crate::turn`]).
pub(crate) fn is_bare() -> bool {
    RESERVED[0].load(Relaxed) != 0
}

pub(crate) fn area() -> usize {
    start() + AREA_AT
}

/// Receives the pages of the area when a bare program's helper empties it. As large as the area.
pub(crate) fn bin() -> usize {
    start() + BIN_AT
}

pub(crate) fn helper_stack_top() -> usize {
    start() + HELPER_STACK_AT + HELPER_STACK
}

/// The end of the stack on which a fork runs; one thread of a process uses it at a time.
pub(crate) fn fork_stack_top() -> usize {
    start() + FORK_STACK_AT + FORK_STACK
}

/// Nonzero where the address space is attached. The kernel empties this page in every copy of an
/// address space, so that a copy that nobody told of is noticed; a `vfork` child, which has no
/// copy, finds what its parent has.
pub(crate) fn attached() -> &'static AtomicU32 {
    // SAFETY: mapped and writable for the life of the process, once there is a mapping at all.
    unsafe { &*((start() + ATTACHED_AT) as *const AtomicU32) }
}

/// Whether this process is the child of a fork that was not followed, and stays on local memory.
#[unsafe(link_section = ".data")]
static UNPAGED: AtomicU32 = AtomicU32::new(0);

/// It is.
pub(crate) fn become_unpaged() {
    UNPAGED.store(1, Relaxed);
}

/// Whether it is.
pub(crate) fn is_unpaged() -> bool {
    UNPAGED.load(Relaxed) != 0
}

/// Whether the program has a filter of system calls (seccomp). One that it has inherited does not
/// count: this process was let attach.
#[unsafe(link_section = ".data")]
pub(crate) static IS_FILTERED: AtomicU32 = AtomicU32::new(0);

/// The program sets a filter.
pub(crate) fn become_filtered() {
    IS_FILTERED.store(1, Relaxed);
}

/// Whether it has: no system call must be made for it that it would not make by itself, where that
/// can be avoided.
pub(crate) fn is_filtered() -> bool {
    IS_FILTERED.load(Relaxed) != 0
}

/// Whether the pager serves this process.
pub(crate) fn is_paged() -> bool {
    start() != 0 && !is_unpaged() && attached().load(Relaxed) != 0
}

/// Whether the program has asked for memory that its children find empty.
#[unsafe(link_section = ".data")]
pub(crate) static USES_WIPE_ON_FORK: AtomicU32 = AtomicU32::new(0);

/// The program asks for such memory.
pub(crate) fn note_wipe_on_fork() {
    USES_WIPE_ON_FORK.store(1, Relaxed);
}

/// Whether it has.
pub(crate) fn uses_wipe_on_fork() -> bool {
    USES_WIPE_ON_FORK.load(Relaxed) != 0
}

/// A table of ranges of memory: start and length in bytes, or zeros.
///
/// A table is read while it is written, [`LEFT_ALONE`] by the pager, from outside. So an entry's
/// length is stored last and cleared first. Ranges that do not fit are not noted.
pub(crate) struct Ranges {
    at: usize,
    /// Entries that were ever in use.
    used: AtomicU32,
}

/// Memory that the pager must not register, although it looks like any other memory.
#[unsafe(link_section = ".data")]
pub(crate) static LEFT_ALONE: Ranges = Ranges { at: LEFT_ALONE_AT, used: AtomicU32::new(0) };

/// Memory that the program itself keeps from its children.
#[unsafe(link_section = ".data")]
pub(crate) static KEPT_BY_PROGRAM: Ranges =
    Ranges { at: KEPT_BY_PROGRAM_AT, used: AtomicU32::new(0) };

impl Ranges {
    /// All entries, empty ones included.
    pub(crate) fn entries(&self) -> &'static [[AtomicU64; 2]] {
        // SAFETY: mapped and writable for the life of the process, once there is a mapping at all;
        // zero is a valid value, and all access is atomic.
        unsafe { std::slice::from_raw_parts((start() + self.at) as *const _, RANGES) }
    }

    fn used(&self) -> &'static [[AtomicU64; 2]] {
        &self.entries()[..self.used.load(Acquire) as usize]
    }

    /// Notes a range, and nothing else of where it is.
    pub(crate) fn note(&self, range: Range) {
        self.forget(range);
        for (i, [at, length]) in self.entries().iter().enumerate() {
            // The start is what claims an entry.
            if at.compare_exchange(0, range.start, Relaxed, Relaxed).is_ok() {
                length.store(range.len, Release);
                self.used.fetch_max(i as u32 + 1, Release);
                return;
            }
        }
    }

    /// The addresses are used for something else now.
    pub(crate) fn forget(&self, range: Range) {
        for [at, length] in self.used() {
            if overlaps(&noted(at, length), &range) {
                length.store(0, Release);
                at.store(0, Release);
            }
        }
    }

    /// The first of the noted ranges that has something in `range`.
    pub(crate) fn first_in(&self, range: Range) -> Option<Range> {
        let noted = self.used().iter().map(|[at, length]| noted(at, length));
        noted.filter(|noted| overlaps(noted, &range)).min_by_key(|noted| noted.start)
    }
}

fn noted(at: &AtomicU64, length: &AtomicU64) -> Range {
    Range { start: at.load(Relaxed), len: length.load(Acquire) }
}

fn overlaps(one: &Range, other: &Range) -> bool {
    one.start < other.start + other.len && other.start < one.start + one.len
}
