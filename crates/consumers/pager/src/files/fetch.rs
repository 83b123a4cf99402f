//! Fetches pages of files from donors.

use crate::shared::Shared;
use crate::state::SEGMENT_PAGES;
use crate::state::record::Record;
use hecaton_memory::{PAGE_SIZE, page_sum};
use hecaton_space::group::DonorIndex;
use hecaton_space::{Completion, Lane, SpaceError};
use hecaton_transport::protocol::MAX_PAGES;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait at a time. The lane itself times out requests that no donor answers.
const LOOK: Duration = Duration::from_secs(1);
/// Pause before a retry after a transient error.
const PAUSE: Duration = Duration::from_millis(10);

/// A page whose contents only donors have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Away {
    pub(super) page: u64,
    pub(super) record: Record,
}

/// The result for one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Came {
    Sound,
    /// This donor sent data that failed the check.
    Wrong(DonorIndex),
}

pub(super) struct Fetcher {
    shared: Arc<Shared>,
    lane: Lane,
    last_token: u64,
    opened: Vec<bool>,
}

impl Fetcher {
    pub(super) fn new(shared: Arc<Shared>, lane: Lane) -> Fetcher {
        Fetcher { shared, lane, last_token: 0, opened: Vec::new() }
    }

    /// Attempts to fetch a page before it counts as lost: one per copy and at least two, and one
    /// more if cold segments are coded.
    pub(super) fn chances(&self) -> usize {
        let config = self.lane.space().config();
        usize::from(config.redundancy.copies()).max(2) + usize::from(config.cold.is_some())
    }

    /// Has the copies of a page compared, because a donor sent wrong data.
    pub(super) fn suspect(&self, page: u64) {
        self.lane.space().suspect(page);
    }

    /// Fetches `pages` into `to`, and returns one result for each. Asks donors in `avoid` only if
    /// no others have the pages. Retries after transient errors.
    pub(super) fn fetch(
        &mut self,
        pages: &[Away],
        avoid: &[DonorIndex],
        to: &mut [u8],
    ) -> Result<Vec<Came>, SpaceError> {
        let mut came = Vec::with_capacity(pages.len());
        while came.len() < pages.len() {
            let rest = &pages[came.len()..];
            let segment = rest[0].page / SEGMENT_PAGES;
            let of_it = rest.iter().take_while(|away| away.page / SEGMENT_PAGES == segment);
            let part = &rest[..of_it.take(MAX_PAGES).count()];
            let at = came.len() * PAGE_SIZE;
            let to = &mut to[at..at + part.len() * PAGE_SIZE];
            match self.fetch_part(part, avoid, to, &mut came) {
                Err(error) if error.is_transient() => {
                    came.truncate(at / PAGE_SIZE);
                    std::thread::sleep(PAUSE);
                }
                result => result?,
            }
        }
        Ok(came)
    }

    fn fetch_part(
        &mut self,
        part: &[Away],
        avoid: &[DonorIndex],
        to: &mut [u8],
        came: &mut Vec<Came>,
    ) -> Result<(), SpaceError> {
        self.last_token += 1;
        let pages: Vec<u64> = part.iter().map(|away| away.page).collect();
        self.lane.read_avoiding(self.last_token, &pages, avoid)?;
        let (mut done, mut failed) = (0, None);
        let (shared, opened, wanted) = (&self.shared, &mut self.opened, self.last_token);
        while done < part.len() && failed.is_none() {
            self.lane.progress(Some(LOOK), &mut |completion| match completion {
                Completion::Read { token, from, giver, data, .. } if token == wanted => {
                    let count = data.len() / PAGE_SIZE;
                    let of_these = &part[from..from + count];
                    opened.clear();
                    match &shared.sealing {
                        Some(sealing) => sealing.open(&pages[from..from + count], data, opened),
                        None => opened.extend(
                            of_these
                                .iter()
                                .zip(data.chunks(PAGE_SIZE))
                                .map(|(away, data)| page_sum(data) == away.record.sum()),
                        ),
                    }
                    let wrong = Came::Wrong(giver.unwrap_or(DonorIndex::UNKNOWN));
                    let each = opened.iter().map(|&is| if is { Came::Sound } else { wrong });
                    came.extend(each);
                    to[from * PAGE_SIZE..][..data.len()].copy_from_slice(data);
                    done = from + count;
                }
                Completion::Failed { token, error, .. } if token == wanted => failed = Some(error),
                // An answer to an earlier attempt.
                _ => {}
            });
        }
        failed.map_or(Ok(()), Err)
    }
}
