//! Chooses the extents that a donor parks when a recall is stuck.
//!
//! The last resort of a recall. Borrowers are asked first, because memory elsewhere is faster than
//! a disk here. They alone know which donors have room and which extents have another copy. Only
//! when they give nothing does the donor park extents in a file. It goes on asking for these, so
//! that they leave the disk for another donor's memory as soon as there is room.
//!
//! The extent that was not used for longest is parked first, and the one that was used last comes
//! back first. A parked extent never changes places with one in memory. On a disk that would cost
//! two extents' time, for a gain that is gone when the borrower's habits change.

/// Memory of a donor at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Most pages that it is to have in memory.
    pub limit_pages: u64,
    /// Pages of extents that take memory: those that are lent and not parked, and those that have
    /// gone back and are not the host's again yet.
    pub memory_pages: u64,
    /// For how long borrowers have given nothing though they were asked to; zero if they are not.
    pub stalled_ms: u64,
    /// For how long that must be. Longer than it takes borrowers to move an extent or to give up a
    /// copy.
    pub patience_ms: u64,
    /// Pages that the file can still take; zero while it takes none.
    pub file_room_pages: u64,
}

/// An extent that could be parked, or is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Its pages.
    pub pages: u64,
    /// Whether it is in the file.
    pub is_parked: bool,
    /// When it was last read or written.
    pub touched_ms: u64,
}

/// Next move, with the index of the extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// From memory to the file.
    Park(usize),
    /// From the file to memory.
    Fetch(usize),
}

/// The next move, if there is one. The same input gives the same answer.
pub fn next(seen: Seen, extents: &[Extent]) -> Option<Move> {
    let of = |is_parked: bool| {
        extents.iter().enumerate().filter(move |(_, extent)| extent.is_parked == is_parked)
    };
    if seen.memory_pages > seen.limit_pages {
        if seen.stalled_ms < seen.patience_ms {
            return None;
        }
        let fits = |(_, extent): &(usize, &Extent)| extent.pages <= seen.file_room_pages;
        let coldest = of(false).filter(fits).min_by_key(|(at, extent)| (extent.touched_ms, *at));
        return coldest.map(|(at, _)| Move::Park(at));
    }
    let room = seen.limit_pages - seen.memory_pages;
    let fits = |(_, extent): &(usize, &Extent)| extent.pages <= room;
    let hottest = of(true).filter(fits).max_by_key(|(at, extent)| (extent.touched_ms, *at));
    hottest.map(|(at, _)| Move::Fetch(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(is_parked: bool, touched_ms: u64) -> Extent {
        Extent { pages: 16, is_parked, touched_ms }
    }

    fn seen(limit_pages: u64, memory_pages: u64) -> Seen {
        let file_room_pages = 1 << 20;
        Seen { limit_pages, memory_pages, stalled_ms: 5, patience_ms: 5, file_room_pages }
    }

    #[test]
    fn the_coldest_is_parked_once_borrowers_are_stuck() {
        let extents = [extent(false, 7), extent(false, 3), extent(true, 1), extent(false, 3)];
        assert_eq!(next(seen(40, 48), &extents), Some(Move::Park(1)));
        let asked_just_now = Seen { stalled_ms: 4, ..seen(40, 48) };
        assert_eq!(next(asked_just_now, &extents), None);
        let full = Seen { file_room_pages: 15, ..seen(40, 48) };
        assert_eq!(next(full, &extents), None);
        assert_eq!(next(seen(0, 16), &[extent(true, 0)]), None, "there is nothing left to park");
    }

    #[test]
    fn the_hottest_comes_back_when_there_is_room_for_it() {
        let extents = [extent(true, 7), extent(true, 9), extent(false, 100)];
        assert_eq!(next(seen(32, 16), &extents), Some(Move::Fetch(1)));
        assert_eq!(next(seen(31, 16), &extents), None);
        assert_eq!(next(seen(16, 16), &extents), None);
        let not_asked = Seen { stalled_ms: 0, file_room_pages: 0, ..seen(32, 16) };
        assert_eq!(next(not_asked, &extents), Some(Move::Fetch(1)), "it needs neither");
    }

    proptest! {
        /// Done until there is nothing left to do, moves end at the limit, or with nothing that
        /// could be parked.
        #[test]
        fn moves_end_and_do_not_come_back(
            held in prop::collection::vec((0u32..4, any::<bool>(), 0u64..100), 0..20),
            limit_pages in 0u64..200,
            file_room in 0u64..200,
        ) {
            let extent = |(order, is_parked, touched_ms): (u32, bool, u64)| {
                Extent { pages: 1u64 << order, is_parked, touched_ms }
            };
            let mut extents: Vec<Extent> = held.into_iter().map(extent).collect();
            let mut file_room_pages = file_room;
            let (mut parked, mut fetched) = (0, 0);
            loop {
                let in_memory = extents.iter().filter(|extent| !extent.is_parked);
                let memory_pages: u64 = in_memory.map(|extent| extent.pages).sum();
                let seen = Seen { file_room_pages, ..seen(limit_pages, memory_pages) };
                match next(seen, &extents) {
                    Some(Move::Park(at)) => {
                        prop_assert!(memory_pages > limit_pages && !extents[at].is_parked);
                        prop_assert!(extents[at].pages <= file_room_pages);
                        file_room_pages -= extents[at].pages;
                        extents[at].is_parked = true;
                        parked += 1;
                    }
                    Some(Move::Fetch(at)) => {
                        prop_assert!(memory_pages + extents[at].pages <= limit_pages);
                        prop_assert!(extents[at].is_parked);
                        extents[at].is_parked = false;
                        fetched += 1;
                    }
                    None => {
                        let is_stuck = extents
                            .iter()
                            .all(|extent| extent.is_parked || extent.pages > file_room_pages);
                        prop_assert!(memory_pages <= limit_pages || is_stuck);
                        break;
                    }
                }
                // One that is parked may leave so much room that a smaller one comes back.
                prop_assert!(parked + fetched <= 2 * extents.len(), "it goes on for ever");
            }
        }
    }
}
