//! Buffers writes: answers them at once, and sends them to donors in batches.
//!
//! Slots name the buffered pages ([`crate::state`]), like those of any write in flight. So the
//! successor of a killed process writes them ([`crate::pool::settle`]), and only a crash of the
//! host loses them. A flush is answered when donors have all writes that were answered before, by
//! that process too.
//!
//! | step | holds |
//! |---|---|
//! | a write takes slots for its pages | nothing: it may wait for room |
//! | it fills them, and they are the pages' from then on | the pages' lock |
//! | the drain writes out pages, oldest first, and empties their slots | the lock of those pages |
//!
//! A page has one slot here. A page that is written again gets another slot, which is named before
//! the earlier one is emptied. A process that is killed in between leaves two slots. Either will
//! do, since that write was not answered. The page keeps its place in the order: a flush that waits
//! for the earlier contents must not miss both.
//!
//! Pages that donors do not take stay, and are retried. Meanwhile flushes fail, and writes go past
//! the buffer, so that they fail themselves.

use crate::BlockError;
use crate::pool::settle::PAUSE;
use crate::pool::store::{Item, Writer};
use crate::requests::page_locks::{Access, PageLock};
use crate::requests::slots::Slots;
use crate::state::{SLOTS, State};
use crate::volume::Volume;
use hecaton_memory::{PAGE_SIZE, PageNo, page_sum, pages_to_bytes};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Most bytes that a buffer holds: a quarter of the slots, so that writes past it always have some.
pub const MAX_BUFFER_BYTES: u64 = SLOTS as u64 / 4 * PAGE_SIZE as u64;

/// Fewest bytes.
pub const MIN_BUFFER_BYTES: u64 = 64 << 10;

/// Pages that are written out at a time.
const BATCH: usize = 256;

/// How long a page waits for others to be written out with.
const DELAY: Duration = Duration::from_millis(5);

/// Writes that wait to be sent.
#[derive(Debug)]
pub(crate) struct Buffer {
    capacity: usize,
    inner: Mutex<Inner>,
    /// Something came, went, or failed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    pages: BTreeMap<PageNo, Entry>,
    /// The same, in the order in which they came.
    order: BTreeMap<u64, PageNo>,
    last: u64,
    /// Pages that an earlier process may have answered writes to, and that donors may not have yet.
    inherited: BTreeSet<PageNo>,
    /// Slots that are in `pages`, or taken for it.
    taken: usize,
    /// Since when there has been something, without anything having been written out.
    since: Option<Instant>,
    /// Somebody waits for it to be empty.
    flushing: usize,
    /// Times that donors did not take a batch; and whether they did not the last time.
    failures: u64,
    is_failing: bool,
    /// Something was given up since the last flush.
    is_lost: bool,
    /// Nothing is written out any more.
    is_over: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    slot: u32,
    place: u64,
}

/// Slots for a write that will be buffered. Dropping this gives unused slots back.
pub(crate) struct Reserved<'a> {
    buffer: &'a Buffer,
    slots: &'a Slots,
    free: Vec<u32>,
}

impl Buffer {
    /// One for so many bytes.
    pub(crate) fn new(bytes: u64) -> Buffer {
        let bytes = bytes.clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES);
        Buffer {
            capacity: (bytes / PAGE_SIZE as u64) as usize,
            inner: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Takes slots for a write of so many pages; none if it is to go past the buffer, because it
    /// is long, or donors do not take what is there. To be called with no page locked.
    pub(crate) fn reserve<'a>(&'a self, slots: &'a Slots, pages: u64) -> Option<Reserved<'a>> {
        let pages = usize::try_from(pages).ok().filter(|pages| *pages <= self.capacity / 4)?;
        let lacks_room = |inner: &mut Inner| {
            !inner.is_failing && !inner.is_over && inner.taken + pages > self.capacity
        };
        let mut inner = self
            .changed
            .wait_while(self.inner(), lacks_room)
            .expect("no thread panics with the buffer");
        if inner.is_failing || inner.is_over {
            return None;
        }
        inner.taken += pages;
        drop(inner);
        Some(Reserved { buffer: self, slots, free: slots.take(pages) })
    }

    /// Whether it has the page.
    pub(crate) fn has(&self, page: PageNo) -> bool {
        self.inner().pages.contains_key(&page)
    }

    /// Those of the pages that it has, or that an earlier process left in its slots, sorted. They
    /// hold data, whatever the state says.
    pub(crate) fn within(&self, pages: Range<PageNo>) -> Vec<PageNo> {
        let inner = self.inner();
        let mut within: Vec<PageNo> =
            inner.pages.range(pages.clone()).map(|(page, _)| *page).collect();
        if !inner.inherited.is_empty() {
            within.extend(inner.inherited.range(pages));
            within.sort_unstable();
            within.dedup();
        }
        within
    }

    /// An earlier process has left these pages in its slots.
    pub(crate) fn inherit(&self, pages: impl Iterator<Item = PageNo>) {
        self.inner().inherited.extend(pages);
    }

    /// These pages of an earlier process are no longer in its slots. `is_failing`: others were
    /// tried in vain, so flushes that wait for them fail.
    pub(crate) fn settled(&self, pages: impl Iterator<Item = PageNo>, is_failing: bool) {
        let mut inner = self.inner();
        pages.for_each(|page| _ = inner.inherited.remove(&page));
        inner.failures += u64::from(is_failing);
        self.changed.notify_all();
    }

    /// Copies a page out, if it has that. The page's lock is held.
    pub(crate) fn copy(&self, state: &State, page: PageNo) -> Option<Vec<u8>> {
        let inner = self.inner();
        let entry = inner.pages.get(&page)?;
        // With the lock: the slot may be another page's as soon as the entry is gone.
        Some(state.copy_of(entry.slot))
    }

    /// The page is with the donors, is a hole, or is written past the buffer: what is here is not
    /// its contents any more. Returns a slot to be given back, unless that is `except`.
    pub(crate) fn forget(&self, state: &State, page: PageNo, except: Option<u32>) -> Option<u32> {
        let mut inner = self.inner();
        let entry = inner.pages.remove(&page)?;
        inner.order.remove(&entry.place);
        inner.taken -= 1;
        self.changed.notify_all();
        if except == Some(entry.slot) {
            return None;
        }
        state.empty(entry.slot);
        Some(entry.slot)
    }

    /// How many bytes are in it.
    pub(crate) fn bytes(&self) -> u64 {
        pages_to_bytes(self.inner().pages.len() as u64)
    }

    /// Something that was answered is lost for good.
    pub(crate) fn lost(&self) {
        self.inner().is_lost = true;
    }

    /// Waits until all that is in it now has been written out.
    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        let mut inner = self.inner();
        let (last, failures) = (inner.last, inner.failures);
        inner.flushing += 1;
        self.changed.notify_all();
        let is_waited_for = |inner: &mut Inner| {
            let oldest = inner.order.first_key_value().map(|(place, _)| *place);
            oldest.is_some_and(|oldest| oldest <= last) || !inner.inherited.is_empty()
        };
        let may_wait = |inner: &mut Inner| {
            is_waited_for(inner) && inner.failures == failures && !inner.is_over
        };
        let mut inner =
            self.changed.wait_while(inner, may_wait).expect("no thread panics with the buffer");
        inner.flushing -= 1;
        let is_left = is_waited_for(&mut inner);
        match std::mem::take(&mut inner.is_lost) || is_left {
            true => Err(BlockError::Unflushed),
            false => Ok(()),
        }
    }

    /// Whether nothing is written out any more.
    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.inner().is_over
    }

    fn close(&self) {
        self.inner().is_over = true;
        self.changed.notify_all();
    }

    /// The oldest pages, when they are to be written out, sorted; none after a while without.
    fn due(&self) -> Vec<PageNo> {
        let inner = self.inner();
        let is_idle = |inner: &mut Inner| inner.order.is_empty();
        let (mut inner, _) = self
            .changed
            .wait_timeout_while(inner, PAUSE, is_idle)
            .expect("no thread panics with the buffer");
        let since = *inner.since.get_or_insert_with(Instant::now);
        let may_wait = |inner: &mut Inner| {
            inner.flushing == 0 && inner.taken < self.capacity / 2 && !inner.order.is_empty()
        };
        let rest = DELAY.saturating_sub(since.elapsed());
        let waited = self.changed.wait_timeout_while(inner, rest, may_wait);
        let (mut inner, _) = waited.expect("no thread panics with the buffer");
        inner.since = None;
        let mut due: Vec<PageNo> = inner.order.values().take(BATCH).copied().collect();
        due.sort_unstable();
        due
    }

    fn tried(&self, is_failing: bool) {
        let mut inner = self.inner();
        inner.is_failing = is_failing;
        inner.failures += u64::from(is_failing);
        self.changed.notify_all();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no thread panics with the buffer")
    }
}

impl Reserved<'_> {
    /// Has the buffer keep these pages, whose lock is held.
    ///
    /// # Panics
    /// If they are more than was reserved.
    pub(crate) fn put(&mut self, state: &State, items: &[Item<'_>]) {
        let mut left = Vec::new();
        for item in items {
            let slot = self.free.pop().expect("no more pages than were reserved");
            state.fill(slot, item.page, item.contents);
            let mut inner = self.buffer.inner();
            match inner.pages.get_mut(&item.page) {
                Some(entry) => {
                    let earlier = std::mem::replace(&mut entry.slot, slot);
                    state.empty(earlier);
                    inner.taken -= 1;
                    left.push(earlier);
                }
                None => {
                    inner.last += 1;
                    let place = inner.last;
                    inner.pages.insert(item.page, Entry { slot, place });
                    inner.order.insert(place, item.page);
                }
            }
        }
        self.slots.give_back(&left);
        self.buffer.changed.notify_all();
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if self.free.is_empty() {
            return;
        }
        self.buffer.inner().taken -= self.free.len();
        self.slots.give_back(&self.free);
        self.buffer.changed.notify_all();
    }
}

/// Writes out what comes into the buffer, until the volume is served no longer.
pub(crate) fn drain(volume: &Volume, buffer: &Buffer) {
    while !volume.is_over() {
        let due = buffer.due();
        if due.is_empty() {
            continue;
        }
        // Without other places readers may go on: they find the pages here, or at the donors.
        let access = if volume.places.is_some() { Access::Exclusive } else { Access::Shared };
        let Ok(lock) = volume.locks.lock_these(due.clone(), access) else {
            buffer.tried(true);
            std::thread::sleep(PAUSE);
            continue;
        };
        match write_out(volume, buffer, &due, &lock) {
            Ok(()) => buffer.tried(false),
            Err(error) => {
                let volume = volume.name();
                tracing::warn!(volume, %error, "what was buffered is not written");
            }
        }
    }
    buffer.close();
}

/// Writes pages out, and returns when it is known of all what became of them.
fn write_out(
    volume: &Volume,
    buffer: &Buffer,
    due: &[PageNo],
    lock: &PageLock,
) -> Result<(), BlockError> {
    let mut lane = match volume.lanes.take() {
        Ok(lane) => lane,
        Err(error) => {
            buffer.tried(true);
            std::thread::sleep(PAUSE);
            return Err(error.into());
        }
    };
    let found = {
        let inner = buffer.inner();
        // Some may have been dropped, or written past it, before they were locked.
        let entries = due.iter().filter_map(|page| Some((*page, inner.pages.get(page)?.slot)));
        entries.collect::<Vec<(PageNo, u32)>>()
    };
    let mut pages: Vec<(PageNo, u32, Vec<u8>)> =
        found.into_iter().map(|(page, slot)| (page, slot, volume.state.copy_of(slot))).collect();
    let mut was_sent = false;
    let mut first_error = None;
    while !pages.is_empty() {
        let items: Vec<Item<'_>> = pages
            .iter()
            .map(|(page, _, contents)| Item { page: *page, sum: page_sum(contents), contents })
            .collect();
        let slots: Vec<u32> = pages.iter().map(|(_, slot, _)| *slot).collect();
        let mut attempt = volume.store(&mut lane, &items, &slots, was_sent, Writer::Buffer);
        was_sent = true;
        let pending = std::mem::take(&mut attempt.pending);
        first_error = first_error.or(attempt.error());
        pages = pending.into_iter().map(|at| pages[at].clone()).collect();
        if first_error.is_some() {
            buffer.tried(true);
        }
        if pages.is_empty() {
            break;
        }
        if volume.is_over() {
            return Err(BlockError::Over);
        }
        // A donor that is away may have some of them yet, so they are sent again on this lane until
        // it is known; who wants the pages is refused, and another request may have a lane.
        lock.set_stuck();
        lane.detach();
        std::thread::sleep(PAUSE);
    }
    match first_error {
        None => Ok(()),
        Some(error) => {
            std::thread::sleep(PAUSE);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::SEGMENT_PAGES;
    use crate::volume::Contents;
    use crate::volume::tests::{World, die, is_anything_named, read};
    use hecaton_testkit::wait_until;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn what_an_earlier_process_has_answered_is_data_and_is_waited_for() {
        let buffer = Buffer::new(MIN_BUFFER_BYTES);
        buffer.inherit([7, 3, 9].into_iter());
        assert_eq!(buffer.within(0..9), [3, 7]);
        std::thread::scope(|scope| {
            let flush = || buffer.flush();
            let first = scope.spawn(flush);
            wait_until("it waits", || buffer.inner().flushing == 1);
            buffer.settled([3].into_iter(), true);
            assert!(first.join().unwrap().is_err(), "donors did not take the others");
            let second = scope.spawn(flush);
            wait_until("it waits", || buffer.inner().flushing == 1);
            buffer.settled([7, 9].into_iter(), false);
            second.join().unwrap().unwrap();
        });
        assert!(buffer.within(0..100).is_empty());
        buffer.flush().unwrap();
    }

    #[test]
    fn a_successor_writes_what_was_buffered() {
        let mut world = World::new(1, 1, SEGMENT_PAGES).buffering(1 << 20);
        world.config.donor_patience = Duration::from_secs(5);
        let volume = world.volume();
        volume.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
        volume.flush().unwrap();
        let address = world.donors[0].stop();
        for (page, fill) in [(0, 2), (1, 3), (0, 4)] {
            volume.write(page * PAGE, &[fill; PAGE_SIZE]).unwrap();
        }
        // As if the process was killed as it wrote page 1 again: the later write was not answered.
        let free = (0..SLOTS).find(|slot| volume.state.named(*slot).is_none()).unwrap();
        volume.state.fill(free, 1, &[5; PAGE_SIZE]);
        // It was a hole until it was answered.
        volume.write(9 * PAGE, &[7; PAGE_SIZE]).unwrap();
        die(&volume);
        world.donors[0].serve_again(address);
        let successor = world.successor(&volume);
        let told = successor.extents(9 * PAGE, PAGE, 1).unwrap();
        assert_eq!(told[0].contents, Contents::Data, "whether donors have it by now or not");
        successor.flush().unwrap();
        assert!(!is_anything_named(&successor), "donors have all that was answered");
        assert!(read(&successor, 9 * PAGE, PAGE_SIZE) == [7; PAGE_SIZE]);
        assert!(read(&successor, 0, PAGE_SIZE) == [4; PAGE_SIZE]);
        let either = read(&successor, PAGE, PAGE_SIZE);
        assert!(either == [3; PAGE_SIZE] || either == [5; PAGE_SIZE]);
        assert!(read(&successor, 3 * PAGE, PAGE_SIZE) == [1; PAGE_SIZE]);
        successor.write(0, &[6; PAGE_SIZE]).unwrap();
        successor.flush().unwrap();
        assert!(read(&successor, 0, PAGE_SIZE) == [6; PAGE_SIZE]);
    }
}
