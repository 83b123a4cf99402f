//! Which extents take no memory, because their pages are in a file.
//!
//! They stay lent, at their place among the donor's pages, and count towards what is above the
//! limit: a borrower that finds room for one elsewhere is to take it there.

use super::{LentExtent, Table};
use hecaton_memory::ExtentId;
use std::collections::BTreeMap;

/// The extents, and the pages of each.
#[derive(Debug, Default)]
pub(super) struct Parked {
    extents: BTreeMap<ExtentId, u64>,
    pages: u64,
}

impl Parked {
    pub(super) fn insert(&mut self, extent: ExtentId, pages: u64) {
        if self.extents.insert(extent, pages).is_none() {
            self.pages += pages;
        }
    }

    pub(super) fn remove(&mut self, extent: ExtentId) {
        self.pages -= self.extents.remove(&extent).unwrap_or(0);
    }
}

impl Table {
    /// An extent's pages are in a file from now on, or in memory. One that is lent no longer is
    /// passed over.
    pub fn set_parked(&mut self, lent: &LentExtent, is_parked: bool) {
        let space = self.spaces.get(&lent.space);
        if is_parked && space.is_some_and(|space| space.extents.contains_key(&lent.extent)) {
            self.parked.insert(lent.extent, lent.count());
        } else {
            self.parked.remove(lent.extent);
        }
    }

    /// Whether an extent's pages are in a file.
    pub fn is_parked(&self, extent: ExtentId) -> bool {
        self.parked.extents.contains_key(&extent)
    }

    /// Pages of extents that are in a file.
    pub fn parked_pages(&self) -> u64 {
        self.parked.pages
    }

    /// Pages of extents that take memory: lent and not parked, or not the host's again yet.
    pub fn memory_pages(&self) -> u64 {
        self.lent_pages + self.leaving_pages() - self.parked.pages
    }

    /// For how long nobody has given anything of what is wanted back; zero if nothing is.
    pub fn stalled_ms(&self, now_ms: u64) -> u64 {
        let asked = self.spaces.values().map(|space| &space.asked);
        let last = asked.filter_map(|asked| Some(asked.first_ms?.max(asked.gave_ms))).max();
        last.map_or(0, |last_ms| now_ms.saturating_sub(last_ms))
    }

    /// Part of [`Table::assert_consistent`].
    pub(super) fn assert_parked_are_lent(&self) {
        let pages: u64 = self.parked.extents.values().sum();
        assert_eq!(pages, self.parked.pages);
        for (&extent, &pages) in &self.parked.extents {
            let lent = self.extents().find(|lent| lent.extent == extent);
            assert_eq!(lent.map(|lent| lent.count()), Some(pages), "extent {extent} is parked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Allocated, TableLimits, Zone};
    use super::*;
    use hecaton_memory::{Epoch, SpaceId};

    const A: SpaceId = SpaceId(1);
    const EPOCH: Epoch = Epoch(1);

    fn table_with(extents: u64) -> (Table, Vec<LentExtent>) {
        let limits = TableLimits { extents: 20, spaces: 4, min_order: 0 };
        let mut table = Table::new(&[Zone { pages: 64, node: None }], limits);
        table.hello(A, EPOCH, 60_000, "", 0).unwrap();
        let take = |segment| match table.allocate(A, EPOCH, (segment, 0), 2, 0).unwrap() {
            Allocated::Fresh(lent) | Allocated::Held(lent) => lent,
        };
        let lent = (0..extents).map(take).collect();
        (table, lent)
    }

    #[test]
    fn what_is_parked_takes_no_memory_and_is_still_wanted_back() {
        let (mut table, lent) = table_with(4);
        table.set_limit(8, 10);
        table.set_parked(&lent[0], true);
        table.set_parked(&lent[0], true);
        table.set_parked(&lent[1], true);
        table.assert_consistent();
        assert_eq!((table.parked_pages(), table.memory_pages()), (8, 8));
        assert_eq!((table.excess_pages(), table.recalled(A)), (8, 2));
        assert_eq!(table.lendable_pages(), 0);
        table.set_parked(&lent[1], false);
        assert_eq!(table.memory_pages(), 12);
        // Gone from here, and so from the file.
        table.free(A, EPOCH, lent[0].extent, 20).unwrap();
        table.assert_consistent();
        assert_eq!((table.parked_pages(), table.memory_pages()), (0, 16));
        table.set_parked(&lent[0], true);
        table.assert_consistent();
        table.set_parked(&lent[2], true);
        table.free_all(A, EPOCH, 30).unwrap();
        table.assert_consistent();
        assert_eq!(table.parked_pages(), 0);
    }

    #[test]
    fn borrowers_are_stuck_from_when_they_were_asked_or_gave_last() {
        let (mut table, lent) = table_with(4);
        assert_eq!(table.stalled_ms(500), 0);
        table.set_limit(4, 1_000);
        assert_eq!(table.stalled_ms(1_700), 700);
        table.free(A, EPOCH, lent[0].extent, 2_000).unwrap();
        assert_eq!(table.stalled_ms(2_300), 300);
        table.set_limit(64, 3_000);
        assert_eq!(table.stalled_ms(9_000), 0);
    }
}
