//! Writes staged pages to the donors: step 5 of an eviction (see [`crate::evict`]).
//!
//! Many requests are in flight at a time, each with pages of one segment. A slot is free once its
//! page was acknowledged. Pages that could not be written stay staged, and are retried.

use crate::shared::Shared;
use crate::state::SEGMENT_PAGES;
use crate::state::sealing::Envelope;
use hecaton_memory::PageSum;
use hecaton_space::{Completion, Lane, SpaceError};
use hecaton_transport::protocol::MAX_PAGES;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long pages may wait for a donor with room before the consumer is ended: its memory is full
/// and so is the pool, and nobody else can help.
const PATIENCE: Duration = Duration::from_secs(10);

/// Staged pages of one segment, ready to be sent.
#[derive(Default)]
struct Write {
    pages: Vec<u64>,
    /// Sums of the slots' contents; once sealed contents were sent, the sums of those.
    sums: Vec<PageSum>,
    slots: Vec<u32>,
}

/// Unsent writes, and writes in flight.
pub(crate) struct Writer {
    shared: Arc<Shared>,
    lane: Lane,
    in_flight: HashMap<u64, Write>,
    /// Not sent yet, or to be sent again.
    unsent: Vec<Write>,
    last_token: u64,
    /// For pages that are to be sealed.
    envelope: Option<Envelope>,
    /// Some pages wait until cold memory has been made copies of again.
    awaits_copies: bool,
    /// Since when no donor has had room.
    no_room_since: Option<Instant>,
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, lane: Lane) -> Writer {
        Writer {
            envelope: shared.sealing.clone().map(Envelope::new),
            shared,
            lane,
            in_flight: HashMap::new(),
            unsent: Vec::new(),
            last_token: 0,
            awaits_copies: false,
            no_room_since: None,
        }
    }

    /// Whether donors are still to answer.
    pub(crate) fn awaits_answers(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Whether there is nothing to write, nor under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.unsent.is_empty()
    }

    /// Whether a write of any of these pages is under way.
    pub(crate) fn is_writing(&self, pages: Range<u64>) -> bool {
        self.in_flight.values().any(|write| write.pages.iter().any(|page| pages.contains(page)))
    }

    /// A page whose contents are in a slot is to be written.
    pub(crate) fn stage(&mut self, page: u64, sum: PageSum, slot: u32) {
        let segment = page / SEGMENT_PAGES;
        let fits = |write: &&mut Write| {
            write.pages.len() < MAX_PAGES && write.pages[0] / SEGMENT_PAGES == segment
        };
        let write = match self.unsent.iter_mut().rev().find(fits) {
            // The same page twice in one request would leave it open which is written last.
            Some(write) if !write.pages.contains(&page) => write,
            _ => {
                self.unsent.push(Write::default());
                self.unsent.last_mut().expect("just pushed")
            }
        };
        write.pages.push(page);
        write.sums.push(sum);
        write.slots.push(slot);
    }

    /// Leaves out of what is to be sent the pages that nobody names any more, or that have newer
    /// contents elsewhere.
    pub(crate) fn forget_superseded(&mut self) {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        for write in &mut self.unsent {
            for i in (0..write.pages.len()).rev() {
                let (page, slot, sum) = (write.pages[i], write.slots[i], write.sums[i]);
                let record = core.pages.record(&core.state, page);
                if record.slot() != Some(slot) || record.refs() == 0 {
                    core.staging.written(&core.state, &core.pages, slot, page, sum);
                    write.pages.swap_remove(i);
                    write.sums.swap_remove(i);
                    write.slots.swap_remove(i);
                }
            }
        }
        self.unsent.retain(|write| !write.pages.is_empty());
    }

    /// Sends what is staged and not under way.
    pub(crate) fn send(&mut self) {
        if self.unsent.is_empty() {
            return;
        }
        self.forget_superseded();
        for mut write in std::mem::take(&mut self.unsent) {
            let data: Vec<&[u8]> =
                write.slots.iter().map(|&slot| self.shared.slot_bytes(slot)).collect();
            self.last_token += 1;
            let (pages, token) = (&write.pages, self.last_token);
            let sent = match &mut self.envelope {
                None => self.lane.write(token, pages, &write.sums, &data),
                Some(envelope) => {
                    let (sealed, sums) = envelope.seal(pages, &data);
                    let sent = self.lane.write(token, pages, sums, &[sealed]);
                    write.sums.copy_from_slice(sums);
                    sent
                }
            };
            match sent {
                Ok(()) => {
                    self.no_room_since = None;
                    self.in_flight.insert(token, write);
                }
                Err(error) => self.keep(write, &error),
            }
        }
        if std::mem::take(&mut self.awaits_copies) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Keeps a failed write staged, and retries it: a donor may get room.
    fn keep(&mut self, write: Write, error: &SpaceError) {
        self.unsent.push(write);
        match error {
            SpaceError::Busy(_) => return self.collect(Some(Duration::from_millis(1))),
            // The next attempt goes to those that are there.
            SpaceError::Interrupted { .. } => return,
            // Others may be sent at once.
            SpaceError::Coded { .. } => return self.awaits_copies = true,
            error if error.is_transient() => {}
            SpaceError::NoRoom { .. } => {
                let since = *self.no_room_since.get_or_insert_with(Instant::now);
                if since.elapsed() > PATIENCE {
                    self.shared.lock().fail(error.to_string());
                }
            }
            error => self.shared.lock().fail(error.to_string()),
        }
        std::thread::sleep(Duration::from_millis(10));
    }

    /// Takes in acknowledgements; waits for one if `wait` says so.
    pub(crate) fn collect(&mut self, wait: Option<Duration>) {
        let mut failed = Vec::new();
        let (shared, in_flight) = (&self.shared, &mut self.in_flight);
        self.lane.progress(wait, &mut |completion| match completion {
            Completion::Written { token, generation } => {
                let Some(write) = in_flight.remove(&token) else { return };
                let mut guard = shared.lock();
                let core = &mut *guard;
                // Before the pages count as stored: a successor that finds them so must also know
                // which extents have them.
                core.state.acknowledged(write.pages[0] / SEGMENT_PAGES, generation);
                core.stats.pages_out += write.pages.len() as u64;
                for ((&page, &slot), &sum) in write.pages.iter().zip(&write.slots).zip(&write.sums)
                {
                    core.staging.written(&core.state, &core.pages, slot, page, sum);
                }
                if core.wants_eviction() {
                    shared.evict.notify_one();
                }
            }
            Completion::Failed { token, error, .. } => {
                if let Some(write) = in_flight.remove(&token) {
                    failed.push((write, error));
                }
            }
            Completion::Read { .. } => unreachable!("this lane only writes"),
        });
        for (write, error) in failed {
            self.keep(write, &error);
        }
    }
}
