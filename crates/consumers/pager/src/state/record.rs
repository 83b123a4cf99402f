//! One page of the space, in one word.

use hecaton_memory::PageSum;

/// | bits | meaning |
/// |---|---|
/// | 0–14 | entries that name the page; more than one after a fork |
/// | 15 | stored: the donors hold the contents that `sum` is of |
/// | 16–31 | staging slot that holds the contents, plus one; 0: none |
/// | 32–63 | checksum of the contents; once stored, of the donors' bytes (which may be sealed) |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record(pub(crate) u64);

const STORED: u64 = 1 << 15;

/// Most entries that may name one page.
pub(crate) const MAX_REFS: u64 = STORED - 1;

impl Record {
    pub(crate) const FREE: Record = Record(0);

    pub(crate) fn refs(self) -> u64 {
        self.0 & MAX_REFS
    }

    pub(crate) fn with_refs(self, refs: u64) -> Record {
        debug_assert!(refs <= MAX_REFS);
        Record(self.0 & !MAX_REFS | refs)
    }

    pub(crate) fn is_stored(self) -> bool {
        self.0 & STORED != 0
    }

    pub(crate) fn with_stored(self, on: bool) -> Record {
        Record(if on { self.0 | STORED } else { self.0 & !STORED })
    }

    pub(crate) fn slot(self) -> Option<u32> {
        ((self.0 >> 16) as u32 & 0xFFFF).checked_sub(1)
    }

    pub(crate) fn with_slot(self, slot: Option<u32>) -> Record {
        let field = slot.map_or(0, |slot| u64::from(slot) + 1);
        Record(self.0 & !(0xFFFF << 16) | field << 16)
    }

    pub(crate) fn sum(self) -> PageSum {
        (self.0 >> 32) as PageSum
    }

    pub(crate) fn with_sum(self, sum: PageSum) -> Record {
        Record(self.0 & 0xFFFF_FFFF | u64::from(sum) << 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch_each_other() {
        let record = Record::FREE
            .with_refs(MAX_REFS)
            .with_stored(true)
            .with_slot(Some(super::super::STAGING_SLOTS as u32 - 1))
            .with_sum(u32::MAX);
        assert_eq!(record.refs(), MAX_REFS);
        assert_eq!(record.slot(), Some(super::super::STAGING_SLOTS as u32 - 1));
        let record = record.with_slot(None).with_refs(1).with_stored(false);
        assert_eq!((record.refs(), record.slot(), record.sum()), (1, None, u32::MAX));
        assert!(!record.is_stored());
    }
}
