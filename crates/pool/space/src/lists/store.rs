//! Pages to the donors.

use super::{WAIT, runs};
use crate::{Completion, Lane, SpaceError};
use hecaton_memory::{Generation, PageNo, PageSum};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long a write waits for a donor with room. Donors that drain or join make some; nothing tells
/// the lane of it, so it asks again.
const ROOM_PATIENCE: Duration = Duration::from_secs(10);

/// Between two attempts to find room.
const ROOM_PAUSE: Duration = Duration::from_millis(100);

/// A page that is to be written.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// Its number in the space.
    pub page: PageNo,
    /// The checksum of the contents.
    pub sum: PageSum,
    /// 4096 bytes.
    pub contents: &'a [u8],
}

/// Why pages were not stored.
#[derive(Debug)]
pub struct StoreError {
    /// The last error.
    pub error: SpaceError,
    /// A donor may have received the pages, and may store them later.
    pub was_sent: bool,
}

/// Writes pages, all different, and calls `ended` for each run when it is stored or has failed.
/// `was_sent`: an earlier attempt to write them may have reached donors.
pub fn store(
    lane: &mut Lane,
    items: &[Item<'_>],
    was_sent: bool,
    mut ended: impl FnMut(Range<usize>, Result<Generation, StoreError>),
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
                Err(error) => ended(run, Err(StoreError { error, was_sent })),
            }
        }
        if to_send.is_empty() && lane.in_flight() == 0 {
            return;
        }
        lane.progress(Some(WAIT), &mut |completion| match completion {
            Completion::Written { token, generation } => {
                if let Some(run) = sent.remove(&token) {
                    ended(run, Ok(generation));
                }
            }
            Completion::Failed { token, error, .. } => match sent.remove(&token) {
                Some(run) if error.is_transient() => to_send.push_back((run, true)),
                Some(run) => ended(run, Err(StoreError { error, was_sent: true })),
                None => {}
            },
            Completion::Read { .. } => {}
        });
    }
}
