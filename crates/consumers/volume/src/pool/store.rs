//! Pages to the donors.

use crate::BlockError;
use hecaton_memory::Generation;
pub(crate) use hecaton_space::lists::Item;
use hecaton_space::lists::{self, StoreError};
use hecaton_space::{Lane, SpaceError};
use std::ops::Range;

/// Origin of a write that a slot names. It decides what happens when no donor and no file takes the
/// page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A client: its request fails, and the slot becomes free.
    Client,
    /// The write buffer: it keeps the slot, and writes it later.
    Buffer,
    /// An earlier process, which may have answered the write: this process tries until it succeeds.
    Predecessor,
}

/// Outcome of a write of some pages.
#[derive(Debug)]
pub(crate) enum Fate {
    /// All copies have them.
    Stored(Generation),
    /// The spill file has them.
    Spilled,
    /// They are what they were, or are found not to be by their sums.
    Unchanged(BlockError),
    /// Some copy may have them, and no more is to be expected: their donors' memory is gone.
    Unknown(BlockError),
    /// A donor that is away may store them yet, at any time. They are to be written again through
    /// the same lane.
    Pending(BlockError),
}

/// Outcome of an attempt at the pages of a request.
#[derive(Debug, Default)]
pub(crate) struct Attempt {
    /// Places of the pages that are not settled, for the next attempt.
    pub(crate) pending: Vec<usize>,
    /// The first error of a page that is settled. No later attempt writes that page, so the request
    /// fails however those end.
    pub(crate) failed: Option<BlockError>,
    /// The first error of a page that is not settled.
    pub(crate) waiting: Option<BlockError>,
}

impl Attempt {
    /// The first error of all.
    pub(crate) fn error(self) -> Option<BlockError> {
        self.failed.or(self.waiting)
    }
}

/// Writes different pages, and tells what became of each run of them. `was_sent` says that an
/// earlier attempt may have reached donors.
pub(crate) fn store(
    lane: &mut Lane,
    items: &[Item<'_>],
    was_sent: bool,
    mut fate: impl FnMut(Range<usize>, Fate),
) {
    lists::store(lane, items, was_sent, |run, ended| match ended {
        Ok(generation) => fate(run, Fate::Stored(generation)),
        Err(StoreError { error, was_sent }) => fate(run, fate_of(error, was_sent)),
    });
}

/// Outcome of a final error for pages that were, or were not, sent before.
pub(crate) fn fate_of(error: SpaceError, was_sent: bool) -> Fate {
    match error {
        // A successor has what was named, and finishes it.
        SpaceError::Fenced { .. } => Fate::Pending(error.into()),
        error if !was_sent => Fate::Unchanged(error.into()),
        SpaceError::Away { .. } | SpaceError::NoRoom { .. } => Fate::Pending(error.into()),
        error => Fate::Unknown(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use crate::state::SLOTS;
    use crate::volume::MAX_UNSETTLED_SLOTS;
    use crate::volume::tests::{World, read};
    use hecaton_memory::PAGE_SIZE;
    use hecaton_testkit::wait_until;
    use std::sync::atomic::Ordering::Release;
    use std::time::Duration;

    #[test]
    fn a_request_fails_if_a_part_of_it_was_refused_and_the_rest_came_later() {
        let mut world = World::full();
        world.config.donor_patience = Duration::from_secs(1);
        let volume = world.volume();
        let beyond = World::FIRST_WITHOUT_ROOM;
        let last = beyond - PAGE_SIZE as u64;
        volume.write(last, &[1; PAGE_SIZE]).expect("there is room");
        // Nothing more may be left to be settled: a request is tried until donors answer.
        volume.unsettled_slots.store(MAX_UNSETTLED_SLOTS, Release);
        let address = world.donors[0].stop();
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| volume.write(last, &[2; 2 * PAGE_SIZE]));
            let named = || (0..SLOTS).filter(|slot| volume.state.named(*slot).is_some()).count();
            wait_until("one page is refused, and the other is tried again", || named() == 1);
            assert!(!writing.is_finished());
            world.donors[0].serve_again(address);
            let written = writing.join().expect("joined");
            written.expect_err("the second page is nowhere");
        });
        assert_eq!(read(&volume, last, PAGE_SIZE), [2; PAGE_SIZE]);
        assert_eq!(read(&volume, beyond, PAGE_SIZE), [0; PAGE_SIZE]);
    }
}
