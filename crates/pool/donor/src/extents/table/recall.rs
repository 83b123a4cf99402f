//! The limit of what is lent, and what is wanted back when more is lent than that.
//!
//! It counts whole extents, written or not: an extent's owner writes to it without asking, so that
//! only the extents bound what the host may be asked for. How many are asked of whom is decided by
//! [`hecaton_policy::recall`], and reviewed with each extent that goes.

use super::Table;
use hecaton_memory::SpaceId;
use hecaton_policy::recall::{Holder, shares};

/// A space that has given nothing for so long counts as unable to. Longer than a large extent's
/// copy takes.
pub(super) const STUCK_AFTER_MS: u64 = 10_000;

/// Recall of extents from one space.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    /// How many extents.
    pub(super) extents: u64,
    /// Since when it has been asked for any.
    pub(super) since_ms: u64,
    /// When it was asked for the first one, since there is something that is wanted back.
    pub(super) first_ms: Option<u64>,
    /// When it gave one last.
    pub(super) gave_ms: u64,
    /// It counts as unable to give, also while it is asked for nothing, until it gives some or all
    /// others are so too. Otherwise two that cannot would be asked by turns, and a third that can
    /// never for long.
    pub(super) is_stuck: bool,
}

impl Asked {
    /// It has given one.
    pub(super) fn gave(&mut self, now_ms: u64) {
        (self.gave_ms, self.is_stuck) = (now_ms, false);
    }

    fn has_been_quiet(&self, now_ms: u64) -> bool {
        let quiet_ms = now_ms.saturating_sub(self.since_ms.max(self.gave_ms));
        self.extents > 0 && quiet_ms >= STUCK_AFTER_MS
    }
}

impl Table {
    /// Lends no more than so many pages from now on, and wants back what is above that.
    pub fn set_limit(&mut self, pages: u64, now_ms: u64) {
        self.limit_pages = pages;
        self.review(now_ms);
    }

    /// Most pages that are lent from now on.
    pub fn limit_pages(&self) -> u64 {
        self.limit_pages
    }

    /// Pages that would be lent now, in extents that are small enough.
    pub fn lendable_pages(&self) -> u64 {
        let in_use = self.lent_pages + self.leaving_pages();
        self.free_pages().min(self.limit_pages.saturating_sub(in_use))
    }

    /// Pages that are lent.
    pub fn lent_pages(&self) -> u64 {
        self.lent_pages
    }

    /// Pages that are lent and above the limit.
    pub fn excess_pages(&self) -> u64 {
        self.lent_pages.saturating_sub(self.limit_pages)
    }

    /// How many of a space's extents are wanted back.
    pub fn recalled(&self, space: SpaceId) -> u64 {
        self.spaces.get(&space).map_or(0, |known| known.asked.extents)
    }

    /// Decides anew what is asked of whom. To be called now and then besides: who gives nothing is
    /// known by the time that passes.
    pub fn review(&mut self, now_ms: u64) {
        let excess_pages = self.excess_pages();
        if excess_pages == 0 {
            for asked in self.spaces.values_mut().map(|space| &mut space.asked) {
                (asked.extents, asked.first_ms, asked.is_stuck) = (0, None, false);
            }
            return;
        }
        for space in self.spaces.values_mut() {
            space.asked.is_stuck |= space.asked.has_been_quiet(now_ms);
        }
        let is_another_round =
            self.spaces.values().all(|space| space.asked.is_stuck || space.extents.is_empty());
        if is_another_round {
            for asked in self.spaces.values_mut().map(|space| &mut space.asked) {
                (asked.since_ms, asked.is_stuck) = (now_ms, false);
            }
        }
        let holders = self.spaces.values().map(|space| {
            let extents = space.extents.len() as u64;
            // They are all as large as the space's segments. If they were not, the next review
            // would make good what this one miscounts.
            let extent_pages = space.extents.values().next().map_or(0, |lent| 1 << lent.order);
            Holder { extents, extent_pages, is_stuck: space.asked.is_stuck }
        });
        let holders: Vec<Holder> = holders.collect();
        for (space, asked) in self.spaces.values_mut().zip(shares(excess_pages, &holders)) {
            if asked > 0 && space.asked.extents == 0 {
                space.asked.since_ms = now_ms;
                space.asked.first_ms.get_or_insert(now_ms);
            }
            space.asked.extents = asked;
        }
    }

    /// Part of [`Table::assert_consistent`].
    pub(super) fn assert_enough_is_asked(&self) {
        let asked = |space: &super::Space| space.asked.extents;
        if self.excess_pages() == 0 {
            return;
        }
        assert!(self.spaces.values().any(|space| asked(space) > 0), "nobody is asked");
        for space in self.spaces.values() {
            assert!(asked(space) <= space.extents.len() as u64, "asked for more than there is");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Allocated, LentExtent, TableLimits, Zone};
    use super::*;
    use hecaton_memory::Epoch;
    use hecaton_transport::protocol::Refusal;

    const A: SpaceId = SpaceId(1);
    const B: SpaceId = SpaceId(2);
    const EPOCH: Epoch = Epoch(1);

    fn take(table: &mut Table, space: SpaceId, segment: u64) -> Result<LentExtent, Refusal> {
        match table.allocate(space, EPOCH, (segment, 0), 2, 0)? {
            Allocated::Fresh(lent) | Allocated::Held(lent) => Ok(lent),
        }
    }

    /// A has six extents of four pages, B has two.
    fn table() -> (Table, Vec<LentExtent>) {
        let limits = TableLimits { extents: 20, spaces: 4, min_order: 0 };
        let mut table = Table::new(&[Zone { pages: 64, node: None }], limits);
        for space in [A, B] {
            table.hello(space, EPOCH, 60_000, "", 0).unwrap();
        }
        let of_a: Vec<_> = (0..6).map(|segment| take(&mut table, A, segment).unwrap()).collect();
        (0..2).for_each(|segment| _ = take(&mut table, B, segment).unwrap());
        (table, of_a)
    }

    fn give(table: &mut Table, lent: &LentExtent, now_ms: u64) {
        table.free(lent.space, EPOCH, lent.extent, now_ms).unwrap();
        table.reclaimed(lent.extent);
        table.assert_consistent();
    }

    #[test]
    fn nothing_is_lent_above_the_limit_and_what_is_held_is_served() {
        let (mut table, of_a) = table();
        assert_eq!(table.lendable_pages(), 32);
        table.set_limit(36, 0);
        assert_eq!((table.lendable_pages(), table.excess_pages()), (4, 0));
        take(&mut table, B, 7).unwrap();
        assert_eq!(take(&mut table, B, 8), Err(Refusal::Full));
        assert_eq!(take(&mut table, A, 0), Ok(of_a[0]), "what is held is named");
        // An extent that was freed and is not reclaimed yet takes room too.
        let leaving = table.free(A, EPOCH, of_a[0].extent, 0).unwrap();
        assert_eq!(take(&mut table, B, 8), Err(Refusal::Full));
        table.reclaimed(leaving.extent);
        take(&mut table, B, 8).unwrap();
    }

    #[test]
    fn what_is_above_the_limit_is_asked_for_until_it_is_back() {
        let (mut table, of_a) = table();
        table.set_limit(16, 0);
        assert_eq!(table.excess_pages(), 16);
        assert_eq!((table.recalled(A), table.recalled(B)), (3, 1));
        give(&mut table, &of_a[0], 5);
        give(&mut table, &of_a[1], 6);
        assert_eq!(table.recalled(A) + table.recalled(B), 2);
        table.set_limit(24, 7);
        assert_eq!((table.recalled(A), table.recalled(B)), (0, 0));
        assert_eq!(table.lendable_pages(), 0);
        table.set_limit(64, 7);
        assert_eq!(table.lendable_pages(), 40);
    }

    #[test]
    fn who_gives_nothing_for_long_is_made_up_for_by_others() {
        let (mut table, of_a) = table();
        table.set_limit(24, 0);
        assert_eq!((table.recalled(A), table.recalled(B)), (2, 0));
        table.review(STUCK_AFTER_MS - 1);
        assert_eq!((table.recalled(A), table.recalled(B)), (2, 0));
        table.review(STUCK_AFTER_MS);
        assert_eq!((table.recalled(A), table.recalled(B)), (2, 2));
        // It could, after all.
        give(&mut table, &of_a[0], STUCK_AFTER_MS + 1);
        assert_eq!(table.recalled(A) + table.recalled(B), 1);
    }

    #[test]
    fn of_many_that_cannot_give_each_is_asked_for_long() {
        let limits = TableLimits { extents: 20, spaces: 4, min_order: 0 };
        let mut table = Table::new(&[Zone { pages: 64, node: None }], limits);
        let spaces = [1, 2, 3].map(SpaceId);
        for (space, extents) in spaces.into_iter().zip([1, 2, 1]) {
            table.hello(space, EPOCH, 60_000, "", 0).unwrap();
            (0..extents).for_each(|segment| _ = take(&mut table, space, segment).unwrap());
        }
        table.set_limit(15, 0);
        // Each for as long as makes it count as unable, in every round.
        let mut longest = [0; 3];
        let mut asked_for = [0; 3];
        for now_ms in (0..5 * STUCK_AFTER_MS).step_by(100) {
            table.review(now_ms);
            for (at, space) in spaces.into_iter().enumerate() {
                asked_for[at] = if table.recalled(space) > 0 { asked_for[at] + 100 } else { 0 };
                longest[at] = longest[at].max(asked_for[at]);
            }
        }
        assert!(longest.into_iter().all(|ms| ms >= STUCK_AFTER_MS), "{longest:?}");
        assert_eq!(
            table.stalled_ms(5 * STUCK_AFTER_MS),
            4 * STUCK_AFTER_MS,
            "since the last two were asked"
        );
    }

    #[test]
    fn who_alone_can_give_is_asked_soon_though_many_others_cannot() {
        const SPACES: u64 = 27;
        let limits = TableLimits { extents: 40, spaces: 40, min_order: 0 };
        let mut table = Table::new(&[Zone { pages: 128, node: None }], limits);
        let spaces = (1..=SPACES).map(SpaceId);
        let lent: Vec<LentExtent> = spaces
            .map(|space| {
                table.hello(space, EPOCH, 60_000, "", 0).unwrap();
                take(&mut table, space, 0).unwrap()
            })
            .collect();
        table.set_limit(4 * (SPACES - 1), 0);
        for (at, able) in lent.iter().enumerate() {
            // One extent of all is wanted, and only this one's borrower has room elsewhere.
            let began_ms = at as u64 * 100 * STUCK_AFTER_MS;
            table.set_limit(4 * SPACES, began_ms);
            table.set_limit(4 * (SPACES - 1), began_ms);
            let mut now_ms = began_ms;
            while table.recalled(able.space) == 0 {
                now_ms += 1000;
                table.review(now_ms);
            }
            assert!(now_ms - began_ms <= 3 * STUCK_AFTER_MS, "{at}: one, three, nine, all");
            give(&mut table, able, now_ms);
            assert!(table.spaces().all(|space| space.recalled == 0), "that was enough");
            take(&mut table, able.space, 0).unwrap_err();
            table.set_limit(4 * SPACES, now_ms);
            take(&mut table, able.space, 0).unwrap();
        }
    }

    #[test]
    fn a_space_that_ends_is_asked_for_nothing() {
        let (mut table, _) = table();
        table.set_limit(0, 0);
        for lent in table.free_all(A, EPOCH, 1).unwrap() {
            table.reclaimed(lent.extent);
        }
        assert_eq!((table.recalled(A), table.recalled(B)), (0, 2));
        table.assert_consistent();
    }
}
