//! Decides which announced regions of guest RAM can be paged. Pure.

use super::memory_file::{Facts, Identity, Kind};
use hecaton_memory::PAGE_SIZE;
use std::ops::Range;

/// Most regions of one hypervisor: more than a VM has memory slots.
pub(crate) const MAX_REGIONS: usize = 512;

/// Most bytes of one hypervisor's memory: the tables have no entries for more.
pub(crate) const MAX_BYTES: u64 = 1 << 40;

const PAGE: u64 = PAGE_SIZE as u64;

/// Addresses at which a process can have memory.
const ADDRESSES: Range<u64> = 1 << 16..1 << 47;

/// A part of a hypervisor's address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Start of the part in its file, in bytes.
    pub(crate) offset: u64,
    /// The file, if the hypervisor shares one with the pager.
    pub(crate) file: Option<Identity>,
}

impl Span {
    pub(crate) fn addresses(&self) -> Range<u64> {
        self.start..self.start + self.len
    }

    fn in_file(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }
}

/// Why a region is not paged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("a region of {0} bytes at {1:#x} (file offset {2:#x}) is empty or not of whole pages")]
    NotPages(u64, u64, u64),
    #[error("a region of {0} bytes at {1:#x} is outside of what a process can have")]
    Outside(u64, u64),
    #[error("the region at {0:#x} overlaps the one at {1:#x}")]
    Overlap(u64, u64),
    #[error("the regions at {0:#x} and {1:#x} are the same part of one file: a page has one place")]
    MappedTwice(u64, u64),
    #[error("the region at {0:#x} ends at {1} bytes of a file that has {2}")]
    BeyondFile(u64, u64, u64),
    #[error("there are more than {MAX_REGIONS} regions")]
    TooMany,
    #[error("there are {0} bytes of memory, and a pager has entries for {MAX_BYTES}")]
    TooLarge(u64),
    #[error(
        "its memory is of pages of {0} bytes, and only pages of 4096 can be paged: start the \
         machine without huge pages"
    )]
    HugePages(u64),
    #[error("its file is not in memory: give it memory-backend-memfd with share=on")]
    NotMemory,
    #[error("its file is sealed against writing")]
    Sealed,
}

pub(super) fn meets(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Checks that `new` can be paged beside the regions in `known`.
pub(crate) fn check(known: &[Span], new: &Span) -> Result<(), Refusal> {
    let Span { start, len, offset, .. } = *new;
    if len == 0 || [start, len, offset].iter().any(|value| !value.is_multiple_of(PAGE)) {
        return Err(Refusal::NotPages(len, start, offset));
    }
    let end = start.checked_add(len).filter(|&end| end <= ADDRESSES.end);
    if start < ADDRESSES.start || end.is_none() || offset.checked_add(len).is_none() {
        return Err(Refusal::Outside(len, start));
    }
    for other in known {
        if meets(&other.addresses(), &new.addresses()) {
            return Err(Refusal::Overlap(start, other.start));
        }
        if new.file.is_some() && other.file == new.file && meets(&other.in_file(), &new.in_file()) {
            return Err(Refusal::MappedTwice(start, other.start));
        }
    }
    if known.len() >= MAX_REGIONS {
        return Err(Refusal::TooMany);
    }
    let bytes = known.iter().map(|span| span.len).sum::<u64>() + len;
    if bytes > MAX_BYTES {
        return Err(Refusal::TooLarge(bytes));
    }
    Ok(())
}

/// Checks that the pages of the region's file can be evicted and given back.
pub(crate) fn check_file(new: &Span, facts: &Facts) -> Result<(), Refusal> {
    match facts.kind {
        Kind::HugePages(bytes) => return Err(Refusal::HugePages(bytes)),
        Kind::Other => return Err(Refusal::NotMemory),
        Kind::Memory => {}
    }
    if facts.sealed {
        return Err(Refusal::Sealed);
    }
    let end = new.offset + new.len;
    if end > facts.bytes {
        return Err(Refusal::BeyondFile(new.start, end, facts.bytes));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::memory_file::MemoryFile;
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsRawFd;

    const BASE: u64 = 0x7f00_0000_0000;

    fn facts(bytes: u64) -> Facts {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        MemoryFile(fd.as_raw_fd()).facts().unwrap()
    }

    fn span(start: u64, len: u64, offset: u64) -> Span {
        Span { start, len, offset, file: None }
    }

    #[test]
    fn whole_pages_within_the_address_space_are_taken() {
        assert_eq!(check(&[], &span(BASE, 1 << 30, 0)), Ok(()));
        for odd in [span(BASE + 1, PAGE, 0), span(BASE, 100, 0), span(BASE, PAGE, 7)] {
            assert!(matches!(check(&[], &odd), Err(Refusal::NotPages(..))), "{odd:?}");
        }
        assert!(matches!(check(&[], &span(BASE, 0, 0)), Err(Refusal::NotPages(..))));
        let last = !(PAGE - 1);
        for wild in
            [span(0, PAGE, 0), span(last, PAGE, 0), span(BASE, last, 0), span(BASE, PAGE, last)]
        {
            assert!(matches!(check(&[], &wild), Err(Refusal::Outside(..))), "{wild:?}");
        }
        assert_eq!(check(&[], &span(1 << 16, 1 << 41, 0)), Err(Refusal::TooLarge(1 << 41)));
    }

    #[test]
    fn what_overlaps_is_refused_in_memory_and_in_the_file() {
        let file = Some(facts(PAGE).identity);
        let known = [Span { file, ..span(BASE, 4 * PAGE, 0) }];
        let overlapping = Span { file, ..span(BASE + 3 * PAGE, PAGE, 9 * PAGE) };
        assert_eq!(check(&known, &overlapping), Err(Refusal::Overlap(overlapping.start, BASE)));
        let twice = Span { file, ..span(BASE + 4 * PAGE, PAGE, 3 * PAGE) };
        assert_eq!(check(&known, &twice), Err(Refusal::MappedTwice(twice.start, BASE)));
        let beside = Span { file, ..span(BASE + 4 * PAGE, PAGE, 4 * PAGE) };
        assert_eq!(check(&known, &beside), Ok(()));
        let another = Span { file: Some(facts(PAGE).identity), ..twice };
        assert_eq!(check(&known, &another), Ok(()));
    }

    #[test]
    fn files_that_cannot_be_paged_are_refused_with_the_reason() {
        let good = facts(4 * PAGE);
        let whole = span(BASE, 4 * PAGE, 0);
        assert_eq!(check_file(&whole, &good), Ok(()));
        let beyond = span(BASE, 4 * PAGE, PAGE);
        assert!(matches!(check_file(&beyond, &good), Err(Refusal::BeyondFile(..))));
        assert_eq!(check_file(&whole, &Facts { sealed: true, ..good }), Err(Refusal::Sealed));
        let huge = Facts { kind: Kind::HugePages(2 << 20), ..good };
        assert_eq!(check_file(&whole, &huge), Err(Refusal::HugePages(2 << 20)));
        let disk = Facts { kind: Kind::Other, ..good };
        assert_eq!(check_file(&whole, &disk), Err(Refusal::NotMemory));
    }

    proptest! {
        /// For any input, the check neither panics nor lets two regions share a page.
        #[test]
        fn accepted_regions_are_apart(
            wishes in prop::collection::vec((any::<u64>(), any::<u64>(), 0..64u64, 0..64u64), 0..20)
        ) {
            let mut known: Vec<Span> = Vec::new();
            for (start, len, near, pages) in wishes {
                for wish in [span(start, len, start), span(BASE + near * PAGE, pages * PAGE, 0)] {
                    if check(&known, &wish).is_ok() {
                        known.push(wish);
                    }
                }
            }
            known.sort_by_key(|span| span.start);
            for pair in known.windows(2) {
                prop_assert!(pair[0].addresses().end <= pair[1].start);
            }
        }
    }
}
