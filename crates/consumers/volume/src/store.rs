//! Pages to the donors.

use crate::BlockError;
use crate::fetch::{WAIT, runs};
use hecaton_memory::{Generation, PageNo, PageSum};
use hecaton_space::{Completion, Lane, SpaceError};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long a write may wait for a donor with room: one that drains, or comes, makes some.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);

/// Between two attempts to find room.
const ROOM_PAUSE: Duration = Duration::from_millis(100);

/// A page that is to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item<'a> {
    pub(crate) page: PageNo,
    pub(crate) sum: PageSum,
    pub(crate) contents: &'a [u8],
}

/// Whose write a slot names. The writer decides what happens when no donor and no file takes the
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

/// What became of some pages.
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

/// Writes different pages, and tells what became of each run of them. `was_sent` says that an earlier
/// attempt may have reached donors.
pub(crate) fn store(
    lane: &mut Lane,
    items: &[Item<'_>],
    was_sent: bool,
    mut fate: impl FnMut(Range<usize>, Fate),
) {
    let space = lane.space().clone();
    let all = runs(items.len(), |at| space.segment_of(items[at].page));
    let mut to_send: VecDeque<(Range<usize>, bool)> =
        all.into_iter().map(|run| (run, was_sent)).collect();
    let mut sent: BTreeMap<u64, Range<usize>> = BTreeMap::new();
    let mut no_room_since: Option<Instant> = None;
    let mut token = 0;
    loop {
        while let Some((run, was_sent)) = to_send.pop_front() {
            token += 1;
            let these = &items[run.clone()];
            let pages: Vec<PageNo> = these.iter().map(|item| item.page).collect();
            let sums: Vec<PageSum> = these.iter().map(|item| item.sum).collect();
            let data: Vec<&[u8]> = these.iter().map(|item| item.contents).collect();
            match lane.write(token, &pages, &sums, &data) {
                Ok(()) => {
                    no_room_since = None;
                    sent.insert(token, run);
                }
                Err(SpaceError::Busy(_)) => {
                    to_send.push_front((run, was_sent));
                    break;
                }
                Err(SpaceError::NoRoom { .. })
                    if no_room_since.get_or_insert_with(Instant::now).elapsed() < ROOM_PATIENCE =>
                {
                    to_send.push_front((run, was_sent));
                    if lane.in_flight() > 0 {
                        break;
                    }
                    std::thread::sleep(ROOM_PAUSE);
                }
                Err(error) if error.is_transient() => to_send.push_back((run, was_sent)),
                Err(error) => fate(run, fate_of(error, was_sent)),
            }
        }
        if to_send.is_empty() && lane.in_flight() == 0 {
            return;
        }
        lane.progress(Some(WAIT), &mut |completion| match completion {
            Completion::Written { token, generation } => {
                if let Some(run) = sent.remove(&token) {
                    fate(run, Fate::Stored(generation));
                }
            }
            Completion::Failed { token, error, .. } => match sent.remove(&token) {
                Some(run) if error.is_transient() => to_send.push_back((run, true)),
                Some(run) => fate(run, fate_of(error, true)),
                None => {}
            },
            Completion::Read { .. } => {}
        });
    }
}

/// What a final error means for pages that were, or were not, sent before.
pub(crate) fn fate_of(error: SpaceError, was_sent: bool) -> Fate {
    match error {
        // A successor has what was named, and finishes it.
        SpaceError::Fenced { .. } => Fate::Pending(error.into()),
        error if !was_sent => Fate::Unchanged(error.into()),
        SpaceError::Away { .. } | SpaceError::NoRoom { .. } => Fate::Pending(error.into()),
        error => Fate::Unknown(error.into()),
    }
}
