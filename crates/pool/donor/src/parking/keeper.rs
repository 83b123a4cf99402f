//! Brings extents from a donor's memory to its file, and back.
//!
//! One thread does this, and it alone writes to the file and sets a page's "parked" bit.
//! [`hecaton_policy::parking`] decides the moves. A move must not lose a page to a crash, a failing
//! disk or a concurrent write, and no request may wait for it:
//!
//! - *To the file*: pages are copied out, a few at a time, and noted as *saved*; whoever changes
//!   one takes the note away. They are written and brought to the disk without any lock. Then those
//!   that still are noted become *parked*: from here on they are read from the file. Until the last
//!   of that, a failure or a kill leaves everything where it was, in memory.
//! - *To memory*: pages are read without any lock, and those that still are parked by then are
//!   stored and are parked no longer.
//!
//! Memory or file room that an extent leaves behind is given up only when no read can be using it.
//! That is when all readers from before the change have gone (see
//! [`View`](crate::pages::gate::View)). Other extents move meanwhile.

use crate::lender::{Lender, Pinned};
use crate::pages::bits::runs;
use crate::pages::gate::View;
use crate::parking::park::Park;
use crate::stop::StopHandle;
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE, SpaceId, pages_to_bytes};
use hecaton_policy::parking::{self, Move, Seen};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::{debug, warn};

/// Time between two looks while nothing is to be done.
const TICK: Duration = Duration::from_millis(100);

/// Pages that are copied while writes to their extent wait: some 50 µs.
const CHUNK: u64 = 256;

/// Extents at a time whose readers are waited for. One that does not take its pages is cut off
/// after some seconds.
const MOST_LEAVING: usize = 8;

/// When an extent is tried again that the disk does not give back.
const RETRY_MS: u64 = 60_000;

/// An extent that could be moved.
pub(crate) struct Candidate {
    pub(crate) space: SpaceId,
    pub(crate) extent: ExtentId,
    pub(crate) facts: parking::Extent,
    /// Pages that are in memory though it is parked.
    pub(crate) stray_pages: u64,
}

/// Input for the keeper's decisions.
pub(crate) struct Survey {
    pub(crate) seen: Seen,
    pub(crate) candidates: Vec<Candidate>,
}

pub(crate) struct Keeper<'a> {
    lender: &'a Lender,
    park: &'a Park,
    buffer: Vec<[u8; PAGE_SIZE]>,
    leaving: Vec<Leaving<'a>>,
    /// Extents that cannot be fetched, and when to try again.
    unreadable: HashMap<ExtentId, u64>,
}

/// A moved extent, with the view that its earlier readers hold.
struct Leaving<'a> {
    before: Pinned<'a>,
    /// The place that its pages have left.
    behind: Behind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// That of an extent that counts as in memory until it is the host's.
    AllMemory,
    /// That of pages which were parked again.
    SomeMemory,
    File,
}

impl Leaving<'_> {
    fn extent(&self) -> ExtentId {
        self.before.view().lent.extent
    }
}

impl<'a> Keeper<'a> {
    pub(crate) fn new(lender: &'a Lender, park: &'a Park) -> Keeper<'a> {
        let buffer = Vec::with_capacity(CHUNK as usize);
        Keeper { lender, park, buffer, leaving: Vec::new(), unreadable: HashMap::new() }
    }

    /// Moves what is to be moved until told to stop.
    pub(crate) fn run(mut self, stop: &StopHandle) {
        while !stop.wait_for(if self.step() { Duration::ZERO } else { TICK }) {}
    }

    /// Does the next thing; false if there was none.
    fn step(&mut self) -> bool {
        self.give_up_what_is_left();
        let is_read = self.leaving.iter().any(|leaving| leaving.behind == Behind::File);
        if !is_read && self.park.take_untidy() {
            self.tidy(0..self.lender.arena().pages());
        }
        if self.leaving.len() >= MOST_LEAVING {
            return false;
        }
        let Some(Survey { mut seen, mut candidates }) = self.lender.survey() else {
            self.park.is_not_needed();
            return false;
        };
        let now_ms = self.lender.now_ms();
        self.unreadable.retain(|_, until_ms| *until_ms > now_ms);
        let of = |candidate: &Candidate| {
            let is_it = |leaving: &Leaving<'_>| leaving.extent() == candidate.extent;
            self.leaving.iter().any(is_it)
        };
        // Readers from before the last move may still use either place.
        candidates
            .retain(|candidate| !of(candidate) && !self.unreadable.contains_key(&candidate.extent));
        let going = self.leaving.iter().filter(|leaving| leaving.behind == Behind::AllMemory);
        let going_pages: u64 = going.map(|leaving| leaving.before.view().lent.count()).sum();
        seen.memory_pages = seen.memory_pages.saturating_sub(going_pages);
        let takes_pages = self.park.takes_pages(now_ms);
        seen.file_room_pages = match takes_pages {
            true => seen.file_room_pages.saturating_sub(going_pages),
            false => 0,
        };
        let facts: Vec<_> = candidates.iter().map(|candidate| candidate.facts).collect();
        let next = parking::next(seen, &facts);
        if let Some(Move::Fetch(at)) = next {
            return self.fetch(&candidates[at]);
        }
        // They have their room in the file already.
        let is_astray = |candidate: &&Candidate| candidate.stray_pages > 0 && takes_pages;
        match (candidates.iter().find(is_astray), next) {
            (Some(candidate), _) => self.park(candidate),
            (None, Some(Move::Park(at))) => self.park(&candidates[at]),
            (None, _) => false,
        }
    }

    /// Brings what an extent has in memory to the file.
    fn park(&mut self, candidate: &Candidate) -> bool {
        let Some(pinned) = self.lender.pin(candidate.space, candidate.extent) else { return true };
        let view = pinned.view();
        let was_parked = view.parking.is_parked.swap(true, Ordering::Relaxed);
        if let Err(error) = self.save(view) {
            let pages = view.lent.pages();
            view.parking.changed(0..view.lent.count());
            view.parking.is_parked.store(was_parked, Ordering::Relaxed);
            self.park.has_failed(&error, self.lender.now_ms());
            // The saved pages are of no use, and the disk may be full of them.
            self.tidy(pages);
            return false;
        }
        let parked = self.mark(view);
        debug!(extent = %candidate.extent, pages = parked, "parked");
        self.park.stored(parked);
        let behind = if was_parked { Behind::SomeMemory } else { Behind::AllMemory };
        self.leave_behind(pinned, behind);
        true
    }

    /// Writes to the file what the extent has in memory.
    fn save(&mut self, view: &View) -> io::Result<()> {
        let pages = view.lent.pages();
        let saving = view.parking.saving(view.lent.count());
        for chunk in chunks(pages.clone()) {
            self.buffer.clear();
            let found: Vec<Range<u64>> = {
                let _alone = view.contents.write().expect("no thread panics in an extent");
                let found: Vec<_> = runs(chunk, |page| self.lender.is_in_memory(page)).collect();
                for page in found.iter().cloned().flatten() {
                    let mut data = [0; PAGE_SIZE];
                    self.lender.arena().read_page(page, &mut data);
                    self.buffer.push(data);
                    saving.set(page - pages.start);
                }
                found
            };
            let mut from = 0;
            for run in found {
                let to = from + (run.end - run.start) as usize;
                self.park.file.write(run.start, &self.buffer[from..to])?;
                from = to;
            }
        }
        self.park.file.sync(pages)
    }

    /// Marks pages as parked if they were saved and not changed since: reads now use the file.
    /// Returns how many.
    fn mark(&self, view: &View) -> u64 {
        let pages = view.lent.pages();
        let saving = view.parking.saving(view.lent.count());
        let mut parked = 0;
        for chunk in chunks(pages.clone()) {
            let _alone = view.contents.write().expect("no thread panics in an extent");
            for page in chunk.filter(|page| saving.get(page - pages.start)) {
                self.park.parked().set(page);
                parked += 1;
            }
        }
        saving.clear(0..view.lent.count());
        parked
    }

    /// Brings an extent back to memory.
    fn fetch(&mut self, candidate: &Candidate) -> bool {
        let Some(pinned) = self.lender.pin(candidate.space, candidate.extent) else { return true };
        let view = pinned.view();
        let pages = view.lent.pages();
        // Before the memory is taken.
        view.parking.is_parked.store(false, Ordering::Relaxed);
        self.lender.set_parked(&view.lent, false);
        let (mut fetched, mut failure) = (0, None);
        for run in runs(pages.clone(), |page| self.park.parked().get(page)) {
            for chunk in chunks(run) {
                self.buffer.resize((chunk.end - chunk.start) as usize, [0; PAGE_SIZE]);
                if let Err(error) = self.park.file.read(chunk.start, &mut self.buffer) {
                    failure = Some(error);
                    continue;
                }
                let _alone = view.contents.write().expect("no thread panics in an extent");
                for (page, data) in chunk.zip(&self.buffer) {
                    if self.park.parked().get(page) {
                        self.lender.arena().write_page(page, data);
                        self.park.parked().clear(page..page + 1);
                        fetched += 1;
                    }
                }
            }
        }
        debug!(extent = %candidate.extent, pages = fetched, "back in memory");
        self.park.fetched(fetched);
        if let Some(error) = failure {
            warn!(%error, extent = %candidate.extent, "parked pages cannot be read; they stay where they are");
            view.parking.is_parked.store(true, Ordering::Relaxed);
            self.lender.set_parked(&view.lent, true);
            self.unreadable.insert(candidate.extent, self.lender.now_ms() + RETRY_MS);
        }
        self.leave_behind(pinned, Behind::File);
        true
    }

    /// Gives up the place that the pages have left, once its last reader is gone.
    fn leave_behind(&mut self, pinned: Pinned<'a>, behind: Behind) {
        if self.lender.renew_view(&pinned) {
            self.leaving.push(Leaving { before: pinned, behind });
        }
    }

    fn give_up_what_is_left(&mut self) {
        for mut leaving in std::mem::take(&mut self.leaving) {
            if !leaving.before.is_alone() {
                self.leaving.push(leaving);
                continue;
            }
            let view = leaving.before.view();
            let pages = view.lent.pages();
            match leaving.behind {
                Behind::File => self.tidy(pages),
                Behind::AllMemory | Behind::SomeMemory => {
                    for chunk in chunks(pages) {
                        let _alone = view.contents.write().expect("no thread panics in an extent");
                        self.lender.empty_memory_of_parked(chunk);
                    }
                    self.lender.set_parked(&view.lent, true);
                }
            }
        }
    }

    /// Gives back the room that pages take in the file and that are not parked.
    fn tidy(&self, pages: Range<u64>) {
        let is_left = |page| self.park.file.has_block(page) && !self.park.parked().get(page);
        for run in runs(pages, is_left) {
            debug!(bytes = pages_to_bytes(run.end - run.start), "room in the file is given back");
            self.park.file.punch(run);
        }
    }
}

fn chunks(pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = pages.end;
    pages.step_by(CHUNK as usize).map(move |from| from..end.min(from + CHUNK))
}

impl Candidate {
    /// An extent as it is at present.
    pub(crate) fn of(view: &View, stray_pages: u64) -> Option<Candidate> {
        // One that is being filled has just been given out, and whoever fills it wants it here.
        if view.standing.generation() == Generation::FILLING {
            return None;
        }
        let facts = parking::Extent {
            pages: 1 << view.lent.order,
            is_parked: view.parking.is_parked.load(Ordering::Relaxed),
            touched_ms: view.parking.touched_ms(),
        };
        Some(Candidate { space: view.lent.space, extent: view.lent.extent, facts, stray_pages })
    }
}
