//! One page of an address space, in one word.

/// Where the page's contents are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Place {
    /// Nowhere: it is zero.
    Zero = 0,
    /// In the program's memory.
    Resident = 1,
    /// In the space page that the entry names: staged, or at its donor.
    Out = 2,
    /// As `Out`, and asked for; the entry's tag is the request's.
    Fetching = 3,
}

/// | bits | meaning |
/// |---|---|
/// | 0–1 | [`Place`] |
/// | 2 | dirty: resident, and not in the space page (any more); fetching: wanted for writing |
/// | 3 | busy: in the eviction batch under way, or was when it was last heard of; faults wait |
/// | 4 | awaited: fetching, and a thread waits for it |
/// | 8–27 | tag: of the request that fetches it; else the time of its last eviction |
/// | 28–63 | space page plus one; 0: none |
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

const DIRTY: u64 = 1 << 2;
const BUSY: u64 = 1 << 3;
const AWAITED: u64 = 1 << 4;
const TAG_SHIFT: u32 = 8;
const TAG_BITS: u32 = 20;
const PAGE_SHIFT: u32 = TAG_SHIFT + TAG_BITS;

/// Tags are this wide; they wrap.
pub(crate) const TAG_MASK: u32 = (1 << TAG_BITS) - 1;

macro_rules! flag {
    ($(#[$doc:meta])* $get:ident, $with:ident, $bit:ident) => {
        $(#[$doc])*
        pub(crate) fn $get(self) -> bool {
            self.0 & $bit != 0
        }
        pub(crate) fn $with(self, on: bool) -> Entry {
            Entry(if on { self.0 | $bit } else { self.0 & !$bit })
        }
    };
}

impl Entry {
    pub(crate) const ZERO: Entry = Entry(0);

    pub(crate) fn place(self) -> Place {
        match self.0 & 3 {
            0 => Place::Zero,
            1 => Place::Resident,
            2 => Place::Out,
            _ => Place::Fetching,
        }
    }

    pub(crate) fn with_place(self, place: Place) -> Entry {
        Entry(self.0 & !3 | place as u64)
    }

    flag!(
        /// See the table above.
        is_dirty, with_dirty, DIRTY
    );
    flag!(
        /// See the table above.
        is_busy, with_busy, BUSY
    );
    flag!(
        /// See the table above.
        is_awaited, with_awaited, AWAITED
    );

    pub(crate) fn tag(self) -> u32 {
        (self.0 >> TAG_SHIFT) as u32 & TAG_MASK
    }

    pub(crate) fn with_tag(self, tag: u32) -> Entry {
        let mask = u64::from(TAG_MASK) << TAG_SHIFT;
        Entry(self.0 & !mask | u64::from(tag & TAG_MASK) << TAG_SHIFT)
    }

    pub(crate) fn space_page(self) -> Option<u64> {
        (self.0 >> PAGE_SHIFT).checked_sub(1)
    }

    pub(crate) fn with_space_page(self, page: Option<u64>) -> Entry {
        let field = page.map_or(0, |page| page + 1);
        Entry(self.0 & ((1 << PAGE_SHIFT) - 1) | field << PAGE_SHIFT)
    }

    /// Resident, and the space page still holds the same.
    pub(crate) fn is_clean_resident(self) -> bool {
        self.place() == Place::Resident && !self.is_dirty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch_each_other() {
        let last_page = super::super::SPACE_PAGES - 1;
        let full = Entry::ZERO
            .with_place(Place::Fetching)
            .with_dirty(true)
            .with_busy(true)
            .with_awaited(true)
            .with_tag(TAG_MASK)
            .with_space_page(Some(last_page));
        assert_eq!(full.space_page(), Some(last_page));
        assert_eq!(full.tag(), TAG_MASK);
        let bare = full.with_tag(0).with_space_page(None).with_busy(false);
        assert_eq!(bare.place(), Place::Fetching);
        assert!(bare.is_dirty() && bare.is_awaited() && !bare.is_busy());
        assert_eq!((bare.tag(), bare.space_page()), (0, None));
        assert_eq!(full.with_place(Place::Zero).tag(), TAG_MASK);
    }
}
