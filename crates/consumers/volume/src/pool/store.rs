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
