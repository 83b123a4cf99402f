//! Writes and discards whose end is not known, because their donor is away.
//!
//! Their client has been told that they failed. But a donor that comes back may still find them in
//! its socket and do them, after whatever was written to the same pages through another connection
//! meanwhile. So the pages stay locked, and the same request is made on the same lane until its end
//! is known: then nothing older can come any more, whatever its bytes are (those of an encrypted
//! volume are others each time). Others that want the pages are refused.
//!
//! A successor begins so as well, with all that its predecessor had under way; there, others wait
//! for as long as a first attempt takes. The predecessor had answered what was in its write buffer:
//! flushes wait until donors have that, and a full disk or pool does not end the attempts.

use crate::pool::lanes::Lent;
use crate::pool::store::Writer;
use crate::requests::page_locks::{Access, PageLock};
use crate::state::{SLOTS, State};
use crate::volume::Volume;
use hecaton_memory::{PageNo, PageSum, page_sum};
use hecaton_space::SpaceError;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Duration;

/// Between two attempts.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// Unsettled requests, and the locks of their pages.
pub(crate) enum Unsettled {
    /// The slots name pages; `Writer` says whose writes they are.
    Writes(Box<Lent>, Vec<PageLock>, Vec<u32>, Writer),
    /// Pages of one segment that are holes; all of the segment is locked.
    Discard(PageLock, Range<PageNo>),
}

impl Volume {
    /// Writes once more what a predecessor had under way, before anybody reads those pages.
    pub(crate) fn settle_predecessors_writes(self: &Arc<Self>) -> Result<(), SpaceError> {
        let named = (0..SLOTS).filter_map(|slot| Some((self.state.named(slot)?, slot)));
        let mut named: Vec<(PageNo, u32)> = named.collect();
        named.sort_unstable();
        // If two slots name a page, the later write was not answered, so that either will do.
        named.dedup_by(|later, first| {
            let is_same = later.0 == first.0;
            if is_same {
                self.state.empty(later.1);
                self.slots.give_back(&[later.1]);
            }
            is_same
        });
        let mut locks = Vec::new();
        for run in named.chunk_by(|one, next| one.0 + 1 == next.0) {
            let pages = run[0].0..run[run.len() - 1].0 + 1;
            let lock = self.locks.lock(pages, Access::Exclusive);
            locks.push(lock.expect("nobody else has a lock yet"));
        }
        if !named.is_empty() {
            let mut lane = self.lanes.take()?;
            lane.detach();
            self.unsettled_slots.fetch_add(named.len(), AcqRel);
            let writer = match &self.buffer {
                Some(buffer) => {
                    buffer.inherit(named.iter().map(|(page, _)| *page));
                    Writer::Predecessor
                }
                // Without a buffer no write is answered before it leaves its slots.
                None => Writer::Client,
            };
            let slots = named.into_iter().map(|(_, slot)| slot).collect();
            begin(self, Unsettled::Writes(Box::new(lane), locks, slots, writer));
        }
        Ok(())
    }
}

/// Settles it in a thread of its own.
pub(crate) fn begin(volume: &Arc<Volume>, what: Unsettled) {
    let volume = Arc::clone(volume);
    volume.counters.unsettled.fetch_add(1, Relaxed);
    let body = move || {
        run(&volume, what);
        volume.counters.unsettled.fetch_sub(1, Relaxed);
    };
    let thread = std::thread::Builder::new().name("settle".into()).spawn(body);
    thread.expect("the system has a thread for a volume");
}

fn run(volume: &Volume, mut what: Unsettled) {
    while !volume.is_over() {
        match &mut what {
            Unsettled::Writes(lane, locks, slots, writer) => {
                let named = Named::of(&volume.state, slots);
                let items: Vec<_> = named.iter().map(Named::item).collect();
                let mut attempt = volume.store(lane, &items, slots, true, *writer);
                let pending = std::mem::take(&mut attempt.pending);
                if let (Writer::Predecessor, Some(buffer)) = (*writer, &volume.buffer) {
                    let is_done = |at: &usize| !pending.contains(at);
                    let done = (0..named.len()).filter(is_done).map(|at| named[at].page);
                    buffer.settled(done, !pending.is_empty());
                }
                volume.unsettled_slots.fetch_sub(slots.len() - pending.len(), AcqRel);
                if pending.is_empty() {
                    return;
                }
                let error = attempt.error().map(tracing::field::display);
                let pages = pending.len();
                tracing::debug!(pages, error, "not settled");
                *slots = pending.into_iter().map(|at| slots[at]).collect();
                // From now on, requests that wait for a predecessor's pages are refused.
                locks.iter().for_each(PageLock::set_stuck);
            }
            Unsettled::Discard(lock, pages) => {
                lock.set_stuck();
                match volume.discard(pages.clone()) {
                    Ok(()) => return,
                    Err(error) => tracing::debug!(%error, "not settled"),
                }
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// A copy of what a slot holds.
pub(crate) struct Named {
    page: PageNo,
    sum: PageSum,
    contents: Vec<u8>,
}

impl Named {
    pub(crate) fn of(state: &State, slots: &[u32]) -> Vec<Named> {
        let named = slots.iter().map(|slot| {
            let contents = state.copy_of(*slot);
            let page = state.named(*slot).expect("it is not settled");
            Named { page, sum: page_sum(&contents), contents }
        });
        named.collect()
    }

    pub(crate) fn item(&self) -> crate::pool::store::Item<'_> {
        crate::pool::store::Item { page: self.page, sum: self.sum, contents: &self.contents }
    }
}
