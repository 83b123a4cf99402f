//! Fetches pages of files from donors, and waits for them.

use crate::shared::Shared;
use crate::state::SEGMENT_PAGES;
use crate::state::record::Record;
use hecaton_memory::{PAGE_SIZE, page_sum};
use hecaton_space::group::DonorIndex;
use hecaton_space::{Completion, Lane, SpaceError};
use hecaton_transport::protocol::MAX_PAGES;
use std::sync::Arc;
use std::time::Duration;

/// How long the lane is waited for at a time. It ends requests that are not answered by itself.
const LOOK: Duration = Duration::from_secs(1);
/// Between two attempts, while donors cannot be asked.
const PAUSE: Duration = Duration::from_millis(10);

/// A page that is at donors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Away {
    pub(super) page: u64,
    pub(super) record: Record,
}

/// What came of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Came {
    Sound,
    /// This donor has sent something else.
    Wrong(DonorIndex),
}

/// A thread's own way to the donors.
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

    /// Donors that can be asked for a page before it is lost.
    pub(super) fn chances(&self) -> usize {
        let config = self.lane.space().config();
        usize::from(config.redundancy.copies()).max(2) + usize::from(config.cold.is_some())
    }

    /// A page came wrong: its copies are looked at.
    pub(super) fn suspect(&self, page: u64) {
        self.lane.space().suspect(page);
    }

    /// Puts pages, one after another, in `to`, and says of each what came. None is asked of the
    /// donors in `avoid`. Waits while the donors are only away for a moment.
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
                // Of an attempt before.
                _ => {}
            });
        }
        failed.map_or(Ok(()), Err)
    }
}
