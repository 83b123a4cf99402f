//! An extent that is lent, and its pages.

use hecaton_memory::{ExtentId, Generation, SpaceId};
use hecaton_transport::protocol::{HeldExtent, Refusal};
use std::ops::Range;

/// An extent and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentExtent {
    /// Its number.
    pub extent: ExtentId,
    /// The space that it is lent to.
    pub space: SpaceId,
    /// The segment that it serves.
    pub segment: u64,
    /// Which copy or shard of the segment.
    pub member: u8,
    /// Its size as a power of two of pages.
    pub order: u8,
    /// Where in the donor's memory it begins.
    pub first_page: u64,
}

impl LentExtent {
    /// The donor's pages that it covers.
    pub fn pages(&self) -> Range<u64> {
        self.first_page..self.first_page + (1 << self.order)
    }

    /// How many pages it has.
    pub fn count(&self) -> u64 {
        1 << self.order
    }

    /// The donor's page behind a page of the extent.
    pub fn page(&self, page: u32) -> Result<u64, Refusal> {
        if u64::from(page) >> self.order != 0 {
            return Err(Refusal::OutOfBounds);
        }
        Ok(self.first_page + u64::from(page))
    }

    /// The donor's pages behind a run of the extent's.
    pub fn run(&self, first: u32, count: u32) -> Result<Range<u64>, Refusal> {
        let end = u64::from(first) + u64::from(count);
        if end > 1 << self.order {
            return Err(Refusal::OutOfBounds);
        }
        Ok(self.first_page + u64::from(first)..self.first_page + end)
    }

    /// As the borrower is told of it, with how many of its pages were written, and its generation.
    pub fn line(&self, written: u32, generation: Generation) -> HeldExtent {
        HeldExtent {
            extent: self.extent,
            segment: self.segment,
            member: self.member,
            order: self.order,
            written,
            generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_an_extent_are_bounded() {
        let lent = LentExtent {
            extent: ExtentId(1),
            space: SpaceId(0xa),
            segment: 0,
            member: 0,
            order: 3,
            first_page: 16,
        };
        assert_eq!((lent.page(0), lent.page(7)), (Ok(16), Ok(23)));
        assert_eq!(lent.page(8), Err(Refusal::OutOfBounds));
        assert_eq!(lent.page(u32::MAX), Err(Refusal::OutOfBounds));
        assert_eq!(lent.run(2, 6), Ok(18..24));
        assert_eq!(lent.run(2, 7), Err(Refusal::OutOfBounds));
        assert_eq!(lent.run(u32::MAX, u32::MAX), Err(Refusal::OutOfBounds));
        let largest = LentExtent { order: 32, first_page: 0, ..lent };
        assert_eq!(largest.page(u32::MAX), Ok(u64::from(u32::MAX)));
    }
}
